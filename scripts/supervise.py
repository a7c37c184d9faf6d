"""Run a command so that none of its processes outlives the script that started it.

    python scripts/supervise.py COMMAND…

The command runs in a session of its own. SIGINT, SIGTERM and SIGHUP are forwarded to it once; it also gets a
SIGTERM when the calling script dies, even by kill -9. If the command fails or is killed, the processes it
leaves behind are ended too: torchrun starts its workers in sessions of their own, which a signal to the
process group does not reach, and it leaves them running if it is killed. Whatever remains after the grace
period is killed. Exits with the command's status, or 128 + N for signal N.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

# torchrun itself gives its workers 30 seconds.
GRACE_SECONDS = float(os.environ.get("MOSIM_GRACE_SECONDS", "40"))
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0


def main(command: list[str]) -> int:
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    script = os.getppid()
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127

    family: set[int] = set()
    next_look = 0.0
    while child.poll() is None and not received:
        if os.getppid() != script:
            received.append(signal.SIGTERM)
        elif time.monotonic() >= next_look:
            family = still_there(family, child.pid)
            next_look = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)

    family = still_there(family, child.pid)
    if received:
        child.send_signal(received[0])
        end(child, family)
        return 128 + received[0]
    if child.returncode != 0:
        end(child, family)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end(child: subprocess.Popen[bytes], family: set[int]) -> None:
    """Wait for the child, end the processes it leaves behind, and kill what outlasts the grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    signalled: set[int] = set()
    while child.poll() is None or family:
        if child.poll() is not None:
            signal_all(family - signalled, signal.SIGTERM)
            signalled |= family
        if time.monotonic() > deadline:
            signal_all(family, signal.SIGKILL)
            if child.poll() is None:
                child.kill()
            child.wait()
            return
        time.sleep(POLL_SECONDS)
        family = still_there(family, child.pid)


def still_there(known: set[int], root: int) -> set[int]:
    """Those of ``known`` and of the descendants of ``root`` that still run, without ``root`` itself."""
    parents = processes()
    found = (known & parents.keys()) | {root}
    size = 0
    while size < len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


def processes() -> dict[int, int]:
    """Parent of every process that is not a zombie; empty if the machine has no ps."""
    try:
        answer = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True)
    except OSError:
        return {}
    rows = (line.split() for line in answer.stdout.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended just before the signal
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(__doc__ if sys.argv[1:] in ([], ["--help"]) else main(sys.argv[1:]))
