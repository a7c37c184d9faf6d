"""The errors that bad input raises; each text is one sentence for the user."""

from __future__ import annotations


class RunError(ValueError):
    """A run, log, plan or file that can't be used."""


class SettingsError(RunError):
    """A setting, or a set of settings, that can't be used; the text names values that would work."""
