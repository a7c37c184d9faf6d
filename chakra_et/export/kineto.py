"""One rank in the layout of PyTorch's profiler, which TensorBoard's plugin torch-tb-profiler reads.

Steps are annotations, kernels and copies have their launch's correlation, operators the id by which their
kernels name them. Nodes are self time, so that an operator with others inside appears as several calls.
Source: the traces that PyTorch writes; categories and fields as in ``traces.device_format``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.report.steps import WHOLE, find_times

# Kinds that are events of such traces; overhead and annotations are not.
CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "kernel": "kernel", "copy": "gpu_memcpy"}
DEVICE = 0  # its process id, as the plugin takes the ids of device processes for those of devices
CPU = 1


def write(window: Window, rank: int, file: IO[bytes]) -> None:
    """Write what ``window`` has of ``rank``, compressed."""
    info = {"rank": rank, "world_size": len(window.run.ranks)}
    document = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": list(_events(window, rank))}
    with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        packed.write(json.dumps(document, separators=(",", ":")).encode())


def _events(window: Window, rank: int) -> Iterator[dict[str, Any]]:
    run = window.run
    rows = [row for row in np.unique(window.row).tolist() if window.rows[row].rank == rank]
    device = {row: window.rows[row].kind == "gpu" for row in rows}
    for pid, name in ((CPU, f"rank {rank}"), (DEVICE, f"rank {rank}, device")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for row in rows:
        place = {"pid": DEVICE if device[row] else CPU, "tid": row}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": window.rows[row].label}}
    own = np.flatnonzero(window.rank == rank)
    first, last = int(window.start_ns[own].min()), int(window.end_ns[own].max())
    main = next((row for row in rows if not device[row]), rows[0])
    for step in find_times(run).steps:
        if step.rank == rank and step.name != WHOLE and step.start_ns < last and step.end_ns > first:
            yield _event(
                "user_annotation", f"ProfilerStep#{step.name}", CPU, main, step.start_ns, step.end_ns
            )
    code, names = window.names
    parent = run.parent[window.node]
    ids = run.graph.gather([trace.ids.astype(np.int64) for trace in run.traces])
    launches = _launches(window)
    for at in own.tolist():
        row, kind = int(window.row[at]), NODE_KINDS[int(window.kind[at])]
        category = CATEGORIES.get(kind) or (
            ("kernel" if device[row] else "cpu_op") if kind == "transfer" else None
        )
        if category is None:
            continue
        number = int(window.id[at])
        args: dict[str, Any] = {"External id": int(ids[parent[at]]) if parent[at] >= 0 else number}
        if device[row]:
            args |= {"device": DEVICE, "stream": row, "correlation": number}
        elif at in launches:
            args["correlation"] = int(window.id[launches[at]])
        pid = DEVICE if device[row] else CPU
        start, end = int(window.start_ns[at]), int(window.end_ns[at])
        yield _event(category, names[int(code[at])], pid, row, start, end) | {"args": args}


def _launches(window: Window) -> dict[int, int]:
    """The device work that each launching node launches, as places in the window."""
    pairs = zip(window.source.tolist(), window.target.tolist(), window.edge_kind, strict=True)
    return {source: target for source, target, kind in pairs if kind == "launch"}


def _event(category: str, name: str, pid: int, tid: int, start: int, end: int) -> dict[str, Any]:
    span = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **span, "args": {}}
