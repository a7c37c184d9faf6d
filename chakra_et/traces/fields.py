"""Convert JSON fields that should be numbers but may be text or absent."""

from __future__ import annotations

import contextlib

import numpy as np

Number = int | float | str | None
MAX_RANKS = 1_000_000


def as_column(values: list[Number], dtype: type = np.int64) -> np.ndarray:
    """Values as a column, with text converted to numbers; -1 (float64: NaN) for anything else."""
    if dtype is np.int64:
        values = [-1 if value is None else value for value in values]
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        column: np.ndarray = np.array(values, dtype=dtype)
        if column.ndim == 1:
            return column
    missing = float("nan") if dtype is np.float64 else -1
    return np.array([as_number(value, missing) for value in values], dtype=dtype)


def as_number(value: Number, missing: float = -1) -> float | int:
    """The number in a field that may be a number, text or None; ``missing`` if it is not a number."""
    try:
        found = float(value) if isinstance(value, str) and not value.lstrip("-").isdigit() else value
        found = int(found) if isinstance(found, str) else found
    except (TypeError, ValueError):
        return missing
    if not isinstance(found, int | float) or not abs(found) < 2**63:
        return missing
    return found
