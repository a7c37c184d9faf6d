"""One order of all communication, for simulators in which a rank communicates once at a time.

On a GPU the collectives of two groups run beside each other on their streams. ASTRA-sim issues whichever is
ready first, and holds all others of the rank up: where one rank is in a collective of group A and another in
one of group B, and both belong to both, neither ends. In the order in which the capture's own dependencies
let the operations begin, that can't be: what an operation waits for comes before it on every rank.
"""

from __future__ import annotations

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.edges import successor_lists
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.longest_path import make_schedule
from chakra_et.simulate.matching import Matching
from chakra_et.simulate.timing import timing


def missing_order(graph: ReplayGraph, matching: Matching) -> np.ndarray:
    """Pairs (before, after) of nodes of one rank, int64[K, 2]: the dependencies that are needed for one order
    of all collectives and sends on all ranks, and aren't there. None where no order can make ranks wait for
    each other: where groups and pairs of ranks that exchange messages form no cycle."""
    replayed = (graph.types == NodeType.COMM_COLL) & (
        graph.attribute("comm_type", -1) == CollectiveType.BROADCAST
    )
    matched = np.flatnonzero((matching.channel >= 0) & ~replayed)
    users = np.unique(np.stack([graph.trace_of[matched], matching.channel[matched]]), axis=1)
    if not _has_cycle(*users):
        return np.empty((0, 2), np.int64)
    times = timing(graph, matching)
    # At least 1 ns each: what depends on an operation then begins after it.
    lasting = np.where(matching.operation >= 0, np.maximum(times.transfer_ns, 1), 0)
    release = np.array(times.release_ns, np.int64)[graph.trace_of]
    start, _ = make_schedule(graph, matching).run(graph.own_ns, lasting, release)
    operation = matching.operation[matched]
    begin = np.zeros(operation.max() + 1, np.int64)
    np.maximum.at(begin, operation, start[matched])
    order = np.lexsort((operation, begin[operation], graph.trace_of[matched]))
    order = order[graph.types[matched[order]] != NodeType.COMM_RECV]  # a receive holds nothing up
    nodes = matched[order]
    same = graph.trace_of[nodes[1:]] == graph.trace_of[nodes[:-1]]
    pairs = np.stack([nodes[:-1][same], nodes[1:][same]], axis=1)
    lacking: np.ndarray = pairs[_unordered(graph, pairs)]
    return lacking


def _has_cycle(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the undirected edges close a cycle: some are left once all ends that stand alone are gone."""
    while True:
        kept = (np.bincount(left)[left] > 1) & (np.bincount(right)[right] > 1)
        if kept.all():
            return len(left) > 0
        left, right = left[kept], right[kept]


def _unordered(graph: ReplayGraph, pairs: np.ndarray) -> np.ndarray:
    """bool[K]: the pairs whose second node doesn't depend on the first."""
    offsets, successors = successor_lists(len(graph), graph.source, graph.target)
    position = graph.position.tolist()
    lacking = []
    for before, after in pairs.tolist():
        last, seen, ahead = position[after], {before}, [before]
        while ahead and after not in seen:
            node = ahead.pop()
            for following in successors[offsets[node] : offsets[node + 1]]:
                if following not in seen and position[following] <= last:
                    seen.add(following)
                    ahead.append(following)
        lacking.append(after not in seen)
    return np.array(lacking, bool)
