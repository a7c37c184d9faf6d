"""Encode columns as the bytes of an .et file.

The bytes are the same as those of the protobuf library: fields in ascending order, defaults left out except
in attribute values, dependencies packed.

Most columns have few distinct values: each distinct value is encoded once, and rows share its bytes. Adjacent
ones are joined into one column of their combinations, so that a node's bytes are copied in few pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import wire
from chakra_et.et.columns import Attribute, ByteStrings, ExecutionTrace, Ragged, Strings, TensorInfo, Texts
from chakra_et.et.schema import (
    ATTR,
    ATTR_NAME,
    CTRL_DEPS,
    DATA_DEPS,
    DEFAULT_VERSION,
    DURATION,
    ID,
    INPUTS,
    IO_FIELDS,
    MEMBERS,
    METADATA_ATTR,
    NAME,
    OUTPUTS,
    START,
    TYPE,
    UNSIGNED_METADATA,
    VALUES,
    VERSION,
)
from chakra_et.et.wire import LENGTH, VARINT, Cells, Part

# Nodes encoded at a time: enough to amortise numpy's overhead, few enough to stay in the cache.
CHUNK = 8192
# Protobuf libraries read no longer message.
LARGEST_MESSAGE = (1 << 31) - 1
WIDEST_RANGE = 4096
"""Integers in a range up to this are encoded as a table of all of the range that occur."""

Other = TypeVar("Other")


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


Column = ValueTable | Callable[[int, int], list[Part]]
"""One or more fields of all nodes: a coded column, or a function of a range of rows."""


def encode(trace: ExecutionTrace) -> Iterator[memoryview]:
    """The bytes of the file, in blocks."""
    if trace.has_metadata:
        yield _messages(1, _metadata_parts(trace.metadata))
    columns: list[Column] = joined(_columns(trace))
    for first in range(0, len(trace), CHUNK):
        last = min(first + CHUNK, len(trace))
        parts: list[Part] = []
        for column in columns:
            parts += [column.part(first, last)] if isinstance(column, ValueTable) else column(first, last)
        yield _messages(last - first, parts)


def _columns(trace: ExecutionTrace) -> Iterator[Column]:
    """The fields of the nodes, in the order in which they are written."""
    count = len(trace)
    yield _number_column(ID, trace.ids)
    yield ValueTable(_string_fields(NAME, trace.names.table), trace.names.index)
    yield _number_column(TYPE, trace.types)
    yield partial(_list_parts, CTRL_DEPS, trace.ctrl_deps)
    yield partial(_list_parts, DATA_DEPS, trace.data_deps)
    yield _number_column(START, trace.start_micros)
    yield _number_column(DURATION, trace.duration_micros)
    yield _tensor_column(INPUTS, trace.inputs)
    yield _tensor_column(OUTPUTS, trace.outputs)
    for name, attribute in trace.attributes.items():
        kind, rows, values = attribute.kind, attribute.rows, attribute.values
        if isinstance(values, Strings):
            strings = _utf8_strings if kind == "string" else wire.byte_strings
            yield where(rows, values.index, _attribute_fields(ATTR, name, kind, strings(values.table)), count)
        elif (narrow := in_narrow_range(values)) is not None:
            used, index = narrow
            yield where(rows, index, _attribute_fields(ATTR, name, kind, used), count)
        else:
            yield partial(_attribute_parts, name, attribute)


def _messages(rows: int, parts: list[Part]) -> memoryview:
    """One message per row, each prefixed by its length."""
    sizes = wire.row_lengths(rows, parts)
    if len(sizes) and sizes.max() > LARGEST_MESSAGE:
        raise TraceError("a node takes more than 2 GiB in the .et file: shorten its inputs and outputs")
    return wire.assemble(rows, [(None, wire.varints(sizes.astype(np.uint64))), *parts]).buffer.data


def _metadata_parts(metadata: dict[str, int | str | bool | float]) -> list[Part]:
    values = dict(metadata)
    version = _text(str(values.pop("version", DEFAULT_VERSION)))
    if not version and not values:
        version = _text(DEFAULT_VERSION)  # some readers stop at an empty first message
    parts: list[Part] = [(None, _string_fields(VERSION, [version]))]
    for name, value in values.items():
        column: Cells | np.ndarray
        if isinstance(value, bool):
            kind, column = "bool", np.array([value], np.int64)
        elif isinstance(value, int) and value >= 0 and (name in UNSIGNED_METADATA or value >= 1 << 63):
            kind, column = "uint64", np.array([value], np.uint64)
        elif isinstance(value, int):
            kind, column = "int64", np.array([value], np.int64)
        elif isinstance(value, float):
            kind, column = "double", np.array([value])
        else:
            kind, column = "string", wire.byte_strings([_text(value)])
        parts.append((None, _attribute_fields(METADATA_ATTR, name, kind, column)))
    return parts


def _number_column(number: int, values: np.ndarray) -> Column:
    if (narrow := in_narrow_range(values)) is not None:
        used, index = narrow
        return ValueTable(wire.assemble(len(used), _number_parts(number, used)), index)
    return lambda first, last: _number_parts(number, values[first:last])


def _number_parts(number: int, values: np.ndarray) -> list[Part]:
    rows = np.flatnonzero(values)
    return [(rows, wire.varints(values[rows], wire.tag(number, VARINT)))]


def _attribute_parts(name: str, attribute: Attribute, first: int, last: int) -> list[Part]:
    low, high = np.searchsorted(attribute.rows, (first, last))
    rows, values = attribute.rows[low:high] - first, attribute.values
    if low == high or isinstance(values, Strings):
        return []
    return [(rows, cells) for cells in _attribute_cells(ATTR, name, attribute.kind, values[low:high])]


def _list_parts(number: int, lists: Ragged, first: int, last: int) -> list[Part]:
    offsets = lists.offsets[first : last + 1] - lists.offsets[first]
    if not offsets[-1]:
        return []
    rows = np.flatnonzero(np.diff(offsets))
    values = lists.values[lists.offsets[first] : lists.offsets[last]]
    packed = wire.assemble(len(values), [(None, wire.varints(values))])
    edges = np.append(packed.starts, len(packed.buffer))[offsets]
    cells = Cells(packed.buffer, edges[:-1][rows], np.diff(edges)[rows])
    return [(rows, wire.length_delimited(wire.tag(number, LENGTH), cells.lengths)), (rows, cells)]


def _tensor_column(number: int, tensors: TensorInfo | None) -> Column:
    if tensors is None:
        return lambda first, last: []
    texts = []
    for place, column in zip(IO_FIELDS[1:], (tensors.shapes, tensors.types), strict=True):
        strings = Texts.of(column)
        used, index = distinct(strings.codes)
        texts.append(ValueTable(_string_fields(place, [strings.table[at] for at in used.tolist()]), index))
    values = tensors.values
    if isinstance(values, ByteStrings) and not values.is_utf8():
        values = list(values)
    return partial(_tensor_parts, number, tensors.rows, values, joined(texts))


def _tensor_parts(
    number: int, rows: np.ndarray, values: Sequence[bytes], texts: list[ValueTable], first: int, last: int
) -> list[Part]:
    low, high = np.searchsorted(rows, (first, last))
    if low == high:
        return []
    if isinstance(values, ByteStrings):
        buffer = np.frombuffer(values.buffer, np.uint8)
        cells = Cells(buffer, values.starts[low:high], values.lengths[low:high].astype(np.int64))
    else:
        cells = _utf8_strings(values[low:high])
    fields: list[Part] = [*_filled_strings(VALUES, cells), *(column.part(low, high) for column in texts)]
    rows = rows[low:high] - first
    head = wire.length_delimited(wire.tag(number, LENGTH), wire.row_lengths(high - low, fields))
    return [(rows, head), *((rows if which is None else rows[which], part) for which, part in fields)]


def _string_fields(number: int, strings: list[bytes]) -> Cells:
    """One string field per string, without bytes if the string is empty."""
    return wire.assemble(len(strings), _filled_strings(number, _utf8_strings(strings)))


def _filled_strings(number: int, cells: Cells) -> list[Part]:
    """The string fields of the rows whose string isn't empty."""
    filled = np.flatnonzero(cells.lengths)
    cells = cells.take(filled)
    head = wire.length_delimited(wire.tag(number, LENGTH), cells.lengths)
    return [(filled, head), (filled, cells)]


def _attribute_fields(number: int, name: str, kind: str, values: Cells | np.ndarray) -> Cells:
    parts = _attribute_cells(number, name, kind, values)
    return wire.assemble(len(parts[0].lengths), [(None, part) for part in parts])


def _attribute_cells(number: int, name: str, kind: str, values: Cells | np.ndarray) -> list[Cells]:
    """Field ``number`` with this attribute, one per value. 0 and empty values are written too.

    A suffix ``#kind`` of ``name``, which distinguishes two kinds of one name, is not written.
    """
    member = MEMBERS[kind]
    prefix = wire.tag(number, LENGTH)
    label = _text(name.removesuffix(f"#{kind}"))
    head = wire.tag(ATTR_NAME, LENGTH) + wire.bytes_of_varint(len(label)) + label if label else b""
    head += wire.tag(member.number, member.wire)
    if isinstance(values, Cells):
        sizes = wire.varints(values.lengths.astype(np.uint64), head)
        return [wire.length_delimited(prefix, sizes.lengths + values.lengths), sizes, values]
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
        return [wire.length_delimited(prefix, payload.lengths), payload]
    payload.buffer[payload.starts + len(prefix)] = payload.lengths - len(prefix) - 1
    return [payload]


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _utf8_strings(strings: Sequence[bytes]) -> Cells:
    """One row per string; bytes that are not UTF-8 are replaced."""
    cells = wire.byte_strings(strings, between=b"\0")
    try:
        # No character spans a zero byte, so the strings are valid if all of them together are.
        str(cells.buffer.data, "utf-8")
    except UnicodeDecodeError:
        return wire.byte_strings([text.decode("utf-8", "replace").encode("utf-8") for text in strings])
    return cells
