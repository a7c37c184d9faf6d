"""A run as a Perfetto trace (.pftrace), which https://ui.perfetto.dev and its trace processor open.

Every rank is a process and every row of the timeline a thread; dependencies between rows are flows. Counters
of each rank: communication that runs, its bytes, device work that is launched and has not started, memory.
Source of the field numbers: perfetto's protos/perfetto/trace (trace_packet, track_event, track_descriptor,
interned_data); times are ns on the trace's default clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO

import numpy as np

from chakra_et.et.columns import NodeType
from chakra_et.et.wire import FIXED64, message_field, tag, text_field, varint_field
from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.report.memory import device_name

SEQUENCE = 1
CLEARED, NEEDED = 1, 2  # SequenceFlags
BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type
LAUNCH = "launch"
CHUNK = 1 << 20


def write(window: Window, file: IO[bytes]) -> None:
    """Write ``window`` as a Perfetto trace."""
    pending, size = [], 0
    for packet in _packets(window):
        pending.append(message_field(1, packet))
        size += len(packet)
        if size > CHUNK:
            file.write(b"".join(pending))
            pending, size = [], 0
    file.write(b"".join(pending))


def _packets(window: Window) -> Iterator[bytes]:
    yield from _tracks(window)
    yield _interned(window)
    yield from _slices(window)
    yield from _counters(window)
    yield from _memory(window)


def _tracks(window: Window) -> Iterator[bytes]:
    """Descriptors of a process for each rank, and a thread for each of its rows."""
    used = np.unique(window.row).tolist()
    for rank in dict.fromkeys(window.rows[row].rank for row in used):
        process = varint_field(1, _process(rank)) + text_field(6, f"rank {rank}")
        yield message_field(60, varint_field(1, _process_uuid(rank)) + message_field(3, process))
    for row in used:
        rank, label = window.rows[row].rank, window.rows[row].label
        thread = varint_field(1, _process(rank)) + varint_field(2, row + 1) + text_field(5, label)
        track = varint_field(1, _row_uuid(row)) + varint_field(5, _process_uuid(rank)) + text_field(2, label)
        yield message_field(60, track + message_field(4, thread) + varint_field(12, row))


def _interned(window: Window) -> bytes:
    """The names of nodes and kinds, which events refer to by number."""
    _, names = window.names
    table = b"".join(
        message_field(2, varint_field(1, at + 1) + text_field(2, name)) for at, name in enumerate(names)
    )
    kinds = b"".join(
        message_field(1, varint_field(1, at + 1) + text_field(2, kind)) for at, kind in enumerate(NODE_KINDS)
    )
    labels = b"".join(
        message_field(3, varint_field(1, at + 1) + text_field(2, name)) for at, name in enumerate(LABELS)
    )
    return varint_field(10, SEQUENCE) + varint_field(13, CLEARED) + message_field(12, kinds + table + labels)


LABELS = ("id", "bytes", "waits for ranks ns")


def _slices(window: Window) -> Iterator[bytes]:
    name, _ = window.names
    starting, ending = _flows(window)
    head = varint_field(10, SEQUENCE) + varint_field(13, NEEDED)
    tracks = {row: varint_field(11, _row_uuid(row)) for row in np.unique(window.row).tolist()}
    numbers = [varint_field(10, at + 1) for at in range(int(name.max()) + 1)]
    kinds = [varint_field(3, at + 1) for at in range(len(NODE_KINDS))]
    size = window.run.graph.attribute("comm_size", 0)[window.node]
    columns = (window.start_ns, window.end_ns, window.row, name, window.kind, window.id, size)
    wait = window.run.wait_ns[window.node]
    for at, (start, end, row, code, kind, number, sent, waited) in enumerate(
        zip(*(column.tolist() for column in (*columns, wait)), strict=True)
    ):
        event = b"".join(
            (varint_field(9, BEGIN), tracks[row], numbers[code], kinds[kind], starting.get(at, b""),
             ending.get(at, b""), _argument(1, number))
        )  # fmt: skip
        if sent:
            event += _argument(2, sent)
        if waited:
            event += _argument(3, waited)
        yield varint_field(8, start) + head + message_field(11, event)
        yield varint_field(8, end) + head + message_field(11, varint_field(9, END) + tracks[row])


def _flows(window: Window) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The flow ids that begin and end at each node: one flow for each dependency between two rows."""
    starting: dict[int, bytes] = {}
    ending: dict[int, bytes] = {}
    across = np.flatnonzero(window.row[window.source] != window.row[window.target])
    pairs = zip(window.source[across].tolist(), window.target[across].tolist(), strict=True)
    for number, (source, target) in enumerate(pairs, 1):
        identity = struct.pack("<Q", number)
        starting[source] = starting.get(source, b"") + tag(47, FIXED64) + identity
        ending[target] = ending.get(target, b"") + tag(48, FIXED64) + identity
    return starting, ending


def _counters(window: Window) -> Iterator[bytes]:
    """Counter tracks of each rank."""
    run = window.run
    communicates = run.graph.types[window.node] >= NodeType.COMM_SEND
    size = run.graph.attribute("comm_size", 0)[window.node]
    launched = [at for at, kind in enumerate(window.edge_kind) if kind == LAUNCH]
    source, target = window.source[launched], window.target[launched]
    uuid = len(window.rows) + len(run.ranks) + 1
    for rank in run.ranks:
        own = communicates & (window.rank == rank)
        from_ns, to_ns = window.start_ns[own], window.end_ns[own]
        queued = window.rank[target] == rank
        waits = (window.end_ns[source[queued]], window.start_ns[target[queued]])
        for label, unit, begin, end, amount in (
            ("communication that runs", "operations", from_ns, to_ns, np.ones(len(from_ns), np.int64)),
            ("communication bytes that run", "bytes", from_ns, to_ns, size[own]),
            ("device work launched, not started", "kernels", *waits, np.ones(int(queued.sum()), np.int64)),
        ):
            if len(begin):
                uuid += 1
                yield _counter_track(uuid, rank, label, unit)
                yield from _counter_values(uuid, begin, np.maximum(end, begin), amount)


def _memory(window: Window) -> Iterator[bytes]:
    """Counter tracks of each rank's memory: allocated, and reserved by the caching allocator."""
    for number, curve in enumerate(window.memory()):
        for place, (what, values) in enumerate(
            (("allocated", curve.allocated), ("reserved", curve.reserved))
        ):
            if values is None:
                continue
            uuid = (1 << 42) + 2 * number + place
            yield _counter_track(uuid, curve.rank, f"{device_name(curve.device)} memory {what}", "bytes")
            yield from _levels(uuid, curve.time_ns, values)


def _counter_track(uuid: int, rank: int, label: str, unit: str) -> bytes:
    track = varint_field(1, uuid) + varint_field(5, _process_uuid(rank)) + text_field(2, label)
    return message_field(60, track + message_field(8, text_field(6, unit)))


def _counter_values(uuid: int, begin: np.ndarray, end: np.ndarray, amount: np.ndarray) -> Iterator[bytes]:
    moment, index = np.unique(np.concatenate([begin, end]), return_inverse=True)
    change = np.bincount(index.reshape(-1), np.concatenate([amount, -amount]), len(moment))
    yield from _levels(uuid, moment, np.rint(np.cumsum(change)).astype(np.int64))


def _levels(uuid: int, moment: np.ndarray, level: np.ndarray) -> Iterator[bytes]:
    head = varint_field(10, SEQUENCE)
    event = varint_field(9, COUNTER) + varint_field(11, uuid)
    for time, value in zip(moment.tolist(), level.tolist(), strict=True):
        yield varint_field(8, time) + head + message_field(11, event + varint_field(30, max(value, 0)))


def _argument(label: int, value: int) -> bytes:
    return message_field(4, varint_field(1, label) + varint_field(3, value))


def _process(rank: int) -> int:
    """A process id: Perfetto keeps 0 for the idle process."""
    return rank + 1


def _process_uuid(rank: int) -> int:
    return (1 << 40) + rank


def _row_uuid(row: int) -> int:
    return (1 << 41) + row
