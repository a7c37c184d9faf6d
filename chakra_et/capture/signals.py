"""Delay signals until files are complete."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hold_signals() -> Iterator[list[int]]:
    """Delay SIGINT and SIGTERM until the end of the block; yields the list of signals received so far.

    After Ctrl-C torchrun sends a second signal, which would interrupt the clean-up started by the first. Does
    nothing outside the main thread, where Python runs no handlers.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {}
    for watched in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(watched)
        if handler is not None:  # None: installed by C code, so it can't be restored
            handlers[int(watched)] = handler
            signal.signal(watched, lambda number, frame: held.append(number))
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            handler = handlers[number]
            # Called rather than raised again: a wake-up descriptor has received the signal already.
            if callable(handler):
                handler(number, None)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(number)
