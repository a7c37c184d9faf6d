"""Words of notes and refusals."""

from __future__ import annotations


def plural(count: int, one: str, several: str = "") -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
