"""Build the execution graph of one rank: nodes are rows, edges are rows.

A replay of the graph reproduces the measured times: a node starts when its lane is free and its dependencies
have ended, and any further delay becomes an overhead node in front of it. Edges point from lower to higher
node numbers, so the graph is acyclic by construction; ``validate`` checks that for the file.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from chakra_et.arrays import lane_order, narrowed
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.dependencies import Dependencies, EdgeKind
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import KIND_OF_CATEGORY, Graph, NodeKind, Rows
from chakra_et.convert.graph.overhead import Edges, fill_overhead, messages_beside
from chakra_et.convert.graph.timeline import Lane, SelfTime, Timeline
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CATEGORIES, KERNEL, RUNTIME, SYNC

# Of the dependencies between consecutive rows of a lane.
ORDER_KINDS = {
    "cpu": EdgeKind.PROGRAM_ORDER,
    "gpu": EdgeKind.STREAM_ORDER,
    "communication": EdgeKind.COLLECTIVE,
}


def build(rank: LinkedRank, found: Dependencies) -> Graph:
    """The graph of a rank, from its timeline and its dependencies ``found``."""
    findings = Findings()
    device, time, items = rank.device, rank.timeline, rank.communication.items
    rows = Rows.join(
        [_cpu_rows(device, time, found), _gpu_rows(device, time, items), _placed_rows(found, items)]
    )
    rows.rearrange(np.lexsort((rows.start, rows.lane)))
    edges = _connect(rows, found)
    beside = messages_beside(rows, items)
    latency, gap, edges = fill_overhead(rows, edges, time.begin, found.lanes, beside)
    del beside

    # Number the nodes by start time. Nodes of duration 0 come first, as others may depend on them.
    order = np.lexsort((rows.lane, rows.end > rows.start, rows.start))
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    rows.rearrange(order)
    latency, gap = narrowed(latency[order]), narrowed(gap[order])
    source, target, kind = edges
    source, target, kind = _all_edges(rows, number[source], number[target], kind, found.lanes, findings)
    return Graph(
        lane=rows.lane, start=rows.start, end=rows.end, event=rows.event, segment=_segments(rows),
        item=rows.item, kind=rows.kind, source=source, target=target, edge_kind=kind,
        launch_latency=latency, stream_gap=gap, lanes=found.lanes, findings=findings,
    )  # fmt: skip


def _cpu_rows(device: DeviceTrace, time: Timeline, found: Dependencies) -> Rows:
    """The self time of the threads, cut where an edge starts or ends, without blocking intervals."""
    segments = time.self_time
    first = np.zeros(len(segments.owner), dtype=bool)
    owned = np.flatnonzero(segments.owner >= 0)
    # Assigned in reverse order, so that each owner's first segment remains.
    of_owner = np.zeros(len(device), dtype=np.int64)
    of_owner[segments.owner[owned[::-1]]] = owned[::-1]
    first[of_owner[segments.owner[owned]]] = True
    edges, waits = found.edges, found.waits
    cuts = np.concatenate([edges[:, 1:3], edges[:, 3:5], waits[:, [0, 1]], waits[:, [0, 2]]])
    parts = []
    for number in range(len(time.lanes)):
        at = np.flatnonzero(segments.lane == number)
        if not len(at):
            continue
        own = SelfTime(segments.lane[at], segments.start[at], segments.end[at], segments.owner[at])
        own, is_first = _cut(own, first[at], np.sort(cuts[cuts[:, 0] == number, 1], kind="stable"))
        keep = _outside(own, is_first, waits[waits[:, 0] == number, 1:])
        parts.append((own.lane[keep], own.start[keep], own.end[keep], own.owner[keep], is_first[keep]))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return Rows(empty, empty, empty, empty, empty, empty)
    lane, start, end, owner, is_first = (np.concatenate(columns) for columns in zip(*parts, strict=True))

    of_category = np.full(len(CATEGORIES) + 1, NodeKind.OPERATOR, dtype=np.int8)
    of_category[RUNTIME:] = NodeKind.RUNTIME
    of_category[[ANNOTATION, -1]] = NodeKind.HOST_OVERHEAD  # outside all events, too
    category = np.where(owner >= 0, device.category[owner], len(CATEGORIES))
    rows = Rows(lane, start, end, owner, of_category[category], np.full(len(owner), -1, dtype=np.int32))
    # An annotation is a node of duration 0: its self time is Python around the operators.
    marks = (category == ANNOTATION) & is_first
    rows.rearrange(np.repeat(np.arange(len(owner)), 1 + (marks & (start < end))))
    mark = np.flatnonzero(marks)
    mark += np.cumsum(start[mark] < end[mark]) - (start[mark] < end[mark])
    rows.end[mark] = rows.start[mark]
    rows.kind[mark] = NodeKind.ANNOTATION
    return rows


def _cut(segments: SelfTime, first: np.ndarray, cuts: np.ndarray) -> tuple[SelfTime, np.ndarray]:
    """Split the segments of one lane at ``cuts`` (ascending); only the first part stays ``first``."""
    cuts = cuts[np.concatenate([[True], cuts[1:] != cuts[:-1]])[: len(cuts)]]
    at = np.searchsorted(segments.start, cuts, side="right") - 1
    inside = (at >= 0) & (segments.start[at] < cuts) & (cuts < segments.end[at])
    at, cuts = at[inside], cuts[inside]
    index = np.repeat(np.arange(len(segments.start)), 1 + np.bincount(at, minlength=len(segments.start)))
    start, end, is_first = segments.start[index], segments.end[index], first[index]
    part = at + np.arange(1, len(at) + 1)  # each cut adds a row, behind the segment and its earlier cuts
    start[part], end[part - 1], is_first[part] = cuts, cuts, False
    return SelfTime(segments.lane[index], start, end, segments.owner[index]), is_first


def _outside(segments: SelfTime, first: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """The rows outside the blocking intervals; an event's first segment stays, with duration 0."""
    keep = np.ones(len(segments.start), dtype=bool)
    if len(waits):
        waits = waits[np.argsort(waits[:, 0], kind="stable")]
        reach = np.maximum.accumulate(waits[:, 1])
        at = np.searchsorted(waits[:, 0], segments.start, side="right") - 1
        blocked = (at >= 0) & (segments.end <= reach[at]) & (segments.start < segments.end)
        keep = ~blocked | first
        segments.end = np.where(blocked & first, segments.start, segments.end)
    return np.flatnonzero(keep)


def _gpu_rows(device: DeviceTrace, time: Timeline, items: list[Communication]) -> Rows:
    event = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    kind = np.array([KIND_OF_CATEGORY.get(c, NodeKind.KERNEL) for c in range(len(CATEGORIES))])[
        device.category[event]
    ]
    item_of = np.full(len(device), -1, dtype=np.int64)
    for number, item in enumerate(items):
        if item.on_gpu and not item.part:
            item_of[item.event] = number
    of_row = item_of[event]
    kind[of_row >= 0] = [_communication_kind(items[number]) for number in of_row[of_row >= 0].tolist()]
    return Rows(time.lane[event], time.start[event], time.end[event], event, kind, of_row)


def _placed_rows(found: Dependencies, items: list[Communication]) -> Rows:
    numbers = sorted(found.placed)
    place = np.array([found.placed[number] for number in numbers], dtype=np.int64).reshape(-1, 3)
    kind = np.array([_communication_kind(items[number]) for number in numbers], dtype=np.int64)
    event = np.array([items[number].event for number in numbers], dtype=np.int64)
    return Rows(place[:, 0], place[:, 1], place[:, 2], event, kind, np.array(numbers, dtype=np.int64))


def _communication_kind(item: Communication) -> NodeKind:
    return NodeKind.P2P if item.is_message else NodeKind.COLLECTIVE


def _connect(rows: Rows, found: Dependencies) -> Edges:
    """The dependencies as edges between rows, from their points on lanes."""
    edges = found.edges
    bounds = np.searchsorted(rows.lane, np.arange(len(found.lanes) + 1))
    from_ = np.full(len(edges), -1, dtype=np.int64)
    to = np.full(len(edges), -1, dtype=np.int64)
    for lane, (low, high) in enumerate(pairwise(bounds.tolist())):
        out = np.flatnonzero(edges[:, 1] == lane)
        at = np.searchsorted(rows.end[low:high], edges[out, 2], side="right") - 1
        from_[out] = np.where(at >= 0, at + low, -1)
        into = np.flatnonzero(edges[:, 3] == lane)
        at = np.searchsorted(rows.start[low:high], edges[into, 4], side="left")
        to[into] = np.where(at < high - low, at + low, -1)
    both = (from_ >= 0) & (to >= 0) & (from_ != to)
    return from_[both], to[both], edges[both, 0]


def _all_edges(
    rows: Rows, source: np.ndarray, target: np.ndarray, kind: np.ndarray, lanes: list[Lane], found: Findings
) -> Edges:
    """The edges between numbered rows, together with those of the order on each lane, by their targets.

    Duplicates are dropped, and edges that do not point forward, which only the rounding of times causes.
    Between two nodes of duration 0 at the same time, the edge starts at the node before instead.
    """
    before = _before(rows)
    while (back := (source >= target) & (source >= 0)).any():
        source = np.where(back, before[source], source)
    follows = np.flatnonzero(before >= 0).astype(np.int32)
    order_kind = np.array([ORDER_KINDS[lane.kind] for lane in lanes], dtype=np.int8)[rows.lane[follows]]
    # Overhead on a lane of communication is followed by program order.
    waits = (order_kind == EdgeKind.COLLECTIVE) & (rows.kind[before[follows]] == NodeKind.HOST_OVERHEAD)
    order_kind[waits] = EdgeKind.PROGRAM_ORDER
    source = np.concatenate([before[follows], source])
    target = np.concatenate([follows, target])
    kind = np.concatenate([order_kind, kind.astype(np.int8)])
    del before, follows, order_kind
    forward = (source >= 0) & (rows.end[source] <= rows.start[target])
    if not forward.all():
        found.add("backward-edge", int((~forward).sum()))
        source, target, kind = source[forward], target[forward], kind[forward]
    order = np.lexsort((kind, source, target))
    source, target, kind = source[order], target[order], kind[order]
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[new], target[new], kind[new]


def _before(rows: Rows) -> np.ndarray:
    """int32[rows]: the previous row of the same lane, -1 for none."""
    before = np.full(len(rows.lane), -1, dtype=np.int32)
    by_lane = lane_order(rows.lane).astype(np.int32)
    same = rows.lane[by_lane[1:]] == rows.lane[by_lane[:-1]]
    before[by_lane[1:][same]] = by_lane[:-1][same]
    return before


def _segments(rows: Rows) -> np.ndarray:
    """int32[rows]: the index of each node among the nodes of its event, in time order."""
    segment = np.zeros(len(rows.event), dtype=np.int32)
    owned = np.flatnonzero(rows.event >= 0)
    order = owned[np.argsort(rows.event[owned], kind="stable")]
    change = np.ones(len(order), dtype=bool)
    change[1:] = rows.event[order[1:]] != rows.event[order[:-1]]
    begin = np.maximum.accumulate(np.where(change, np.arange(len(order)), 0))
    segment[order] = np.arange(len(order)) - begin
    return segment
