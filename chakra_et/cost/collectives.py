"""The time of a collective or a message on a topology: NCCL's where it names GPUs, else by the α–β–γ model.

``nccl`` has the times of NCCL. The rest is for gloo and for simulators, whose collectives are rings over all
members. A message of n bytes takes α + nβ ns on the slowest link of the ring; reducing n received bytes takes
nγ. With p members that each contribute n bytes (``comm_size``: the shard of an all-gather, the whole input of
all others):

    ALL_REDUCE      2(p−1)α + 2(p−1)/p·nβ + (p−1)/p·nγ
    REDUCE_SCATTER   (p−1)α +  (p−1)/p·nβ + (p−1)/p·nγ
    ALL_GATHER       (p−1)α +  (p−1)·nβ
    ALL_TO_ALL       (p−1)α +  (p−1)/p·nβ                     pairwise exchange
    BROADCAST        (p−1)α + nβ,  REDUCE the same + nγ       pipelined along the ring, as in NCCL
    GATHER, SCATTER  (p−1)α + β × bytes that the root moves   directly between the root and each member
    BARRIER          ⌈lg p⌉α                                  dissemination

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19 (2005), for rings, pairwise exchange and the cost model; nccl-tests, doc/PERFORMANCE.md, for the
bytes per link (its bus bandwidth is 1/β).
"""

from __future__ import annotations

from collections.abc import Sequence

from chakra_et.cost.topology import Dimension, Topology
from chakra_et.et.columns import CollectiveType


def collective_time(kind: CollectiveType, size: float, ranks: Sequence[int], topology: Topology) -> float:
    """ns from the arrival of the last member to the common end of the collective.

    ``size``: bytes that one rank contributes (``comm_size``). ``ranks``: the members; their coordinates
    determine the links. Raises ``ValueError`` for a rank that is not in the topology.
    """
    if min(ranks, default=0) < 0 or max(ranks, default=0) >= topology.ranks:
        raise ValueError(f"ranks {min(ranks)} to {max(ranks)} are not all in a topology of {topology.ranks}")
    p = len(ranks)
    if p < 2:
        return topology.call_ns
    if topology.nccl is not None:
        return _by_nccl(kind, size, ranks, topology)
    alpha, beta = _slowest_hop(topology, ranks)
    part, steps = (p - 1) / p * size, p - 1
    messages, sent, reduced = {
        CollectiveType.ALL_REDUCE: (2 * steps, 2 * part, part),
        CollectiveType.REDUCE_SCATTER: (steps, part, part),
        CollectiveType.REDUCE_SCATTER_BLOCK: (steps, part, part),
        CollectiveType.ALL_GATHER: (steps, steps * size, 0.0),
        CollectiveType.GATHER: (steps, steps * size, 0.0),
        CollectiveType.ALL_TO_ALL: (steps, part, 0.0),
        CollectiveType.SCATTER: (steps, part, 0.0),
        CollectiveType.BROADCAST: (steps, size, 0.0),
        CollectiveType.REDUCE: (steps, size, size),
    }.get(kind, (steps.bit_length(), 0.0, 0.0))
    return topology.call_ns + messages * alpha + sent * beta + reduced * 1e9 / topology.reduce_bandwidth


def message_time(size: int, source: int, target: int, topology: Topology) -> float:
    """ns for a message between two ranks: NCCL's, or α + nβ of the outermost dimension that it crosses."""
    if topology.nccl is not None:
        return topology.nccl.message(size, _between(topology, (source, target)))
    alpha, beta = _slowest_hop(topology, (source, target))
    return topology.call_ns + alpha + size * beta


def _between(topology: Topology, ranks: Sequence[int]) -> Dimension | None:
    """The dimension between nodes, None for ranks of one node."""
    inner = topology.dimensions[0].size
    return topology.dimensions[1] if len({rank // inner for rank in ranks}) > 1 else None


def _by_nccl(kind: CollectiveType, size: float, ranks: Sequence[int], topology: Topology) -> float:
    from chakra_et.cost import nccl  # read only where GPUs are named

    assert topology.nccl is not None
    whole, outer = nccl.whole_bytes(kind, size, len(ranks)), _between(topology, ranks)
    if outer is None:
        return float(topology.nccl.time(kind, whole, len(ranks)))
    nodes = len({rank // topology.dimensions[0].size for rank in ranks})
    return nccl.between_nodes(kind, whole, -(-len(ranks) // nodes), nodes, topology.nccl, outer)


def _slowest_hop(topology: Topology, ranks: Sequence[int]) -> tuple[float, float]:
    """The largest α and β between neighbours in the ring ``ranks``, which determine the time of each step."""
    places = [topology.coordinates(rank) for rank in ranks]
    crossed = {
        max((at for at in range(len(a)) if a[at] != b[at]), default=-1)  # the outermost that differs
        for a, b in zip(places, [*places[1:], places[0]], strict=True)
    }
    used = [topology.dimensions[at] for at in crossed - {-1}]
    return max((d.latency_ns for d in used), default=0.0), max((1e9 / d.bandwidth for d in used), default=0.0)
