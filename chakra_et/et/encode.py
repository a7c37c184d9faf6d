"""Encode columns as the bytes of an .et file.

The bytes are the same as those of the protobuf library: fields in ascending order, defaults left out except
in attribute values, dependencies packed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import wire
from chakra_et.et.columns import ExecutionTrace, Ragged, Strings, TensorInfo
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
    VERSION,
)
from chakra_et.et.wire import LENGTH, VARINT, Cells, Part

# Nodes encoded at a time: enough to amortise numpy's overhead, few enough to stay in the cache.
CHUNK = 8192
# Protobuf libraries read no longer message.
LARGEST_MESSAGE = (1 << 31) - 1


def encode(trace: ExecutionTrace) -> Iterator[memoryview]:
    """The bytes of the file, in blocks."""
    if trace.has_metadata:
        yield _messages(1, _metadata_parts(trace.metadata))
    names = _string_fields(NAME, trace.names.table)
    # Each distinct string is encoded once, and rows share its bytes.
    tables = {
        name: _attribute_fields(ATTR, name, attribute.kind, _table(attribute.kind, attribute.values.table))
        for name, attribute in trace.attributes.items()
        if isinstance(attribute.values, Strings)
    }
    for first in range(0, len(trace), CHUNK):
        last = min(first + CHUNK, len(trace))
        yield _messages(last - first, _node_parts(trace, names, tables, first, last))


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
        parts.append((None, _attribute_fields(METADATA_ATTR, name, *_metadata_column(name, value))))
    return parts


def _metadata_column(name: str, value: int | str | bool | float) -> tuple[str, Cells | np.ndarray]:
    if isinstance(value, bool):
        return "bool", np.array([value], np.int64)
    if isinstance(value, int):
        unsigned = value >= 0 and (name in UNSIGNED_METADATA or value >= 1 << 63)
        return (
            ("uint64", np.array([value], np.uint64)) if unsigned else ("int64", np.array([value], np.int64))
        )
    if isinstance(value, float):
        return "double", np.array([value])
    return "string", wire.byte_strings([_text(value)])


def _node_parts(
    trace: ExecutionTrace, names: Cells, tables: dict[str, Cells], first: int, last: int
) -> list[Part]:
    """The fields of the nodes [first, last), in the order in which they are written."""
    parts = _number_parts(ID, trace.ids[first:last])
    parts += [(None, names.take(trace.names.index[first:last]))]
    parts += _number_parts(TYPE, trace.types[first:last])
    parts += _list_parts(CTRL_DEPS, trace.ctrl_deps, first, last)
    parts += _list_parts(DATA_DEPS, trace.data_deps, first, last)
    parts += _number_parts(START, trace.start_micros[first:last])
    parts += _number_parts(DURATION, trace.duration_micros[first:last])
    parts += _tensor_parts(INPUTS, trace.inputs, first, last)
    parts += _tensor_parts(OUTPUTS, trace.outputs, first, last)
    for name, attribute in trace.attributes.items():
        low, high = np.searchsorted(attribute.rows, (first, last))
        rows, values = attribute.rows[low:high] - first, attribute.values
        if isinstance(values, Strings):
            parts.append((rows, tables[name].take(values.index[low:high])))
        elif low < high:
            parts += [
                (rows, cells) for cells in _attribute_cells(ATTR, name, attribute.kind, values[low:high])
            ]
    return parts


def _number_parts(number: int, values: np.ndarray) -> list[Part]:
    rows = np.flatnonzero(values)
    return [(rows, wire.constant(wire.tag(number, VARINT), len(rows))), (rows, wire.varints(values[rows]))]


def _list_parts(number: int, lists: Ragged, first: int, last: int) -> list[Part]:
    offsets = lists.offsets[first : last + 1] - lists.offsets[first]
    rows = np.flatnonzero(np.diff(offsets))
    values = lists.values[lists.offsets[first] : lists.offsets[last]]
    packed = wire.assemble(len(values), [(None, wire.varints(values))])
    edges = np.append(packed.starts, len(packed.buffer))[offsets]
    cells = Cells(packed.buffer, edges[:-1][rows], np.diff(edges)[rows])
    return [(rows, part) for part in (*wire.length_delimited(wire.tag(number, LENGTH), cells.lengths), cells)]


def _tensor_parts(number: int, tensors: TensorInfo | None, first: int, last: int) -> list[Part]:
    if tensors is None:
        return []
    low, high = np.searchsorted(tensors.rows, (first, last))
    fields: list[Part] = []
    for place, column in zip(IO_FIELDS, (tensors.values, tensors.shapes, tensors.types), strict=True):
        cells = _utf8_strings(column[low:high])
        filled = np.flatnonzero(cells.lengths)
        cells = cells.take(filled)
        head = wire.length_delimited(wire.tag(place, LENGTH), cells.lengths)
        fields += [(filled, part) for part in (*head, cells)]
    sizes = wire.row_lengths(high - low, fields)
    rows = tensors.rows[low:high] - first
    head = wire.length_delimited(wire.tag(number, LENGTH), sizes)
    return [(rows, part) for part in head] + [(rows[where], part) for where, part in fields]


def _string_fields(number: int, strings: list[bytes]) -> Cells:
    """One string field per string, without bytes if the string is empty."""
    cells = _utf8_strings(strings)
    filled = np.flatnonzero(cells.lengths)
    cells = cells.take(filled)
    head = wire.length_delimited(wire.tag(number, LENGTH), cells.lengths)
    return wire.assemble(len(strings), [(filled, part) for part in (*head, cells)])


def _table(kind: str, strings: list[bytes]) -> Cells:
    return _utf8_strings(strings) if kind == "string" else wire.byte_strings(strings)


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
        sizes = wire.varints(values.lengths.astype(np.uint64))
        before = wire.length_delimited(prefix, len(head) + sizes.lengths + values.lengths)
        return [*before, wire.constant(head, len(sizes.lengths)), sizes, values]
    if member.wire == VARINT:
        payload = wire.varints(_to_unsigned(values, kind))
    else:
        payload = wire.fixed(values.astype(member.dtype))
    # A number takes at most ten bytes, so there are few distinct heads.
    lengths = range(wire.LONGEST_VARINT + 1)
    heads = wire.byte_strings(
        [prefix + wire.bytes_of_varint(len(head) + length) + head for length in lengths]
    )
    return [heads.take(payload.lengths), payload]


def _to_unsigned(values: np.ndarray, kind: str) -> np.ndarray:
    """Integers as the uint64 whose varint encodes them: two's complement, or zigzag for sint."""
    if MEMBERS[kind].dtype == "zigzag":
        signed = values.astype(np.int64)
        return ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    return values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _utf8_strings(strings: list[bytes]) -> Cells:
    """One row per string; bytes that are not UTF-8 are replaced."""
    cells = wire.byte_strings(strings, between=b"\0")
    try:
        # No character spans a zero byte, so the strings are valid if all of them together are.
        str(cells.buffer.data, "utf-8")
    except UnicodeDecodeError:
        return wire.byte_strings([text.decode("utf-8", "replace").encode("utf-8") for text in strings])
    return cells
