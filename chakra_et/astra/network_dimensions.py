"""ASTRA-sim's analytical network: its dimensions, and how long it takes for communication.

Facts from astra-network-analytical (congestion_unaware): a link's bandwidth counts in GiB/s; a message takes
hops · latency + bytes / bandwidth, two hops on a Switch; a message between ranks that differ in several
dimensions takes the links of the first of them. From astra-sim/system: a group of fewer than all ranks is one
ring over its members in the order of the group file; all ranks together reduce-scatter inwards to outwards
and gather back; all-to-all on a ring passes every message on from rank to rank, and so costs p(p−1)/2
messages; reducing a byte costs two reads and a write of local memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.cost.collectives import collective_time
from chakra_et.cost.topology import Dimension, Topology
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts

FIELDS = ("comm_type", "comm_size", "comm_src", "comm_dst")


@dataclass(frozen=True)
class Crossings:
    """What the analytical network puts on too fast a link: ``messages`` between ranks that differ in several
    dimensions, and ``groups`` whose ring has such a hop."""

    messages: int
    groups: tuple[str, ...]


def simulated_dimensions(topology: Topology, split: bool) -> Topology:
    """The topology as network.yml has it. ``split``: a single dimension becomes two with the same links,
    where its size allows: ASTRA-sim aborts at the end of a run with several groups on one dimension."""
    if not split or len(topology.dimensions) > 1:
        return topology
    whole = topology.dimensions[0]
    inner = next((size for size in range(int(whole.size**0.5), 1, -1) if whole.size % size == 0), 0)
    if not inner or whole.kind != "Switch":
        return topology
    outer = dataclasses.replace(whole, size=inner)
    return dataclasses.replace(
        topology, dimensions=(dataclasses.replace(whole, size=whole.size // inner), outer)
    )


def group_time(kind: CollectiveType, size: int, ranks: Sequence[int], topology: Topology) -> float:
    """ns of a collective of ``ranks``, in the order of the group file, as ASTRA-sim's network has it."""
    if len(ranks) == topology.ranks:
        return collective_time(kind, size, range(topology.ranks), topology, "hierarchical")
    hops = [_hop(a, b, topology) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
    latency, beta = max(d.latency_ns for d in hops), max(1e9 / d.bandwidth for d in hops)
    if kind is CollectiveType.ALL_TO_ALL:
        count = len(ranks)
        return count * (count - 1) / 2 * (latency + size / count * beta)
    flat = Topology.flat(len(ranks), 1e9 / beta, latency, topology.reduce_bandwidth)
    return collective_time(kind, size, range(len(ranks)), flat, "ring")


def transfer_ns(trace: ExecutionTrace, groups: Mapping[str, Sequence[int]], topology: Topology) -> np.ndarray:
    """How long each communication node of a rank lasts once its members are there, int64[N]; other nodes and
    broadcasts, which ASTRA-sim replays: their recorded duration."""
    lasting = trace.duration_micros.astype(np.int64) * 1000
    table, index = texts(trace, "pg_name")
    kinds, sizes, source, target = (trace.column(name, -1) for name in FIELDS)
    known: dict[tuple[int, int, int], float] = {}
    for row in np.flatnonzero(trace.types >= NodeType.COMM_SEND).tolist():
        if trace.types[row] == NodeType.COMM_COLL:
            key = int(kinds[row]), int(sizes[row]), int(index[row])
            if key[0] == CollectiveType.BROADCAST:
                continue
            if key not in known:
                name = table[key[2]] if key[2] >= 0 else "0"
                ranks = groups.get(name) or range(topology.ranks)
                known[key] = group_time(CollectiveType(key[0]), key[1], ranks, topology)
            lasting[row] = round(known[key])
        else:
            hop = _hop(int(source[row]), int(target[row]), topology)
            lasting[row] = round(hop.latency_ns + int(sizes[row]) * 1e9 / hop.bandwidth)
    return lasting


def crossings(
    traces: Mapping[int, ExecutionTrace], groups: Mapping[str, Sequence[int]], topology: Topology
) -> Crossings:
    """Messages are counted at their senders; ``traces`` may be of some ranks only."""
    messages, used = 0, set()
    for trace in traces.values():
        rows = np.flatnonzero(trace.types == NodeType.COMM_SEND)
        source, target = trace.column("comm_src", -1)[rows], trace.column("comm_dst", -1)[rows]
        messages += sum(
            _is_diagonal(a, b, topology)
            for a, b in zip(source.tolist(), target.tolist(), strict=True)
            if a >= 0 <= b
        )
        used |= set(texts(trace, "pg_name")[0])
    found = []
    for name in sorted(used & set(groups), key=int):
        ranks = groups[name]
        if 1 < len(ranks) < topology.ranks:
            ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
            if any(_is_diagonal(a, b, topology) for a, b in ring):
                found.append(name)
    return Crossings(messages, tuple(found))


def _hop(source: int, target: int, topology: Topology) -> Dimension:
    """The dimension whose links a message takes: the first in which the two ranks differ."""
    places = zip(topology.coordinates(source), topology.coordinates(target), strict=True)
    differing = (at for at, (a, b) in enumerate(places) if a != b)
    return topology.dimensions[next(differing, 0)]


def _is_diagonal(source: int, target: int, topology: Topology) -> bool:
    places = zip(topology.coordinates(source), topology.coordinates(target), strict=True)
    return sum(a != b for a, b in places) > 1
