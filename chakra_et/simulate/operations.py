"""Communication as operations of several ranks: participants, the last to arrive, and waits."""

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


def find_operations(graph: ReplayGraph, matching: Matching, start_ns: np.ndarray) -> Operations:
    """The operations of ``matching``. ``start_ns`` int64[N]: start of each node, on a common clock."""
    of_node = np.full(len(graph), -1, dtype=np.int64)
    nodes = np.flatnonzero(matching.channel >= 0)
    if not len(nodes):
        return Operations(of_node, np.empty(0, np.int64))
    key = np.stack([matching.channel, matching.ordinals(graph.position)], axis=1)[nodes]
    _, group, count = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    sides = np.array([len(channel.sides) for channel in matching.channels], dtype=np.int64)
    whole = count[group] == sides[key[:, 0]]
    nodes, group = nodes[whole], group[whole]
    if not len(nodes):
        return Operations(of_node, np.empty(0, np.int64))
    # The last of each group when sorted by arrival.
    order = np.lexsort((nodes, start_ns[nodes], group))
    ends = np.flatnonzero(np.append(np.diff(group[order]) != 0, True))
    last = nodes[order][ends]
    rank = np.empty(len(last), np.int64)
    by_arrival = np.lexsort((last, start_ns[last]))
    rank[by_arrival] = np.arange(len(last))
    of_node[nodes] = rank[np.searchsorted(group[order][ends], group)]
    return Operations(of_node, last[by_arrival])


def waited_for(graph: ReplayGraph, operations: Operations, wait_ns: np.ndarray) -> np.ndarray:
    """int64[T, T]: ns that trace i waited for trace j, the last to arrive at an operation.

    ``wait_ns`` int64[N]: wait of each communication node.
    """
    count = len(graph.traces)
    nodes = np.flatnonzero(operations.of_node >= 0)
    late = operations.last[operations.of_node[nodes]]
    pair = graph.trace_of[nodes] * count + graph.trace_of[late]
    total = np.zeros(count * count, dtype=np.int64)
    np.add.at(total, pair, np.where(late == nodes, 0, wait_ns[nodes]))
    return total.reshape(count, count)
