"""Messages of the capture, shown whether or not the program has configured logging, and delayed signals."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator

_log = logging.getLogger("chakra_et.capture")


def notify(level: int, message: str, *values: object) -> None:
    """Log a line, or print it to stderr if the program has no log handler."""
    if is_logging_configured():
        _log.log(level, message, *values)
    else:
        print("chakra-et:", message % values, file=sys.stderr, flush=True)


def is_logging_configured() -> bool:
    """Whether a log handler would receive our messages."""
    return _log.hasHandlers()


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
