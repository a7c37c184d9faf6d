"""The errors raised for bad input."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace, pair of traces or .et file that cannot be used.

    The text is one sentence for the user: what is wrong, in which file, rank and node, and what to do.
    Commands print it without a traceback and exit with a non-zero status.
    """


class UnreadableTrace(TraceError):
    """The trace at ``path`` is damaged; repairing it may help."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(text)
        self.path = path
