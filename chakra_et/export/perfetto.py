"""A run as a Perfetto trace (.pftrace), which https://ui.perfetto.dev and its trace processor open.

Every rank is a process and every row of the timeline a thread; dependencies between rows are flows. Counters
of each rank: communication that runs, its bytes, device work that is launched and has not started, memory.
Source of the field numbers: perfetto's protos/perfetto/trace (trace_packet, track_event, track_descriptor,
interned_data); times are ns on the trace's default clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

import numpy as np

from chakra_et.et.columns import NodeType
from chakra_et.et.wire import FIXED64, message_field, tag, text_field, varint_field
from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.report.timeline import device_name

SEQUENCE = 1
CLEARED, NEEDED = 1, 2  # SequenceFlags
BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type
LABELS = ("id", "bytes", "waits for ranks ns")
CHUNK = 1 << 20


def write(window: Window, file: IO[bytes]) -> None:
    """Write ``window`` as a Perfetto trace."""
    pending, size = [], 0
    for part in (_tracks, _slices, _counters, _memory):
        for packet in part(window):
            pending.append(message_field(1, packet))
            size += len(packet)
            if size > CHUNK:
                file.write(b"".join(pending))
                pending, size = [], 0
    file.write(b"".join(pending))


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A message of (field number, value) …: whole numbers, texts and messages."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint_field(number, value))
        elif isinstance(value, str):
            parts.append(text_field(number, value))
        else:
            parts.append(message_field(number, value))
    return b"".join(parts)


def _process(rank: int) -> int:
    """The track of a rank. Its process id is the rank + 1: Perfetto keeps 0 for the idle process."""
    return (1 << 40) + rank


def _thread(row: int) -> int:
    return (1 << 41) + row


def _tracks(window: Window) -> Iterator[bytes]:
    """A process for each rank, a thread for each of its rows, and the names that events refer to."""
    used = window.used_rows()
    for rank in dict.fromkeys(window.rows[row].rank for row in used):
        process = message((1, rank + 1), (6, f"rank {rank}"))
        yield message((60, message((1, _process(rank)), (3, process))))
    for row in used:
        rank, label = window.rows[row].rank, window.rows[row].label
        thread = message((1, rank + 1), (2, row + 1), (5, label))
        track = message((1, _thread(row)), (5, _process(rank)), (2, label), (4, thread), (12, row))
        yield message_field(60, track)
    yield interned({1: NODE_KINDS, 2: window.names, 3: LABELS})


def interned(names: Mapping[int, Iterable[str]]) -> bytes:
    """The names that events refer to, numbered from 1: by field of InternedData."""
    table = b"".join(
        message((field, message((1, number), (2, name))))
        for field, of_field in names.items()
        for number, name in enumerate(of_field, 1)
    )
    return message((10, SEQUENCE), (13, CLEARED), (12, table))


def _slices(window: Window) -> Iterator[bytes]:
    # The flow ids that begin and end at each node: one flow for each dependency between two rows.
    flows: dict[int, bytes] = {}
    across = np.flatnonzero(window.row[window.source] != window.row[window.target])
    for field, nodes in ((47, window.source), (48, window.target)):
        for number, node in enumerate(nodes[across].tolist(), 1):
            flows[node] = flows.get(node, b"") + tag(field, FIXED64) + struct.pack("<Q", number)
    head = message((10, SEQUENCE), (13, NEEDED))
    begin, finish = varint_field(9, BEGIN), varint_field(9, END)
    tracks = {row: varint_field(11, _thread(row)) for row in window.used_rows()}
    names = [varint_field(10, at + 1) for at in range(len(window.names))]
    kinds = [varint_field(3, at + 1) for at in range(len(NODE_KINDS))]
    size = window.run.graph.attribute("comm_size", 0)[window.node]
    wait = window.run.wait_ns[window.node]
    columns = (window.start_ns, window.end_ns, window.row, window.name, window.kind, window.id, size, wait)
    for at, (start, end, row, name, kind, *values) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        event = begin + tracks[row] + names[name] + kinds[kind] + flows.get(at, b"")
        for label, value in enumerate(values, 1):  # the id always, bytes and waiting where there are some
            if value or label == 1:
                event += message_field(4, varint_field(1, label) + varint_field(3, value))
        yield varint_field(8, start) + head + message_field(11, event)
        yield varint_field(8, end) + head + message_field(11, finish + tracks[row])


def _counters(window: Window) -> Iterator[bytes]:
    """What of each rank runs or waits at a time."""
    run = window.run
    communicates = run.graph.types[window.node] >= NodeType.COMM_SEND
    size = run.graph.attribute("comm_size", 0)[window.node]
    launched = [at for at, kind in enumerate(window.edge_kind) if kind == "launch"]
    source, target = window.source[launched], window.target[launched]
    uuid = len(window.rows) + len(run.ranks) + 1
    for rank in run.ranks:
        own = communicates & (window.rank == rank)
        runs = (window.start_ns[own], window.end_ns[own])
        queued = window.rank[target] == rank
        waits = (window.end_ns[source[queued]], window.start_ns[target[queued]])
        for label, unit, (begin, end), amount in (
            ("communication that runs", "operations", runs, np.ones(int(own.sum()), np.int64)),
            ("communication bytes that run", "bytes", runs, size[own]),
            ("device work launched, not started", "kernels", waits, np.ones(int(queued.sum()), np.int64)),
        ):
            if len(begin):
                uuid += 1
                both = np.concatenate([begin, np.maximum(end, begin)])
                moment, index = np.unique(both, return_inverse=True)
                change = np.bincount(index.reshape(-1), np.concatenate([amount, -amount]), len(moment))
                level = np.rint(np.cumsum(change)).astype(np.int64)
                levels = zip(moment.tolist(), level.tolist(), strict=True)
                yield from counter(uuid, _process(rank), label, unit, levels)


def _memory(window: Window) -> Iterator[bytes]:
    """The memory of each rank's devices: allocated, and reserved by the caching allocator."""
    for number, curve in enumerate(window.memory()):
        name = f"{device_name(curve.device)} memory"
        for uuid, what, level in (
            ((1 << 42) + 2 * number, "allocated", curve.allocated),
            ((1 << 42) + 2 * number + 1, "reserved", curve.reserved),
        ):
            if level is not None:
                levels = zip(curve.time_ns.tolist(), level.tolist(), strict=True)
                yield from counter(uuid, _process(curve.rank), f"{name} {what}", "bytes", levels)


def counter(
    uuid: int, process: int, label: str, unit: str, levels: Iterable[tuple[int, int]]
) -> Iterator[bytes]:
    """A counter track of a process, and its level from each moment on."""
    yield message((60, message((1, uuid), (5, process), (2, label), (8, message((6, unit))))))
    head, event = varint_field(10, SEQUENCE), message((9, COUNTER), (11, uuid))
    for time, level in levels:
        yield varint_field(8, time) + head + message_field(11, event + varint_field(30, max(level, 0)))
