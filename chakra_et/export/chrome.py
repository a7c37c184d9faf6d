"""A run as events of the Trace Event Format, as it was recorded, or the nodes of its .et files.

chrome://tracing and Speedscope open them, and Perfetto gets them as slices. What was recorded keeps its
nesting, arguments and flows. TensorBoard's plugin torch-tb-profiler gets a rank's nodes: steps are
annotations, kernels and copies have their launch's correlation, operators the id by which their kernels name
them. Nodes are self time, so that an operator with others inside appears as several calls. Sources: the
document "Trace Event Format" of the Chromium project; the traces that PyTorch writes, with categories and
fields as in ``traces.device_format``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from chakra_et.export.perfetto import Event, Slices
from chakra_et.report.columns import EDGE_NAMES, NODE_KINDS, edge_kinds, name_codes, page_kinds
from chakra_et.report.run import ReportRun
from chakra_et.report.timeline import curves, lay_out, queues
from chakra_et.report.times import WHOLE, find_steps
from chakra_et.traces.records import read_records

# Kinds that are events of PyTorch's traces; overhead and annotations are not.
CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "kernel": "kernel", "copy": "gpu_memcpy"}
OTHERS = frozenset(NODE_KINDS) - {"kernel"}
# Process ids: the plugin takes those of device processes for the ids of devices.
DEVICE, CPU = 0, 1
_PROCESSES = 1000  # of one rank

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
        self.edge_kind = edge_kinds(run)
        launches = self.edge_kind == EDGE_NAMES.index("launch")
        self.launched = np.full(len(run.graph), -1)
        self.launched[run.graph.source[launches]] = run.graph.target[launches]
        (self.name, self.names), self.kind = name_codes(run), page_kinds(run)

    def of_rank(self, rank: int) -> Iterator[Event]:
        """The names of processes and threads, then the nodes row by row."""
        run, graph = self.run, self.run.graph
        yield _about("process_name", {"name": f"rank {rank}"}, CPU)
        yield _about("process_name", {"name": f"rank {rank}, device"}, DEVICE)
        for number, row in enumerate(self.rows):
            if row.rank == rank:
                yield _about("thread_name", {"name": row.label}, self.process[number], number)
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
        for curve in (*curves(run), *queues(run, self.edge_kind)):
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
