"""The critical path across ranks: the chain of nodes that determines the time of a replay.

It is traced back from the node that ends last, each time to the dependency (or the previous node on the
thread or stream) that ended last. At a communication it continues on the rank that arrived last: the others
waited for that rank, so nothing before on their side could have made the run shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.operations import Operations
from chakra_et.simulate.replays import ReplayResult


@dataclass(frozen=True)
class CriticalPath:
    """The P nodes of the path in time order, int64[P]; node i accounts for ``from_ns[i]`` to ``to_ns[i]``.

    ``from_ns[i + 1]`` is ``to_ns[i]``: the path covers the replay from first node to end without gaps. If the
    path changes ranks at a communication, the node that arrived last comes before the node whose end the path
    follows, and only the latter accounts for the transfer.
    """

    node: np.ndarray
    from_ns: np.ndarray
    to_ns: np.ndarray

    @property
    def lasts_ns(self) -> np.ndarray:
        """int64[P]: the time that each node accounts for."""
        lasts: np.ndarray = self.to_ns - self.from_ns
        return lasts


def critical_path(graph: ReplayGraph, operations: Operations, result: ReplayResult) -> CriticalPath:
    """The critical path of ``result``, a device replay of ``graph``; ``operations`` by its start times."""
    start, end = graph.gather(result.start_ns), graph.gather(result.end_ns)
    before = _binding(graph, end)
    node = int(np.argmax(end))
    nodes, bounds = [], [int(end[node])]
    while node >= 0:
        operation = int(operations.of_node[node])
        last = int(operations.last[operation]) if operation >= 0 else node
        nodes.append(node)
        if start[last] > start[node]:
            bounds.append(int(start[last]))
            node = last
            continue
        ahead = int(before[node])
        # A launch latency may overlap with the dependency that ended last.
        bounds.append(min(int(end[ahead]) if ahead >= 0 else int(start[node]), bounds[-1]))
        node = ahead
    at = np.array(bounds[::-1], dtype=np.int64)
    return CriticalPath(np.array(nodes[::-1], dtype=np.int64), at[:-1], at[1:])


def _binding(graph: ReplayGraph, end: np.ndarray) -> np.ndarray:
    """int64[N]: the dependency or previous node on the lane that ended last before each node, -1 for none."""
    lane_source, lane_target = graph.lane_edges()
    source = np.concatenate([graph.source, lane_source])
    target = np.concatenate([graph.target, lane_target])
    free = end[source] + np.concatenate([graph.lag_ns, np.zeros(len(lane_source), np.int64)])
    order = np.lexsort((free, target))
    last = np.flatnonzero(np.append(np.diff(target[order]) != 0, True)) if len(order) else order
    latest = np.full(len(graph), -1, dtype=np.int64)
    latest[target[order[last]]] = source[order[last]]
    return latest
