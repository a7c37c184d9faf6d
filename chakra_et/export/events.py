"""A run as events of the Trace Event Format, as it was recorded, or the nodes of its .et files.

chrome://tracing and Speedscope open them, and https://ui.perfetto.dev gets them as a .pftrace. What was
recorded keeps its nesting, arguments and flows. Nodes are self time, so that an operator with others inside
appears as several calls.
Sources: the document "Trace Event Format" of the Chromium project; the traces that PyTorch writes, with
categories and fields as in ``traces.device_format``; perfetto's protos/perfetto/trace (trace_packet,
track_event, track_descriptor, interned_data) for the field numbers, with times as ns on the trace's default
clock.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from chakra_et.et.node_attributes import EDGE_NAMES
from chakra_et.et.wire import FIXED64, message, tag
from chakra_et.redact import redacted_json
from chakra_et.report.run import NODE_KINDS, ReportRun
from chakra_et.report.timeline import curves, lay_out, queues
from chakra_et.traces.records import Taker, read_records

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


def recorded_events(traces: Mapping[int, Path], use: Use) -> None:
    """The device traces of the ranks, with every level of their slices, arguments and flows."""
    for rank, path in sorted(traces.items()):
        read_records(path, "traceEvents", lambda _: _RecordedTrace, _SliceTaker(rank, use))


def labelled(source: Source, label: str, use: Use) -> None:
    """What ``source`` gives, and ``label`` for each process, which viewers show beside its name."""
    processes = set[Any]()

    def see(event: Event) -> None:
        processes.add(event["pid"])
        use(event)

    source(see)
    for process in sorted(processes) if label else ():
        use({"ph": "M", "name": "process_labels", "pid": process, "args": {"labels": label}})


class _RecordedTrace(msgspec.Struct):
    traceEvents: list[dict[str, Any]] = []


class _SliceTaker(Taker):
    """Gives the events of a trace to ``use``, with the process ids of a rank."""

    def __init__(self, rank: int, use: Use) -> None:
        self.rank, self.use, self.seen = rank, use, dict[Any, int]()

    def take(self, records: list[Event]) -> None:
        text = msgspec.json.encode(records)
        public = redacted_json(text)
        for event in records if public is text else msgspec.json.decode(public):
            own = self.seen.setdefault(event.get("pid"), len(self.seen))
            event["pid"] = (self.rank + 1) * _PROCESSES + own
            if "id" in event:
                event["id"] = f"{self.rank}:{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                event["args"] = {"name": f"rank {self.rank}: {(event.get('args') or {}).get('name', '')}"}
            self.use(event)


def node_events(run: ReportRun, use: Use, only: int | None = None) -> None:
    """The nodes of all ranks, or of one, each with a process for its CPU and one for its device;
    dependencies between rows, as flows; counters of memory and of launched work.

    An end is cut at the start of the next node of its row of the timeline: starts and durations are rounded
    to µs independently, and viewers would take neighbours that overlap by a µs for nested ones.
    """
    graph, (rows, row_of) = run.graph, lay_out(run)
    ranks, ids = run.ranks if only is None else [only], run.ids
    shown = np.isin([row.rank for row in rows], ranks)
    # Perfetto keeps 0 for the idle process; TensorBoard's plugin wants a device's number for its process.
    processes = {rank: (2 * rank + 1, 2 * rank + 2) if only is None else (0, 1) for rank in ranks}
    process = [processes.get(row.rank, (0, 0))[row.kind != "gpu"] for row in rows]
    for rank, (device, host) in processes.items():
        use(_about("process_name", f"rank {rank}", host))
        use(_about("process_name", f"rank {rank}, device", device))
    for number in np.flatnonzero(shown).tolist():
        use(_about("thread_name", rows[number].label, process[number], number))
    order = np.lexsort((run.end_ns, run.start_ns, row_of))
    first, second = order[:-1], order[1:]
    end_ns = run.end_ns.copy()
    limit = np.maximum(run.start_ns[second], run.start_ns[first])
    end_ns[first] = np.where(row_of[first] == row_of[second], np.minimum(end_ns[first], limit), end_ns[first])
    (code, names), size = run.names, graph.attribute("comm_size", 0)

    def at_start(kind: str, node: int, **more: Any) -> None:
        place = {"pid": process[row_of[node]], "tid": int(row_of[node]), "ts": int(run.start_ns[node]) / 1000}
        use({"ph": kind, **place, **more})

    launches = run.edge_kinds == EDGE_NAMES.index("launch")
    launched = dict(zip(graph.source[launches].tolist(), ids[graph.target[launches]].tolist(), strict=True))
    for node in order[shown[row_of[order]]].tolist():
        above = run.parent[node]
        args = {"id": int(ids[node]), "External id": int(ids[node if above < 0 else above])}
        if rows[row_of[node]].kind == "gpu":
            args |= {"device": 0, "stream": int(row_of[node]), "correlation": args["id"]}
        elif node in launched:
            args["correlation"] = launched[node]
        if size[node]:
            args |= {"bytes": int(size[node]), "waits for ranks ns": int(run.wait_ns[node])}
        lasts = int(end_ns[node] - run.start_ns[node]) / 1000
        kind = NODE_KINDS[run.node_kinds[node]]
        at_start("X", node, name=names[code[node]], cat=kind, dur=lasts, args=args)
    between = (row_of[graph.source] != row_of[graph.target]) & shown[row_of[graph.target]]
    for number in np.flatnonzero(between).tolist():
        name = EDGE_NAMES[run.edge_kinds[number]]
        at_start("s", graph.source[number], id=number, name=name, cat="dependency")
        at_start("f", graph.target[number], id=number, name=name, cat="dependency")
    for curve in (each for each in (*curves(run), *queues(run)) if each.rank in processes):
        for label, levels in curve.lines().items():
            about = {"ph": "C", "name": label, "pid": processes[curve.rank][1]}
            for time, level in zip(curve.time_ns.tolist(), levels.tolist(), strict=True):
                use({**about, "ts": time / 1000, "args": {"value": max(level, 0)}})


def _about(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


class Slices:
    """Events as a Perfetto trace (.pftrace): processes, threads, slices with arguments, flows, counters.

    ``threads``: (process, thread) → slices as (start ns, minus its length, encoded event).
    """

    def __init__(self) -> None:
        self.threads: dict[tuple[int, Any], list[tuple[int, int, bytes]]] = defaultdict(list)
        self.labels: dict[tuple[int, Any], str] = {}
        self.counters: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
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
            at = thread if event.get("name") == "thread_name" else (event["pid"], event.get("name"))
            self.labels[at] = str(arguments.get("labels", arguments.get("name", "")))
        elif kind == "X":
            name, category = (str(event.get(of, "")) for of in ("name", "cat"))
            body = message((10, self._name(2, name)), (3, self._name(1, category)))
            body += message(*((4, self._argument(*each)) for each in arguments.items()))
            length = round(float(event.get("dur") or 0) * 1000)
            self.threads[thread].append((start, -length, body))
        elif kind in ("s", "t", "f") and "id" in event:
            number = self.flow_ids.setdefault(f"{event.get('cat')} {event['id']}", len(self.flow_ids) + 1)
            flow = tag(48 if kind == "f" else 47, FIXED64) + struct.pack("<Q", number)
            place = (*thread, start)
            self.flows[place] = self.flows.get(place, b"") + flow
        elif kind == "C":
            self.counters[event["pid"], str(event["name"])].append((start, arguments["value"]))
        elif event.get("name") == "[memory]" and type(arguments.get("Total Allocated")) is int:
            device = f"{arguments.get('Device Type', '')}:{arguments.get('Device Id', '')} allocated"
            self.counters[event["pid"], device].append((start, arguments["Total Allocated"]))

    def _name(self, field: int, text: str) -> int:
        known = self.names[field]
        return known.setdefault(text, len(known) + 1)

    def _argument(self, name: str, value: Any) -> bytes:
        number = self._name(3, name)
        if isinstance(value, int) and 0 <= value < 1 << 63:
            return message((1, number), (3, int(value)))
        return message((1, number), (6, value if isinstance(value, str) else json.dumps(value)))

    def write(self, source: Source, file: IO[bytes]) -> int:
        """Write the trace of all events, and return how many slices it has."""
        source(self.add)
        for packet in self._packets():
            file.write(message((1, packet)))
        return sum(map(len, self.threads.values()))

    def _packets(self) -> Iterator[bytes]:
        processes = dict.fromkeys(process for process, _ in (*self.threads, *self.counters))
        for process in processes:
            name = self.labels.get((process, "process_name"), f"process {process}")
            notes = [(8, text) for text in (self.labels.get((process, "process_labels")),) if text]
            yield message((60, message((1, process), (3, message((1, process), (6, name), *notes)))))
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
                for time, body in lane:
                    event = message((9, BEGIN if body else END), (11, track)) + body
                    yield message((8, time), (10, SEQUENCE), (13, NEEDED), (11, event))
        for (process, label), levels in self.counters.items():
            track += 1
            unit = "kernels" if "launched" in label else "bytes"
            yield message((60, message((1, track), (5, process), (2, label), (8, message((6, unit))))))
            for time, level in sorted(levels):
                event = message((9, COUNTER), (11, track), (30, max(level, 0)))
                yield message((8, time), (10, SEQUENCE), (11, event))

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
