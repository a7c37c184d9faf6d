"""The protobuf wire format on whole columns, without a Python object per field.

Encoding: one field of all rows is a ``Cells`` column of byte strings; ``assemble`` concatenates columns row
by row. Decoding: ``scan`` steps through the fields of many messages at once.
Source of the format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST_VARINT = 10
# Payload bytes by wire type if fixed. Wire types that proto3 lacks get a size that fits no message.
SIZE_OF_WIRE = np.array([0, 8, 0, 1 << 62, 1 << 62, 4, 1 << 62, 1 << 62])


class WireError(ValueError):
    """Invalid protobuf bytes. ``owner``: number of the message; ``offset``: in bytes."""

    def __init__(self, what: str, owner: int, offset: int) -> None:
        super().__init__(what)
        self.what, self.owner, self.offset = what, owner, offset


# ---- encoding ----


@dataclass(eq=False, repr=False)
class Cells(Sequence[bytes]):
    """A column of byte strings: row i is ``buffer[starts[i]:starts[i] + lengths[i]]``.

    ``buffer`` is uint8, ``starts`` and ``lengths`` int64[rows]. Rows may share bytes.
    """

    buffer: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def take(self, index: np.ndarray | slice) -> Cells:
        return Cells(self.buffer, self.starts[index], self.lengths[index])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return list(self.take(row))
        start = self.starts[row]
        return self.buffer[start : start + self.lengths[row]].tobytes()


Part = tuple["np.ndarray | None", Cells]
"""A column and the rows that have it, ascending (None: all rows)."""


def byte_strings(strings: Sequence[bytes]) -> Cells:
    """One row per string. In the buffer a zero byte, which belongs to no row, is behind each string."""
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    starts = np.cumsum(lengths) - lengths + np.arange(len(strings))
    return Cells(np.frombuffer(b"\0".join([*strings, b""]), np.uint8), starts, lengths)


def joined(parts: Sequence[Cells]) -> Cells:
    """The rows of all parts, of which there is one at least."""
    before = np.cumsum([0, *(len(part.buffer) for part in parts)])
    starts = [part.starts + at for part, at in zip(parts, before, strict=False)]
    buffer, lengths = ([getattr(part, name) for part in parts] for name in ("buffer", "lengths"))
    return Cells(np.concatenate(buffer), np.concatenate(starts), np.concatenate(lengths))


def varints(values: np.ndarray, prefix: bytes = b"") -> Cells:
    """Integers from 0 on, such as lengths, as varints behind ``prefix``, one per row."""
    values = np.ascontiguousarray(values, np.uint64)
    lengths = np.ones(len(values), np.int64)
    top = int(values.max()) if len(values) else 0
    for shift in range(7, max(top.bit_length(), 1), 7):
        lengths += values >= np.uint64(1 << shift)
    width = int(lengths.max()) if len(values) else 1
    table = _prefixed(prefix, len(values), width)
    for place in range(width):
        byte = ((values >> np.uint64(7 * place)) & np.uint64(0x7F)).astype(np.uint8)
        if place + 1 < width:
            byte |= (lengths > place + 1).view(np.uint8) << 7
        table[:, len(prefix) + place] = byte
    return _rows_of(table, lengths + len(prefix))


def fixed(values: np.ndarray, prefix: bytes = b"") -> Cells:
    """A little-endian number array as fixed32 or fixed64 behind ``prefix``, one per row."""
    width = values.dtype.itemsize
    table = _prefixed(prefix, len(values), width)
    table[:, len(prefix) :] = values.view(np.uint8).reshape(-1, width)
    return _rows_of(table, np.full(len(values), len(prefix) + width, np.int64))


def _prefixed(prefix: bytes, rows: int, width: int) -> np.ndarray:
    table = np.empty((rows, len(prefix) + width), np.uint8)
    table[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    return table


def _rows_of(table: np.ndarray, lengths: np.ndarray) -> Cells:
    return Cells(table.reshape(-1), np.arange(len(table)) * table.shape[1], lengths)


def tag(number: int, wire: int) -> bytes:
    return bytes_of_varint(number << 3 | wire)


def bytes_of_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    return bytes((value & 0x7F | 0x80,)) + bytes_of_varint(value >> 7)


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A message of (field number, value) …: whole numbers from 0 on, texts and messages."""
    parts = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            parts += tag(number, VARINT) + bytes_of_varint(value)
        else:
            content = value.encode("utf-8", "replace") if isinstance(value, str) else value
            parts += tag(number, LENGTH) + bytes_of_varint(len(content)) + content
    return bytes(parts)


def row_lengths(rows: int, parts: Sequence[Part]) -> np.ndarray:
    """int64[rows]: bytes of each row over all columns."""
    lengths = np.zeros(rows, np.int64)
    for which, cells in parts:
        lengths[slice(None) if which is None or len(which) == rows else which] += cells.lengths
    return lengths


def assemble(rows: int, parts: Sequence[Part]) -> Cells:
    """Concatenate columns row by row: row i is the ith row of each part, in the order of the parts."""
    lengths = row_lengths(rows, parts)
    starts = np.cumsum(lengths) - lengths
    buffer = np.empty(int(lengths.sum()), np.uint8)
    place = starts.copy()
    for which, cells in parts:
        chosen = slice(None) if which is None or len(which) == rows else which
        _copy(buffer, place[chosen], cells)
        place[chosen] += cells.lengths
    return Cells(buffer, starts, lengths)


def _copy(target: np.ndarray, places: np.ndarray, cells: Cells) -> None:
    """Write row i of ``cells`` at ``target[places[i]:]``.

    Rows of equal length are copied together as elements of that many bytes, which is several times faster
    than a gather of single bytes.
    """
    lengths = cells.lengths
    if not len(lengths):
        return
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest == longest:
        if longest:
            source = windows(cells.buffer, longest)
            windows(target, longest)[places] = source[cells.starts]
        return
    order, edges = by_length(lengths)
    places, starts, in_order = places[order], cells.starts[order], lengths[order]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        length = int(in_order[low])
        if length:
            windows(target, length)[places[low:high]] = windows(cells.buffer, length)[starts[low:high]]


def by_length(lengths: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """(stable order by length, offsets in it of the groups of equal length)."""
    # numpy sorts 16-bit integers by radix.
    narrow = len(lengths) and int(lengths.max()) < 1 << 16
    order = np.argsort(lengths.astype(np.uint16) if narrow else lengths, kind="stable")
    in_order = lengths[order]
    changes = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    return order, [0, *changes.tolist(), len(order)]


def windows(buffer: np.ndarray, length: int) -> np.ndarray:
    """``result[i]`` is ``buffer[i:i + length]`` as one element: overlapping views into the same memory."""
    return np.ndarray((len(buffer) - length + 1,), np.dtype((np.void, length)), buffer, strides=(1,))


# ---- decoding ----


@dataclass(eq=False, repr=False)
class Fields:
    """The fields of many messages, one row per field; rows of one message are in byte order.

    ``message``: index of the message among those scanned; ``key``: ``number << 3 | wire type``; payload:
    ``data[start:end]`` (the varint's own bytes for a varint); ``value``: of a varint, uint64. Others: int64.
    """

    message: np.ndarray
    key: np.ndarray
    start: np.ndarray
    end: np.ndarray
    value: np.ndarray

    def take(self, index: np.ndarray) -> Fields:
        return Fields(*(column[index] for column in vars(self).values()))

    def where(self, number: int, *wires: int) -> Fields:
        """The fields with this number and one of these wire types."""
        return self.take(np.flatnonzero(np.isin(self.key, [number << 3 | wire for wire in wires])))


def scan(raw: bytes, starts: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> Fields:
    """Split the messages ``raw[starts[i]:ends[i]]`` into fields.

    ``owners`` int64[K]: the message numbers for errors. Each pass advances every message by one field and
    drops messages that are done, so the work is linear in the bytes. Raises ``WireError`` for a field that
    does not fit its message and for a wire type that proto3 lacks.
    """
    data = np.frombuffer(raw, np.uint8)
    active = np.flatnonzero(starts < ends)
    position, stop = starts[active], ends[active]
    none = np.zeros(0, np.int64)
    steps: list[tuple[np.ndarray, ...]] = [(none, none, none, none, np.zeros(0, np.uint64))]
    while len(active):
        key, start = read_varints(data, position)
        key = key.view(np.int64)
        wire = key & 7
        value, end = read_varints(data, start)
        if (wire != VARINT).any():
            long = wire == LENGTH
            # A hostile length can be any uint64: clip it to one byte more than the message has.
            room = stop + 1 - np.minimum(end, stop)
            last = end + np.where(long, np.minimum(value, room.view(np.uint64)).view(np.int64), 0)
            others = np.flatnonzero(SIZE_OF_WIRE.take(wire))
            last[others] = start[others] + SIZE_OF_WIRE[wire[others]]
            start, end = np.where(long, end, start), last
        legal = (end <= stop) & (start <= end) & ((key >> 3) != 0)
        if not legal.all():
            bad = int(np.flatnonzero(~legal)[0])
            raise WireError("a field does not fit its message", int(owners[active[bad]]), int(position[bad]))
        steps.append((active, key, start, end, value))
        going_on = np.flatnonzero(end < stop)
        if len(going_on) == len(active):
            position = end
        else:
            active, position, stop = active[going_on], end[going_on], stop[going_on]
    return Fields(*(np.concatenate(column) for column in zip(*steps, strict=True)))


def read_varints(data: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values uint64, positions after them). A varint over 10 bytes or 64 bits, or beyond the end of the
    data, gets a position far behind the data, where no message ends."""
    first = data.take(position, mode="clip")
    value = (first & 0x7F).astype(np.uint64)
    after = position + 1
    index = np.flatnonzero(first > 0x7F)
    for place in range(1, LONGEST_VARINT):
        if not len(index):
            break
        byte = data.take(after[index], mode="clip")
        value[index] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        after[index] += 1
        if place == LONGEST_VARINT - 1:
            after[index[byte > 1]] = len(data) + 16
        index = index[byte > 0x7F]
    return value, after


def read_varint(raw: bytes, at: int, stop: int) -> tuple[int, int]:
    """(value, position after it); the position is behind ``stop`` if there is no valid varint before it."""
    values, after = read_varints(np.frombuffer(raw[at:stop] or b"\x80", np.uint8), np.zeros(1, np.int64))
    return (int(values[0]), at + int(after[0])) if after[0] <= stop - at else (0, stop + 1)


def decode_varints(
    raw: bytes, starts: np.ndarray, ends: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Decode spans ``raw[starts[i]:ends[i]]`` that are filled with varints: (values uint64, count per span).

    Raises ``WireError`` for a span that ends within a varint, or with a value beyond 64 bits.
    """
    lengths = ends - starts
    at = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
    data = np.frombuffer(raw, np.uint8)[at]
    last = data < 0x80
    finish = np.flatnonzero(last)
    edges = np.cumsum(lengths)
    filled = lengths > 0
    open_ended = np.flatnonzero(~last[edges[filled] - 1])
    if len(open_ended):
        span = np.flatnonzero(filled)[open_ended[0]]
        raise WireError("a list of numbers is cut off", int(owners[span]), int(starts[span]))
    begin = np.concatenate(([0], finish[:-1] + 1)) if len(finish) else finish
    values, after = read_varints(data, begin)
    too_long = begin[after > len(data)]
    if len(too_long):
        span = int(np.searchsorted(edges, too_long[0], side="right"))
        raise WireError("a number has more than 64 bits", int(owners[span]), int(at[too_long[0]]))
    before = np.concatenate(([0], np.cumsum(last)))
    return values, before[edges] - before[edges - lengths]
