"""A run as events of the Trace Event Format, as it was recorded, or the nodes of its .et files.

chrome://tracing and Speedscope open them, and https://ui.perfetto.dev gets them as a .pftrace. What was
recorded keeps its nesting, arguments and flows. TensorBoard's plugin torch-tb-profiler gets a rank's nodes:
steps are annotations, kernels and copies have their launch's correlation, operators the id by which their
kernels name them. Nodes are self time, so that an operator with others inside appears as several calls.
Sources: the document "Trace Event Format" of the Chromium project; the traces that PyTorch writes, with
categories and fields as in ``traces.device_format``; perfetto's protos/perfetto/trace (trace_packet,
track_event, track_descriptor, interned_data) for the field numbers, with times as ns on the trace's default
clock.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from chakra_et.et.node_attributes import EDGE_NAMES
from chakra_et.et.wire import FIXED64, message_field, tag, text_field, varint_field
from chakra_et.report.run import NODE_KINDS, ReportRun
from chakra_et.report.timeline import curves, lay_out, queues
from chakra_et.report.times import WHOLE, find_steps
from chakra_et.traces.records import read_records

# Kinds that are events of PyTorch's traces; overhead and annotations are not.
CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "kernel": "kernel", "copy": "gpu_memcpy"}
OTHERS = frozenset(NODE_KINDS) - {"kernel"}
# Process ids: the plugin takes those of device processes for the ids of devices.
DEVICE, CPU = 0, 1
_PROCESSES = 1000  # of one rank

SEQUENCE = 1
CLEARED, NEEDED = 1, 2  # SequenceFlags
BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type

Event = dict[str, Any]
Use = Callable[[Event], None]
Source = Callable[[Use], None]
"""Gives all events of a run to what uses them."""


def packed(file: IO[bytes]) -> IO[bytes]:
    """``file`` as one that compresses what is written; the same input gives the same bytes."""
    return gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)  # type: ignore[return-value]


def write_chrome(source: Source, file: IO[bytes]) -> int:
    """Write events as JSON, one per line; returns how many slices there are."""
    count, separator = 0, b'{"displayTimeUnit": "ns", "traceEvents": [\n'

    def use(event: Event) -> None:
        nonlocal count, separator
        file.write(separator + json.dumps(event, separators=(",", ":")).encode())
        count, separator = count + (event.get("ph") == "X"), b",\n"

    source(use)
    file.write(b"\n]}\n")
    return count


def write_perfetto(source: Source, file: IO[bytes]) -> int:
    """Write events as a Perfetto trace; returns how many slices there are."""
    found = Slices()
    source(found.add)
    return found.write(file)


def recorded_events(traces: Mapping[int, Path], use: Use) -> None:
    """The device traces of the ranks, with every level of their slices, arguments and flows."""
    for rank, path in sorted(traces.items()):
        read_records(path, "traceEvents", lambda _: _Trace, _Taker(rank, use))


class _Trace(msgspec.Struct):
    traceEvents: list[dict[str, Any]] = []
    baseTimeNanoseconds: int = 0


class _Taker:
    """Gives the events of a trace to ``use``, with the process ids of a rank."""

    def __init__(self, rank: int, use: Use) -> None:
        self.rank, self.use, self.seen = rank, use, dict[Any, int]()

    def take(self, records: list[Event]) -> None:
        for event in records:
            own = self.seen.setdefault(event.get("pid"), len(self.seen))
            event["pid"] = (self.rank + 1) * _PROCESSES + own
            if "id" in event:
                event["id"] = f"{self.rank}:{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                event["args"] = {"name": f"rank {self.rank}: {(event.get('args') or {}).get('name', '')}"}
            self.use(event)

    def leave_out(self, record: bytes) -> None:
        pass


class NodeEvents:
    """The nodes of a run as events, each rank with a process for its CPU (1) and one for its device (0).

    An end is cut at the start of the next node of its row of the timeline: starts and durations are rounded
    to µs independently, and viewers would take neighbours that overlap by a µs for nested ones.
    """

    def __init__(self, run: ReportRun) -> None:
        self.run, (self.rows, self.row) = run, lay_out(run)
        self.process = [DEVICE if row.kind == "gpu" else CPU for row in self.rows]
        self.order = np.lexsort((run.end_ns, run.start_ns, self.row))
        first, second = self.order[:-1], self.order[1:]
        limit = np.maximum(run.start_ns[second], run.start_ns[first])
        same = self.row[first] == self.row[second]
        self.end_ns = run.end_ns.copy()
        self.end_ns[first[same]] = np.minimum(run.end_ns[first], limit)[same]
        self.edge_kind = run.edge_kinds
        launches = self.edge_kind == EDGE_NAMES.index("launch")
        self.launched = np.full(len(run.graph), -1)
        self.launched[run.graph.source[launches]] = run.graph.target[launches]
        (self.name, self.names), self.kind = run.names, run.node_kinds

    def of_rank(self, rank: int) -> Iterator[Event]:
        """The names of processes and threads, then the nodes row by row."""
        run, graph = self.run, self.run.graph
        yield _about("process_name", {"name": f"rank {rank}"}, CPU)
        yield _about("process_name", {"name": f"rank {rank}, device"}, DEVICE)
        for number, lane in enumerate(self.rows):
            if lane.rank == rank:
                yield _about("thread_name", {"name": lane.label}, self.process[number], number)
        size = graph.attribute("comm_size", 0)
        own = graph.trace_of[self.order] == run.ranks.index(rank)
        for at in self.order[own].tolist():
            row, kind, number = int(self.row[at]), NODE_KINDS[self.kind[at]], int(run.ids[at])
            on_device = self.process[row] == DEVICE
            category = CATEGORIES.get(kind, kind)
            if kind == "transfer":
                category = "kernel" if on_device else "cpu_op"
            parent, launched = run.parent[at], self.launched[at]
            args: Event = {"id": number, "External id": int(run.ids[parent]) if parent >= 0 else number}
            if on_device:
                args |= {"device": DEVICE, "stream": row, "correlation": number}
            elif launched >= 0:
                args["correlation"] = int(run.ids[launched])
            if size[at]:
                args |= {"bytes": int(size[at]), "waits for ranks ns": int(run.wait_ns[at])}
            times = int(run.start_ns[at]), int(self.end_ns[at])
            yield _span(self.names[self.name[at]], category, self.process[row], row, *times, args)

    def write_all(self, use: Use) -> None:
        """Also dependencies between rows, as flows, and counters."""
        run, graph = self.run, self.run.graph
        for rank in run.ranks:
            for event in self.of_rank(rank):
                use(event | {"pid": event["pid"] + 2 * rank + 1})  # Perfetto keeps 0 for the idle process
        for number in np.flatnonzero(self.row[graph.source] != self.row[graph.target]).tolist():
            for kind, at in (("s", graph.source[number]), ("f", graph.target[number])):
                row = int(self.row[at])
                place = {"pid": self.process[row] + 2 * self.rows[row].rank + 1, "tid": row}
                about = {"name": EDGE_NAMES[self.edge_kind[number]], "cat": "dependency"}
                use({"ph": kind, "id": number, **about, **place, "ts": int(run.start_ns[at]) / 1000})
        for curve in (*curves(run), *queues(run)):
            place = {"pid": 2 * curve.rank + 1 + CPU}
            for label, levels in curve.lines().items():
                for time, level in zip(curve.time_ns.tolist(), levels.tolist(), strict=True):
                    args = {"value": max(level, 0)}
                    use({"ph": "C", "name": label, **place, "ts": time / 1000, "args": args})

    def write_kineto(self, rank: int, file: IO[bytes]) -> None:
        """Write the nodes of ``rank`` as PyTorch's profiler would, compressed, with its steps as
        annotations."""
        info = {"rank": rank, "world_size": len(self.run.ranks)}
        events = [event for event in self.of_rank(rank) if event.get("cat") not in OTHERS]
        main = next(number for number, row in enumerate(self.rows) if row.rank == rank)
        for step in find_steps(self.run):
            if step.rank == rank and step.name != WHOLE:
                times = step.start_ns, step.end_ns
                events.append(_span(f"ProfilerStep#{step.name}", "user_annotation", CPU, main, *times, {}))
        document = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
        with packed(file) as written:
            written.write(json.dumps(document, separators=(",", ":")).encode())


def _about(name: str, args: Event, pid: int, tid: int | None = None) -> Event:
    return {"ph": "M", "name": name, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _span(name: str, category: str, pid: int, tid: int, start: int, end: int, args: Event) -> Event:
    place = {"pid": pid, "tid": tid, "ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}


class Slices:
    """Events as a Perfetto trace (.pftrace): processes, threads, slices with arguments, flows, counters.

    ``threads``: (process, thread) → slices as (start ns, minus its length, encoded event).
    """

    def __init__(self) -> None:
        self.threads: dict[tuple[int, Any], list[tuple[int, int, bytes]]] = {}
        self.labels: dict[tuple[int, Any], str] = {}
        self.counters: dict[tuple[int, str], list[tuple[int, int]]] = {}
        # Numbers of names: of events (2), categories (1) and arguments (3), see InternedData.
        self.names: dict[int, dict[str, int]] = {1: {}, 2: {}, 3: {}}
        self.flows: dict[tuple[int, Any, int], bytes] = {}
        self.flow_ids: dict[str, int] = {}

    def add(self, event: Event) -> None:
        kind, thread = event.get("ph"), (event["pid"], event.get("tid"))
        start = round(float(event.get("ts") or 0) * 1000)
        given = event.get("args")
        arguments: Event = given if isinstance(given, dict) else {}
        if kind == "M":
            if event.get("name") in ("process_name", "thread_name"):
                at = thread if event["name"] == "thread_name" else (event["pid"], None)
                self.labels[at] = str(arguments.get("name", ""))
        elif kind == "X":
            body = varint_field(10, self._name(2, str(event.get("name", ""))))
            body += varint_field(3, self._name(1, str(event.get("cat", ""))))
            body += b"".join(message_field(4, self._argument(*each)) for each in arguments.items())
            length = round(float(event.get("dur") or 0) * 1000)
            self.threads.setdefault(thread, []).append((start, -length, body))
        elif kind in ("s", "t", "f") and "id" in event:
            number = self.flow_ids.setdefault(f"{event.get('cat')} {event['id']}", len(self.flow_ids) + 1)
            flow = tag(48 if kind == "f" else 47, FIXED64) + struct.pack("<Q", number)
            place = (*thread, start)
            self.flows[place] = self.flows.get(place, b"") + flow
        elif kind == "C":
            levels = self.counters.setdefault((event["pid"], str(event["name"])), [])
            levels.append((start, arguments["value"]))
        elif event.get("name") == "[memory]" and type(arguments.get("Total Allocated")) is int:
            device = f"{arguments.get('Device Type', '')}:{arguments.get('Device Id', '')} allocated"
            level = (start, arguments["Total Allocated"])
            self.counters.setdefault((event["pid"], device), []).append(level)

    def _name(self, field: int, text: str) -> int:
        known = self.names[field]
        return known.setdefault(text, len(known) + 1)

    def _argument(self, name: str, value: Any) -> bytes:
        head = varint_field(1, self._name(3, name))
        if isinstance(value, bool) or (isinstance(value, int) and 0 <= value < 1 << 63):
            return head + varint_field(3, int(value))
        return head + message_field(6, (value if isinstance(value, str) else json.dumps(value)).encode())

    def write(self, file: IO[bytes]) -> int:
        """Write the trace, and return how many slices it has."""
        for packet in self._packets():
            file.write(message_field(1, packet))
        return sum(map(len, self.threads.values()))

    def _packets(self) -> Iterator[bytes]:
        processes = dict.fromkeys(process for process, _ in (*self.threads, *self.counters))
        for process in processes:
            about = message((1, process), (6, self.labels.get((process, None), f"process {process}")))
            yield message((60, message((1, process), (3, about))))
        table = b"".join(
            message((field, message((1, number), (2, name))))
            for field, names in self.names.items()
            for number, name in enumerate(names, 1)
        )
        yield message((10, SEQUENCE), (13, CLEARED), (12, table))
        track = 1 << 40
        for number, (thread, slices) in enumerate(self.threads.items(), 1):
            slices.sort(key=lambda each: each[:2])
            for lane in self._lanes(thread, slices):
                track += 1
                label = self.labels.get(thread, str(thread[1]))
                about = message((1, thread[0]), (2, number), (5, label))
                yield message((60, message((1, track), (5, thread[0]), (2, label), (4, about))))
                head = message((10, SEQUENCE), (13, NEEDED))
                for time, body in lane:
                    begins = varint_field(9, BEGIN if body else END) + varint_field(11, track) + body
                    yield varint_field(8, time) + head + message_field(11, begins)
        for (process, label), levels in self.counters.items():
            track += 1
            unit = "kernels" if "launched" in label else "bytes"
            yield message((60, message((1, track), (5, process), (2, label), (8, message((6, unit))))))
            head, event = varint_field(10, SEQUENCE), message((9, COUNTER), (11, track))
            for time, level in sorted(levels):
                yield (
                    varint_field(8, time) + head + message_field(11, event + varint_field(30, max(level, 0)))
                )

    def _lanes(
        self, thread: tuple[int, Any], slices: list[tuple[int, int, bytes]]
    ) -> list[list[tuple[int, bytes]]]:
        """Begins (with their event) and ends (without) in order of time; a slice that overlaps another one
        without lying within it, as kernels of one stream may, goes to a further lane.
        """
        lanes: list[list[tuple[int, bytes]]] = []
        open_ends: list[list[int]] = []
        for start, minus, body in slices:
            end, at = start - minus, 0
            while at < len(lanes):
                ends = open_ends[at]
                while ends and ends[-1] <= start:
                    lanes[at].append((ends.pop(), b""))
                if not ends or end <= ends[-1]:
                    break
                at += 1
            else:
                lanes.append([])
                open_ends.append([])
            open_ends[at].append(end)
            lanes[at].append((start, body + self.flows.pop((*thread, start), b"")))
        for lane, ends in zip(lanes, open_ends, strict=True):
            lane += [(end, b"") for end in reversed(ends)]
        return lanes


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
