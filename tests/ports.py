"""TCP ports for tests that run beside each other."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ports that the system gives to connections, a range per pytest-xdist worker. The first one differs
# by process, as several checkouts may be tested on one machine.
_PER_WORKER = 400
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OFFSETS = itertools.count(os.getpid())


def free_port() -> int:
    """A port that no process listens on, and that no other test is given."""
    for offset in itertools.islice(_OFFSETS, _PER_WORKER):
        port = 12_000 + _WORKER * _PER_WORKER + offset % _PER_WORKER
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
