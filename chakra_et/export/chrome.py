"""The nodes of a run as events of the Trace Event Format, as PyTorch's profiler writes it.

chrome://tracing and Speedscope open them, Perfetto gets them as slices, and TensorBoard's plugin
torch-tb-profiler a rank's: steps are annotations, kernels and copies have their launch's correlation,
operators the id by which their kernels name them. Nodes are self time, so that an operator with others inside
appears as several calls. Sources: the document "Trace Event Format" of the Chromium project; the traces that
PyTorch writes, with categories and fields as in ``traces.device_format``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from chakra_et.export.perfetto import Event, Slices
from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS, edge_kinds
from chakra_et.report.timeline import curves, queues
from chakra_et.report.times import WHOLE, find_steps

# Kinds that are events of PyTorch's traces; overhead and annotations are not.
CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "kernel": "kernel", "copy": "gpu_memcpy"}
OTHERS = frozenset(NODE_KINDS) - {"kernel"}
# Process ids: the plugin takes those of device processes for the ids of devices.
DEVICE, CPU = 0, 1


def packed(file: IO[bytes]) -> IO[bytes]:
    """``file`` as one that compresses what is written; the same input gives the same bytes."""
    return gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)  # type: ignore[return-value]


def write(window: Window, file: IO[bytes]) -> None:
    """Write ``window`` as JSON, one event per line; a rank has a process for its CPU, one for its device."""
    separator = b'{"displayTimeUnit": "ns", "traceEvents": [\n'
    for event in _events(window):
        file.write(separator + json.dumps(event, separators=(",", ":")).encode())
        separator = b",\n"
    file.write(b"\n]}\n")


def write_perfetto(window: Window, file: IO[bytes]) -> None:
    """Write ``window`` as a Perfetto trace."""
    found = Slices()
    for event in _events(window):
        event["pid"] += 1  # Perfetto keeps 0 for the idle process
        found.add(event)
    found.write(file)


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


def _events(window: Window) -> Iterator[Event]:
    """The events of all ranks, dependencies between rows as flows, and counters."""
    rank, row = window.rank, window.row
    process = [2 * row.rank + (DEVICE if row.kind == "gpu" else CPU) for row in window.rows]
    for each in dict.fromkeys(rank.tolist()):
        for event in _of_rank(window, each):
            yield event | {"pid": event["pid"] + 2 * each}
    across = np.flatnonzero(row[window.source] != row[window.target])
    for number, edge in enumerate(across.tolist()):
        for kind, at in (("s", int(window.source[edge])), ("f", int(window.target[edge]))):
            of = int(row[at])
            place = {"pid": process[of], "tid": of, "ts": int(window.start_ns[at]) / 1000}
            yield {"ph": kind, "id": number, "name": window.edge_kind[edge], "cat": "dependency", **place}
    for curve in (*curves(window.run), *queues(window.run, edge_kinds(window.run))):
        for label, levels in curve.lines().items():
            for time, level in zip(curve.time_ns.tolist(), levels.tolist(), strict=True):
                place = {"pid": 2 * curve.rank + CPU, "ts": time / 1000}
                yield {"ph": "C", "name": label, **place, "args": {"value": max(level, 0)}}


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
