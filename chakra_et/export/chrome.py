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
from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS, edge_kinds
from chakra_et.report.timeline import curves, queues
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


def write_kineto(window: Window, rank: int, file: IO[bytes]) -> None:
    """Write what ``window`` has of ``rank`` as PyTorch's profiler would, compressed."""
    info = {"rank": rank, "world_size": len(window.run.ranks)}
    events = [event for event in _of_rank(window, rank) if event.get("cat") not in OTHERS]
    main = next(row for row in window.used_rows() if window.rows[row].rank == rank)
    for step in find_steps(window.run):
        if step.rank == rank and step.name != WHOLE:
            name = f"ProfilerStep#{step.name}"
            events.append(_span(name, "user_annotation", CPU, main, step.start_ns, step.end_ns, {}))
    document = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
    with packed(file) as written:
        written.write(json.dumps(document, separators=(",", ":")).encode())


def node_events(window: Window, use: Use) -> None:
    """The nodes of all ranks, each with a process for its CPU and one for its device, dependencies between
    rows as flows, and counters."""
    run, rows = window.run, window.row
    process = [2 * row.rank + 1 + (DEVICE if row.kind == "gpu" else CPU) for row in window.rows]
    for rank in dict.fromkeys(window.rank.tolist()):
        for event in _of_rank(window, rank):
            use(event | {"pid": event["pid"] + 2 * rank + 1})  # Perfetto keeps 0 for the idle process
    across = np.flatnonzero(rows[window.source] != rows[window.target])
    for number, edge in enumerate(across.tolist()):
        for kind, at in (("s", int(window.source[edge])), ("f", int(window.target[edge]))):
            row = int(rows[at])
            place = {"pid": process[row], "tid": row, "ts": int(window.start_ns[at]) / 1000}
            use({"ph": kind, "id": number, "name": window.edge_kind[edge], "cat": "dependency", **place})
    for curve in (*curves(run), *queues(run, edge_kinds(run))):
        for label, levels in curve.lines().items():
            for time, level in zip(curve.time_ns.tolist(), levels.tolist(), strict=True):
                place = {"pid": 2 * curve.rank + 1 + CPU, "ts": time / 1000}
                use({"ph": "C", "name": label, **place, "args": {"value": max(level, 0)}})


def _of_rank(window: Window, rank: int) -> Iterator[Event]:
    run = window.run
    rows = [row for row in window.used_rows() if window.rows[row].rank == rank]
    process = {row: DEVICE if window.rows[row].kind == "gpu" else CPU for row in rows}
    yield _about("process_name", {"name": f"rank {rank}"}, CPU)
    yield _about("process_name", {"name": f"rank {rank}, device"}, DEVICE)
    for row in rows:
        yield _about("thread_name", {"name": window.rows[row].label}, process[row], row)
    own = np.flatnonzero(window.rank == rank)
    parent = run.parent[window.node]
    edges = zip(window.source.tolist(), window.target.tolist(), window.edge_kind, strict=True)
    launched = {source: target for source, target, kind in edges if kind == "launch"}
    size, wait = run.graph.attribute("comm_size", 0)[window.node], run.wait_ns[window.node]
    for at in own.tolist():
        row, kind = int(window.row[at]), NODE_KINDS[int(window.kind[at])]
        on_device, number = process[row] == DEVICE, int(window.id[at])
        category = CATEGORIES.get(kind, kind)
        if kind == "transfer":
            category = "kernel" if on_device else "cpu_op"
        args: dict[str, Any] = {"id": number}
        args["External id"] = int(run.ids[parent[at]]) if parent[at] >= 0 else number
        if on_device:
            args |= {"device": DEVICE, "stream": row, "correlation": number}
        elif at in launched:
            args["correlation"] = int(window.id[launched[at]])
        if size[at]:
            args |= {"bytes": int(size[at]), "waits for ranks ns": int(wait[at])}
        start, end = int(window.start_ns[at]), int(window.end_ns[at])
        yield _span(window.names[int(window.name[at])], category, process[row], row, start, end, args)


def _about(name: str, args: Event, pid: int, tid: int | None = None) -> Event:
    return {"ph": "M", "name": name, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _span(name: str, category: str, pid: int, tid: int, start: int, end: int, args: Event) -> Event:
    place = {"pid": pid, "tid": tid, "ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}
