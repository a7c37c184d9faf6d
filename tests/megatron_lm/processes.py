"""Processes of this machine, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def processes_with(marker: str) -> list[int]:
    """Ids of the processes that have ``marker`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
