"""Messages of the capture, shown whether or not the program has configured logging."""

from __future__ import annotations

import logging
import sys

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
