"""The reduction of gradients for ranks that were captured without data parallelism.

Under DistributedDataParallel with one process the collectives are there, and reduce nothing: they become
those of the data-parallel group. Without it they are put in: buckets of 25 MiB (the first of 1 MiB) of the
gradients in the order in which they become ready, each beside the rest of the backward pass, and awaited at
its end. That is an assumption, which the notes state with a count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, Strings
from chakra_et.et.node_attributes import communicates, has, set_integers, set_texts, texts, without
from chakra_et.job.axes import axes_of, forward_uses
from chakra_et.job.blocks import Blocks
from chakra_et.job.buckets import FIRST_MIB, OTHERS_MIB, buckets_of
from chakra_et.job.gradients import NEAR, Sweep, sweeps_of
from chakra_et.job.operators import Operators, operators_of
from chakra_et.job.sets import Groups
from chakra_et.transform.added_ddp import with_ddp
from chakra_et.transform.unroll import Draft, drafted, finished

_OPERATORS = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema", "parent", "segment")


@dataclass(frozen=True)
class Reduced:
    """``traces`` with the reductions, in ``groups`` of one rank each, and the captured row of each node."""

    traces: dict[int, ExecutionTrace]
    groups: Groups
    source: dict[int, np.ndarray]
    notes: list[str]


def with_reductions(
    traces: Mapping[int, ExecutionTrace], groups: Groups, where: str, bucket_mb: float | None = None
) -> Reduced:
    """Raises ``TraceError`` where no gradients are recognised. ``bucket_mb``: DDP's bucket_cap_mb."""
    first = (FIRST_MIB, OTHERS_MIB) if bucket_mb is None else (bucket_mb, bucket_mb)
    (rank, trace), *others = traces.items()
    silent = not others and not communicates(trace).any()
    on_cpu = (trace.column("stream", -1) < 0).all()
    if silent and on_cpu and "collective" not in texts(trace, "kind")[0]:
        group = str(max(map(int, groups), default=0) + 1)
        one, rows, notes = with_ddp(trace, rank, group, bucket_mb)
        return Reduced({rank: one}, {**groups, group: [rank]}, {rank: rows}, notes)
    numbers = iter(range(max(map(int, groups), default=0) + 1, 1 << 30))
    made: dict[int, ExecutionTrace] = {}
    source: dict[int, np.ndarray] = {}
    own: Groups = dict(groups)
    found = put_in = largest = 0
    for rank, trace in traces.items():
        name = str(next(numbers))
        own[name] = [rank]
        operators = operators_of(trace, f"{where}.{rank}")
        rows = _local(operators)
        if len(rows):
            made[rank], source[rank] = _joined(operators, rows, name), np.arange(len(trace))
            found += len(rows)
            continue
        sweeps = sweeps_of(operators, None)
        if not sweeps:
            raise TraceError(
                f"{where}.{rank}: no gradients were recognised: neither collectives of one process "
                "(DistributedDataParallel) nor torch::autograd::AccumulateGrad with shapes"
            )
        made[rank], source[rank], sizes = _put_in(
            operators, _last_of_steps(sweeps, operators), name, first, where
        )
        put_in += len(sizes)
        largest = max(largest, *sizes)
    notes = []
    if found:
        notes.append(
            f"{found:,} collectives of gradients that one process had by itself are those of the "
            "data-parallel "
            "group"
        )
    if put_in:
        notes.append(
            f"no gradients were reduced in the capture: {put_in:,} all-reduces were put in, assuming "
            f"buckets of {first[1]:g} MiB (the first of {first[0]:g}; the largest has {largest:,} bytes) "
            "beside the backward pass; copies into buckets take no time"
        )
    return Reduced(made, own, source, notes)


def shared_groups(traces: Mapping[int, ExecutionTrace]) -> set[str]:
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


def _local(operators: Operators) -> np.ndarray:
    """Rows of all-reduces and the like of one rank, of gradients: launched in a backward pass, or of as many
    bytes as all gradients."""
    trace = operators.trace
    table, index = texts(trace, "kind")
    alone = np.array([*(text == "collective" for text in table), False])[index] & (
        trace.types != NodeType.COMM_COLL
    )
    whole = {sum(each.bytes for each in sweep.gradients) for sweep in sweeps_of(operators, None)}
    found = []
    for row in np.flatnonzero(alone & (operators.parent >= 0)).tolist():
        size = _bytes(operators, row)
        top = int(operators.top[operators.parent[row]])
        inside = top >= 0 and operators.name[top].endswith("AccumulateGrad")
        if size and (inside or any(abs(size - each) <= NEAR * each for each in whole)):
            found.append(row)
    return np.array(found, dtype=np.int64)


def _bytes(operators: Operators, row: int) -> int:
    shapes = operators.shapes(row) or operators.shapes(int(operators.parent[row]))
    return sum(int(np.prod(shape)) for shape in shapes) * operators.item(row)


def _kind(name: str) -> CollectiveType:
    lowered = name.lower().replace("_", "")
    if "reducescatter" in lowered:
        return CollectiveType.REDUCE_SCATTER
    return CollectiveType.ALL_GATHER if "allgather" in lowered else CollectiveType.ALL_REDUCE


def _joined(operators: Operators, rows: np.ndarray, group: str) -> ExecutionTrace:
    sizes = {row: _bytes(operators, row) for row in rows.tolist()}
    kinds = {row: _kind(operators.name[row]) for row in sizes}
    return _as_collectives(operators.trace, sizes, kinds, group)


def _as_collectives(
    trace: ExecutionTrace, sizes: Mapping[int, int], kinds: Mapping[int, CollectiveType], group: str
) -> ExecutionTrace:
    rows = np.array(sorted(sizes), dtype=np.int64)
    types, duration = trace.types.copy(), trace.duration_micros.copy()
    types[rows] = NodeType.COMM_COLL
    duration[rows] = 1
    trace = replace(trace, types=types, duration_micros=duration)
    new = {"comm_size": sizes, "comm_type": {row: int(kind) for row, kind in kinds.items()}}
    for name, values in new.items():
        column, present = trace.column(name), has(trace, name)
        column[rows] = [values[row] for row in rows.tolist()]
        present[rows] = True
        trace = set_integers(trace, name, "int64", column, present)
    for name, text in (("pg_name", group), ("pg_description", "data parallel")):
        table, index = texts(trace, name)
        index[rows] = len(table)
        trace = set_texts(trace, name, [*table, text], index)
    return trace


def _last_of_steps(sweeps: list[Sweep], operators: Operators) -> list[Sweep]:
    """The last backward pass before each update of the parameters: those before it accumulate."""
    updates = [row for row, phase in enumerate(operators.phase) if phase == "optimizer"]
    if not updates:
        return sweeps
    ends = np.array([sweep.gradients[-1].row for sweep in sweeps])
    at = np.searchsorted(np.array(updates), ends)
    following = [updates[place] if place < len(updates) else -1 for place in at.tolist()]
    return [
        sweep
        for sweep, one, two in zip(sweeps, following, [*following[1:], -2], strict=True)
        if one >= 0 and one != two
    ]


def _put_in(
    operators: Operators, sweeps: list[Sweep], group: str, limits: tuple[float, float], where: str
) -> tuple[ExecutionTrace, np.ndarray, list[int]]:
    """The trace with an all-reduce for each bucket, the captured rows, and the bytes of the buckets."""
    trace = operators.trace
    nothing = np.full(len(trace), -1)
    blocks = Blocks(nothing, nothing, [], 0, "")
    draft = drafted(trace, blocks, [])
    lane = max(draft.lanes, default=0) + 1
    draft.lanes[lane] = []
    sizes: dict[int, int] = {}
    for sweep in sweeps:
        sizes_of, types = ([getattr(each, of) for each in sweep.gradients] for of in ("bytes", "type"))
        for bucket in buckets_of(sizes_of, types, limits[1] * 2**20, limits[0] * 2**20):
            last = sweep.gradients[bucket[-1]].row
            node = len(draft.old)
            draft.old.append(last)
            draft.copy.append(1)
            draft.lanes[lane].append(node)
            sizes[node] = sum(sweep.gradients[at].bytes for at in bucket)
            _tie(operators, draft, node, last, sweep.gradients[-1].row)
    made = finished(draft, trace, blocks, where)
    place = {int(node): at for at, node in enumerate(made.node.tolist())}
    rows = {place[node]: size for node, size in sizes.items()}
    new = _bare(made.trace, np.array(sorted(rows), dtype=np.int64), lane)
    new = _as_collectives(new, rows, dict.fromkeys(rows, CollectiveType.ALL_REDUCE), group)
    return _with_lane(new), made.source, list(sizes.values())


def _tie(operators: Operators, draft: Draft, node: int, ready: int, end: int) -> None:
    """An all-reduce waits for the gradient in row ``ready`` and the device work before it; what follows the
    pass, whose last gradient is in row ``end``, waits for the all-reduce."""
    cpu = draft.lanes[int(operators.lane[ready])]
    draft.across.append((_last_in(operators, cpu, ready), node))
    last = _last_in(operators, cpu, end)
    after = next((row for row in cpu if row > last), None)
    device = [lane for lane in draft.lanes if lane not in operators.tops and lane != max(draft.lanes)]
    waits = False
    for lane in device:
        rows = np.array([row for row in draft.lanes[lane] if operators.parent[row] >= 0], dtype=np.int64)
        if not len(rows) or operators.trace.types[rows[0]] >= NodeType.COMM_SEND:
            continue
        launched = operators.parent[rows]
        before, behind = rows[launched <= ready], rows[launched > end]
        draft.across += [(int(before[-1]), node)] if len(before) else []
        draft.across += [(node, int(behind[0]))] if len(behind) else []
        waits |= bool(len(behind))
    if after is not None and not waits:
        draft.across.append((node, after))


def _last_in(operators: Operators, cpu: list[int], row: int) -> int:
    """The last row on the lane that lies in the outermost operator around ``row``."""
    top = operators.top[row]
    last = row
    for other in cpu[int(np.searchsorted(np.array(cpu), row)) :]:
        if operators.top[other] != top:
            break
        last = other
    return last


def _bare(trace: ExecutionTrace, rows: np.ndarray, lane: int) -> ExecutionTrace:
    """The copies of gradients' nodes as communication: without what an operator has."""
    chosen = np.zeros(len(trace), dtype=bool)
    chosen[rows] = True
    trace = without(trace, [name for name in trace.attributes if name in _OPERATORS], chosen)
    lanes, on_cpu = trace.column("lane"), trace.column("is_cpu_op")
    lanes[rows], on_cpu[rows] = lane, 0
    everywhere = np.ones(len(trace), dtype=bool)
    trace = set_integers(trace, "lane", trace.attributes["lane"].kind, lanes, everywhere)
    trace = set_integers(trace, "is_cpu_op", trace.attributes["is_cpu_op"].kind, on_cpu, everywhere)
    table, index = texts(trace, "kind")
    index[rows] = len(table)
    trace = set_texts(trace, "kind", [*table, "collective"], index)
    names = trace.names.index.copy()
    names[rows] = len(trace.names.table)
    return replace(trace, names=Strings([*trace.names.table, b"gradient all-reduce"], names))


def _with_lane(trace: ExecutionTrace) -> ExecutionTrace:
    try:
        lanes = json.loads(trace.metadata_str("lanes") or "[]")
    except ValueError:
        return trace
    lanes.append({"kind": "communication", "label": "gradients"})
    return replace(trace, metadata={**trace.metadata, "lanes": json.dumps(lanes, separators=(",", ":"))})
