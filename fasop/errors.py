"""The one exception that the commands turn into a sentence, and what they propose."""

from __future__ import annotations

from collections.abc import Iterable

from chakra_et.errors import TraceError

# Input that no plan can be made of: one sentence that says what, where, and what would work.
PlanError = TraceError


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` where a known word is close, else the known words."""
    import difflib  # only refusals need it

    words = {each.lower(): each for each in sorted(known, reverse=True)}
    close = difflib.get_close_matches(word.lower(), sorted(words), 1, 0.5)
    return f"did you mean {words[close[0]]!r}?" if close else f"use one of {', '.join(sorted(known))}."
