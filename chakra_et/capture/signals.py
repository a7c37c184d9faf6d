"""Signals that wait until files are finished."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hold_signals() -> Iterator[list[int]]:
    """Keep SIGINT and SIGTERM back until the end of the block; yields the numbers of those that came.

    On Ctrl-C torchrun sends a second signal right after the first, which would end the clean-up of the
    first. Does nothing outside the main thread, where no handler would run.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:  # None: set by C code, and can't be put back
            handlers[number] = handler
            signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            handler = handlers[number]
            # Called, not raised anew: a wake-up descriptor has seen the signal already.
            if callable(handler):
                handler(number, None)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(number)
