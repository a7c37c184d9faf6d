"""A run in the Trace Event Format, which chrome://tracing, Perfetto and Speedscope open.

Every rank is a process, every row of the timeline a thread, every dependency between rows a flow.
Source of the format: the document "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from chakra_et.export.window import Window
from chakra_et.report.columns import NODE_KINDS
from chakra_et.report.memory import device_name


def write(window: Window, file: IO[bytes], compress: bool) -> None:
    """Write ``window`` as JSON, one event per line; through gzip where ``compress``."""
    if compress:
        with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
            _write(window, packed)
    else:
        _write(window, file)


def _write(window: Window, file: Any) -> None:
    file.write(b'{"displayTimeUnit": "ns", "traceEvents": [\n')
    separator = b""
    for event in _events(window):
        file.write(separator + json.dumps(event, separators=(",", ":")).encode())
        separator = b",\n"
    file.write(b"\n]}\n")


def _events(window: Window) -> Iterator[dict[str, Any]]:
    used = np.unique(window.row).tolist()
    for rank in dict.fromkeys(window.rows[row].rank for row in used):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for row in used:
        place = {"pid": window.rows[row].rank, "tid": row}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": window.rows[row].label}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": row}}
    code, names = window.names
    size = window.run.graph.attribute("comm_size", 0)[window.node]
    wait = window.run.wait_ns[window.node]
    columns = (window.start_ns, window.end_ns, window.row, code, window.kind, window.id, size, wait)
    for start, end, row, name, kind, number, sent, waited in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        args = {"id": number}
        if sent:
            args |= {"bytes": sent, "wait_us": waited / 1000}
        yield {
            "ph": "X", "name": names[name], "cat": NODE_KINDS[kind], "pid": window.rows[row].rank, "tid": row,
            "ts": start / 1000, "dur": (end - start) / 1000, "args": args,
        }  # fmt: skip
    yield from _flows(window)
    yield from _memory(window)


def _memory(window: Window) -> Iterator[dict[str, Any]]:
    """A counter for each device of each rank; viewers stack its values, so the second is what is left."""
    for curve in window.memory():
        shared = {"ph": "C", "name": f"{device_name(curve.device)} memory", "pid": curve.rank}
        free = None if curve.reserved is None else np.maximum(curve.reserved - curve.allocated, 0)
        for at, (time, allocated) in enumerate(
            zip(curve.time_ns.tolist(), curve.allocated.tolist(), strict=True)
        ):
            args = {"allocated": allocated}
            if free is not None:
                args["reserved, not allocated"] = int(free[at])
            yield {**shared, "ts": time / 1000, "args": args}


def _flows(window: Window) -> Iterator[dict[str, Any]]:
    row, start, end = window.row, window.start_ns, window.end_ns
    for number, (source, target) in enumerate(
        zip(window.source.tolist(), window.target.tolist(), strict=True)
    ):
        if row[source] == row[target]:
            continue
        shared = {"cat": "dependency", "name": window.edge_kind[number], "id": number}
        # A flow event belongs to the slice that runs at its time.
        yield {"ph": "s", **shared, **_at(window, source, int(max(start[source], end[source] - 1)))}
        yield {"ph": "f", "bp": "e", **shared, **_at(window, target, int(start[target]))}


def _at(window: Window, node: int, time_ns: int) -> dict[str, Any]:
    row = int(window.row[node])
    return {"pid": window.rows[row].rank, "tid": row, "ts": time_ns / 1000}
