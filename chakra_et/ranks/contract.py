"""The skeleton of a rank: its communication and the steps, and what lies between, contracted.

A skeleton is an ``ExecutionTrace`` with fewer nodes, so that whatever replays a run reads it. Its nodes are
the communication of the rank, and segments: successive nodes of one thread or stream that nothing enters or
leaves in between, as one node for each kind of time. The time of each kind stays what it was.

Of the dependencies between threads and streams, most never decide when anything starts: a stream gets a
thousand kernels from a thread, and at most a few of these launches hold it up. Dependencies that leave one
stretch of a thread and enter one stretch of a stream replace each other, so that only the one on the longest
path is kept: the longest with the times as recorded, and with each kind of work at 0, ½, 2 and 10 times as
long. With these times, and any times of communication, each communication of a replay starts when it did in
the full graph; with others it may start earlier, by what another dependency would have held it up.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chakra_et.diagnose import node_classes as classes
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType, Strings
from chakra_et.et.node_attributes import has, set_integers, texts, with_metadata
from chakra_et.et.rearrange import take_rows
from chakra_et.et.sets import MANY_RANKS, Skeletons
from chakra_et.et.skeleton import VERSION, write_skeleton
from chakra_et.jobs import Jobs
from chakra_et.names import SKELETON, RunFiles
from chakra_et.simulate.run import Run, make_run
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.stragglers.recorded import find_stretches

ATTRIBUTES = (
    *("kind", "phase", "lane", "tid", "stream", "device", "is_cpu_op"),
    *("comm_type", "comm_size", "comm_tag", "comm_src", "comm_dst", "comm_dtype", "comm_sequence"),
    *("pg_name", "pg_original_name", "pg_description", "wait_micros", "transfer_micros"),
    *("num_ops", "tensor_size", "launch_latency_ns", "stream_gap_ns"),
)
"""The attributes that nodes of a skeleton keep; those of segments are sums where they are amounts."""
_FACTORS = (0.0, 0.5, 2.0, 10.0)
# By which names ``node_classes`` finds a segment's class again.
_NAMES = {
    classes.COMPUTE: "{} bound by arithmetic (gemm, conv, attention)",
    classes.MEMORY: "{} bound by memory",
    classes.LOADING: "{} in DataLoader",
    classes.COMPILING: "{} in (dynamo_timed)",
    classes.ALLOCATING: "cudaMalloc_cudaFree",
}


def write_skeletons(
    scratch: RunFiles, place: RunFiles, wanted: Skeletons, jobs: Jobs, workers: int
) -> list[str]:
    """Write the skeletons of the .et files in ``scratch`` where they are ``wanted``, and remove those of an
    earlier conversion at ``place`` where not. Returns what to tell the user, one sentence each."""
    written = [path for _, path in scratch.et_files()]
    if wanted == "off" or wanted == "auto" and len(written) <= MANY_RANKS:
        for _, path in place.et_files(SKELETON):
            path.unlink()
        return []
    if wanted == "auto" and importlib.util.find_spec("pyarrow") is None:
        return ["joint questions will read whole ranks, as skeletons need pyarrow: pip install pyarrow"]
    with contextlib.closing(jobs(_write, written, workers)) as outcomes:
        failed = {number: str(error) for number, error in outcomes if isinstance(error, TraceError)}
    made = f"skeletons written of {len(written) - len(failed)} of {len(written)} ranks"
    return [made, *(f"{written[at].name} has no skeleton: {failed[at]}" for at in sorted(failed)[:1])]


def _write(path: Path) -> None:
    write_skeleton(path.with_suffix(SKELETON), skeleton(path))


def skeleton(path: Path) -> ExecutionTrace:
    """The skeleton of the rank in a file, or what it holds if that is one."""
    trace = et_file.read(path)
    return trace if "skeleton" in trace.metadata else contract(trace)


def contract(trace: ExecutionTrace) -> ExecutionTrace:
    """The skeleton of one rank's trace. Raises ``TraceError`` for a trace that can't be replayed."""
    run = make_run("", [trace], [trace.metadata_int("rank") or 0])
    graph = run.graph
    stretches = find_stretches(run)
    step = run.steps[0].step  # -1 for work of before the first
    stretch = (step + 1) * (int(stretches.ordinal.max()) + 1) + stretches.ordinal
    work = classes.node_classes(run)
    source, target = _needed(run, stretch, work)
    begins = np.zeros(len(graph), bool)
    begins[run.steps[0].first[run.steps[0].first >= 0]] = True
    phase = graph.gather([texts(trace, "phase")[1]])
    key = ((stretch * (phase.max() + 2) + phase + 1) * len(KINDS) + run.kind) * len(classes.CLASSES) + work
    piece, segment, first = _segments(run, source, target, begins, key)
    last = np.full(int(piece.max()) + 1, -1)
    np.maximum.at(last, piece, segment)  # the last segment of each piece
    source, target = last[piece[source]], segment[target]
    lane = graph.in_lanes.lane[first]
    by_lane = np.argsort(lane, kind="stable")
    chained = lane[by_lane[1:]] == lane[by_lane[:-1]]
    source = np.append(source, by_lane[:-1][chained])
    target = np.append(target, by_lane[1:][chained])
    dropped = tuple(name for name in trace.attributes if name not in ATTRIBUTES)
    made = take_rows(trace, graph.row[first], source, target, dropped)
    made = _with_sums(made, run, segment, first)
    made.inputs = made.outputs = None
    made.names = _names(run, first, work, begins)
    for name, values in (("step_index", step), ("comm_ordinal", stretches.ordinal)):
        made = set_integers(made, name, "int64", values[first], np.ones(len(first), bool))
    return with_metadata(made, skeleton=VERSION, skeleton_of=len(trace), conversion_report=None)


def _needed(run: Run, stretch: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The dependencies between lanes, and those with a lag, that can be on a longest path."""
    graph, lane = run.graph, run.graph.in_lanes.lane
    crossing = (lane[graph.source] != lane[graph.target]) | (graph.lag_ns > 0)
    source, target, lag = graph.source[crossing], graph.target[crossing], graph.lag_ns[crossing]
    order, place = graph.in_lanes.nodes, graph.in_lanes.spot
    communication = run.is_communication[order]
    passed = [np.concatenate(([0], np.cumsum((run.measured.own_ns * by)[order]))) for by in _directions(work)]
    while True:
        enters, leaves = communication.copy(), communication.copy()
        enters[place[target]] = leaves[place[source]] = True
        entered = np.cumsum(enters)[place[source]]
        left = (np.cumsum(leaves) - leaves)[place[target]]
        key = np.stack([lane[source], entered, stretch[source], lane[target], left, stretch[target]])
        group = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
        by_group = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.diff(group[by_group], prepend=-1))
        kept = np.zeros(len(source), bool)
        for path in passed if len(source) else ():
            length = (path[place[source] + 1] + lag - path[place[target]])[by_group]
            longest = np.maximum.reduceat(length, starts)
            among = np.flatnonzero(length == np.repeat(longest, np.diff(np.append(starts, len(length)))))
            kept[by_group[among[np.unique(group[by_group][among], return_index=True)[1]]]] = True
        if kept.all():
            return source, target
        source, target, lag = source[kept], target[kept], lag[kept]


def _directions(work: np.ndarray) -> Iterator[np.ndarray]:
    """How many times as long each node may take, float64[N]: see above."""
    yield np.ones(len(work))
    present = np.unique(work).tolist()
    for factor in _FACTORS:
        for chosen in [*([each] for each in present), classes.ON_DEVICE]:
            yield np.where(np.isin(work, chosen), factor, 1.0)


def _segments(
    run: Run, source: np.ndarray, target: np.ndarray, begins: np.ndarray, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The piece between entries and exits, and the segment of each node, int64[N]; the first node of each
    segment. Segments are numbered by the position of that node, so that dependencies point forward."""
    cut, lanes = np.zeros(len(run.graph) + 1, bool), run.graph.in_lanes
    place = lanes.spot
    communication = place[run.is_communication]
    cut[lanes.first] = cut[place[begins]] = cut[place[target]] = cut[place[source] + 1] = True
    cut[communication] = cut[communication + 1] = True
    piece = np.empty(len(run.graph), np.int64)
    piece[lanes.nodes] = np.cumsum(cut[:-1]) - 1
    number = np.unique(np.stack([piece, key]), axis=1, return_inverse=True)[1].reshape(-1)
    by_position = np.argsort(run.graph.position, kind="stable")
    at = np.unique(number[by_position], return_index=True)[1]
    order = np.argsort(at)
    return piece, np.argsort(order)[number], by_position[at[order]]


def _with_sums(made: ExecutionTrace, run: Run, segment: np.ndarray, first: np.ndarray) -> ExecutionTrace:
    """The segments with the times and amounts of all their nodes. What runs for other than its duration has
    ``stream_gap_ns``: the first node's lag stays what it was."""
    graph = run.graph

    def total(values: np.ndarray) -> np.ndarray:
        return np.rint(np.bincount(segment, values, len(first))).astype(np.int64)

    made.duration_micros = total(graph.duration_ns // 1000).astype(np.uint64)
    gap, latency = graph.attribute("stream_gap_ns", -1), graph.attribute("launch_latency_ns", -1)
    gapped, own = total(gap >= 0) > 0, total(graph.own_ns)
    lag = (latency - np.maximum(gap, 0))[first]
    made = set_integers(made, "stream_gap_ns", "int64", own, gapped)
    behind = latency[first] >= 0
    made = set_integers(made, "launch_latency_ns", "int64", lag + np.where(gapped, own, 0), behind)
    for name in ("num_ops", "tensor_size"):
        if name in made.attributes:
            made = set_integers(made, name, "int64", total(graph.attribute(name, 0)), has(made, name))
    return made


def _names(run: Run, first: np.ndarray, work: np.ndarray, begins: np.ndarray) -> Strings:
    table: dict[str, int] = {}
    index = []
    for node in first.tolist():
        name = run.names[run.name_of[node]]
        if run.graph.types[node] < NodeType.COMM_SEND and not begins[node]:
            name = _NAMES.get(int(work[node]), "{}").format(KINDS[run.kind[node]])
        index.append(table.setdefault(name, len(table)))
    return Strings([name.encode() for name in table], np.array(index, np.int32))
