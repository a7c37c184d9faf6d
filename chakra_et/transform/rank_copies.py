"""Copies of a captured rank for other places of the mesh: groups, peers, sizes and times of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from chakra_et.cost.collectives import collective_time, message_time
from chakra_et.cost.topology import Topology
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import communicates, has, set_integers, set_texts, texts, with_metadata
from chakra_et.job.mesh import Mesh, Place, ScaledGroups
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.timing import timing
from chakra_et.transform.step_variation import kind_of, stretched

SHARDED = (CollectiveType.ALL_GATHER, CollectiveType.GATHER)
"""Collectives whose ``comm_size`` is a rank's shard of a whole that keeps its size."""
RECORDED = ("measured_end_micros", "trace_start_ns", "clock_offset_ns", "clock_spread_ns", "rank")
EVERY = ("", "0")
"""The names of the group of all ranks, which needs no entry in the group file."""
WAITING = ("wait_micros", "transfer_micros")


def transfers(
    traces: Mapping[int, ExecutionTrace], groups: Mapping[str, Sequence[int]]
) -> dict[int, np.ndarray]:
    """How long each node lasts once its partners are there, by rank, float64[N] µs.

    The members of a collective end together: what it takes is their median. Other nodes last as recorded.
    """
    graph = build_graph(list(traces.values()), list(traces))
    matching = match(graph, groups)
    times = timing(graph, matching)
    recorded = graph.duration_ns if times.transfer_ns is None else times.transfer_ns
    lasting = recorded.astype(np.float64)
    matched = np.flatnonzero(matching.channel >= 0)
    if len(matched):
        ordinals = matching.ordinal[matched]
        keys = np.stack([matching.channel[matched], ordinals], axis=1)
        _, operation = np.unique(keys, axis=0, return_inverse=True)
        operation = operation.reshape(-1)
        order = np.lexsort((lasting[matched], operation))
        starts = np.flatnonzero(np.r_[True, np.diff(operation[order]) != 0])
        counts = np.diff(np.r_[starts, len(order)])
        sides = lasting[matched][order]
        middle = (sides[starts + (counts - 1) // 2] + sides[starts + counts // 2]) / 2
        lasting[matched] = middle[operation]
    of_rank = graph.scatter(np.rint(lasting).astype(np.int64).tolist())
    return {rank: column / 1000 for rank, column in zip(traces, of_rank, strict=True)}


def without_waiting(trace: ExecutionTrace, lasting: np.ndarray) -> ExecutionTrace:
    """The trace without recorded starts and waits: its communication lasts ``lasting`` (float64[N] µs)."""
    talks = communicates(trace)
    duration = np.where(talks, np.maximum(np.rint(lasting), 1), trace.duration_micros).astype(np.uint64)
    attributes = {name: each for name, each in trace.attributes.items() if name not in WAITING}
    plain = dataclasses.replace(
        trace,
        start_micros=np.zeros(len(trace), dtype=np.uint64),
        duration_micros=duration,
        attributes=attributes,
    )
    return with_metadata(plain, **dict.fromkeys(RECORDED))


def resized(
    trace: ExecutionTrace,
    members: Mapping[str, tuple[int, int]],
    lasting: Callable[[CollectiveType, int, int, str, float], float],
) -> ExecutionTrace:
    """The trace with the sizes and times of collectives whose groups have other numbers of members.

    ``members``: group → (members before, after). ``lasting(kind, size before, size after, group, µs
    before)``: the time after, µs. The shards of gathers shrink as members are added; whatever is reduced,
    scattered or exchanged keeps its whole size.
    """
    table, index = texts(trace, "pg_name")
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size", 0)
    duration = trace.duration_micros.copy()
    changed = sizes.copy()
    for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
        group = table[index[row]] if index[row] >= 0 else EVERY[0]
        kind, size = int(kinds[row]), int(sizes[row])
        before, after = members[group]
        if kind in SHARDED:
            changed[row] = max(-(-size * before // after), 1)
        if kind in set(CollectiveType):
            time = lasting(CollectiveType(kind), size, int(changed[row]), group, float(duration[row]))
            duration[row] = max(round(time), 1)
    trace = set_integers(trace, "comm_size", "int64", changed, has(trace, "comm_size"))
    return dataclasses.replace(trace, duration_micros=duration)


def relabelled(
    trace: ExecutionTrace, names: Mapping[str, str], peers: Mapping[int, int], world: int
) -> ExecutionTrace:
    """The trace with other group names and ranks: ``names`` and ``peers`` map all that occur in it."""
    table, index = texts(trace, "pg_name")
    if table:
        trace = set_texts(trace, "pg_name", [names.get(name, name) for name in table], index)
    for name in ("comm_src", "comm_dst"):
        attribute = trace.attributes.get(name)
        if attribute is not None:
            old = trace.column(name, -1)
            new = np.array([peers.get(rank, rank) for rank in old.tolist()], dtype=np.int64)
            trace = set_integers(trace, name, attribute.kind, new, has(trace, name))
    return with_metadata(trace, world_size=world)


def names_in(trace: ExecutionTrace, groups: ScaledGroups, place: Place) -> dict[str, str]:
    """Captured group → new group, of those that a rank uses, for its copy at ``place`` of the new mesh."""
    used = [name for name in texts(trace, "pg_name")[0] if name in groups.shapes]
    return {name: groups.name_for(name, place) for name in used}


def peers_in(trace: ExecutionTrace, old: Mesh, new: Mesh, source: Place, place: Place) -> dict[int, int]:
    """Captured rank → new rank, of those that messages name: as many places away, for the copy at ``place``
    of the rank at ``source``."""
    named: set[int] = set()
    for name in ("comm_src", "comm_dst"):
        attribute = trace.attributes.get(name)
        if attribute is not None:
            named |= set(trace.column(name)[attribute.rows].tolist())
    found = {}
    for rank in sorted(named):
        if 0 <= rank < old.ranks:
            peer = old.place(rank)
            data = (place.data + peer.data - source.data) % new.dp
            tensor = (place.tensor + peer.tensor - source.tensor) % new.tp
            found[rank] = new.rank(Place(tensor, data, peer.stage))
    return found


def timed(trace: ExecutionTrace, groups: Mapping[str, Sequence[int]], topology: Topology) -> ExecutionTrace:
    """The trace with the times of its collectives and messages on ``topology``."""
    table, index = texts(trace, "pg_name")
    kinds, sizes, source, target = (
        trace.column(name, -1) for name in ("comm_type", "comm_size", "comm_src", "comm_dst")
    )
    duration = trace.duration_micros.copy()
    known: dict[tuple[int, int, int], float] = {}
    for row in np.flatnonzero(trace.types >= NodeType.COMM_SEND).tolist():
        size = int(sizes[row])
        if trace.types[row] == NodeType.COMM_COLL:
            key = int(kinds[row]), size, int(index[row])
            if key[0] not in set(CollectiveType):
                continue
            if key not in known:
                name = table[key[2]] if key[2] >= 0 else EVERY[0]
                ranks = groups.get(name) or range(topology.ranks)
                known[key] = collective_time(CollectiveType(key[0]), size, ranks, topology)
            time = known[key]
        elif source[row] >= 0 and target[row] >= 0:
            time = message_time(size, int(source[row]), int(target[row]), topology)
        else:
            continue
        duration[row] = max(round(time / 1000), 1)
    return dataclasses.replace(trace, duration_micros=duration)


def varied(trace: ExecutionTrace, step: np.ndarray, factors: np.ndarray) -> ExecutionTrace:
    """The trace with compute times multiplied by the factor (float64[S, K]) of their ``step`` (int64[N]) and
    kind."""
    computes = (trace.types < NodeType.COMM_SEND) & (step >= 0)
    of_node = factors[np.minimum(step, len(factors) - 1), kind_of(trace)]
    duration = trace.duration_micros.copy()
    duration[computes] = stretched(duration[computes].astype(np.float64), of_node[computes])
    return dataclasses.replace(trace, duration_micros=duration)
