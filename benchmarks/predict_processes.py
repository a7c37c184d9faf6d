"""Processes for ``predict_benchmark.py``: ranks on cores of their own, or in network namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError

PROGRAM = Path(__file__).with_name("predict_rank.py")
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Memory that was freed stays with the process. Otherwise an operator that writes a large tensor may have to
wait for new pages, which depends on what was freed before it, and can take longer than its work."""
_SLICE_NS = 100_000
"""For which a thread keeps its core once others want it."""
_SCHED_SETATTR = 314
"""Its number on x86-64."""


def launch(
    plan: dict[str, Any],
    folder: Path,
    prefixes: Sequence[list[str]],
    interfaces: Sequence[str],
) -> None:
    """Run all ranks of a plan. Raises ``TraceError`` with their last words where one fails."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    commands = [
        [*prefix, sys.executable, str(PROGRAM), str(path), str(rank)] for rank, prefix in enumerate(prefixes)
    ]
    _run_all(commands, folder, [{"GLOO_SOCKET_IFNAME": interface} for interface in interfaces])


def measure_network(folder: Path, prefixes: Sequence[list[str]]) -> None:
    """Measure gloo among as many ranks; the file is folder/network.json."""
    words = ["-m", "chakra_et", "measure-network", "--largest", "25", "--repeats", "11"]
    commands = [
        [*prefix, sys.executable, *words, "--output", str(folder / "network.json")] for prefix in prefixes
    ]
    port = str(free_port())
    more = {"WORLD_SIZE": str(len(prefixes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    root = str(Path(__file__).resolve().parents[1])
    ranks = [
        {"RANK": str(at), "LOCAL_RANK": str(at), "PYTHONPATH": root, **more} for at in range(len(prefixes))
    ]
    _run_all(commands, folder, ranks)


def _run_all(commands: Sequence[list[str]], folder: Path, environments: Sequence[dict[str, str]]) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    begin = partial(_come_first, short_slices=is_crowded(len(commands)))
    for rank, (command, more) in enumerate(zip(commands, environments, strict=True)):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | MALLOC | more
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115
        # One core for each process, all for a single one: it inherits them.
        os.sched_setaffinity(0, allowed if len(commands) == 1 else {cores[rank % len(cores)]})
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=begin,
            )
        )
    os.sched_setaffinity(0, allowed)
    try:
        statuses = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        last = (folder / "rank0.log").read_text().strip().splitlines()[-1:] or ["no output"]
        raise TraceError(f"the runs failed: {last[0]}")


def is_crowded(processes: int) -> bool:
    """Whether some of them share a core."""
    return processes > len(os.sched_getaffinity(0))


def _come_first(short_slices: bool) -> None:
    """Go before other programs of the machine, where that is allowed: their share of the time is noise here.

    ``short_slices``: threads that share a core take turns often, so that a message is not left waiting for
    another rank's computing (sched_setattr(2); from Linux 6.12 on it sets the slice, before that nothing).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")
    with contextlib.suppress(OSError):
        os.nice(-20)
    if short_slices and platform.machine() == "x86_64":
        # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, _SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, attributes, 0)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[list[list[str]], list[str]]]:
    """Two network namespaces joined by a veth pair: the commands that enter them, and their interfaces.

    Raises ``TraceError`` where they can't be made: not root, or no ``ip`` or ``tc``.
    """
    reason = cannot_shape()
    if reason:
        raise TraceError(reason)
    number = os.getpid() % 100_000
    names, interfaces = [f"cp{number}{side}" for side in "ab"], [f"cv{number}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ["type", "veth", "peer", "name", interfaces[1], "netns", names[1]]
        _ip("link", "add", interfaces[0], "netns", names[0], *peer)
        for at, (name, interface) in enumerate(zip(names, interfaces, strict=True), 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", interface)
            for each in (interface, "lo"):
                _ip("-n", name, "link", "set", each, "up")
        yield [["ip", "netns", "exec", name] for name in names], interfaces
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def cannot_shape() -> str | None:
    """Why no limited network can be made here, None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"network namespaces need the program {absent[0]}"
    name = f"cp{os.getpid() % 100_000}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise TraceError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
