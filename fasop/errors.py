"""The one exception that the commands turn into a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(Exception):
    """Input that no plan can be made of: one sentence that says what, where, and what would work."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where a known word is close, else the known words."""
    words = sorted(known)
    close = difflib.get_close_matches(word.lower(), [known_word.lower() for known_word in words], 1, 0.5)
    for known_word in words:
        if close and known_word.lower() == close[0]:
            return f"did you mean {known_word!r}?"
    return f"use one of {', '.join(words)}."
