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
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from chakra_et.cost.topology import Dimension, Topology, divisor
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import has, set_integers, texts
from chakra_et.et.sets import Groups
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.replays import Ends
from chakra_et.validate.table import LARGEST_MESSAGE

HANDSHAKE_BYTES = 8192


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
        inner = divisor(whole.size)
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


def collective_ends(
    kind: CollectiveType, size: int, ranks: Sequence[int], topology: Topology, starts: np.ndarray
) -> np.ndarray:
    """When each of ``ranks``, in the order of the group file, has its last message, ns; ``starts``
    float64[p]: when each is ready."""
    if len(ranks) < topology.ranks:
        links = [_hop(a, b, topology) for a, b in zip([ranks[-1], *ranks[:-1]], ranks, strict=True)]
        # With one dimension, groups have its algorithm; with several they are rings.
        direct = len(topology.dimensions) == 1 and links[0].kind != "Ring"
        return _messages(starts, kind, size, links, topology, direct)
    times = starts.reshape([d.size for d in reversed(topology.dimensions)])
    dimensions = range(len(topology.dimensions))
    phases = [(kind, at) for at in dimensions]
    if kind is CollectiveType.ALL_REDUCE:
        within = dimensions[:-1]
        phases = [(CollectiveType.REDUCE_SCATTER, at) for at in within] + phases[-1:]
        phases += [(CollectiveType.ALL_GATHER, at) for at in reversed(within)]
    elif kind is CollectiveType.ALL_GATHER:
        phases.reverse()
    for phase, at in phases:
        dimension, axis = topology.dimensions[at], len(dimensions) - 1 - at
        lines, links = np.moveaxis(times, axis, -1), [dimension] * dimension.size
        done = _messages(lines, phase, size, links, topology, dimension.kind != "Ring")
        times = np.moveaxis(done, -1, axis)
        if phase is CollectiveType.REDUCE_SCATTER:
            size //= dimension.size
        elif phase is CollectiveType.ALL_GATHER:
            size *= dimension.size
    return times.reshape(-1)


def _messages(
    times: np.ndarray,
    kind: CollectiveType,
    size: int,
    links: Sequence[Dimension],
    topology: Topology,
    direct: bool,
) -> np.ndarray:
    """When members are done that are ready at ``times`` (float64[…, p]), each with one of the ``links``
    from the member before it. ``direct``: an all-to-all sends to each other member in turn, not around the
    ring."""
    count = len(links)
    part = size if kind is CollectiveType.ALL_GATHER else size // count
    waits = np.array([handshake(link) for link in links])
    lasting = np.array([link.latency_ns + part * 1e9 / link.bandwidth for link in links])
    reducing = part * 1e9 / topology.reduce_bandwidth
    exchange = kind is CollectiveType.ALL_TO_ALL
    steps = 2 * (count - 1) if kind is CollectiveType.ALL_REDUCE else count - 1
    steps = count * (count - 1) // 2 if exchange and not direct else steps
    for step in range(steps):
        before = np.roll(times, step + 1 if exchange and direct else 1, -1)
        times = np.maximum(before, times + waits) + lasting
        if step < count - 1 and kind in (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE_SCATTER):
            times = times + reducing
    return times


def handshake(dimension: Dimension) -> float:
    """ns from a receiver's readiness until the sender knows of it."""
    return dimension.latency_ns + HANDSHAKE_BYTES * 1e9 / dimension.bandwidth


def network_times(graph: ReplayGraph, groups: Groups, topology: Topology) -> Ends:
    """When the members of an operation of ``graph`` are done in ASTRA-sim's network."""
    kinds, sizes = (graph.attribute(name, -1).tolist() for name in ("comm_type", "comm_size"))

    def ends(members: list[int], starts: list[int]) -> list[int]:
        node, ranks = members[0], [graph.rank(member) for member in members]
        if graph.types[node] == NodeType.COMM_COLL:
            order = groups.get(graph.groups[graph.group[node]]) or range(topology.ranks)
            started = dict(zip(ranks, starts, strict=True))
            ready = np.array([started[rank] for rank in order], np.float64)
            done = collective_ends(CollectiveType(kinds[node]), sizes[node], order, topology, ready)
            ended = dict(zip(order, np.rint(done).astype(np.int64).tolist(), strict=True))
            return [ended[rank] for rank in ranks]
        link = _hop(ranks[0], ranks[1], topology)
        waits = [handshake(link) * (graph.types[member] == NodeType.COMM_RECV) for member in members]
        begin = max(start + wait for start, wait in zip(starts, waits, strict=True))
        return [round(begin + link.latency_ns + sizes[node] * 1e9 / link.bandwidth)] * 2

    return ends


def with_shorter_messages(
    traces: Mapping[int, ExecutionTrace], groups: Groups, topology: Topology
) -> Topology:
    """The topology with links as slow as it takes for ``effective_sizes`` that ASTRA-sim's messages can have.
    ``traces``: of all ranks."""
    sized = (effective_sizes(trace, rank, groups, topology) for rank, trace in traces.items())
    largest = max((int(trace.column("comm_size").max(initial=0)) for trace in sized), default=0)
    factor = largest / LARGEST_MESSAGE
    if factor <= 1:
        return topology
    dimensions = [dataclasses.replace(d, bandwidth=d.bandwidth / factor) for d in topology.dimensions]
    note = (
        f"all links are written {factor:.1f} times slower, and all messages as much shorter: ASTRA-sim can't "
        "have messages of 2 GiB and more"
    )
    return dataclasses.replace(topology, dimensions=tuple(dimensions), notes=(*topology.notes, note))


def effective_sizes(trace: ExecutionTrace, rank: int, groups: Groups, topology: Topology) -> ExecutionTrace:
    """The trace with the bytes of each communication with which it lasts as long as planned, from when all
    its members are ready: what a network of one bandwidth per dimension can have of unequal links."""
    table, index = texts(trace, "pg_name")
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size").copy()
    peers = np.where(trace.types == NodeType.COMM_SEND, trace.column("comm_dst"), trace.column("comm_src"))
    known: dict[tuple[int, int], tuple[float, float, int]] = {}
    for row in np.flatnonzero(trace.types >= NodeType.COMM_SEND).tolist():
        key = int(kinds[row]), int(index[row]) if kinds[row] >= 0 else int(peers[row])
        if key not in known:
            if key[0] < 0:
                link = _hop(rank, key[1], topology)
                known[key] = link.latency_ns, 1e9 / link.bandwidth, 1
            else:
                ranks = (groups.get(table[key[1]]) if key[1] >= 0 else None) or range(topology.ranks)
                count, kind = len(ranks), CollectiveType(key[0])
                idle = np.zeros(count)
                ends = [collective_ends(kind, n * count, ranks, topology, idle).max() for n in (1, 1 << 30)]
                known[key] = ends[0], (ends[1] - ends[0]) / (1 << 30), count
        fixed, per_part, count = known[key]
        part = max(round((int(trace.duration_micros[row]) * 1000 - fixed) / per_part), 1)
        sizes[row] = part * (1 if key[0] == CollectiveType.ALL_GATHER else count)
    return set_integers(trace, "comm_size", "int64", sizes, has(trace, "comm_size"))


def crossings(traces: Mapping[int, ExecutionTrace], groups: Groups, topology: Topology) -> Iterator[str]:
    """What the analytical network puts on too fast a link: messages between ranks that differ in several
    dimensions, counted at their senders, and groups whose ring has such a hop."""

    def diagonal(source: int, target: int) -> bool:
        places = zip(topology.coordinates(source), topology.coordinates(target), strict=True)
        return sum(a != b for a, b in places) > 1

    messages, used = 0, set()
    for trace in traces.values():
        rows = np.flatnonzero(trace.types == NodeType.COMM_SEND)
        pairs = (trace.column(name, -1)[rows].tolist() for name in ("comm_src", "comm_dst"))
        messages += sum(a >= 0 and b >= 0 and diagonal(a, b) for a, b in zip(*pairs, strict=True))
        used |= set(texts(trace, "pg_name")[0])
    within = [groups[name] for name in used & set(groups) if 1 < len(groups[name]) < topology.ranks]
    rings = sum(any(map(diagonal, ranks, [*ranks[1:], ranks[0]])) for ranks in within)
    for count, what in ((messages, "messages"), (rings, "groups whose rings")):
        if count:
            yield (
                f"{count:,} {what} go to another node and another place in it: ASTRA-sim gives them "
                "the links within a node, which are faster than theirs"
            )


def _hop(source: int, target: int, topology: Topology) -> Dimension:
    """The dimension whose links a message takes, the first in which the two ranks differ; on a Ring with the
    latency of all links on the way."""
    places = zip(topology.dimensions, topology.coordinates(source), topology.coordinates(target), strict=True)
    found, apart = next(((d, abs(a - b)) for d, a, b in places if a != b), (topology.dimensions[0], 1))
    if found.kind == "Ring":
        return dataclasses.replace(found, latency_ns=found.latency_ns * min(apart, found.size - apart))
    return found
