"""Decode the bytes of an .et file from any writer into columns."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import chain

import numpy as np

from chakra_et.et import schema, wire
from chakra_et.et.columns import Attribute, ExecutionTrace, Ragged, Strings, TensorInfo
from chakra_et.et.wire import LENGTH, VARINT, Fields, WireError

# Nodes decoded at a time: enough to amortise numpy's overhead, few enough to need little memory.
CHUNK = 8192
# Strings of one length to compare with the whole column before looking up rows one by one.
COMPARED = 8
# Real files have about twenty names, and each is a column: this limits the cost of a hostile file.
MOST_ATTRIBUTES = 4096
# Bits for the field key in a column's number; the bits above hold the number of its name.
KEY_BITS = 9
# By field key: whether it is a value of AttributeProto.
IS_VALUE_KEY = np.zeros(1 << KEY_BITS, bool)
IS_VALUE_KEY[list(schema.KIND_OF_KEY)] = True

# One chunk of nodes: (rows, the texts of each field in schema.IO_FIELDS).
_TensorBlock = tuple[np.ndarray, list[list[bytes]]]


class _Interned(dict[bytes, int]):
    """Distinct byte strings → index, in the order of first occurrence."""

    def __missing__(self, text: bytes) -> int:
        self[text] = len(self)
        return len(self) - 1

    def index(self, raw: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32[K]: the index of each string ``raw[starts[i]:ends[i]]``."""
        index = np.empty(len(starts), np.int32)
        order, edges = wire.by_length(ends - starts)
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            rows = order[low:high]
            if not len(rows):
                continue
            # Most columns repeat a few strings, and comparing all rows with one string costs much less than
            # looking up each row.
            begin = starts[rows]
            length = int(ends[rows[0]] - begin[0])
            found = np.full(len(rows), -1, np.int32)
            if length:
                text = wire.windows(np.frombuffer(raw, np.uint8), length)[begin].view(f"S{length}")
                at = 0
                for _ in range(COMPARED):
                    first = raw[begin[at] : begin[at] + length]
                    found[text == first] = self[first]
                    at = int(np.argmin(found))
                    if found[at] >= 0:
                        break
            left = np.flatnonzero(found < 0)
            found[left] = [self[raw[start : start + length]] for start in begin[left].tolist()]
            index[rows] = found
        return index


@dataclass
class _Column:
    """One attribute, collected chunk by chunk."""

    kind: str
    rows: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    table: _Interned = field(default_factory=_Interned)

    def finish(self) -> Attribute:
        values = np.concatenate(self.values)
        is_text = schema.MEMBERS[self.kind].wire == LENGTH
        return Attribute(
            self.kind, np.concatenate(self.rows), Strings(list(self.table), values) if is_text else values
        )


class _Attributes:
    """The attributes of all nodes, or of the metadata."""

    def __init__(self) -> None:
        self.names = _Interned()
        self.columns: dict[int, _Column] = {}
        self.follows: dict[int, set[int]] = {}

    def add(self, raw: bytes, fields: Fields, first: int) -> None:
        """Add the attribute messages ``fields``; their nodes are numbered from ``first``."""
        fields = fields.take(np.argsort(fields.message, kind="stable"))
        owners = fields.message + first
        parts = wire.scan(raw, fields.start, fields.end, owners)

        label = parts.where(schema.ATTR_NAME, LENGTH)
        start, end = _spans(label, len(owners))
        names = self.names.index(raw, start, end).astype(np.int64)
        if len(self.names) > MOST_ATTRIBUTES:
            raise WireError(f"more than {MOST_ATTRIBUTES} attribute names", int(owners[-1]), int(start[-1]))

        chosen = np.full(len(owners), -1)
        valued = np.flatnonzero(IS_VALUE_KEY.take(parts.key, mode="clip"))
        chosen[parts.message[valued]] = valued  # the last member wins, as in any oneof
        present = np.flatnonzero(chosen >= 0)
        chosen, owners = chosen[present], owners[present]
        values = parts.take(chosen)
        keys = names[present] << KEY_BITS | values.key
        together = np.flatnonzero(owners[1:] == owners[:-1])
        for pair in np.unique(keys[together] << 32 | keys[together + 1]).tolist():
            self.follows.setdefault(pair & 0xFFFFFFFF, set()).add(pair >> 32)

        found = np.flatnonzero(np.bincount(keys)).tolist()
        for key in sorted(found, key=lambda key: int(np.argmax(keys == key))):
            which = np.flatnonzero(keys == key)
            # If a node has an attribute twice, the last one counts.
            which = which[np.append(owners[which[1:]] != owners[which[:-1]], True)]
            column = self.columns.setdefault(key, _Column(schema.KIND_OF_KEY[key & (1 << KEY_BITS) - 1]))
            column.rows.append(owners[which])
            column.values.append(_values(raw, column, values.take(which)))

    def finish(self) -> dict[str, Attribute]:
        """The attributes by name, in an order consistent with every node if there is one."""
        order = list(self.columns)
        sorter = TopologicalSorter({key: sorted(self.follows.get(key, ())) for key in order})
        with contextlib.suppress(CycleError):
            order = list(sorter.static_order())
        table = list(self.names)
        attributes: dict[str, Attribute] = {}
        for key in order:
            column = self.columns[key]
            name = table[key >> KEY_BITS].decode("utf-8", "replace")
            attributes[f"{name}#{column.kind}" if name in attributes else name] = column.finish()
        return attributes


def decode(raw: bytes) -> ExecutionTrace:
    """The trace in the bytes of a file. Raises ``WireError`` with the node's index, -1 for the metadata."""
    starts, ends = _messages(raw)
    has_metadata = _starts_with_metadata(raw, starts, ends)
    metadata = _metadata(raw, starts[:1], ends[:1]) if has_metadata else {}
    starts, ends = starts[int(has_metadata) :], ends[int(has_metadata) :]
    count = len(starts)

    columns = (schema.ID, schema.TYPE, schema.START, schema.DURATION)
    numbers = {number: np.zeros(count, np.uint64) for number in columns}
    names = _Interned()
    name_index = np.zeros(count, np.int32)
    lists: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {schema.CTRL_DEPS: [], schema.DATA_DEPS: []}
    tensors: dict[int, list[_TensorBlock]] = {schema.INPUTS: [], schema.OUTPUTS: []}
    attributes = _Attributes()
    for first in range(0, count, CHUNK):
        chunk = slice(first, min(first + CHUNK, count))
        owners = np.arange(chunk.start, chunk.stop)
        fields = wire.scan(raw, starts[chunk], ends[chunk], owners)
        for number, column in numbers.items():
            varints = fields.where(number, VARINT)
            column[varints.message + first] = varints.value
        name_index[chunk] = names.index(raw, *_spans(fields.where(schema.NAME, LENGTH), len(owners)))
        for number, chunks in lists.items():
            chunks.append(_numbers(raw, fields.where(number, VARINT, LENGTH), owners))
        for number, blocks in tensors.items():
            _tensors(raw, fields.where(number, LENGTH), owners, first, blocks)
        attributes.add(raw, fields.where(schema.ATTR, LENGTH), first)
    return ExecutionTrace(
        ids=numbers[schema.ID],
        names=Strings(list(names), name_index),
        types=np.minimum(numbers[schema.TYPE], 255).astype(np.uint8),
        start_micros=numbers[schema.START],
        duration_micros=numbers[schema.DURATION],
        ctrl_deps=_ragged(lists[schema.CTRL_DEPS]),
        data_deps=_ragged(lists[schema.DATA_DEPS]),
        inputs=_join_tensors(tensors[schema.INPUTS]),
        outputs=_join_tensors(tensors[schema.OUTPUTS]),
        attributes=attributes.finish(),
        metadata=metadata,
        has_metadata=has_metadata,
    )


def _starts_with_metadata(raw: bytes, starts: np.ndarray, ends: np.ndarray) -> bool:
    """Whether the first message is a ``GlobalMetadata``, which has only length-delimited fields 1 and 2."""
    keys = wire.scan(raw, starts[:1], ends[:1], np.array([-1])).key
    return bool(np.isin(keys, (schema.VERSION << 3 | LENGTH, schema.METADATA_ATTR << 3 | LENGTH)).all())


def _messages(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Start and end offsets of the messages. Raises ``WireError``."""
    marks = array("q")
    at, size = 0, len(raw)
    what = ""
    while at < size and not what:
        marks.append(at)
        length = raw[at]
        if 0 < length < 0x80:
            at += length + 1
        elif length and at + 1 < size and raw[at + 1] < 0x80:
            at += (length & 0x7F | raw[at + 1] << 7) + 2
        else:
            length, after = wire.read_varint(raw, at, min(at + 5, size))
            if not length:
                what = "an empty message, where readers stop" if after == at + 1 else "not a message length"
            at = after + length
    lengths, starts = wire.read_varints(np.frombuffer(raw, np.uint8), np.frombuffer(marks, np.int64))
    ends = starts + lengths.astype(np.int64)
    if at > size:
        what = what or f"the message has {ends[-1] - starts[-1]} bytes, but only {size - starts[-1]} are left"
    if what:
        node = len(marks) - 1 - int(_starts_with_metadata(raw, starts, ends)) if len(marks) > 1 else -1
        raise WireError(what, node, marks[-1])
    return starts, ends


def _metadata(raw: bytes, start: np.ndarray, end: np.ndarray) -> dict[str, int | str | bool | float]:
    fields = wire.scan(raw, start, end, np.array([-1]))
    version_start, version_end = _spans(fields.where(schema.VERSION, LENGTH), 1)
    metadata: dict[str, int | str | bool | float] = {}
    attributes = _Attributes()
    attributes.add(raw, fields.where(schema.METADATA_ATTR, LENGTH), -1)
    for name, attribute in attributes.finish().items():
        if attribute.kind == "string":
            metadata[name] = attribute.values[0]
        elif not isinstance(attribute.values, Strings):
            value = attribute.values[0].item()
            metadata[name] = bool(value) if attribute.kind == "bool" else value
    metadata["version"] = raw[version_start[0] : version_end[0]].decode("utf-8", "replace")
    return metadata


def _spans(fields: Fields, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the payload of the last of ``fields`` in each message; 0 and 0 if it has none."""
    start, end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    start[fields.message], end[fields.message] = fields.start, fields.end
    return start, end


def _numbers(raw: bytes, fields: Fields, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, count per message) of a repeated uint64 field, packed or not."""
    fields = fields.take(np.argsort(fields.message, kind="stable"))
    values, counts = wire.decode_varints(raw, fields.start, fields.end, owners[fields.message])
    return values, np.bincount(fields.message, counts, len(owners)).astype(np.int64)


def _ragged(chunks: list[tuple[np.ndarray, np.ndarray]]) -> Ragged:
    counts = np.concatenate([np.zeros(1, np.int64), *(counts for _, counts in chunks)])
    values = np.concatenate([np.zeros(0, np.uint64), *(values for values, _ in chunks)])
    return Ragged(np.cumsum(counts), values)


def _tensors(raw: bytes, fields: Fields, owners: np.ndarray, first: int, blocks: list[_TensorBlock]) -> None:
    """Append the IOInfo messages to ``blocks``."""
    parts = wire.scan(raw, fields.start, fields.end, owners[fields.message])
    rows = np.unique(fields.message)
    columns: list[list[bytes]] = []
    for number in schema.IO_FIELDS:
        found = parts.where(number, LENGTH)
        found.message = fields.message[found.message]
        start, end = _spans(found, len(owners))
        columns.append([raw[a:b] for a, b in zip(start[rows].tolist(), end[rows].tolist(), strict=True)])
    blocks.append((rows + first, columns))


def _join_tensors(blocks: list[_TensorBlock]) -> TensorInfo | None:
    if not any(len(rows) for rows, _ in blocks):
        return None
    rows, columns = zip(*blocks, strict=True)
    return TensorInfo(np.concatenate(rows), *map(list, map(chain.from_iterable, zip(*columns, strict=True))))


def _values(raw: bytes, column: _Column, fields: Fields) -> np.ndarray:
    """The payloads as values of ``column``: numbers, or indices into its table."""
    kind = schema.MEMBERS[column.kind]
    if kind.wire == LENGTH:
        return column.table.index(raw, fields.start, fields.end)
    if kind.wire != VARINT:
        payload = wire.windows(np.frombuffer(raw, np.uint8), int(wire.SIZE_OF_WIRE[kind.wire]))[fields.start]
        wide = {"f": np.float64, "i": np.int64, "u": np.uint64 if kind.dtype == "<u8" else np.int64}
        return payload.view(kind.dtype).astype(wide[kind.dtype[1]])
    if kind.dtype == "zigzag":
        zigzag: np.ndarray = (fields.value >> np.uint64(1)) ^ -(fields.value & np.uint64(1)).view(np.uint64)
        return zigzag.view(np.int64)
    if kind.dtype == "u8":
        return fields.value
    if kind.dtype == "bool":
        truth: np.ndarray = fields.value != 0
        return truth.astype(np.int64)
    return fields.value.astype(kind.dtype).astype(np.int64)
