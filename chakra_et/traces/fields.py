"""Values of JSON fields that should be numbers, and may be text or absent."""

from __future__ import annotations

import contextlib

import numpy as np

Number = int | float | str | None
MAX_RANKS = 1_000_000


def as_column(values: list[Number], dtype: type = np.int64) -> np.ndarray:
    """Values as a column, -1 where there is none; text that holds a number counts as that number."""
    if dtype is np.int64:
        values = [-1 if value is None else value for value in values]
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        column = np.array(values, dtype=dtype)
        if column.ndim == 1:
            return column
    missing = float("nan") if dtype is np.float64 else -1
    return np.array([as_number(value, missing) for value in values], dtype=dtype)


def as_number(value: Number, missing: float = -1) -> float | int:
    """A number from a field that may be a number, text or nothing; ``missing`` where it can't be one."""
    try:
        found = float(value) if isinstance(value, str) and not value.lstrip("-").isdigit() else value
        found = int(found) if isinstance(found, str) else found
    except (TypeError, ValueError):
        return missing
    if not isinstance(found, int | float) or not abs(found) < 2**63:
        return missing
    return found
