"""Build the attribute columns of an .et file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chakra_et.arrays import lane_order, narrowed
from chakra_et.et.columns import Attribute, Strings, ValueKind

Add = Callable[[str, ValueKind, np.ndarray, Any], None]
"""Add one attribute: name, kind, the rows that have it (ascending), and their values."""


def collector(attributes: dict[str, Attribute]) -> Add:
    """A function that adds attributes to ``attributes``, except those that no node has."""

    def add(name: str, kind: ValueKind, rows: np.ndarray, values: Any) -> None:
        if len(rows):
            known = isinstance(values, Strings) or values.dtype == np.uint64
            attributes[name] = Attribute(kind, rows, values if known else narrowed(values))

    return add


def strings(values: list[str]) -> Strings:
    """A string column that stores equal strings once."""
    table: dict[str, int] = {}
    index = [table.setdefault(value, len(table)) for value in values]
    return Strings([text.encode("utf-8", "replace") for text in table], np.array(index, dtype=np.int32))


def coded(names: list[str], index: np.ndarray) -> Strings:
    """A string column from ``index``, int[rows] into ``names``."""
    return Strings([name.encode("utf-8", "replace") for name in names], index.astype(np.int32, copy=False))


def whole_micros(lane: np.ndarray, length_ns: np.ndarray) -> np.ndarray:
    """int64[N]: durations in whole µs. The remainder is carried to the next node of the lane, so that lanes
    lose no time. Nodes are in the order of their start."""
    order = lane_order(lane)
    total = np.cumsum(length_ns[order])
    nodes = np.bincount(lane)
    nodes = nodes[nodes > 0]
    first = np.cumsum(nodes) - nodes
    total -= np.repeat(np.append(0, total)[first], nodes)
    total //= 1000
    micros = np.diff(total, prepend=0)
    micros[first] = total[first]
    result = np.empty(len(order), dtype=np.int64)
    result[order] = micros
    return result
