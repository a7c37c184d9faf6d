"""Overhead: time between a node and its dependencies that nothing in the trace accounts for.

On the device it has two parts that behave differently when durations change. A kernel starts one launch
latency after its launch, which overlaps with earlier kernels of the stream, and a short gap after the
previous kernel. Each overhead node records both, so that a prediction does not add up launch latencies if the
device is the bottleneck.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chakra_et.graph.communication import Communication
from chakra_et.graph.dependencies import EdgeKind
from chakra_et.graph.nodes import NodeKind, Rows
from chakra_et.graph.timeline import Lane

# A kernel that starts within this many typical latencies of its launch was not delayed by its stream, even if
# the previous kernel ended in the meantime.
_PROMPT = 1.5


def messages_beside(rows: Rows, items: list[Communication]) -> np.ndarray:
    """int64[rows]: for a further message of a kernel, the row of the kernel; -1 for all other rows."""
    further = np.array([item.on_gpu and item.part > 0 for item in items] + [False], dtype=bool)[rows.item]
    beside = np.full(len(rows.start), -1, dtype=np.int64)
    if further.any():
        own = np.flatnonzero((rows.item >= 0) & ~further)
        row_of = dict(zip(rows.event[own].tolist(), own.tolist(), strict=True))
        at = np.flatnonzero(further)
        beside[at] = [row_of[event] for event in rows.event[at].tolist()]
    return beside


def fill_overhead(
    rows: Rows, source: np.ndarray, target: np.ndarray, kind: np.ndarray, begin: int, lanes: list[Lane],
    beside: np.ndarray,
) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Insert an overhead row before each row that starts later than its lane and dependencies allow.

    A row ``beside`` another one shares its overhead. Returns the rows, and source, target and kind of the
    edges.
    """
    valid = rows.end[source] <= rows.start[target]
    launch = kind == EdgeKind.LAUNCH
    launched = np.full(len(rows.start), -1, dtype=np.int64)
    np.maximum.at(launched, target[valid & launch], rows.end[source[valid & launch]])
    others = np.full(len(rows.start), begin, dtype=np.int64)
    np.maximum.at(others, target[valid & ~launch], rows.end[source[valid & ~launch]])
    ready = np.maximum(launched, others)
    behind = beside < 0
    late = np.flatnonzero((rows.start > ready) & behind)
    on_gpu = np.array([lane.kind == "gpu" for lane in lanes], dtype=bool)[rows.lane]
    latency, gap = _latency_and_gap(rows.start, np.where(on_gpu & behind, launched, -1), others)
    # Without an overhead row, the row itself has the latency, and no gap.
    rows = replace(rows, launch_latency=latency.copy())
    rows.launch_latency[late] = -1
    on_gpu, latency, gap = on_gpu[late], latency[late], gap[late]
    none = np.full(len(late), -1, dtype=np.int64)
    extra = Rows(
        rows.lane[late], ready[late], rows.start[late], none,
        np.where(on_gpu, NodeKind.DEVICE_OVERHEAD, NodeKind.HOST_OVERHEAD).astype(np.int64), none,
        latency, gap,
    )  # fmt: skip
    position = np.concatenate([np.arange(len(rows.start)) * 2 + 1, late * 2])
    order = np.argsort(position, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    overhead_of = np.full(len(rows.start), -1, dtype=np.int64)
    overhead_of[late] = place[len(rows.start) :]
    joined = Rows.join([rows, extra]).take(order)
    into = np.where(overhead_of[target] >= 0, overhead_of[target], place[target])
    lane_order = np.where(on_gpu, EdgeKind.STREAM_ORDER, EdgeKind.PROGRAM_ORDER).astype(np.int64)
    shared = np.flatnonzero((beside >= 0) & (overhead_of[beside] >= 0))
    return (
        joined,
        np.concatenate([place[source], overhead_of[late], overhead_of[beside[shared]]]),
        np.concatenate([into, place[late], place[shared]]),
        np.concatenate([kind, lane_order, np.full(len(shared), EdgeKind.STREAM_ORDER)]),
    )


def _latency_and_gap(
    start: np.ndarray, launched: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``launch_latency`` and ``stream_gap`` of rows that start at ``start``, ns; -1 without a launch.

    ``launched``: end of the launch, -1 for none; ``others``: end of the other dependencies.
    """
    has_launch = launched >= 0
    latency = start - launched
    idle = has_launch & (others <= launched) & (latency > 0)
    typical = int(np.median(latency[idle])) if idle.any() else 0
    prompt = idle | (has_launch & (latency <= _PROMPT * typical))
    queued = has_launch & ~prompt
    between = start - others
    typical_gap = int(np.median(between[queued])) if queued.any() else 0
    latency = np.where(prompt, latency, np.minimum(latency, typical))
    gap = np.where(prompt, np.minimum(between, typical_gap), between)
    return np.where(has_launch, latency, -1), np.where(has_launch, gap, -1)
