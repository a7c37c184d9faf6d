"""The device replay for many sets of durations at once: what is ready at the same depth is computed
together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.replay.joint import ReplayGraph
from chakra_et.replay.matching import Matching


@dataclass(frozen=True)
class Levels:
    """The nodes in an order in which dependencies come first; arrays are int64.

    ``order[N]``: nodes, level by level, those of one communication operation together. ``level[L + 1]``:
    where each level begins in ``order``. ``operation``: for each level, where its operations begin, counted
    from the level's first node; None for a level without matched communication. ``edge[N + 1]``: where the
    edges of each node of ``order`` begin. ``source[E + N]``, ``lag_ns[E + N]``: the place in ``order`` that
    an edge comes from, or N and the trace's index for its release.
    """

    order: np.ndarray
    level: np.ndarray
    operation: list[np.ndarray | None]
    edge: np.ndarray
    source: np.ndarray
    lag_ns: np.ndarray

    def ends(self, own_ns: np.ndarray, release_ns: np.ndarray) -> np.ndarray:
        """When each node ends, int64[N, K] in ns, for K sets of ``own_ns`` [N, K] and ``release_ns`` [T,
        K]."""
        count = len(self.order)
        own = own_ns[self.order]
        end = np.concatenate([np.empty_like(own), release_ns])
        bounds = self.level.tolist()
        edges = self.edge[self.level].tolist()
        for number, operation in enumerate(self.operation):
            first, last = bounds[number], bounds[number + 1]
            used = slice(edges[number], edges[number + 1])
            arrived = end[self.source[used]] + self.lag_ns[used, None]
            start = np.maximum.reduceat(arrived, self.edge[first:last] - edges[number], axis=0)
            if operation is not None:
                sizes = np.diff(operation, append=last - first)
                start = np.repeat(np.maximum.reduceat(start, operation, axis=0), sizes, axis=0)
            np.add(start, own[first:last], out=end[first:last])
        found: np.ndarray = np.empty_like(own)
        found[self.order] = end[:count]
        return found


def find_levels(graph: ReplayGraph, matching: Matching) -> Levels:
    """The levels of a graph that ``device_replay`` can run: all members of every communication must be
    there."""
    lane_source, lane_target = graph.lane_edges()
    source, target = np.concatenate([graph.source, lane_source]), np.concatenate([graph.target, lane_target])
    lag_ns = np.concatenate([graph.lag_ns, np.zeros(len(lane_source), dtype=np.int64)])
    operation = _operations(graph, matching)
    depth = _depths(operation, source, target)[operation]
    order = np.lexsort((operation, depth))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    level = np.concatenate([np.flatnonzero(np.diff(depth[order], prepend=-1)), [len(order)]])
    # Every node has an edge from its rank's release.
    everywhere = np.arange(len(order))
    into = np.concatenate([place[target], everywhere])
    by_target = np.argsort(into, kind="stable")
    sources = np.concatenate([place[source], len(order) + graph.trace_of[order]])
    lags = np.concatenate([lag_ns, np.zeros(len(order), dtype=np.int64)])
    return Levels(
        order=order,
        level=level,
        operation=_starts(operation[order], level),
        edge=np.searchsorted(into[by_target], np.arange(len(order) + 1)),
        source=sources[by_target],
        lag_ns=lags[by_target],
    )


def _operations(graph: ReplayGraph, matching: Matching) -> np.ndarray:
    """A number for each node, int64[N], the same for the members of one communication operation."""
    alone = matching.channel < 0
    key = np.where(
        alone,
        -1 - np.arange(len(graph)),
        matching.channel * len(graph) + matching.ordinals(graph.position),
    )
    _, operation = np.unique(key, return_inverse=True)
    found: np.ndarray = operation
    return found


def _depths(operation: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """How many operations come before each on its longest path, int64[operations]."""
    count = int(operation.max()) + 1
    begins, ends = operation[source], operation[target]
    waiting = np.bincount(ends, minlength=count)
    by_source = np.argsort(begins, kind="stable")
    after = ends[by_source]
    first = np.searchsorted(begins[by_source], np.arange(count + 1))
    depth = np.zeros(count, dtype=np.int64)
    ready = np.flatnonzero(waiting == 0)
    number = 0
    while len(ready):
        depth[ready] = number
        sizes = first[ready + 1] - first[ready]
        total = int(sizes.sum())
        offsets = np.repeat(first[ready] - np.cumsum(sizes) + sizes, sizes)
        reached = after[offsets + np.arange(total)]
        np.subtract.at(waiting, reached, 1)
        ready = np.unique(reached[waiting[reached] == 0])
        number += 1
    return depth


def _starts(operation: np.ndarray, level: np.ndarray) -> list[np.ndarray | None]:
    """``Levels.operation``, from the operation of each place."""
    begins = np.flatnonzero(np.diff(operation, prepend=-1))
    bounds = np.searchsorted(begins, level)
    together = bounds[1:] - bounds[:-1] < np.diff(level)
    return [
        begins[bounds[number] : bounds[number + 1]] - level[number] if several else None
        for number, several in enumerate(together.tolist())
    ]
