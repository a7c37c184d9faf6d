"""Build the attribute columns of an .et file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chakra_et.et.columns import Attribute, Strings, ValueKind

Add = Callable[[str, ValueKind, np.ndarray, Any], None]
"""Add one attribute: name, kind, the rows that have it (ascending), and their values."""


def collector(attributes: dict[str, Attribute]) -> Add:
    """A function that adds attributes to ``attributes``, except those that no node has."""

    def add(name: str, kind: ValueKind, rows: np.ndarray, values: Any) -> None:
        if len(rows):
            attributes[name] = Attribute(kind, rows, _narrowed(values))

    return add


def _narrowed(values: Any) -> Any:
    """int64 values as int32 if they fit, as half of the memory of a conversion is attributes."""
    if not isinstance(values, np.ndarray) or values.dtype != np.int64:
        return values
    bounds = np.iinfo(np.int32)
    return values.astype(np.int32) if bounds.min <= values.min() and values.max() <= bounds.max else values


def strings(values: list[str]) -> Strings:
    """A string column that stores equal strings once."""
    table: dict[str, int] = {}
    index = [table.setdefault(value, len(table)) for value in values]
    return Strings([text.encode("utf-8", "replace") for text in table], np.array(index, dtype=np.int32))


def coded(names: list[str], index: np.ndarray) -> Strings:
    """A string column from ``index``, int[rows] into ``names``."""
    return Strings([name.encode("utf-8", "replace") for name in names], index.astype(np.int32))
