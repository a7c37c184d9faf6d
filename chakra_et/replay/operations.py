"""Communication as operations of several ranks: who takes part, who came last, who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.replay.joint import ReplayGraph
from chakra_et.replay.matching import Matching


@dataclass(frozen=True)
class Operations:
    """The K operations of which every side is there.

    ``of_node[N]``: the operation of each node, -1 for all others. ``last[K]``: the node that arrived last,
    which ended the waits of the others. All int64; operations are numbered by the arrival of ``last``.
    """

    of_node: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.last)


def find_operations(graph: ReplayGraph, matching: Matching, start_ns: np.ndarray) -> Operations:
    """The operations by what was matched; ``start_ns`` int64[N]: when each node arrives, on one clock."""
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
    """int64[T, T]: ns that trace i waited until trace j, the last of an operation, arrived.

    ``wait_ns`` int64[N]: how long each communication node waited.
    """
    count = len(graph.traces)
    nodes = np.flatnonzero(operations.of_node >= 0)
    late = operations.last[operations.of_node[nodes]]
    pair = graph.trace_of[nodes] * count + graph.trace_of[late]
    total = np.zeros(count * count, dtype=np.int64)
    np.add.at(total, pair, np.where(late == nodes, 0, wait_ns[nodes]))
    return total.reshape(count, count)
