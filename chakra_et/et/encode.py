"""Encode columns as the bytes of an .et file.

The bytes are the same as those of the protobuf library: fields in ascending order, defaults left out except
in attribute values, dependencies packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import schema, wire
from chakra_et.et.columns import ExecutionTrace, Ragged, Strings, TensorInfo
from chakra_et.et.wire import LENGTH, VARINT, Cells, Part

# Nodes encoded at a time: enough to amortise numpy's overhead, few enough to stay in the cache.
CHUNK = 8192
# Protobuf libraries read no longer message.
LARGEST_MESSAGE = (1 << 31) - 1

# Integers in such a range have few values. Neighbouring fields with few values are written as one field, if
# at most so many pairs of values occur, of so many possible ones.
FEW, MOST_VALUES, MOST_POSSIBLE = 256, 8192, 1 << 22

Column = Callable[[int, int], list[Part]]
"""One or more fields of the nodes in a range of rows."""


@dataclass(eq=False, repr=False)
class _Coded:
    """Fields with few values: those of row i are ``cells[index[i]]``; int32[rows]."""

    cells: Cells
    index: np.ndarray

    def __call__(self, first: int, last: int) -> list[Part]:
        return [(None, self.cells.take(self.index[first:last]))]

    def followed_by(self, other: _Coded) -> _Coded | None:
        """The fields of both, None if they have too many values together."""
        width = len(other.cells)
        if (possible := len(self.cells) * width) > MOST_POSSIBLE:
            return None
        index = self.index * np.int32(width) + other.index if width > 1 else self.index
        known = np.arange(possible)
        if possible > min(MOST_VALUES, len(index)):  # leave out those that don't occur
            place = np.zeros(possible, np.int32)
            place[index] = 1
            known = np.flatnonzero(place)
            place[known] = np.arange(len(known))
            index = place[index]
        if len(known) > MOST_VALUES:
            return None
        pairs: list[Part] = [(None, self.cells.take(known // width)), (None, other.cells.take(known % width))]
        return _Coded(wire.assemble(len(known), pairs), index)


def encode(trace: ExecutionTrace, part: int = 0, parts: int = 1) -> Iterator[memoryview]:
    """The bytes of the file, in blocks: the metadata (no bytes if it has none), then the nodes. Of several
    ``parts``, this one has every ``parts``-th block, from block ``part`` on."""
    if not part:
        yield _messages(1, _metadata_parts(trace.metadata)) if trace.has_metadata else memoryview(b"")
    columns = list(_joined(_columns(trace)))
    for first in range((part - 1) % parts * CHUNK, len(trace), parts * CHUNK):
        last = min(first + CHUNK, len(trace))
        yield _messages(last - first, [field for column in columns for field in column(first, last)])


def _columns(trace: ExecutionTrace) -> Iterator[Column]:
    """The fields of the nodes, in the order in which they are written."""
    types = np.arange(int(trace.types.max(initial=0)) + 1)
    yield partial(_number_parts, schema.ID, trace.ids)
    yield _Coded(_string_fields(schema.NAME, trace.names.table), trace.names.index)
    yield _Coded(wire.assemble(len(types), _number_parts(schema.TYPE, types)), trace.types)
    yield partial(_list_parts, schema.CTRL_DEPS, trace.ctrl_deps)
    yield partial(_list_parts, schema.DATA_DEPS, trace.data_deps)
    yield partial(_number_parts, schema.START, trace.start_micros)
    yield partial(_number_parts, schema.DURATION, trace.duration_micros)
    for number, tensors in ((schema.INPUTS, trace.inputs), (schema.OUTPUTS, trace.outputs)):
        if tensors is not None:
            yield partial(_tensor_parts, number, tensors.rows, list(_joined(_texts(tensors))))
    for name, attribute in trace.attributes.items():
        kind, values = attribute.kind, attribute.values
        if isinstance(values, Strings):
            # Each distinct string is encoded once, and rows share its bytes.
            table = _utf8_strings(values.table) if kind == "string" else wire.byte_strings(values.table)
            index = values.index
        elif len(values) and values.dtype.kind in "iu" and int(values.max()) - int(values.min()) < FEW:
            index = values - values.min()
            table = values.min() + np.arange(index.max() + 1, dtype=values.dtype)
        else:
            yield partial(_attribute_parts, name, attribute.rows, kind, values)
            continue
        yield _of_rows(_attribute_fields(schema.ATTR, name, kind, table), attribute.rows, index, len(trace))


def _texts(tensors: TensorInfo) -> Iterator[Column]:
    """The fields of the tensors, one row per node that has some."""
    columns = (tensors.values, tensors.shapes, tensors.types)
    for number, texts in zip(schema.IO_FIELDS, columns, strict=True):
        cells = _utf8_strings(texts)
        if len(cells.buffer) < 2 * len(cells):  # rows share their bytes
            places = cells.starts << 32 | cells.lengths
            _, first, index = np.unique(places, return_index=True, return_inverse=True)
            yield _Coded(_string_fields(number, cells.take(first)), index)
        else:
            yield partial(_filled_strings, number, cells)


def _joined(columns: Iterator[Column]) -> Iterator[Column]:
    """The columns, those with few values joined with their neighbours."""
    before = next(columns)
    for column in columns:
        if isinstance(before, _Coded) and isinstance(column, _Coded) and (both := before.followed_by(column)):
            before = both
        else:
            yield before
            before = column
    yield before


def _of_rows(table: Cells, rows: np.ndarray, index: np.ndarray, count: int) -> _Coded:
    """The column in which ``rows`` of ``count`` rows have field ``index`` of the table, and others none."""
    if len(rows) == count:
        return _Coded(table, index.astype(np.int32, copy=False))
    places = np.full(count, len(table), np.int32)
    places[rows] = index
    return _Coded(Cells(table.buffer, np.append(table.starts, 0), np.append(table.lengths, 0)), places)


def _messages(rows: int, parts: list[Part]) -> memoryview:
    """One message per row, each prefixed by its length."""
    sizes = wire.row_lengths(rows, parts)
    if len(sizes) and sizes.max() > LARGEST_MESSAGE:
        raise TraceError("a node takes more than 2 GiB in the .et file: shorten its inputs and outputs")
    return wire.assemble(rows, [(None, wire.varints(sizes)), *parts]).buffer.data


def _metadata_parts(metadata: dict[str, int | str | bool | float]) -> list[Part]:
    values = dict(metadata)
    version = _text(str(values.pop("version", schema.DEFAULT_VERSION)))
    if not version and not values:
        version = _text(schema.DEFAULT_VERSION)  # some readers stop at an empty first message
    parts: list[Part] = [(None, _string_fields(schema.VERSION, [version]))]
    for name, value in values.items():
        column: Cells | np.ndarray
        if isinstance(value, str):
            kind, column = "string", wire.byte_strings([_text(value)])
        else:
            unsigned = type(value) is int and value >= 0 and name in schema.UNSIGNED_METADATA
            column = np.array([value], np.uint64 if unsigned else None)
            kind = {"b": "bool", "i": "int64", "u": "uint64", "f": "double"}[column.dtype.kind]
        parts.append((None, _attribute_fields(schema.METADATA_ATTR, name, kind, column)))
    return parts


def _number_parts(number: int, values: np.ndarray, first: int = 0, last: int | None = None) -> list[Part]:
    values = values[first:last]
    rows = np.flatnonzero(values)
    return [(rows, wire.varints(values[rows], wire.tag(number, VARINT)))]


def _attribute_parts(
    name: str, rows: np.ndarray, kind: str, values: np.ndarray, first: int, last: int
) -> list[Part]:
    low, high = np.searchsorted(rows, (first, last))
    rows = rows[low:high] - first
    cells = _attribute_cells(schema.ATTR, name, kind, values[low:high]) if low < high else []
    return [(rows, part) for part in cells]


def _list_parts(number: int, lists: Ragged, first: int, last: int) -> list[Part]:
    offsets = lists.offsets[first : last + 1] - lists.offsets[first]
    if not offsets[-1]:
        return []
    rows = np.flatnonzero(np.diff(offsets))
    values = lists.values[lists.offsets[first] : lists.offsets[last]]
    packed = wire.assemble(len(values), [(None, wire.varints(values))])
    edges = np.append(packed.starts, len(packed.buffer))[offsets]
    cells = Cells(packed.buffer, edges[:-1][rows], np.diff(edges)[rows])
    return [(rows, wire.varints(cells.lengths, wire.tag(number, LENGTH))), (rows, cells)]


def _tensor_parts(number: int, rows: np.ndarray, columns: list[Column], first: int, last: int) -> list[Part]:
    low, high = map(int, np.searchsorted(rows, (first, last)))
    if low == high:
        return []
    fields = [part for column in columns for part in column(low, high)]
    rows = rows[low:high] - first
    head = wire.varints(wire.row_lengths(high - low, fields), wire.tag(number, LENGTH))
    return [(rows, head), *((rows if which is None else rows[which], part) for which, part in fields)]


def _string_fields(number: int, strings: Sequence[bytes]) -> Cells:
    """One string field per string, without bytes if the string is empty."""
    return wire.assemble(len(strings), _filled_strings(number, _utf8_strings(strings)))


def _filled_strings(number: int, cells: Cells, first: int = 0, last: int | None = None) -> list[Part]:
    """The string fields of the rows whose string isn't empty."""
    cells = cells.take(slice(first, last))
    filled = np.flatnonzero(cells.lengths)
    cells = cells.take(filled)
    head = wire.varints(cells.lengths, wire.tag(number, LENGTH))
    return [(filled, head), (filled, cells)]


def _attribute_fields(number: int, name: str, kind: str, values: Cells | np.ndarray) -> Cells:
    parts = _attribute_cells(number, name, kind, values)
    return wire.assemble(len(parts[0].lengths), [(None, part) for part in parts])


def _attribute_cells(number: int, name: str, kind: str, values: Cells | np.ndarray) -> list[Cells]:
    """Field ``number`` with this attribute, one per value. 0 and empty values are written too.

    A suffix ``#kind`` of ``name``, which distinguishes two kinds of one name, is not written.
    """
    member = schema.MEMBERS[kind]
    prefix = wire.tag(number, LENGTH)
    label = _text(name.removesuffix(f"#{kind}"))
    head = wire.tag(schema.ATTR_NAME, LENGTH) + wire.bytes_of_varint(len(label)) + label if label else b""
    head += wire.tag(member.number, member.wire)
    if isinstance(values, Cells):
        sizes = wire.varints(values.lengths, head)
        return [wire.varints(sizes.lengths + values.lengths, prefix), sizes, values]
    short = len(head) + wire.LONGEST_VARINT < 128  # the length takes one byte, which is filled in below
    before = prefix + b"\0" + head if short else head
    if member.wire == VARINT:
        # Varints of negative numbers are those of their two's complement, or zigzag for sint.
        if member.dtype == "zigzag":
            values = (values.astype(np.int64) << 1) ^ (values.astype(np.int64) >> 63)
        elif values.dtype != np.uint64:
            values = values.astype(np.int64)
        payload = wire.varints(values.view(np.uint64), before)
    else:
        payload = wire.fixed(values.astype(member.dtype), before)
    if not short:
        return [wire.varints(payload.lengths, prefix), payload]
    payload.buffer[payload.starts + len(prefix)] = payload.lengths - len(prefix) - 1
    return [payload]


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _utf8_strings(strings: Sequence[bytes]) -> Cells:
    """One row per string; bytes that are not UTF-8 are replaced."""
    cells = strings if isinstance(strings, Cells) else wire.byte_strings(strings)
    try:
        # No character spans the zero bytes, so the strings are valid if all of them together are.
        str(cells.buffer.data, "utf-8")
    except UnicodeDecodeError:
        return wire.byte_strings([text.decode("utf-8", "replace").encode("utf-8") for text in cells])
    return cells
