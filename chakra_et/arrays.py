"""Distinct values of integer arrays.

``np.unique`` imports ``numpy.ma``, which takes 2% of the time of a small conversion.
"""

from __future__ import annotations

import numpy as np


def unique(values: np.ndarray) -> np.ndarray:
    """The distinct values, ascending."""
    ordered = np.sort(values)
    found: np.ndarray = ordered[_starts(ordered)]
    return found


def first_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, ascending; the first row of each)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = _starts(ordered)
    return ordered[starts], order[starts]


def _starts(ordered: np.ndarray) -> np.ndarray:
    starts = np.ones(len(ordered), dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return starts
