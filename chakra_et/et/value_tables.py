"""Columns with few distinct values: each distinct value is encoded once, and rows share its bytes.

Most attributes of a trace are such. Adjacent ones are joined into one column of their combinations, so that a
node's bytes are copied in few pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from chakra_et.et import wire
from chakra_et.et.wire import Cells, Part

Other = TypeVar("Other")
WIDEST_RANGE = 4096
"""Integers in a range up to this are encoded as a table of all of the range that occur."""


@dataclass(eq=False, repr=False)
class ValueTable:
    """Row i is row ``index[i]`` of ``table``. ``index`` is int32[rows]."""

    table: Cells
    index: np.ndarray

    def part(self, first: int, last: int) -> Part:
        """The rows [first, last)."""
        return None, self.table.take(self.index[first:last])


def where(rows: np.ndarray, index: np.ndarray, table: Cells, count: int) -> ValueTable:
    """A column of ``count`` rows, of which ``rows`` (ascending) have the rows ``index`` of ``table`` and the
    others nothing."""
    if len(rows) == count:
        return ValueTable(table, index.astype(np.int32, copy=False))
    nothing = len(table.lengths)
    full = np.full(count, nothing, dtype=np.int32)
    full[rows] = index
    return ValueTable(Cells(table.buffer, np.append(table.starts, 0), np.append(table.lengths, 0)), full)


def in_narrow_range(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(distinct values, index of each value in them) of integers in a small range; None for others."""
    if not len(values) or values.dtype.kind not in "iu":
        return None
    low = values.min()
    if int(values.max()) - int(low) >= WIDEST_RANGE:
        return None
    used, index = distinct((values - low).astype(np.int64))
    return used.astype(values.dtype) + low, index


def joined(columns: Iterable[ValueTable | Other]) -> list[ValueTable | Other]:
    """``columns`` with adjacent tables joined, as far as these have few combinations."""
    found: list[ValueTable | Other] = []
    for column in columns:
        last = found[-1] if found else None
        both = (
            _join(last, column) if isinstance(last, ValueTable) and isinstance(column, ValueTable) else None
        )
        if both is not None:
            found[-1] = both
        else:
            found.append(column)
    return found


def _join(one: ValueTable, other: ValueTable) -> ValueTable | None:
    rows, width = len(one.index), len(other.table.lengths)
    if len(one.table.lengths) * width > 4 * rows + WIDEST_RANGE:
        return None
    used, index = distinct(one.index.astype(np.int64) * width + other.index)
    if len(used) > min(rows // 4 + 16, 1 << 16):
        return None
    parts: list[Part] = [(None, one.table.take(used // width)), (None, other.table.take(used % width))]
    return ValueTable(wire.assemble(len(used), parts), index)


def distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, index of each value in them) of small integers ≥ 0, without sorting them."""
    used = np.flatnonzero(np.bincount(codes))
    place = np.zeros(int(used[-1]) + 1 if len(used) else 0, dtype=np.int32)
    place[used] = np.arange(len(used), dtype=np.int32)
    return used, place[codes]
