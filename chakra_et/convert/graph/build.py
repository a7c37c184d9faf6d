"""Build the execution graph of one rank: nodes are rows, edges are rows.

A replay of the graph reproduces the measured times: a node starts when its lane is free and its dependencies
have ended, and any further delay becomes an overhead node in front of it. Edges point from lower to higher
node numbers, so the graph is acyclic by construction; ``validate`` checks that for the file.
"""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import lane_order, narrowed
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind, Edges, Graph, NodeKind, Rows
from chakra_et.convert.graph.timeline import Lane, Timeline, named, on_device
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CATEGORIES, CPU_OP, MEMCPY, MEMSET, RUNTIME

# Of the dependencies between consecutive rows of a lane.
ORDER_KINDS = {
    "cpu": EdgeKind.PROGRAM_ORDER,
    "gpu": EdgeKind.STREAM_ORDER,
    "communication": EdgeKind.COLLECTIVE,
}
# A kernel that starts within this many typical latencies of its launch was not delayed by its stream, even if
# the previous kernel ended in the meantime.
_PROMPT = 1.5


def build(rank: LinkedRank, found: Dependencies) -> Graph:
    """The graph of a rank, from its timeline and its dependencies ``found``."""
    findings = Findings()
    device, time, items = rank.device, rank.timeline, rank.communication.items
    dependencies = found.edges
    parts = _cpu_rows(device, time, dependencies, found.waits), _other_rows(device, time, found, items)
    rows = Rows(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))
    del parts
    rows.rearrange(np.lexsort((rows.start, rows.lane)))
    edges = _connect(rows, dependencies, len(found.lanes))
    del dependencies
    latency, gap, edges = _fill_overhead(rows, edges, time.begin, found.lanes, items)

    # Number the nodes by start time. Nodes of duration 0 come first, as others may depend on them.
    order = np.lexsort((rows.lane, rows.end > rows.start, rows.start))
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    rows.rearrange(order)
    latency, gap = narrowed(latency[order]), narrowed(gap[order])
    source, target, kind = edges
    source, target, kind = _all_edges(rows, number[source], number[target], kind, found.lanes, findings)
    return Graph(
        **vars(rows), segment=_segments(rows), source=source, target=target, edge_kind=kind,
        launch_latency=latency, stream_gap=gap, lanes=found.lanes, findings=findings,
    )  # fmt: skip


def _cpu_rows(device: DeviceTrace, time: Timeline, edges: np.ndarray, waits: np.ndarray) -> Rows:
    """The self time of the threads, cut where an edge starts or ends, without blocking intervals."""
    segments = time.self_time
    first = np.zeros(len(segments.owner), dtype=bool)
    owned = np.flatnonzero(segments.owner >= 0)
    # Assigned in reverse order, so that each owner's first segment remains.
    of_owner = np.zeros(len(device), dtype=np.int64)
    of_owner[segments.owner[owned[::-1]]] = owned[::-1]
    first[of_owner[segments.owner[owned]]] = True
    if not len(segments.owner):  # nothing to cut
        edges, waits = edges[:0], waits[:0]
    # One number for a place on a lane, so that all lanes are searched at once.
    span = 2 + max(int(points.max(initial=0)) for points in (segments.end, edges[:, [2, 4]], waits[:, 1:]))
    start, end = segments.lane * span + segments.start, segments.lane * span + segments.end

    # Split where an edge or wait starts or ends; only the first part stays ``first``.
    lanes, times = edges[:, [1, 3]].ravel(), edges[:, [2, 4]].ravel()
    cuts = np.unique(np.concatenate([lanes * span + times, (waits[:, :1] * span + waits[:, 1:]).ravel()]))
    at = np.searchsorted(start, cuts, side="right") - 1
    inside = (at >= 0) & (start[at] < cuts) & (cuts < end[at])
    at, cuts = at[inside], cuts[inside]
    index = np.repeat(np.arange(len(start)), 1 + np.bincount(at, minlength=len(start)))
    start, end, first = start[index], end[index], first[index]
    part = at + np.arange(1, len(at) + 1)  # each cut adds a row, behind the segment and its earlier cuts
    start[part], end[part - 1], first[part] = cuts, cuts, False

    # Blocking intervals become no nodes, but an event's first segment stays, with duration 0.
    keep = np.ones(len(start), dtype=bool)
    if len(waits):
        since, reach = (waits[:, :1] * span + waits[:, 1:]).T
        order = np.argsort(since, kind="stable")
        since, reach = since[order], np.maximum.accumulate(reach[order])
        at = np.searchsorted(since, start, side="right") - 1
        blocked = (at >= 0) & (end <= reach[at]) & (start < end)
        keep = ~blocked | first
        end = np.where(blocked & first, start, end)
    lane, owner = segments.lane[index[keep]], segments.owner[index[keep]]
    start, end, is_first = start[keep] - lane * span, end[keep] - lane * span, first[keep]
    of_category = np.full(len(CATEGORIES) + 1, NodeKind.OPERATOR, dtype=np.int8)
    of_category[RUNTIME:] = NodeKind.RUNTIME
    of_category[[ANNOTATION, -1]] = NodeKind.HOST_OVERHEAD  # outside all events, too
    category = np.where(owner >= 0, device.category[owner], len(CATEGORIES))
    if not len(on_device(device)):
        # Without a device, what a compiled graph does between operators is its fused kernels.
        fused = named(device, lambda name: name.startswith("## Call CompiledFxGraph"))
        category[fused[owner] & (category == ANNOTATION)] = CPU_OP
    rows = Rows(lane, start, end, owner, of_category[category], np.full(len(owner), -1, dtype=np.int32))
    # An annotation is a node of duration 0: its self time is Python around the operators.
    marks = (category == ANNOTATION) & is_first
    rows.rearrange(np.repeat(np.arange(len(owner)), 1 + (marks & (start < end))))
    mark = np.flatnonzero(marks)
    mark += np.cumsum(start[mark] < end[mark]) - (start[mark] < end[mark])
    rows.end[mark] = rows.start[mark]
    rows.kind[mark] = NodeKind.ANNOTATION
    return rows


def _other_rows(device: DeviceTrace, time: Timeline, found: Dependencies, items: list[Communication]) -> Rows:
    """Device work, and communication that is placed on lanes of its own."""
    gpu, placed = on_device(device), sorted(found.placed)
    lane, start, end = np.array([found.placed[number] for number in placed], np.int64).reshape(-1, 3).T
    kernels = [number for number, item in enumerate(items) if item.on_gpu and not item.part]
    item_of = np.full(len(device), -1, dtype=np.int64)
    item_of[[items[number].event for number in kernels]] = kernels
    event = np.append(gpu, np.array([items[number].event for number in placed], dtype=np.int64))
    item = np.append(item_of[gpu], np.array(placed, dtype=np.int64))
    kinds = [NodeKind.P2P if each.is_message else NodeKind.COLLECTIVE for each in items]
    of_category = np.full(len(CATEGORIES), NodeKind.KERNEL)
    of_category[[MEMCPY, MEMSET]] = NodeKind.MEMCPY, NodeKind.MEMSET
    kind = np.where(item >= 0, np.array([*kinds, -1])[item], of_category[device.category[event]])
    lane, start, end = (
        np.append(column[gpu], own)
        for column, own in ((time.lane, lane), (time.start, start), (time.end, end))
    )
    return Rows(lane, start, end, event, kind, item)


def _segments(rows: Rows) -> np.ndarray:
    """int32[rows]: the index of each node among the nodes of its event, in time order."""
    segment = np.zeros(len(rows.event), dtype=np.int32)
    owned = np.flatnonzero(rows.event >= 0)
    order = owned[np.argsort(rows.event[owned], kind="stable")]
    event = rows.event[order]
    segment[order] = np.arange(len(order)) - np.searchsorted(event, event)  # the first of the event
    return segment


def _connect(rows: Rows, edges: np.ndarray, lanes: int) -> Edges:
    """The dependencies as edges between rows, from their points on lanes."""
    bounds = np.searchsorted(rows.lane, np.arange(lanes + 1))
    # One number for a place on a lane, so that all lanes are searched at once.
    span = 2 + int(max(rows.end.max(initial=0), edges[:, [2, 4]].max(initial=0)))
    base = rows.lane.astype(np.int64) * span
    _, out, left, into, enters = edges.T
    from_ = np.searchsorted(base + rows.end, out * span + left, side="right") - 1
    from_ = np.where(from_ >= bounds[out], from_, -1)
    to = np.searchsorted(base + rows.start, into * span + enters, side="left")
    to = np.where(to < bounds[into + 1], to, -1)
    both = (from_ >= 0) & (to >= 0) & (from_ != to)
    return from_[both], to[both], edges[both, 0]


def _all_edges(
    rows: Rows, source: np.ndarray, target: np.ndarray, kind: np.ndarray, lanes: list[Lane], found: Findings
) -> Edges:
    """The edges between numbered rows and those of the order on each lane, by their targets, without
    duplicates and those that do not point forward, which only the rounding of times causes."""
    before = np.full(len(rows.lane), -1, dtype=np.int32)  # the previous row of the same lane
    by_lane = lane_order(rows.lane).astype(np.int32)
    same = rows.lane[by_lane[1:]] == rows.lane[by_lane[:-1]]
    before[by_lane[1:][same]] = by_lane[:-1][same]
    del by_lane, same
    # Between two nodes of duration 0 at the same time, the edge starts at the node before instead.
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
    new = np.append(True, (source[1:] != source[:-1]) | (target[1:] != target[:-1]))[: len(source)]
    return source[new], target[new], kind[new]


# ---- overhead: time between a node and its dependencies that nothing in the trace accounts for ----
#
# On the device it has two parts that behave differently when durations change. A kernel starts one launch
# latency after its launch, which overlaps with earlier kernels of the stream, and a short gap after the
# previous kernel. Each overhead node records both, so that a prediction does not add up launch latencies if
# the device is the bottleneck.


def _fill_overhead(
    rows: Rows, edges: Edges, begin: int, lanes: list[Lane], items: list[Communication]
) -> tuple[np.ndarray, np.ndarray, Edges]:
    """Insert an overhead row before each row (in the order of lanes) that starts later than its lane and
    dependencies allow: launch latency and stream gap of the new rows, and the edges between them."""
    source, target, kind = edges
    # A further message of a kernel shares the kernel's overhead.
    is_further = np.array([item.on_gpu and item.part > 0 for item in items] + [False])[rows.item]
    further = np.flatnonzero(is_further)
    launched, others = _ready(rows, edges, begin)
    ready = np.maximum(launched, others)
    is_late = (rows.start > ready) & ~is_further
    late = np.flatnonzero(is_late)
    on_gpu = np.array([lane.kind == "gpu" for lane in lanes], dtype=bool)[rows.lane]
    index = np.repeat(np.arange(len(is_late)), 1 + is_late)
    place = np.arange(len(is_late)) + np.cumsum(is_late)
    extra = place[late] - 1
    latency, gap = (np.full(len(index), -1, dtype=np.int64) for _ in range(2))
    known = np.flatnonzero(on_gpu & ~is_further & (launched >= 0))
    # Without an overhead row, the row itself has the latency, and no gap.
    at = place[known] - is_late[known]
    latency[at], between = _latency_and_gap(rows.start[known], launched[known], others[known])
    gap[at[is_late[known]]] = between[is_late[known]]
    own = np.flatnonzero((rows.item >= 0) & ~is_further)
    row_of = dict(zip(rows.event[own].tolist(), own.tolist(), strict=True))
    kernels = np.array([row_of[event] for event in rows.event[further].tolist()], np.int64)
    further, kernels = further[is_late[kernels]], kernels[is_late[kernels]]
    begins = ready[late]
    del launched, others, ready
    rows.rearrange(index)
    rows.end[extra], rows.start[extra] = rows.start[extra], begins
    rows.event[extra] = rows.item[extra] = -1
    rows.kind[extra] = np.where(on_gpu[late], NodeKind.DEVICE_OVERHEAD, NodeKind.HOST_OVERHEAD)
    first = place - is_late
    edges = (
        np.concatenate([place[source], first[kernels]]),
        np.concatenate([first[target], place[further]]),
        np.concatenate([kind, np.full(len(further), EdgeKind.STREAM_ORDER)]),
    )
    return latency, gap, edges


def _ready(rows: Rows, edges: Edges, begin: int) -> tuple[np.ndarray, np.ndarray]:
    """When each row was launched (-1 for none), and when its lane and its other dependencies let it start."""
    source, target, kind = edges
    valid = rows.end[source] <= rows.start[target]
    source, target, launch = source[valid], target[valid], kind[valid] == EdgeKind.LAUNCH
    launched = np.full(len(rows.start), -1, dtype=np.int64)
    np.maximum.at(launched, target[launch], rows.end[source[launch]])
    others = np.full(len(rows.start), begin, dtype=np.int64)
    follows = (rows.lane[1:] == rows.lane[:-1]) & (rows.end[:-1] <= rows.start[1:])
    np.maximum(others[1:], rows.end[:-1], out=others[1:], where=follows)
    np.maximum.at(others, target[~launch], rows.end[source[~launch]])
    return launched, others


def _latency_and_gap(
    start: np.ndarray, launched: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``launch_latency`` and ``stream_gap``, from the ends of the launch and of the other dependencies."""
    latency = start - launched
    idle = (others <= launched) & (latency > 0)
    typical = int(np.median(latency[idle])) if idle.any() else 0
    prompt = idle | (latency <= _PROMPT * typical)
    between = start - others
    typical_gap = 0 if prompt.all() else int(np.median(between[~prompt]))
    latency = np.where(prompt, latency, np.minimum(latency, typical))
    return latency, np.where(prompt, np.minimum(between, typical_gap), between)
