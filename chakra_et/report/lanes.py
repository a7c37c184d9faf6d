"""The rows of a timeline: every thread, stream and communicator of every rank, without overlap in a row."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.report.run import ReportRun

# Starts and durations are rounded to µs independently, so neighbours may overlap by this much.
ROUNDING_NS = 2000
# The most rows that one lane is drawn in, where its nodes overlap.
MOST_ROWS = 8
ORDER = {"cpu": 0, "gpu": 1, "communication": 2}


@dataclass(frozen=True)
class Row:
    """One row: ``kind`` is cpu, gpu or communication."""

    rank: int
    kind: str
    label: str


def lay_out(run: ReportRun) -> tuple[list[Row], np.ndarray]:
    """The rows of a run, rank by rank, and the row of each node, int64[N]."""
    rows: list[Row] = []
    of_node = np.empty(len(run.graph), dtype=np.int64)
    for trace, rank in enumerate(run.ranks):
        lane, labels = lanes_of(run.traces[trace])
        start, end = run.of_trace(run.start_ns, trace), run.of_trace(run.end_ns, trace)
        of_row = np.empty(len(lane), dtype=np.int64)
        order = sorted(np.unique(lane).tolist(), key=lambda at: (ORDER.get(labels[at][0], 3), at))
        for number in order:
            kind, label = labels[number]
            at = np.flatnonzero(lane == number)
            at = at[np.lexsort((end[at], start[at]))]
            place = stacked(start[at], end[at])
            of_row[at] = len(rows) + place
            further = range(int(place.max()) + 1)
            rows += [Row(rank, kind, label if not each else f"{label} ({each + 1})") for each in further]
        first, last = run.graph.first[trace], run.graph.first[trace + 1]
        of_node[first:last] = of_row[run.graph.row[first:last]]
    return rows, of_node


def lanes_of(trace: ExecutionTrace) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """The lane of each row of a file, int64[rows], and (kind, label) of each lane.

    Our files number their lanes. Elsewhere: the thread of a CPU node, the stream of a device node, and one
    lane for all communication without a stream.
    """
    on_cpu = trace.column("is_cpu_op") != 0
    if "lane" in trace.attributes:
        lane = trace.column("lane", -1)
        named = _named_lanes(trace)
        labels: dict[int, tuple[str, str]] = {}
        for number in np.unique(lane).tolist():
            label = named[number] if 0 <= number < len(named) else None
            first = int(np.argmax(lane == number))
            labels[number] = label or ("cpu" if on_cpu[first] else "gpu", f"lane {number}")
        return lane, labels
    communicates = trace.types >= NodeType.COMM_SEND
    stream, thread = trace.column("stream", -1), trace.column("tid", -1)
    choices = [on_cpu, stream >= 0, communicates]
    kind, value = np.select(choices, [0, 1, 2], 1), np.select(choices, [thread, stream, -1], -1)
    keys, lane = np.unique(np.stack([kind, value]), axis=1, return_inverse=True)
    labels = {}
    for number, (what, which) in enumerate(keys.T.tolist()):
        name = ("thread", "stream", "communication")[what]
        label = name if what == 2 else "device" if what == 1 and which < 0 else f"{name} {which}"
        labels[number] = (("cpu", "gpu", "communication")[what], label)
    return lane.reshape(-1), labels


def _named_lanes(trace: ExecutionTrace) -> list[tuple[str, str] | None]:
    """The lanes that the metadata describes."""
    try:
        lanes = json.loads(str(trace.metadata.get("lanes", "[]")))
    except (ValueError, RecursionError):
        return []
    found: list[tuple[str, str] | None] = []
    for lane in lanes if isinstance(lanes, list) else []:
        known = lane if isinstance(lane, dict) else {}
        kind, label = str(known.get("kind", "")), str(known.get("label", ""))
        prefix = "thread " if kind == "cpu" and label.isdigit() else ""
        found.append((kind, prefix + label) if kind and label else None)
    return found


def stacked(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """A place, 0 to ``MOST_ROWS`` - 1, for each of these spans so that none overlaps another, int64[K].

    The spans are in order of their starts; the lowest free place is taken, the last one where none is free.
    """
    place = np.zeros(len(start), dtype=np.int64)
    if not len(start) or (start[1:] >= np.maximum.accumulate(end)[:-1] - ROUNDING_NS).all():
        return place
    free: list[int] = []
    busy, used = [(int(end[0]), 0)], 1
    for at, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        if not at:
            continue
        while busy and busy[0][0] - ROUNDING_NS <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            place[at] = heapq.heappop(free)
        else:
            place[at] = min(used, MOST_ROWS - 1)
            used = min(used + 1, MOST_ROWS)
        heapq.heappush(busy, (finish, int(place[at])))
    return place
