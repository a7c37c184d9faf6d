"""Run jobs in other processes, each in its own.

A job that dies affects no other. On Windows all jobs run in this process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from chakra_et.errors import TraceError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Argument = TypeVar("Argument")
Jobs = Callable[..., Generator[tuple[int, Any], None, None]]
"""``run``, or what runs jobs elsewhere as it does."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
_PROCESSES = hasattr(os, "killpg")
LARGE = 8 << 20  # bytes to read or write from which on a second process saves time


def run(
    function: Callable[[Argument], Any], arguments: Sequence[Argument], workers: int
) -> Generator[tuple[int, Any], None, None]:
    """Yield (index of the argument, result or ``TraceError``) as the jobs finish.

    With 0 workers the jobs run in this process. If a worker dies, its job gives a ``TraceError``. All workers
    have ended when the generator ends, also by an exception, and soon after this process is killed.
    """
    if not workers or not _PROCESSES:
        for number, argument in enumerate(arguments):
            yield number, outcome(function, argument)
        return
    from multiprocessing.connection import wait  # a tenth of the time of converting a small trace

    waiting = list(enumerate(arguments))[::-1]
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, argument = waiting.pop()
                # An interrupt in between would leave a worker that is not in running.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
                try:
                    process, receiver = _start(function, argument)
                    running[receiver] = number, process
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for receiver in cast("list[Connection]", wait(list(running))):
                number, process = running[receiver]
                result = _receive(receiver, process)
                _end(process)
                receiver.close()
                del running[receiver]
                yield number, result
    finally:
        for _, process in running.values():
            _end(process)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return, each made by a process of its own. Raises the first ``TraceError``."""
    found: list[Any] = [None] * len(calls)
    with contextlib.closing(run(lambda call: call(), calls, len(calls))) as outcomes:
        for number, found[number] in outcomes:
            if isinstance(found[number], TraceError):
                raise found[number]
    return found


def forks() -> bool:
    """Whether a new process has all that this one has; connections of fsspec don't survive it."""
    return sys.platform == "linux" and "upath" not in sys.modules


def default_workers() -> int:
    """One per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(function: Callable[[Any], Any], argument: Any) -> tuple[BaseProcess, Connection]:
    """Start a process with the job; what it sends can be received from the connection."""
    import multiprocessing

    context: Any = multiprocessing.get_context("fork" if forks() else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(target=_child, args=(function, argument, sender, os.getpid()))
    process.start()
    sender.close()
    return process, receiver


def _receive(receiver: Connection, process: BaseProcess) -> Any:
    try:
        with open(receiver.fileno(), "rb", closefd=False) as stream:
            return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        process.join()
        code = process.exitcode
        killed = code is not None and code < 0
        reason = "was killed, perhaps for lack of memory" if killed else f"ended with status {code}"
        return TraceError(f"its worker process {reason}; try fewer --workers.")


def _end(process: BaseProcess) -> None:
    """Kill a worker and the tools that it runs."""
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # not yet the leader of a group
    process.join()


def _child(function: Callable[[Any], Any], argument: Any, sender: Connection, parent: int) -> None:
    os.setpgid(0, 0)
    # The parent ends its workers when it is stopped; a thread does so if the parent was killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    import threading

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # Not sender.send, which holds all of it in memory once more.
    with sender, open(sender.fileno(), "wb", closefd=False) as stream:
        pickle.dump(outcome(function, argument), stream, protocol=5)


def outcome(function: Callable[[Any], Any], argument: Any) -> Any:
    """What a job returns, or the ``TraceError`` that tells why it doesn't."""
    try:
        return function(argument)
    except TraceError as error:
        return error
    except MemoryError:
        return TraceError("not enough memory; try fewer --workers.")
    except OSError as error:
        return TraceError(f"{error.filename or 'a file'}: {error.strerror or error}.")
    except Exception as error:  # an internal error must not stop the other jobs
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        return TraceError(
            f"internal error {type(error).__name__}: {error} ({place.filename}:{place.lineno}); "
            f"please report it."
        )
