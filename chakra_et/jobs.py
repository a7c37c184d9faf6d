"""Run independent jobs on several processes, each with a time limit and none able to take others down."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from chakra_et.errors import TraceError

Argument = TypeVar("Argument")


def run(
    function: Callable[[Argument], Any], arguments: Sequence[Argument], workers: int, timeout: float = 0
) -> Iterator[tuple[int, Any]]:
    """Yield (number of the argument, result or the ``TraceError`` that it ended with), as they finish.

    One worker without a time limit (seconds; 0: none) runs in this process. A worker that dies or takes too
    long becomes a ``TraceError`` of its job alone.
    """
    if workers <= 1 and not timeout:
        for number, argument in enumerate(arguments):
            yield number, _call(function, argument)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting = list(enumerate(arguments))[::-1]
    running: dict[Connection, tuple[int, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, workers):
                number, argument = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(function, argument, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = (number, process, time.monotonic() + timeout if timeout else float("inf"))
            nearest = min(deadline for _, _, deadline in running.values()) - time.monotonic()
            ready = wait(list(running), None if nearest == float("inf") else max(0.0, nearest))
            now = time.monotonic()
            for receiver in list(running):
                number, process, deadline = running[receiver]
                if receiver in ready:
                    result = _receive(receiver, process)
                elif now >= deadline:
                    process.kill()
                    result = TraceError(
                        f"gave up after {timeout:g} s; raise --timeout, or see whether the trace is whole."
                    )
                else:
                    continue
                process.join()
                receiver.close()
                del running[receiver]
                yield number, result
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()


def _receive(receiver: Connection, process: Any) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        reason = (
            "was killed, perhaps for lack of memory" if code and code < 0 else f"ended with status {code}"
        )
        return TraceError(f"its worker process {reason}; try fewer --workers.")


def _child(function: Callable[[Any], Any], argument: Any, sender: Connection) -> None:
    sender.send(_call(function, argument))
    sender.close()


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except TraceError as error:
        return error
    except MemoryError:
        return TraceError("not enough memory; try fewer --workers.")
    except OSError as error:
        return TraceError(f"{error.filename or 'a file'}: {error.strerror or error}.")
    except Exception as error:  # a defect of ours must not stop the other pairs
        place = traceback.extract_tb(error.__traceback__)[-1]
        return TraceError(
            f"internal error {type(error).__name__}: {error} ({place.filename}:{place.lineno}); "
            f"please report it."
        )
