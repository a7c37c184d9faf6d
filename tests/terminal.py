"""What a program writes to a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from typing import Any


def on_a_terminal(command: Sequence[object], environment: Mapping[str, str], **options: Any) -> bytes:
    """All that a command writes to its output and error streams, which are one terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    process = subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=theirs, stderr=theirs, **options
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's answer once nobody holds the other end
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert process.wait(60) == 0
    return said
