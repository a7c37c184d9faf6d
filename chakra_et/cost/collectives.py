"""The time of a collective or a message on a topology: NCCL's where it names GPUs, else by the α–β–γ model.

``nccl`` has the times of NCCL. The rest is for gloo, for simulators, and for an algorithm that is asked for.

A message of n bytes takes α + nβ ns on its link; reducing n received bytes takes nγ. With p members that each
contribute n bytes (``comm_size``: the shard of an all-gather, the whole input of all others), a ring takes

    ALL_REDUCE      2(p−1)α + 2(p−1)/p·nβ + (p−1)/p·nγ
    REDUCE_SCATTER   (p−1)α +  (p−1)/p·nβ + (p−1)/p·nγ
    ALL_GATHER       (p−1)α +  (p−1)·nβ
    ALL_TO_ALL       (p−1)α +  (p−1)/p·nβ                     pairwise exchange
    BROADCAST        (p−1)α + nβ,  REDUCE the same + nγ       pipelined along the ring, as in NCCL
    GATHER, SCATTER  (p−1)α + β × bytes that the root moves   directly between the root and each member
    BARRIER          ⌈lg p⌉α                                  dissemination

and a tree of depth ⌈lg p⌉: ALL_REDUCE 2⌈lg p⌉α + 2nβ + nγ, BROADCAST ⌈lg p⌉α + nβ, REDUCE the same + nγ.
Hierarchical: an all-reduce is a reduce-scatter within the node, an all-reduce of 1/p₀ of the bytes among the
GPUs with the same index in each node, and an all-gather within the node; the others likewise.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19 (2005), for rings, pairwise exchange and the cost model; nccl-tests, doc/PERFORMANCE.md, for the
bytes per link (its bus bandwidth is 1/β); Sanders, Speck and Träff, "Two-tree algorithms for
full bandwidth broadcast, reduction and scan" (2009) for trees as in NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from chakra_et.cost.topology import Dimension, Topology, fills_grid
from chakra_et.et.columns import CollectiveType

if TYPE_CHECKING:
    from chakra_et.cost.nccl import NcclNode

Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
_STEPWISE = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.REDUCE_SCATTER_BLOCK,
    CollectiveType.ALL_GATHER,
    CollectiveType.ALL_TO_ALL,
)
_BY_TREE = (CollectiveType.ALL_REDUCE, CollectiveType.BROADCAST, CollectiveType.REDUCE)


def collective_time(
    kind: CollectiveType,
    size: int,
    ranks: Sequence[int],
    topology: Topology,
    algorithm: Algorithm = "auto",
) -> float:
    """ns from the arrival of the last member to the common end of the collective.

    ``size``: bytes that one rank contributes (``comm_size``). ``ranks``: the members; their coordinates
    determine the links. ``auto``: what NCCL takes where the topology names GPUs; else hierarchical if the
    members fill a grid over several dimensions, and otherwise a ring. ``tree`` means a ring for a collective
    without a tree algorithm. Raises ``ValueError`` for a rank that is not in the topology.
    """
    if min(ranks, default=0) < 0 or max(ranks, default=0) >= topology.ranks:
        raise ValueError(f"ranks {min(ranks)} to {max(ranks)} are not all in a topology of {topology.ranks}")
    if len(ranks) < 2:
        return topology.call_ns
    if topology.nccl is not None and algorithm == "auto":
        return _by_nccl(kind, size, ranks, topology, topology.nccl)
    gamma = 1e9 / topology.reduce_bandwidth
    grid = fills_grid(topology, ranks)
    several = grid is not None and sum(count > 1 for count in grid) > 1
    if grid is not None and several and kind in _STEPWISE and algorithm in ("auto", "hierarchical"):
        return topology.call_ns + _hierarchical(kind, size, grid, topology.dimensions, gamma)
    alpha, beta = _slowest_hop(topology, ranks)
    if algorithm == "tree" and kind in _BY_TREE:
        return topology.call_ns + _tree(kind, size, len(ranks), alpha, beta, gamma)
    return topology.call_ns + _ring(kind, size, len(ranks), alpha, beta, gamma)


def message_time(size: int, source: int, target: int, topology: Topology) -> float:
    """ns for a message between two ranks: NCCL's, or α + nβ of the outermost dimension that it crosses."""
    if topology.nccl is not None:
        outer = _between(topology, (source, target))
        if outer is None:
            return topology.nccl.message(size)
        from chakra_et.cost import nccl

        return nccl.message_between(size, outer.bandwidth, outer.latency_ns)
    alpha, beta = _slowest_hop(topology, (source, target))
    return topology.call_ns + alpha + size * beta


def _between(topology: Topology, ranks: Sequence[int]) -> Dimension | None:
    """The dimension between nodes, None for ranks of one node."""
    inner = topology.dimensions[0].size
    return topology.dimensions[1] if len({rank // inner for rank in ranks}) > 1 else None


def _by_nccl(
    kind: CollectiveType, size: float, ranks: Sequence[int], topology: Topology, node: NcclNode
) -> float:
    from chakra_et.cost import nccl  # its table is read only where GPUs are named

    whole, outer = nccl.whole_bytes(kind, size, len(ranks)), _between(topology, ranks)
    if outer is None:
        return float(node.time(kind, whole, len(ranks)))
    nodes = len({rank // topology.dimensions[0].size for rank in ranks})
    per_node = -(-len(ranks) // nodes)
    return nccl.between_nodes(kind, whole, per_node, nodes, node, outer.bandwidth, outer.latency_ns)


def _slowest_hop(topology: Topology, ranks: Sequence[int]) -> tuple[float, float]:
    """The largest α and β between neighbours in the ring ``ranks``, which determine the time of each step."""
    places = [topology.coordinates(rank) for rank in ranks]
    crossed = {_crossed(a, b) for a, b in zip(places, [*places[1:], places[0]], strict=True)} - {-1}
    used = [topology.dimensions[at] for at in crossed]
    return max((d.latency_ns for d in used), default=0.0), max((_beta(d) for d in used), default=0.0)


def _crossed(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The outermost dimension in which two coordinates differ, -1 for none."""
    return max((at for at in range(len(a)) if a[at] != b[at]), default=-1)


def _beta(dimension: Dimension) -> float:
    return 1e9 / dimension.bandwidth


def _ring(kind: CollectiveType, size: float, p: int, alpha: float, beta: float, gamma: float) -> float:
    part = (p - 1) / p * size
    match kind:
        case CollectiveType.ALL_REDUCE:
            return 2 * (p - 1) * alpha + part * (2 * beta + gamma)
        case CollectiveType.REDUCE_SCATTER | CollectiveType.REDUCE_SCATTER_BLOCK:
            return (p - 1) * alpha + part * (beta + gamma)
        case CollectiveType.ALL_GATHER | CollectiveType.GATHER:
            return (p - 1) * (alpha + size * beta)
        case CollectiveType.ALL_TO_ALL | CollectiveType.SCATTER:
            return (p - 1) * alpha + part * beta
        case CollectiveType.BROADCAST:
            return (p - 1) * alpha + size * beta
        case CollectiveType.REDUCE:
            return (p - 1) * alpha + size * (beta + gamma)
    return (p - 1).bit_length() * alpha


def _tree(kind: CollectiveType, size: float, p: int, alpha: float, beta: float, gamma: float) -> float:
    depth = (p - 1).bit_length()
    down = depth * alpha + size * beta
    up = down + size * gamma
    return down if kind is CollectiveType.BROADCAST else up if kind is CollectiveType.REDUCE else up + down


def _hierarchical(
    kind: CollectiveType, size: float, grid: tuple[int, ...], dimensions: tuple[Dimension, ...], gamma: float
) -> float:
    used = [(count, d) for count, d in zip(grid, dimensions, strict=True) if count > 1]
    scatter, gather = CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER

    def phase(of: CollectiveType, size: float, count: int, dimension: Dimension) -> float:
        return _ring(of, size, count, dimension.latency_ns, _beta(dimension), gamma)

    total = 0.0
    if kind is CollectiveType.ALL_REDUCE:
        for count, dimension in used[:-1]:
            total += phase(scatter, size, count, dimension) + phase(gather, size / count, count, dimension)
            size /= count
        return total + phase(kind, size, *used[-1])
    for count, dimension in reversed(used) if kind is gather else used:
        total += phase(kind, size, count, dimension)
        if kind is gather:
            size *= count
        elif kind is not CollectiveType.ALL_TO_ALL:
            size /= count
    return total
