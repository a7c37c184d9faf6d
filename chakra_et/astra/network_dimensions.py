"""ASTRA-sim's analytical network: its dimensions, and how long it takes for communication.

Facts from astra-network-analytical (congestion_unaware): a link's bandwidth counts in GiB/s; a message takes
hops · latency + bytes / bandwidth, two hops on a Switch; a message between ranks that differ in several
dimensions takes the links of the first of them. From astra-sim/system: a group of fewer than all ranks is one
ring over its members in the order of the group file; all ranks together reduce-scatter inwards to outwards
and gather back; all-to-all on a ring passes every message on from rank to rank, and so costs p(p−1)/2
messages; reducing a byte costs two reads and a write of local memory. With the rendezvous protocol each
message, those of collectives too, waits for one of 8,192 bytes from its receiver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.cost.collectives import collective_time
from chakra_et.cost.topology import Dimension, Topology
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts

HANDSHAKE_BYTES = 8192
FIELDS = ("comm_type", "comm_size", "comm_src", "comm_dst")


@dataclass(frozen=True)
class Crossings:
    """What the analytical network puts on too fast a link: ``messages`` between ranks that differ in several
    dimensions, and ``groups`` whose ring has such a hop."""

    messages: int
    groups: tuple[str, ...]


def simulated_dimensions(topology: Topology, several: bool) -> Topology:
    """The topology as network.yml has it, with notes on what differs from the one given.

    ``several``: there are several groups of fewer than all ranks. With these ASTRA-sim aborts at the end of a
    run on one dimension, which becomes two with the same links where its size allows. Raises ``TraceError``
    where the links would be others.
    """
    pairs = [d.kind == "Ring" and d.size == 2 for d in topology.dimensions]
    dimensions = [
        dataclasses.replace(d, kind="FullyConnected") if pair else d
        for d, pair in zip(topology.dimensions, pairs, strict=True)
    ]
    notes = []
    if any(pairs):
        notes.append(
            "a Ring of two ranks is written as FullyConnected, which has the same links and doesn't make "
            "ASTRA-sim abort"
        )
    if several and len(dimensions) == 1:
        whole = dimensions[0]
        if whole.kind == "Ring":
            raise TraceError(
                f"ASTRA-sim aborts on one Ring of {whole.size} ranks with several groups: "
                "give a switch (leave `ring` out), or two dimensions (GPUs per node, nodes)"
            )
        inner = next((size for size in range(int(whole.size**0.5), 1, -1) if whole.size % size == 0), 0)
        if inner:
            sizes = whole.size // inner, inner
            dimensions = [dataclasses.replace(whole, size=size) for size in sizes]
            notes.append(
                f"the {whole.size} ranks are written as {sizes[0]} × {sizes[1]} with the same links, as "
                "ASTRA-sim aborts on one dimension with several groups: collectives of all ranks run "
                "dimension by dimension"
            )
        else:
            notes.append(
                f"{whole.size} ranks can't be split into two dimensions, and with several groups on one "
                "ASTRA-sim can abort (status 134) after the last rank has finished: its times are right"
            )
    return dataclasses.replace(topology, dimensions=tuple(dimensions), notes=(*topology.notes, *notes))


def group_time(kind: CollectiveType, size: int, ranks: Sequence[int], topology: Topology) -> float:
    """ns of a collective of ``ranks``, in the order of the group file, as ASTRA-sim's network has it."""
    exchange = kind is CollectiveType.ALL_TO_ALL
    if len(ranks) == topology.ranks:
        waiting = [
            dataclasses.replace(d, latency_ns=d.latency_ns + handshake(d)) for d in topology.dimensions
        ]
        if exchange:
            return sum(
                _messages(d.size, d.kind) * (d.latency_ns + size / d.size * 1e9 / d.bandwidth)
                for d in waiting
            )
        return collective_time(
            kind, size, ranks, dataclasses.replace(topology, dimensions=tuple(waiting)), "hierarchical"
        )
    hops = [_hop(a, b, topology) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
    latency, beta = max(d.latency_ns + handshake(d) for d in hops), max(1e9 / d.bandwidth for d in hops)
    if exchange:
        only = topology.dimensions[0].kind if len(topology.dimensions) == 1 else "Ring"
        return _messages(len(ranks), only) * (latency + size / len(ranks) * beta)
    flat = Topology.flat(len(ranks), 1e9 / beta, latency, topology.reduce_bandwidth)
    return collective_time(kind, size, range(len(ranks)), flat, "ring")


def _messages(count: int, kind: str) -> int:
    """Messages that follow each other in an all-to-all: around a ring, or to each other rank in turn."""
    return count * (count - 1) // 2 if kind == "Ring" else count - 1


def handshake(dimension: Dimension) -> float:
    """ns from a receiver's readiness until the sender knows of it."""
    return dimension.latency_ns + HANDSHAKE_BYTES * 1e9 / dimension.bandwidth


def handshake_ns(trace: ExecutionTrace, rank: int, topology: Topology) -> np.ndarray:
    """The handshake of each receive of ``rank``, int64[N], 0 for other nodes."""
    found = np.zeros(len(trace), np.int64)
    source = trace.column("comm_src", -1)
    for row in np.flatnonzero(trace.types == NodeType.COMM_RECV).tolist():
        found[row] = round(handshake(_hop(int(source[row]), rank, topology)))
    return found


def transfer_ns(
    trace: ExecutionTrace, rank: int, groups: Mapping[str, Sequence[int]], topology: Topology
) -> np.ndarray:
    """How long each communication node of ``rank`` lasts once its members are there, int64[N]; other nodes
    and broadcasts, which ASTRA-sim replays: their recorded duration."""
    lasting = trace.duration_micros.astype(np.int64) * 1000
    table, index = texts(trace, "pg_name")
    kinds, sizes, source, target = (trace.column(name, -1) for name in FIELDS)
    peer = np.where(trace.types == NodeType.COMM_SEND, target, source)
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
            hop = _hop(rank, int(peer[row]), topology)
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
    """The dimension whose links a message takes, the first in which the two ranks differ; on a Ring with the
    latency of all links on the way."""
    places = zip(topology.dimensions, topology.coordinates(source), topology.coordinates(target), strict=True)
    found, apart = next(((d, abs(a - b)) for d, a, b in places if a != b), (topology.dimensions[0], 1))
    if found.kind == "Ring":
        return dataclasses.replace(found, latency_ns=found.latency_ns * min(apart, found.size - apart))
    return found


def _is_diagonal(source: int, target: int, topology: Topology) -> bool:
    places = zip(topology.coordinates(source), topology.coordinates(target), strict=True)
    return sum(a != b for a, b in places) > 1
