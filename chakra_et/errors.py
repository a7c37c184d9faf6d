"""The errors raised for bad input.

    with contextlib.suppress(TraceError):
        chakra_et.load("outputs/not_there")

Each is one sentence for the user; programs catch ``TraceError``, which all of them are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class TraceError(ValueError):
    """A trace, pair of traces or .et file that cannot be used.

    The text is one sentence for the user: what is wrong, in which file, rank and node, and what to do.
    Commands print it without a traceback and exit with a non-zero status.
    """


@contextlib.contextmanager
def time_limit(seconds: float, error: TraceError) -> Iterator[None]:
    """Raises ``error`` if the block takes longer, as regular expressions may. Only the main thread has one,
    as only it gets signals, and not on Windows."""
    import signal  # most commands need neither
    import threading

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason(error: Exception) -> str:
    """Why a file can't be read as JSON of the expected layout, in words."""
    if isinstance(error, OSError):
        return f"can't be read: {(error.strerror or str(error)).lower()}"
    if isinstance(error, KeyError):
        return f"has no {error.args[0]!r}"
    if isinstance(error, TypeError | AttributeError | IndexError | RecursionError):
        return "has another layout"
    return f"isn't readable: {error}"


class UnreadableTrace(TraceError):
    """The trace at ``path`` is damaged; repairing it may help."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(text)
        self.path = path
