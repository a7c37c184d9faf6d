"""Columns and JSON in, one gzip block out: how a page carries its data.

The block is an unsigned 32-bit length, JSON of that many bytes, then the columns, little-endian. The JSON has
``columns``, a list of [name, type, rows, encoding]: type is u1, u2, u4 or f8; encoding ``delta`` means that
each value was replaced by its difference from the one before (modulo 2^32), so that sorted columns compress
well. A column's bytes are ordered by significance (all lowest bytes first), which puts equal bytes together.
``assets/data.js`` reads it.
"""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import numpy as np

TYPES = {"u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "f8": np.float64}
LEVEL = 6  # of gzip: higher ones take three times as long for 3% less


class PackedColumns:
    """Collects the columns of a page."""

    def __init__(self) -> None:
        self._listed: list[tuple[str, str, int, str]] = []
        self._blocks: list[bytes] = []

    def add(self, name: str, values: np.ndarray, delta: bool = False) -> None:
        """Add whole numbers from 0 to 2^32 - 1, or doubles. With ``delta`` for columns that hardly change."""
        if values.dtype.kind == "f":
            kind = "f8"
        elif delta:
            kind = "u4"
            values = np.diff(values.astype(np.int64), prepend=np.int64(0)).astype(np.int64) & 0xFFFFFFFF
        else:
            most = int(values.max(initial=0))
            kind = "u1" if most < 1 << 8 else "u2" if most < 1 << 16 else "u4"
        column = np.ascontiguousarray(values, dtype=TYPES[kind])
        self._listed.append((name, kind, len(column), "delta" if delta else "plain"))
        self._blocks.append(column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes())

    def pack(self, content: dict[str, Any]) -> bytes:
        """The columns and ``content`` as one block; the same input gives the same bytes."""
        text = json.dumps(content | {"columns": self._listed}, separators=(",", ":")).encode()
        return gzip.compress(
            b"".join([struct.pack("<I", len(text)), text, *self._blocks]), compresslevel=LEVEL, mtime=0
        )


def unpack(block: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The content and the columns of a block, for programs that read a page's data."""
    raw = gzip.decompress(block)
    (length,) = struct.unpack_from("<I", raw)
    content, at, columns = json.loads(raw[4 : 4 + length]), 4 + length, {}
    for name, kind, rows, encoding in content["columns"]:
        size = np.dtype(TYPES[kind]).itemsize
        block = raw[at : at + rows * size]
        values = np.frombuffer(block, np.uint8).reshape(size, rows).T.copy().view(TYPES[kind]).reshape(-1)
        columns[name] = np.cumsum(values, dtype=np.uint32) if encoding == "delta" else values
        at += rows * size
    return content, columns
