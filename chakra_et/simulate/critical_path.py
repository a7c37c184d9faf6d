"""Who waits for whom: operations by arrival, and the critical path across ranks.

The critical path is the chain of nodes that determines the time of a replay. It is traced back from the node
that ends last, each time to the dependency (or the previous node on the thread or stream) that ended last. At
a communication it continues on the rank that arrived last: the others waited for that rank, so nothing before
on their side could have made the run shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching


@dataclass(frozen=True)
class Operations:
    """The K operations with all sides present, numbered by the arrival of ``last``.

    ``of_node`` int64[N]: the operation of each node, -1 for none. ``last`` int64[K]: the node that arrived
    last and ended the waits of the others.
    """

    of_node: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.last)


def find_operations(matching: Matching, start_ns: np.ndarray) -> Operations:
    """The operations of ``matching``. ``start_ns`` int64[N]: start of each node, on a common clock."""
    nodes, operation = matching.complete(), matching.operation
    last = matching.last_members(start_ns)[np.unique(operation[nodes])]
    last = last[np.lexsort((last, start_ns[last]))]
    number = np.empty(int(operation.max(initial=-1)) + 1, np.int64)
    number[operation[last]] = np.arange(len(last))
    of_node = np.full(len(operation), -1, dtype=np.int64)
    of_node[nodes] = number[operation[nodes]]
    return Operations(of_node, last)


def waited_for(graph: ReplayGraph, operations: Operations, start_ns: np.ndarray) -> np.ndarray:
    """int64[T, T]: ns that trace i waited for trace j, the last to arrive at an operation.

    ``start_ns`` int64[N]: start of each node, by which the operations were found.
    """
    nodes = np.flatnonzero(operations.of_node >= 0)
    late = operations.last[operations.of_node[nodes]]
    total = np.zeros((len(graph.traces),) * 2, dtype=np.int64)
    np.add.at(total, (graph.trace_of[nodes], graph.trace_of[late]), start_ns[late] - start_ns[nodes])
    return total


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


def critical_path(
    graph: ReplayGraph, operations: Operations, start: np.ndarray, end: np.ndarray
) -> CriticalPath:
    """The critical path of a replay of ``graph`` as the devices ran, with these times, int64[N] ns;
    ``operations`` by ``start``."""
    # The dependency or previous node on the lane that ended last before each node.
    source, target, lag = graph.all_edges
    free = end[source] + lag
    latest = np.full(len(graph), np.iinfo(np.int64).min)
    np.maximum.at(latest, target, free)
    last = free == latest[target]
    before = np.full(len(graph), -1, dtype=np.int64)
    before[target[last][::-1]] = source[last][::-1]  # of several the first one stays
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
