"""A run in the Trace Event Format, as PyTorch's profiler writes it: all ranks for viewers, or one rank.

chrome://tracing and Speedscope open it, and TensorBoard's plugin torch-tb-profiler a rank's: steps are
annotations, kernels and copies have their launch's correlation, operators the id by which their kernels name
them. Nodes are self time, so that an operator with others inside appears as several calls.
Sources: the document "Trace Event Format" of the Chromium project; the traces that PyTorch writes, with
categories and fields as in ``traces.device_format``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.report.times import WHOLE, find_steps

# Kinds that are events of PyTorch's traces; overhead and annotations are not.
CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "kernel": "kernel", "copy": "gpu_memcpy"}
# Process ids: the plugin takes those of device processes for the ids of devices.
DEVICE, CPU = 0, 1

Event = dict[str, Any]


def packed(file: IO[bytes]) -> IO[bytes]:
    """``file`` as one that compresses what is written; the same input gives the same bytes."""
    return gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)  # type: ignore[return-value]


def write(window: Window, file: IO[bytes]) -> None:
    """Write ``window`` as JSON, one event per line; a rank has a process for its CPU, one for its device."""
    file.write(b'{"displayTimeUnit": "ns", "traceEvents": [\n')
    separator = b""
    for rank in dict.fromkeys(window.rank.tolist()):
        for event in _kineto_events(window, rank):
            event["pid"] += 2 * rank
            file.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
    file.write(b"\n]}\n")


def write_kineto(window: Window, rank: int, file: IO[bytes]) -> None:
    """Write what ``window`` has of ``rank`` as PyTorch's profiler would, compressed."""
    info = {"rank": rank, "world_size": len(window.run.ranks)}
    document = {
        "schemaVersion": 1,
        "distributedInfo": info,
        "traceEvents": list(_kineto_events(window, rank)),
    }
    with packed(file) as written:
        written.write(json.dumps(document, separators=(",", ":")).encode())


def _kineto_events(window: Window, rank: int) -> Iterator[Event]:
    run = window.run
    rows = [row for row in window.used_rows() if window.rows[row].rank == rank]
    process = {row: DEVICE if window.rows[row].kind == "gpu" else CPU for row in rows}
    yield _about("process_name", {"name": f"rank {rank}"}, CPU)
    yield _about("process_name", {"name": f"rank {rank}, device"}, DEVICE)
    for row in rows:
        yield _about("thread_name", {"name": window.rows[row].label}, process[row], row)
    own = np.flatnonzero(window.rank == rank)
    first, last = int(window.start_ns[own].min()), int(window.end_ns[own].max())
    main = next((row for row in rows if process[row] == CPU), rows[0])
    for step in find_steps(run):
        if step.rank == rank and step.name != WHOLE and step.start_ns < last and step.end_ns > first:
            name = f"ProfilerStep#{step.name}"
            yield _span(name, "user_annotation", CPU, main, step.start_ns, step.end_ns, {})
    parent = run.parent[window.node]
    edges = zip(window.source.tolist(), window.target.tolist(), window.edge_kind, strict=True)
    launched = {source: target for source, target, kind in edges if kind == "launch"}
    for at in own.tolist():
        row, kind = int(window.row[at]), NODE_KINDS[int(window.kind[at])]
        on_device = process[row] == DEVICE
        category = CATEGORIES.get(kind)
        if kind == "transfer":
            category = "kernel" if on_device else "cpu_op"
        if category is None:
            continue
        number = int(window.id[at])
        args: dict[str, Any] = {"External id": int(run.ids[parent[at]]) if parent[at] >= 0 else number}
        if on_device:
            args |= {"device": DEVICE, "stream": row, "correlation": number}
        elif at in launched:
            args["correlation"] = int(window.id[launched[at]])
        start, end = int(window.start_ns[at]), int(window.end_ns[at])
        yield _span(window.names[int(window.name[at])], category, process[row], row, start, end, args)


def _about(name: str, args: Event, pid: int, tid: int | None = None) -> Event:
    return {"ph": "M", "name": name, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _span(name: str, category: str, pid: int, tid: int, start: int, end: int, args: Event) -> Event:
    place = {"pid": pid, "tid": tid, "ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}
