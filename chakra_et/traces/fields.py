"""Convert JSON fields that should be numbers but may be text or absent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

Number = int | float | str | None
MAX_RANKS = 1_000_000


def as_column(values: list[Number], dtype: type = np.int64) -> np.ndarray:
    """Values as a column, with text converted to numbers; -1 (float64: NaN) for anything else."""
    missing = float("nan") if dtype is np.float64 else -1
    for _ in range(2):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            column: np.ndarray = np.array(values, dtype=dtype)
            if column.ndim == 1:
                return column
        values = [missing if value is None else value for value in values]
    return np.array([as_number(value, missing) for value in values], dtype=dtype)


def indices(values: list[Any], known: dict[Any, int], key: Callable[[Any], Any] = str) -> np.ndarray:
    """int32[values]: the index of ``key(value)`` in ``known``, to which new keys are added."""
    for are_new in (False, True):
        with contextlib.suppress(TypeError):  # not yet known, or not hashable, or not their own keys
            for value in dict.fromkeys(values) if are_new else ():
                known.setdefault(key(value), len(known))
            return np.array(list(map(known.get, values)), dtype=np.int32)
    return np.array([known.setdefault(key(value), len(known)) for value in values], dtype=np.int32)


def copies(texts: list[msgspec.Raw]) -> list[bytes]:
    """The texts without the pieces that they point into; half the time of a call of ``bytes`` for each."""
    found = b"\0".join(texts).split(b"\0")
    return found if len(found) == len(texts) else list(map(bytes, texts))


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
