"""The error that bad input raises; its text is one sentence for the user."""

from __future__ import annotations


class RunError(ValueError):
    """A setting, run, log or file that can't be used; the text says what would do."""
