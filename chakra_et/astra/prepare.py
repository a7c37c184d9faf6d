"""Make the nodes of a set's ranks what ASTRA-sim runs: each change is counted, none is silent.

Facts from astra-sim/workload/Workload.cc: memory nodes need a remote memory model, which the bundle has not;
all-reduce, all-gather, reduce-scatter and all-to-all are simulated, a broadcast lasts as recorded, any other
collective throws; a communication on the CPU throws.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.et.edges import edges_of
from chakra_et.et.node_attributes import communicates, has, set_integers, texts, with_integers, without
from chakra_et.et.rearrange import select
from chakra_et.et.sets import Groups, RankSet
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.validate.table import SIMULATED, UNEVEN

Keep = Literal["all", "gpu", "comm"]
_OF_COMMUNICATION = (
    "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "comm_priority", "pg_name",
    "transfer_micros", "wait_micros",
)  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """What goes into a bundle: a set that lacks no rank. ``steps``: what was done about those that it lacked;
    ``captured``: the captured numbers of the ranks, in order, where others were left out."""

    set: RankSet
    steps: Sequence[str] = ()
    captured: Sequence[int] | None = None


def ranks_of(found: RankSet, trim: bool = False) -> Ranks:
    """The ranks of a set. Raises ``TraceError`` where some are missing and ``trim`` is False."""
    if not found.missing:
        return Ranks(found)
    if not trim:
        raise TraceError(
            f"{found.run.name}: {found.lacks}: convert them, or use --trim to leave them out or --fill to "
            "make them from ranks of the same stage"
        )
    place = {rank: at for at, rank in enumerate(found.files)}
    step = (
        f"{found.lacks} and were left out (--trim): the others are ranks 0 to {len(place) - 1}, groups "
        "are cut to them, sizes are as recorded"
    )
    groups = {
        name: [place[rank] for rank in members if rank in place] for name, members in found.groups.items()
    }
    files = dict(enumerate(found.files.values()))
    used = {name: members for name, members in groups.items() if members}
    return Ranks(replace(found, files=files, groups=used), (step,), list(place))


def trimmed(trace: ExecutionTrace, ranks: Sequence[int]) -> tuple[ExecutionTrace, int]:
    """The trace with peers renumbered to their place in ``ranks``, and how many messages to and from absent
    ranks became compute. Collectives keep their sizes."""
    place = np.full(max(ranks) + 2, -1, dtype=np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    lost = np.zeros(len(trace), dtype=bool)
    for name, kind in (("comm_src", NodeType.COMM_RECV), ("comm_dst", NodeType.COMM_SEND)):
        if name in trace.attributes:
            new = place[np.clip(trace.column(name, -1), -1, len(place) - 1)]
            lost |= (trace.types == kind) & (new < 0)
            present = has(trace, name) & (new >= 0)
            trace = set_integers(trace, name, trace.attributes[name].kind, new, present)
    return as_compute(trace, lost), int(lost.sum())


def larger_sizes(talk: Mapping[int, ExecutionTrace], groups: Groups) -> dict[int, dict[int, int]]:
    """Rank → row → bytes of the collectives to which other members contribute more, as gathers and scatters
    can be: all of them get the largest, since ASTRA-sim's ranks wait for messages of their own size for ever.

    ``talk``: the communication nodes of all ranks.
    """
    talk = {rank: trace for rank, trace in talk.items() if len(trace)}
    found: dict[int, dict[int, int]] = defaultdict(dict)
    uneven = (*UNEVEN, CollectiveType.BROADCAST)  # which takes the place of a scatter
    if not any(np.isin(trace.column("comm_type", -1), uneven).any() for trace in talk.values()):
        return found
    graph = build_graph(list(talk.values()), list(talk))
    operation = match(graph, groups).operation
    kind, size = graph.attribute("comm_type", -1), graph.attribute("comm_size", 0)
    nodes = np.flatnonzero((operation >= 0) & np.isin(kind, uneven))
    largest = np.zeros(int(operation.max(initial=0)) + 1, np.int64)
    np.maximum.at(largest, operation[nodes], size[nodes])
    for node in nodes[size[nodes] < largest[operation[nodes]]].tolist():
        found[graph.rank(node)][int(graph.row[node])] = int(largest[operation[node]])
    return found


def prepared(
    trace: ExecutionTrace, groups: Groups, world: int, keep: Keep, larger: Mapping[int, int]
) -> tuple[ExecutionTrace, Counter[str]]:
    """The trace as ASTRA-sim runs it, and how many nodes changed, by what was changed.

    ``groups``: of the comm-group file; ``world``: ranks of the set. ``keep``: all nodes, those of the GPU and
    all communication, or communication alone. A node that is left out passes its dependencies on.
    ``larger``: the rank's ``larger_sizes``. Raises ``TraceError`` where nothing is left.
    """
    counts = Counter[str]()
    if larger:
        what = "have the bytes of the largest, where ranks contribute different numbers"
        counts[f"parts of collectives {what}"] = len(larger)
        rows = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
        trace = with_integers(trace, "comm_size", {int(rows[at]): size for at, size in larger.items()})
    memory = np.isin(trace.types, (NodeType.MEM_LOAD, NodeType.MEM_STORE))
    counts["memory nodes run as compute, for their recorded durations"] = int(memory.sum())
    trace = as_compute(trace, memory)
    trace = _nearest(trace, counts)
    incomplete = communicates(trace) & ~_complete(trace)
    table, index = texts(trace, "pg_name")
    alone = [world < 2 if name in ("", "0") else len(groups.get(name, (0, 1))) < 2 for name in table]
    in_one_rank = np.array([*alone, world < 2])[index]
    local = (trace.types == NodeType.COMM_COLL) & ~incomplete & in_one_rank
    what = "communications without a kind, a size or a peer run as compute, as long as recorded"
    counts[what] = int(incomplete.sum())
    counts["communications within one rank run as compute"] = int(local.sum())
    trace = as_compute(trace, incomplete | local)
    on_cpu = communicates(trace) & (trace.column("is_cpu_op") != 0)
    counts["communications marked as CPU operators are marked as device operators"] = int(on_cpu.sum())
    trace = with_integers(trace, "is_cpu_op", dict.fromkeys(np.flatnonzero(on_cpu).tolist(), 0), "bool")
    if keep != "all":
        trace = _kept(trace, keep, counts)
    return _ended(trace, counts), +counts


def as_compute(trace: ExecutionTrace, rows: np.ndarray) -> ExecutionTrace:
    """The nodes ``rows`` (bool[N]) as COMP nodes with their durations, without what only communication
    has."""
    if not rows.any():
        return trace
    types = np.where(rows, np.uint8(NodeType.COMP), trace.types).astype(np.uint8)
    return without(replace(trace, types=types), _OF_COMMUNICATION, rows)


# The substitutes for collectives that ASTRA-sim does not simulate.
NEAREST_IN_ASTRA_SIM = {
    CollectiveType.BARRIER: CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE: CollectiveType.ALL_REDUCE,
    CollectiveType.GATHER: CollectiveType.ALL_GATHER,
    CollectiveType.SCATTER: CollectiveType.BROADCAST,
    CollectiveType.REDUCE_SCATTER_BLOCK: CollectiveType.REDUCE_SCATTER,
}


def _nearest(trace: ExecutionTrace, counts: Counter[str]) -> ExecutionTrace:
    kind = np.where(trace.types == NodeType.COMM_COLL, trace.column("comm_type", -1), -1)
    changed = kind.copy()
    for source, target in NEAREST_IN_ASTRA_SIM.items():
        rows = kind == source
        changed[rows] = target
        what = f"run as the nearest one: {source.name} as {target.name}"
        counts[f"collectives that ASTRA-sim doesn't have {what}"] = int(rows.sum())
    if (changed == kind).all():
        return trace
    # A barrier moves no data; one byte per rank is the least that ASTRA-sim finishes.
    barrier = (kind == CollectiveType.BARRIER) & ~has(trace, "comm_size")
    if barrier.any():
        sizes = np.where(barrier, 1, trace.column("comm_size"))
        trace = set_integers(trace, "comm_size", "int64", sizes, barrier | has(trace, "comm_size"))
    return set_integers(trace, "comm_type", "int64", changed, changed >= 0)


def _complete(trace: ExecutionTrace) -> np.ndarray:
    """bool[N]: what a simulator needs of a communication is there."""
    collective = np.isin(trace.column("comm_type", -1), (*SIMULATED, CollectiveType.BROADCAST))
    send, receive = has(trace, "comm_dst"), has(trace, "comm_src")
    kinds = [trace.types == NodeType.COMM_COLL, trace.types == NodeType.COMM_SEND]
    peers = np.select(kinds, [collective, send & has(trace, "comm_tag")], receive & has(trace, "comm_tag"))
    return peers & (trace.column("comm_size", 0) > 0)


def _ended(trace: ExecutionTrace, counts: Counter[str]) -> ExecutionTrace:
    """The trace with a CPU operator of no duration behind all communication that nothing waits for.

    ASTRA-sim's statistics throw as a rank with CPU operators finishes; only an event of its own queue, which
    a message isn't, catches that.
    """
    last = communicates(trace)
    parents = edges_of(trace).parent
    last[parents[parents >= 0]] = False
    on_cpu = (trace.types == NodeType.COMP) & (trace.column("is_cpu_op", 1) != 0)
    if not last.any() or not on_cpu.any():
        return trace
    what = "with CPU operators, ASTRA-sim aborts where a message is last"
    counts[f"ranks end with a node without work: {what}"] = 1
    data, control = trace.data_deps, trace.ctrl_deps
    ended = replace(
        trace,
        ids=np.append(trace.ids, trace.ids.max() + np.uint64(1)),
        names=Strings([*trace.names.table, b"end"], np.append(trace.names.index, len(trace.names.table))),
        types=np.append(trace.types, np.uint8(NodeType.COMP)),
        start_micros=np.append(trace.start_micros, trace.start_micros.max()),
        duration_micros=np.append(trace.duration_micros, np.uint64(0)),
        data_deps=Ragged(
            np.append(data.offsets, data.offsets[-1] + last.sum()), np.append(data.values, trace.ids[last])
        ),
        ctrl_deps=Ragged(np.append(control.offsets, control.offsets[-1]), control.values),
    )
    flags = np.append(trace.column("is_cpu_op"), 1)
    return set_integers(ended, "is_cpu_op", "bool", flags, np.append(has(trace, "is_cpu_op"), True))


def _kept(trace: ExecutionTrace, keep: Keep, counts: Counter[str]) -> ExecutionTrace:
    communication, on_device = communicates(trace), trace.column("is_cpu_op") == 0
    wanted = communication | on_device if keep == "gpu" else communication
    if keep == "gpu" and not (on_device & ~communication).any():
        raise TraceError("has no GPU nodes: leave --gpu-only out")
    if not wanted.any():
        raise TraceError("has no communication: leave --comm-only out")
    what = "CPU operators" if keep == "gpu" else "all but communication"
    counts[f"nodes left out: {what}"] = int((~wanted).sum())
    lane = trace.column("lane", -1)
    return select(trace, wanted, np.where(lane >= 0, lane, trace.column("stream", -1)))


def with_dependencies(trace: ExecutionTrace, before: np.ndarray, after: np.ndarray) -> ExecutionTrace:
    """The trace in which each row of ``after`` has a control dependency on that of ``before``."""
    deps = trace.ctrl_deps
    owner = np.concatenate([np.repeat(np.arange(len(trace)), np.diff(deps.offsets)), after])
    order = np.argsort(owner, kind="stable")
    values = np.concatenate([deps.values, trace.ids[before]])[order]
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=len(trace)), dtype=np.int64)))
    return replace(trace, ctrl_deps=Ragged(offsets, values))
