"""Distinct values, median and memory of arrays.

``np.unique`` and ``np.median`` import ``numpy.ma``, which takes 2% of the time of a small conversion.
"""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

NARROW = 1 << 16
"""Integers in a range up to this are counted instead of sorted."""
# Below this many rows the memory is small, and giving it back takes longer than it is worth.
WORTH_ROWS = 200_000


def unique(values: np.ndarray) -> np.ndarray:
    """The distinct values, ascending."""
    if (low := _low_of_narrow(values)) is not None:
        found: np.ndarray = np.flatnonzero(np.bincount(np.subtract(values, low, dtype=np.int64))) + low
        return found.astype(values.dtype)
    ordered = np.sort(values, kind="stable")  # mostly sorted already
    found = ordered[_starts(ordered)]
    return found


def first_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, ascending; the first row of each)."""
    if (low := _low_of_narrow(values)) is not None:
        codes = np.subtract(values, low, dtype=np.int64)
        first = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
        first[codes[::-1]] = np.arange(len(values) - 1, -1, -1)
        found = np.flatnonzero(first >= 0)
        return (found + low).astype(values.dtype), first[found]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = _starts(ordered)
    return ordered[starts], order[starts]


def coded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, ascending; the index in them of each value)."""
    known = unique(values)
    return known, np.searchsorted(known, values)


def coded_pairs(first: np.ndarray, second: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """(distinct pairs of one value of each, ascending; the index in them of each row)."""
    (ones, one), (others, other) = coded(first), coded(second)
    known, index = coded(one * len(others) + other)
    return list(
        zip(ones[known // len(others)].tolist(), others[known % len(others)].tolist(), strict=True)
    ), index


def lane_order(lanes: np.ndarray) -> np.ndarray:
    """The rows in the order of their lanes (numbers ≥ -1), otherwise in their own."""
    few = not len(lanes) or lanes.max() < 1 << 15
    return np.argsort(lanes.astype(np.int16) if few else lanes, kind="stable")  # 16 bits: sorted by radix


def _low_of_narrow(values: np.ndarray) -> int | None:
    """The lowest value if all are in a narrow range, and enough that this is worth it; None for others."""
    if not len(values) or values.dtype.kind != "i":
        return None
    low, high = int(values.min()), int(values.max())
    return low if high - low < min(NARROW, 4 * len(values)) else None


def narrowed(values: np.ndarray) -> np.ndarray:
    """Integers in as little memory as they need: as int32 if they fit, and equal ones as one (read-only)."""
    if not len(values) or values.dtype.kind not in "iu":
        return values
    low, high = int(values.min()), int(values.max())
    bounds = np.iinfo(np.int32)
    if values.dtype.itemsize > 4 and bounds.min <= low and high <= bounds.max:
        values = values.astype(np.int32)
    return np.broadcast_to(values[:1].copy(), len(values)) if low == high else values


def give_back(rows: int) -> None:
    """Return what large arrays leave behind; ``rows``, of events or nodes, tell whether that is much.

    The C library of Linux keeps freed arrays of up to 32 MB, which add a fifth to the peak of a large
    conversion. Others return them on their own.
    """
    if rows >= WORTH_ROWS:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def median(values: np.ndarray) -> float:
    """The median of at least one value."""
    middle = len(values) // 2
    low, high = (middle - 1, middle) if len(values) % 2 == 0 else (middle, middle)
    parted = np.partition(values, (low, high))
    return (float(parted[low]) + float(parted[high])) / 2


def _starts(ordered: np.ndarray) -> np.ndarray:
    starts = np.ones(len(ordered), dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return starts
