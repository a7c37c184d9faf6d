"""The reduction of gradients for ranks that were captured without data parallelism.

Under DistributedDataParallel with one process the collectives are there, and reduce nothing: they become
those of the data-parallel group. Without it they are put in: buckets of 25 MiB (the first of 1 MiB) of the
gradients in the order in which they become ready, each beside the rest of the backward pass, and awaited at
its end; on CPUs also the copies into buckets and back, at the places where PyTorch 2.x records
them (torch/csrc/distributed/c10d/reducer.cpp). That is an assumption, which the notes state with a count.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts, with_integers, with_metadata, with_texts
from chakra_et.et.rearrange import New, insert
from chakra_et.job.gradients import FIRST_MIB, NEAR, OTHERS_MIB, Sweep, buckets_of, sweeps_of
from chakra_et.job.mesh import axes_of, forward_uses
from chakra_et.job.operators import Operators, operators_of
from chakra_et.transform.changes import RankTraces
from chakra_et.transform.ddp import BACK, INTO_BUCKET
from chakra_et.transform.operator_times import Elementwise

# As the reducer of PyTorch 2.x records them with their operators inside: nodes, self time between each.
_INTO_NODES, _LAUNCH_NODES, _BACK_NODES = 11, 2, 6


def with_reductions(ranks: RankTraces, bucket_mb: float | None = None) -> RankTraces:
    """The ranks with the reduction of gradients that one replica does without, each in a group of its own.
    ``bucket_mb``: DDP's bucket_cap_mb, None for its default. Raises ``TraceError`` where no gradients are
    recognised."""
    limits = (FIRST_MIB, OTHERS_MIB) if bucket_mb is None else (bucket_mb, bucket_mb)
    groups = dict(ranks.groups)
    notes = []
    traces: dict[int, ExecutionTrace] = {}
    number = max(map(int, groups), default=0)
    found, put_in = 0, list[int]()
    for rank, trace in ranks.traces.items():
        number += 1
        groups[str(number)] = [rank]
        where = f"{ranks.where}.{rank}"
        operators = operators_of(trace, where)
        own = _own_collectives(operators)
        if own:
            traces[rank] = _as_collectives(trace, own, str(number))
            found += len(own)
            continue
        sweeps = sweeps_of(operators, None)
        if not any(each.shape for sweep in sweeps for each in sweep.gradients):
            raise TraceError(
                f"{where}: no gradients were recognised: neither collectives of one process "
                "(DistributedDataParallel) nor torch::autograd::AccumulateGrad with shapes"
            )
        sweeps = _last_of_steps(sweeps, operators)
        traces[rank], sizes = _put_in(operators, sweeps, str(number), limits)
        put_in += sizes
    if found:
        notes.append(
            f"{found:,} collectives of gradients that one process had by itself are those of the "
            "data-parallel group"
        )
    if put_in:
        notes.append(
            f"no gradients were reduced in the capture: {len(put_in):,} all-reduces were put in, assuming "
            f"buckets of {limits[1]:g} MiB (the first of {limits[0]:g}; the largest has {max(put_in):,} "
            "bytes) beside the backward pass; on CPUs, copies into buckets and back at the rate of "
            "elementwise operators, on GPUs none"
        )
    several = {name for name, members in ranks.groups.items() if len(members) > 1}
    apart = frozenset(several - _shared_groups(ranks.traces))
    if apart:
        notes.append(
            f"{len(apart)} of {len(several)} groups are of one replica (tensor, pipeline or expert "
            "parallel), by their descriptions; each new replica has its own"
        )
    return ranks.with_traces(traces, *notes, groups=groups, apart=apart)


def _shared_groups(traces: Mapping[int, ExecutionTrace]) -> set[str]:
    """The groups that span all replicas: those of data parallelism by their descriptions, and the default one
    unless it shares work in forward passes."""
    found = set()
    sharing = forward_uses(traces.values())
    for trace in traces.values():
        (names, of_node), (described, about) = texts(trace, "pg_name"), texts(trace, "pg_description")
        for at, text in set(zip(of_node.tolist(), about.tolist(), strict=True)):
            words = described[text] if text >= 0 else ""
            default = not words or "default" in words.lower()
            if at >= 0 and ("dp" in axes_of(words) or (default and names[at] not in sharing)):
                found.add(names[at])
    return found


def _own_collectives(operators: Operators) -> dict[int, int]:
    """Rows and bytes of all-reduces and the like of one rank, of gradients: launched in a backward pass, or
    of as many bytes as all gradients."""
    trace = operators.trace
    table, index = texts(trace, "kind")
    alone = np.array([*(text == "collective" for text in table), False])[index]
    alone &= (trace.types != NodeType.COMM_COLL) & (operators.parent >= 0)
    whole = {sum(each.bytes for each in sweep.gradients) for sweep in sweeps_of(operators, None)}
    found = {}
    for row in np.flatnonzero(alone).tolist():
        shapes = operators.shapes(row) or operators.shapes(int(operators.parent[row]))
        size = sum(int(np.prod(shape)) for shape in shapes) * operators.item(row)
        top = int(operators.top[operators.parent[row]])
        inside = top >= 0 and operators.name[top].endswith("AccumulateGrad")
        if size and (inside or any(abs(size - each) <= NEAR * each for each in whole)):
            found[row] = size
    return found


def _as_collectives(trace: ExecutionTrace, sizes: Mapping[int, int], group: str) -> ExecutionTrace:
    """The trace whose nodes of these rows are collectives of ``sizes`` bytes that last 1 µs."""
    rows = sorted(sizes)
    types, duration = trace.types.copy(), trace.duration_micros.copy()
    types[rows], duration[rows] = NodeType.COMM_COLL, 1
    trace = replace(trace, types=types, duration_micros=duration)
    kinds = {}
    for row in rows:
        name = trace.names[row].lower().replace("_", "")
        kind = CollectiveType.ALL_GATHER if "allgather" in name else CollectiveType.ALL_REDUCE
        kinds[row] = int(CollectiveType.REDUCE_SCATTER if "reducescatter" in name else kind)
    trace = with_integers(trace, "comm_size", sizes)
    trace = with_integers(trace, "comm_type", kinds)
    trace = with_texts(trace, "pg_name", dict.fromkeys(rows, group))
    return with_texts(trace, "pg_description", dict.fromkeys(rows, "data parallel"))


def _last_of_steps(sweeps: Sequence[Sweep], operators: Operators) -> list[Sweep]:
    """The last backward pass before each update of the parameters: those before it accumulate."""
    updates = [row for row, phase in enumerate(operators.phase) if phase == "optimizer"]
    if not updates:
        return list(sweeps)
    following = np.searchsorted(updates, [sweep.gradients[-1].row for sweep in sweeps])
    is_last = (following < len(updates)) & (np.diff(following, append=-1) != 0)
    return [sweeps[at] for at in np.flatnonzero(is_last).tolist()]


def _put_in(
    operators: Operators, sweeps: Sequence[Sweep], group: str, limits: tuple[float, float]
) -> tuple[ExecutionTrace, list[int]]:
    """The trace with an all-reduce for each bucket, on CPUs also the copies into buckets and back; and the
    bytes of the buckets."""
    trace, new, on_cpu = operators.trace, list[New](), not (operators.trace.column("stream", -1) >= 0).any()
    lane, rate = int(trace.column("lane", -1).max()) + 1, Elementwise(trace)
    attributes = {"kind": "collective", "pg_name": group, "pg_description": "data parallel"}
    for sweep in sweeps:
        sizes, types = ([getattr(each, of) for each in sweep.gradients] for of in ("bytes", "type"))
        cpu, last = np.flatnonzero(operators.lane == sweep.lane), sweep.gradients[-1].row
        back: list[New] = []
        for bucket in buckets_of(sizes, types, limits[1] * 2**20, limits[0] * 2**20):
            ready = sweep.gradients[bucket[-1]].row
            before, behind = _tied(operators, ready, last)
            node = New(max(before), ready, 1.0, "gradient all-reduce", [*before], behind)
            if on_cpu and behind:
                end = _last_in(operators, cpu, last)
                for at in bucket:
                    row, moved = sweep.gradients[at].row, 2 * sizes[at]
                    around = int(operators.top[row])
                    after, into = _last_in(operators, cpu, row), rate.micros(moved, _INTO_NODES)
                    new.append(New(after, around, into, INTO_BUCKET, parent=around))
                    micros = rate.micros(moved, _BACK_NODES)
                    back.append(New(end, behind[0], micros, BACK, texts={"kind": "operator"}))
                around = int(operators.top[ready])
                call = rate.micros(0, _LAUNCH_NODES)
                launch = New(max(before), around, call, "c10d::allreduce_", parent=around)
                node = New(max(before), around, 1.0, "gloo:all_reduce", [launch], parent=launch)
                back[-len(bucket)].needs.append(node)
                new.append(launch)
            node.collective, node.lane, node.texts = sum(sizes[at] for at in bucket), lane, attributes
            new.append(node)
        new += back
    made = insert(trace, np.zeros(len(trace), bool), new)
    with contextlib.suppress(ValueError):
        known = json.loads(made.metadata_str("lanes") or "[]")
        known.append({"kind": "communication", "label": "gradients"})
        made = with_metadata(made, lanes=json.dumps(known, separators=(",", ":")))
    return made, [node.collective for node in new if node.collective is not None]


def _tied(operators: Operators, ready: int, end: int) -> tuple[list[int], list[int]]:
    """The rows that an all-reduce waits for, and those that wait for it: it follows the gradient in row
    ``ready`` and the device work before it; what comes after the pass, whose last gradient is in row ``end``,
    follows the all-reduce."""
    trace, lane = operators.trace, operators.lane
    cpu = np.flatnonzero(lane == lane[ready])
    before, waiting = [_last_in(operators, cpu, ready)], []
    for each in np.setdiff1d(lane, list(operators.tops)).tolist():
        rows = np.flatnonzero((lane == each) & (operators.parent >= 0))
        if not len(rows) or trace.types[rows[0]] >= NodeType.COMM_SEND:
            continue
        launched = operators.parent[rows]
        before += rows[launched <= ready][-1:].tolist()
        waiting.append(rows[launched > end])
    last = max(before)
    behind = [int(rows[rows > last][0]) for rows in waiting if (rows > last).any()]
    return before, behind or cpu[cpu > max(_last_in(operators, cpu, end), last)][:1].tolist()


def _last_in(operators: Operators, cpu: np.ndarray, row: int) -> int:
    """The last of the lane's rows that lies in the outermost operator around ``row``, without a gap."""
    inside = operators.top[cpu[cpu >= row]] == operators.top[row]
    return int(cpu[cpu >= row][: len(inside) if inside.all() else int(inside.argmin())][-1])
