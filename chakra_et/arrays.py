"""Codes of values, and the memory of arrays."""

from __future__ import annotations

import contextlib
import ctypes
import heapq

import numpy as np

# Below this many rows the memory is small, and giving it back takes longer than it is worth.
WORTH_ROWS = 200_000


def coded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, ascending; the index in them of each value)."""
    if len(values) and values.dtype.kind == "i":
        low, high = int(values.min()), int(values.max())
        if high - low < 4 * len(values):  # without sorting
            there, place = np.zeros(high - low + 1, bool), values.astype(np.int64) - low
            there[place] = True
            return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[place]
    known, index = np.unique(values, return_inverse=True)
    return known, index.reshape(-1)


def coded_pairs(first: np.ndarray, second: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """(distinct pairs of one value of each, ascending; the index in them of each row)."""
    (ones, one), (others, other) = coded(first), coded(second)
    known, index = coded(one * len(others) + other)
    return list(
        zip(ones[known // len(others)].tolist(), others[known % len(others)].tolist(), strict=True)
    ), index


def rows_by_value(values: np.ndarray, among: np.ndarray | None = None) -> dict[int, np.ndarray]:
    """Each distinct value, ascending → the rows that have it, in order; of ``among`` these, if given."""
    rows = np.argsort(values if among is None else values[among], kind="stable")
    rows = rows if among is None else among[rows]
    known, first = np.unique(values[rows], return_index=True)
    return dict(zip(known.tolist(), np.split(rows, first[1:]), strict=False))


def nearest(known: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """For each row, itself or its nearest ancestor that is ``known``, -1 for none; without recursion."""
    up = np.append(np.where(known, np.arange(len(parent)), parent), -1)  # the last one: no ancestor
    for _ in range(len(parent).bit_length()):
        further = up[up]  # each round doubles the distance
        if (further == up).all():
            break
        up = further
    return np.where(np.append(known, False)[up[:-1]], up[:-1], -1)


def stacked(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """A place from 0 on for each of these spans so that none overlaps another, int64[K]: the lowest that is
    free. The spans are in order of their starts."""
    place = np.zeros(len(start), dtype=np.int64)
    if (start[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return place
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for at, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        place[at] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (finish, int(place[at])))
    return place


def medians(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The median of the values of each of the groups 0, 1, …, none of which is empty; float64."""
    count = np.bincount(group)
    ordered = values[np.lexsort((values, group))]
    first = np.cumsum(count) - count
    return (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2


def lane_order(lanes: np.ndarray) -> np.ndarray:
    """The rows in the order of their lanes (numbers ≥ -1), otherwise in their own."""
    few = not len(lanes) or lanes.max() < 1 << 15
    return np.argsort(lanes.astype(np.int16) if few else lanes, kind="stable")  # 16 bits: sorted by radix


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


def keep_memory() -> None:
    """Let this process keep what large arrays leave behind for the next ones. The C library of Linux maps
    each array above 32 MB anew: with millions of nodes, clearing its pages takes a quarter of the time."""
    with contextlib.suppress(OSError, AttributeError):
        for parameter, value in ((-1, -1), (-4, 0)):  # nothing is trimmed, and nothing mapped
            ctypes.CDLL(None).mallopt(parameter, value)
