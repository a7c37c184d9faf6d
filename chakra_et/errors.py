"""The errors that bad input raises."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace, pair of traces or .et file that can't be used.

    Its text is one sentence for the user: what is wrong, in which file, rank and node, and what to do.
    Commands print it and end with a non-zero status; they show no traceback.
    """


class UnreadableTrace(TraceError):
    """The trace at ``path`` is damaged; a repair may help."""

    def __init__(self, text: str, path: Path | None = None) -> None:
        super().__init__(text)
        self.path = path
