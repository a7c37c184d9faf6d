"""Overhead: time between a node and its dependencies that nothing in the trace accounts for.

On the device it has two parts that behave differently when durations change. A kernel starts one launch
latency after its launch, which overlaps with earlier kernels of the stream, and a short gap after the
previous kernel. Each overhead node records both, so that a prediction does not add up launch latencies if the
device is the bottleneck.
"""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import median
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.dependencies import EdgeKind
from chakra_et.convert.graph.nodes import NodeKind, Rows
from chakra_et.convert.graph.timeline import Lane

# A kernel that starts within this many typical latencies of its launch was not delayed by its stream, even if
# the previous kernel ended in the meantime.
_PROMPT = 1.5

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Source, target and kind of each edge; the first two are rows."""


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
    rows: Rows, edges: Edges, begin: int, lanes: list[Lane], beside: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Edges]:
    """Insert an overhead row before each row that starts later than its lane and dependencies allow.

    ``rows`` are in the order of their lanes, and ``edges`` those between lanes. A row ``beside`` another one
    shares its overhead. Returns launch latency and stream gap of the new rows, and the edges between them.
    """
    source, target, kind = edges
    launched, others = _ready(rows, edges, begin)
    ready = np.maximum(launched, others)
    behind = beside < 0
    is_late = (rows.start > ready) & behind
    late = np.flatnonzero(is_late)
    on_gpu = np.array([lane.kind == "gpu" for lane in lanes], dtype=bool)[rows.lane]
    index = np.repeat(np.arange(len(is_late)), 1 + is_late)
    place = np.arange(len(is_late)) + np.cumsum(is_late)
    extra = place[late] - 1
    latency, gap = (np.full(len(index), -1, dtype=np.int64) for _ in range(2))
    known = np.flatnonzero(on_gpu & behind & (launched >= 0))
    # Without an overhead row, the row itself has the latency, and no gap.
    at = place[known] - is_late[known]
    latency[at], between = _latency_and_gap(rows.start[known], launched[known], others[known])
    gap[at[is_late[known]]] = between[is_late[known]]

    begins = ready[late]
    del launched, others, ready
    rows.rearrange(index)
    rows.end[extra], rows.start[extra] = rows.start[extra], begins
    rows.event[extra] = rows.item[extra] = -1
    rows.kind[extra] = np.where(on_gpu[late], NodeKind.DEVICE_OVERHEAD, NodeKind.HOST_OVERHEAD)
    first = place - is_late
    shared = np.flatnonzero((beside >= 0) & is_late[beside])
    edges = (
        np.concatenate([place[source], first[beside[shared]]]),
        np.concatenate([first[target], place[shared]]),
        np.concatenate([kind, np.full(len(shared), EdgeKind.STREAM_ORDER)]),
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
    """``launch_latency`` and ``stream_gap`` of launched rows that start at ``start``, ns.

    ``launched``: end of the launch; ``others``: end of the other dependencies.
    """
    latency = start - launched
    idle = (others <= launched) & (latency > 0)
    typical = int(median(latency[idle])) if idle.any() else 0
    prompt = idle | (latency <= _PROMPT * typical)
    between = start - others
    typical_gap = 0 if prompt.all() else int(median(between[~prompt]))
    latency = np.where(prompt, latency, np.minimum(latency, typical))
    return latency, np.where(prompt, np.minimum(between, typical_gap), between)
