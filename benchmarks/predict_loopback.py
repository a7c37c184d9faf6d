"""A loopback of one's own for ``predict_benchmark.py``, without BBR."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from benchmarks.predict_processes import cannot_shape

_RENO = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"


@contextlib.contextmanager
def own_loopback() -> Iterator[list[str]]:
    """The command that enters a network namespace whose TCP is Reno, empty where none can be made.

    BBR, which some machines use for all connections, sends at the rate that it has seen. Between ranks whose
    threads share cores with computing it sees too little, and sends again what wasn't lost.
    """
    if cannot_shape():
        yield []
        return
    name = f"cp{os.getpid() % 100_000}lo"
    try:
        for words in (["netns", "add", name], ["-n", name, "link", "set", "lo", "up"]):
            subprocess.run(["ip", *words], check=True)
        subprocess.run(["ip", "netns", "exec", name, "sh", "-c", _RENO], check=True)
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
