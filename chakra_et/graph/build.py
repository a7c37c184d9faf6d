"""Build the execution graph of one rank: nodes are rows, edges are rows.

A replay of the graph reproduces the measured times: a node starts when its lane is free and its dependencies
have ended, and any further delay becomes an overhead node in front of it. Edges point from lower to higher
node numbers, so the graph is acyclic by construction; ``validate`` checks that for the file.
"""

from __future__ import annotations

import numpy as np

from chakra_et.findings import Findings
from chakra_et.graph.communication import Communication
from chakra_et.graph.dependencies import Dependencies, EdgeKind
from chakra_et.graph.linked import LinkedRank
from chakra_et.graph.nodes import KIND_OF_CATEGORY, Graph, NodeKind, Rows, rows_of
from chakra_et.graph.overhead import fill_overhead, messages_beside
from chakra_et.graph.timeline import SelfTime, Timeline
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, KERNEL, RUNTIME, SYNC


def build(rank: LinkedRank, found: Dependencies) -> Graph:
    """The graph of a rank, from its timeline and its dependencies ``found``."""
    findings = Findings()
    device, time, items = rank.device, rank.timeline, rank.communication.items
    rows = Rows.join(
        [_cpu_rows(device, time, found), _gpu_rows(device, time, items), _placed_rows(found, items)]
    )
    rows = rows.take(np.lexsort((np.arange(len(rows.lane)), rows.start, rows.lane)))
    source, target, kind = _connect(rows, found)
    beside = messages_beside(rows, items)
    rows, source, target, kind = fill_overhead(rows, source, target, kind, time.begin, found.lanes, beside)

    # Number the nodes by start time. Nodes of duration 0 come first, as others may depend on them.
    order = np.lexsort((np.arange(len(rows.lane)), rows.lane, rows.end > rows.start, rows.start))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    rows = rows.take(order)
    source, target = number[source], number[target]
    source, target, kind = _forward_only(rows, source, target, kind, findings)
    return Graph(
        lane=rows.lane, start=rows.start, end=rows.end, event=rows.event, segment=_segments(rows),
        item=rows.item, kind=rows.kind, source=source.astype(np.int32), target=target.astype(np.int32),
        edge_kind=kind.astype(np.int8),
        launch_latency=rows.launch_latency, stream_gap=rows.stream_gap, lanes=found.lanes, findings=findings,
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
        own, is_first = _cut(own, first[at], np.sort(cuts[cuts[:, 0] == number, 1]))
        keep = _outside(own, is_first, waits[waits[:, 0] == number, 1:])
        parts.append((own.lane[keep], own.start[keep], own.end[keep], own.owner[keep], is_first[keep]))
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return rows_of(empty, empty, empty, empty, empty, empty)
    lane, start, end, owner, is_first = (np.concatenate(columns) for columns in zip(*parts, strict=True))

    annotation = np.zeros(len(owner), dtype=bool)
    annotation[owner >= 0] = device.category[owner[owner >= 0]] == ANNOTATION
    kind = np.full(len(owner), NodeKind.HOST_OVERHEAD, dtype=np.int64)
    work = (owner >= 0) & ~annotation
    runtime = np.zeros(len(owner), dtype=bool)
    runtime[work] = device.category[owner[work]] >= RUNTIME
    kind[work] = NodeKind.OPERATOR
    kind[runtime] = NodeKind.RUNTIME
    rows = rows_of(lane, start, end, owner, kind, np.full(len(owner), -1, dtype=np.int64))
    # An annotation is a node of duration 0: its self time is Python around the operators.
    marks = annotation & is_first
    mark_rows = rows.take(np.flatnonzero(marks))
    mark_rows.kind[:] = NodeKind.ANNOTATION
    mark_rows.end = mark_rows.start.copy()
    rest = rows.take(np.flatnonzero(~(marks & (start == end))))
    position = np.concatenate([np.flatnonzero(marks) * 2, np.flatnonzero(~(marks & (start == end))) * 2 + 1])
    return Rows.join([mark_rows, rest]).take(np.argsort(position, kind="stable"))


def _cut(segments: SelfTime, first: np.ndarray, cuts: np.ndarray) -> tuple[SelfTime, np.ndarray]:
    """Split the segments of one lane at ``cuts`` (ascending); only the first part stays ``first``."""
    cuts = cuts[np.concatenate([[True], cuts[1:] != cuts[:-1]])[: len(cuts)]]
    at = np.searchsorted(segments.start, cuts, side="right") - 1
    inside = (at >= 0) & (segments.start[at] < cuts) & (cuts < segments.end[at])
    at, cuts = at[inside], cuts[inside]
    index = np.concatenate([np.arange(len(segments.start)), at])
    start = np.concatenate([segments.start, cuts])
    order = np.lexsort((start, index))
    index, start = index[order], start[order]
    end = segments.end[index]
    same = index[1:] == index[:-1]
    end[:-1][same] = start[1:][same]
    is_first = first[index]
    is_first[1:][same] = False
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
    kind = np.array([KIND_OF_CATEGORY.get(c, NodeKind.KERNEL) for c in range(SYNC + 1)])[
        device.category[event]
    ]
    item_of = np.full(len(device), -1, dtype=np.int64)
    for number, item in enumerate(items):
        if item.on_gpu and not item.part:
            item_of[item.event] = number
    of_row = item_of[event]
    kind[of_row >= 0] = [_communication_kind(items[number]) for number in of_row[of_row >= 0].tolist()]
    return rows_of(time.lane[event], time.start[event], time.end[event], event, kind.astype(np.int64), of_row)


def _placed_rows(found: Dependencies, items: list[Communication]) -> Rows:
    numbers = sorted(found.placed)
    place = np.array([found.placed[number] for number in numbers], dtype=np.int64).reshape(-1, 3)
    kind = np.array([_communication_kind(items[number]) for number in numbers], dtype=np.int64)
    event = np.array([items[number].event for number in numbers], dtype=np.int64)
    return rows_of(place[:, 0], place[:, 1], place[:, 2], event, kind, np.array(numbers, dtype=np.int64))


def _communication_kind(item: Communication) -> NodeKind:
    return NodeKind.P2P if item.is_message else NodeKind.COLLECTIVE


def _connect(rows: Rows, found: Dependencies) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges between rows: the order of each lane, and the dependencies by their points on lanes."""
    sources, targets, kinds = [], [], []
    edges = found.edges
    bounds = np.searchsorted(rows.lane, np.arange(len(found.lanes) + 1))
    order_kind = {
        "cpu": EdgeKind.PROGRAM_ORDER,
        "gpu": EdgeKind.STREAM_ORDER,
        "communication": EdgeKind.COLLECTIVE,
    }
    from_ = np.full(len(edges), -1, dtype=np.int64)
    to = np.full(len(edges), -1, dtype=np.int64)
    for lane, info in enumerate(found.lanes):
        low, high = bounds[lane], bounds[lane + 1]
        if high > low:
            sources.append(np.arange(low, high - 1))
            targets.append(np.arange(low + 1, high))
            kinds.append(np.full(high - low - 1, order_kind[info.kind]))
        out = np.flatnonzero(edges[:, 1] == lane)
        at = np.searchsorted(rows.end[low:high], edges[out, 2], side="right") - 1
        from_[out] = np.where(at >= 0, at + low, -1)
        into = np.flatnonzero(edges[:, 3] == lane)
        at = np.searchsorted(rows.start[low:high], edges[into, 4], side="left")
        to[into] = np.where(at < high - low, at + low, -1)
    both = (from_ >= 0) & (to >= 0) & (from_ != to)
    sources.append(from_[both])
    targets.append(to[both])
    kinds.append(edges[both, 0])
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(kinds)


def _forward_only(
    rows: Rows, source: np.ndarray, target: np.ndarray, kind: np.ndarray, findings: Findings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop duplicate edges and edges that do not point forward, which only the rounding of times causes.

    Between two nodes of duration 0 at the same time, the edge starts at the node before instead.
    """
    before = np.full(len(rows.lane), -1, dtype=np.int64)
    by_lane = np.argsort(rows.lane, kind="stable")
    same = rows.lane[by_lane[1:]] == rows.lane[by_lane[:-1]]
    before[by_lane[1:][same]] = by_lane[:-1][same]
    while (back := (source >= target) & (source >= 0)).any():
        source = np.where(back, before[source], source)
    forward = (source >= 0) & (rows.end[source] <= rows.start[target])
    findings.add("backward-edge", int((~forward).sum()))
    source, target, kind = source[forward], target[forward], kind[forward]
    order = np.lexsort((kind, source, target))
    source, target, kind = source[order], target[order], kind[order]
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[new], target[new], kind[new]


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
