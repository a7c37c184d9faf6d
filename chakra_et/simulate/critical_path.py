"""Who waits for whom, and the critical path across ranks.

The critical path is the chain of nodes that determines the time of a replay. It is traced back from the node
that ends last, each time to the dependency (or the previous node on the thread or stream) that ended last. At
a communication it continues on the rank that arrived last: the others waited for that rank, so nothing before
on their side could have made the run shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.simulate.joint import ReplayGraph


def waited_for(graph: ReplayGraph, last: np.ndarray, start_ns: np.ndarray) -> np.ndarray:
    """int64[T, T]: ns that trace i waited for trace j, the last to arrive at an operation.

    ``start_ns`` int64[N]: start of each node; ``last``: ``last_members`` by these.
    """
    nodes = np.flatnonzero(last >= 0)
    late = last[nodes]
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
        return self.to_ns - self.from_ns


def critical_path(graph: ReplayGraph, last: np.ndarray, start: np.ndarray, end: np.ndarray) -> CriticalPath:
    """The critical path of a replay of ``graph`` as the devices ran, with these times, int64[N] ns;
    ``last``: ``last_members`` by ``start``."""
    before, node = graph.last_before(end), int(np.argmax(end))
    nodes, bounds = [], [int(end[node])]
    while node >= 0:
        late = int(last[node]) if last[node] >= 0 else node
        nodes.append(node)
        if start[late] > start[node]:
            bounds.append(int(start[late]))
            node = late
            continue
        ahead = int(before[node])
        # A launch latency may overlap with the dependency that ended last.
        bounds.append(min(int(end[ahead]) if ahead >= 0 else int(start[node]), bounds[-1]))
        node = ahead
    at = np.array(bounds[::-1], dtype=np.int64)
    return CriticalPath(np.array(nodes[::-1], dtype=np.int64), at[:-1], at[1:])
