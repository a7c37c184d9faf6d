"""What a timeline shows beside the nodes: its rows, without overlap in a row, and curves of memory.

A row is a thread, stream or communicator of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from chakra_et.arrays import stacked
from chakra_et.et import memory as names
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import EDGE_NAMES
from chakra_et.report.run import ReportRun

# Starts and durations are rounded to µs independently, so neighbours may overlap by this much.
ROUNDING_NS = 2000
# The most rows that one lane is drawn in, where its nodes overlap, and that the calls of a thread are.
MOST_ROWS, MOST_DEPTH = 8, 100
QUEUE = "launched, not started"
ORDER = {"cpu": 0, "gpu": 1, "communication": 2}


@dataclass(frozen=True)
class Row:
    """One row: ``kind`` is cpu, gpu, communication or stack."""

    rank: int
    kind: str
    label: str


@dataclass(frozen=True)
class Stacks:
    """K slices of call stacks, int64[K]: ``trace`` counts the run's files; ``row`` is ``thread`` ×
    ``MOST_DEPTH`` + the number of slices around it; ``start_ns``, ``end_ns``: as in ``ReportRun``; ``name``:
    index into ``names``; ``kind``: into ``NODE_KINDS``. ``threads``: their labels."""

    trace: np.ndarray
    row: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    names: Sequence[str] = ()
    threads: Sequence[str] = ()


NO_STACKS = Stacks(*np.zeros((6, 0), dtype=np.int64))


def lay_out(run: ReportRun, stacks: Stacks = NO_STACKS) -> tuple[list[Row], np.ndarray]:
    """The rows of a run, rank by rank, and the row of each node and then of each slice, int64[N + K]."""
    rows: list[Row] = []
    of_node, of_slice = [], np.zeros(len(stacks.trace), dtype=np.int64)
    times = zip(run.traces, run.ranks, *map(run.graph.scatter, (run.start_ns, run.end_ns)), strict=True)
    for number, (trace, rank, start, end) in enumerate(times):
        lane, labels = lanes_of(trace)
        of_row = np.empty(len(lane), dtype=np.int64)
        for each in sorted(np.unique(lane).tolist(), key=lambda at: (ORDER.get(labels[at][0], 3), at)):
            kind, label = labels[each]
            at = np.flatnonzero(lane == each)
            at = at[np.lexsort((end[at], start[at]))]
            place = np.minimum(stacked(start[at], end[at] - ROUNDING_NS), MOST_ROWS - 1)
            of_row[at] = len(rows) + place
            further = [f"{label} ({more + 2})" for more in range(int(place.max()))]
            rows += [Row(rank, kind, label) for label in (label, *further)]
        of_node.append(of_row)
        own = np.flatnonzero(stacks.trace == number)
        used, place = np.unique(stacks.row[own], return_inverse=True)
        of_slice[own] = len(rows) + place
        for thread, depth in zip(*map(np.ndarray.tolist, np.divmod(used, MOST_DEPTH)), strict=True):
            rows.append(Row(rank, "stack", "" if depth else f"calls of {stacks.threads[thread]}"))
    return rows, np.concatenate((run.graph.gather(of_node), of_slice))


def lanes_of(trace: ExecutionTrace) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
    """The lane of each row of a file, int64[rows], and (kind, label) of each lane.

    Our files number their lanes. Elsewhere: the thread of a CPU node, the stream of a device node, and one
    lane for all communication without a stream.
    """
    on_cpu = trace.column("is_cpu_op") != 0
    labels: dict[int, tuple[str, str]] = {}
    if "lane" in trace.attributes:
        lane, named = trace.column("lane", -1), _named_lanes(trace)
        numbers, first = np.unique(lane, return_index=True)
        for number, of_host in zip(numbers.tolist(), on_cpu[first], strict=True):
            known = 0 <= number < len(named)
            labels[number] = named[number] if known else ("cpu" if of_host else "gpu", f"lane {number}")
        return lane, labels
    stream, thread = trace.column("stream", -1), trace.column("tid", -1)
    choices = [on_cpu, stream >= 0, trace.types >= NodeType.COMM_SEND]
    kind, value = np.select(choices, [0, 1, 2], 1), np.select(choices, [thread, stream, -1], -1)
    keys, lane = np.unique(np.stack([kind, value]), axis=1, return_inverse=True)
    for number, (what, which) in enumerate(keys.T.tolist()):
        label = (f"thread {which}", f"stream {which}" if which >= 0 else "device", "communication")[what]
        labels[number] = ("cpu", "gpu", "communication")[what], label
    return lane.reshape(-1), labels


class _Lane(msgspec.Struct):
    kind: str
    label: str


def _named_lanes(trace: ExecutionTrace) -> list[tuple[str, str]]:
    """The lanes that the metadata describes."""
    try:
        lanes = msgspec.json.decode(trace.metadata_str("lanes") or "[]", type=list[_Lane])
    except msgspec.DecodeError:
        return []
    prefix = {True: "thread ", False: ""}
    return [(of.kind, prefix[of.kind == "cpu" and of.label.isdigit()] + of.label) for of in lanes]


@dataclass(frozen=True)
class Curve:
    """K moments of one device of one rank, in order of time, int64[K].

    ``time_ns``: as in ``ReportRun.start_ns``; ``allocated``, ``reserved``: bytes from then on (``reserved``
    is None where no allocator reserves any); ``node``: the node that changed it. With the ``device``
    ``QUEUE``, ``allocated`` is how much work was launched and has not started.
    """

    rank: int
    device: str
    time_ns: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray | None
    node: np.ndarray

    def lines(self) -> dict[str, np.ndarray]:
        """What it shows, by name."""
        if self.device == QUEUE:
            return {QUEUE: self.allocated}
        name = f"{device_name(self.device)} memory"
        found = {f"{name} allocated": self.allocated}
        return found if self.reserved is None else found | {f"{name} reserved": self.reserved}


def curves(run: ReportRun) -> list[Curve]:
    """One curve for each rank and device that has memory, in the order of ranks; empty without any.

    A level changes within a node. The curve has the node's highest level from its start on, and the one that
    it leaves from its end on, or from the start of the next node where another thread allocates sooner.
    """
    found = []
    nodes = run.graph.scatter(np.arange(len(run.graph)))
    for rank, trace, every in zip(run.ranks, run.traces, nodes, strict=True):
        for device in names.devices(trace):
            rows = trace.attributes[names.attribute(device, names.ALLOCATED)].rows
            rows = rows[np.argsort(run.start_ns[every[rows]], kind="stable")]
            node = every[rows]
            start = run.start_ns[node]
            end = np.minimum(run.end_ns[node], np.append(start[1:], run.end_ns.max()))
            left, highest, reserved = (
                trace.column(names.attribute(device, field))[rows]
                for field in (names.ALLOCATED, names.PEAK, names.RESERVED)
            )
            times = np.column_stack((start, end)).ravel()
            allocated = np.column_stack((np.maximum(highest, left), left)).ravel()
            held = np.repeat(reserved, 2) if reserved.any() else None
            found.append(Curve(rank, device, times, allocated, held, np.repeat(node, 2)))
    return found


def queues(run: ReportRun) -> list[Curve]:
    """One curve for each rank that launches device work."""
    graph = run.graph
    launches = run.edge_kinds == EDGE_NAMES.index("launch")
    source, target = graph.source[launches], graph.target[launches]
    found = []
    for number, rank in enumerate(run.ranks):
        own = graph.trace_of[target] == number
        begins, ends = run.end_ns[source[own]], run.start_ns[target[own]]
        times = np.concatenate((begins, np.maximum(begins, ends)))
        if not len(times):
            continue
        moments, at = np.unique(times, return_inverse=True)
        change = np.repeat((1.0, -1.0), len(begins))
        level = np.rint(np.cumsum(np.bincount(at.reshape(-1), change, len(moments)))).astype(np.int64)
        node = np.empty(len(moments), dtype=np.int64)
        node[at.reshape(-1)] = np.concatenate((target[own], target[own]))
        found.append(Curve(rank, QUEUE, moments, level, None, node))
    return found


def usage(run: ReportRun) -> list[dict[str, Any]]:
    """One row for each of ``curves``. ``peak_ns``: the start of the node in which most was allocated;
    ``reserved_bytes``: the most, None where no allocator reserves any."""
    return [
        {
            "rank": curve.rank,
            "device": device_name(curve.device),
            "peak_bytes": int(curve.allocated[at]),
            "peak_ns": int(curve.time_ns[at]),
            "peak_node": int(curve.node[at]),
            "reserved_bytes": None if curve.reserved is None else int(curve.reserved.max()),
        }
        for curve in curves(run)
        for at in [int(curve.allocated.argmax())]
    ]


def largest_peak(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The device on which most was allocated; a CPU where no other device is known."""
    on_device = [each for each in found if each["device"] != "cpu"] or found
    return max(on_device, key=lambda each: each["peak_bytes"], default=None)


def device_name(device: str) -> str:
    """As lanes name it: "gpu 0" for gpu0."""
    letters = device.rstrip("0123456789")
    return f"{letters.rstrip('_')} {device[len(letters) :]}".strip()
