"""The errors raised for bad input.

    with contextlib.suppress(TraceError):
        chakra_et.load("outputs/not_there")

Each is one sentence for the user; programs catch ``TraceError``, which all of them are.
"""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace, pair of traces or .et file that cannot be used.

    The text is one sentence for the user: what is wrong, in which file, rank and node, and what to do.
    Commands print it without a traceback and exit with a non-zero status.
    """


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
