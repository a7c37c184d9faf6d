"""Align the clocks of ranks by their collectives, and split communication into wait and transfer.

Ranks on one host share a clock; clocks of different hosts differ by milliseconds or more. But all members of
an all-reduce, all-gather, reduce-scatter, all-to-all or barrier end within microseconds of each other. So the
clock offset of two ranks is the median difference between the ends of their common collectives, and its
uncertainty is the spread around that median.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching

# Collectives that end at the same time on all ranks. A broadcast's root or a reduce's leaf may end earlier.
SYMMETRIC = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.BARRIER,
)


@dataclass(frozen=True)
class Alignment:
    """Clock offsets of T traces, int64[T]: add ``offset_ns`` to the recorded times of each trace.

    ``spread_ns``, int64[T], is the median absolute deviation of the collectives' ends around the offset,
    ``matched`` the number of collectives compared.
    """

    offset_ns: np.ndarray
    spread_ns: np.ndarray
    matched: int


def align(graph: ReplayGraph, matching: Matching, starts_ns: np.ndarray) -> Alignment | None:
    """The clock offsets of all ranks; None if some rank has no collective in common with the others.

    ``starts_ns`` int64[N]: recorded start times, each on the clock of its rank.
    """
    ends = starts_ns + graph.duration_ns
    operations = _operations(graph, matching)
    count = len(graph.traces)
    differences: dict[tuple[int, int], list[int]] = {}
    for nodes in operations:
        by_trace = sorted((int(graph.trace_of[node]), int(ends[node])) for node in nodes)
        first, reference = by_trace[0]
        for trace, end in by_trace[1:]:
            differences.setdefault((first, trace), []).append(reference - end)
    offset: dict[int, tuple[int, int]] = {0: (0, 0)}
    # Go from rank to rank, starting with the pairs that have most collectives in common.
    pairs = sorted(differences, key=lambda pair: -len(differences[pair]))
    while len(offset) < count:
        link = next((pair for pair in pairs if (pair[0] in offset) != (pair[1] in offset)), None)
        if link is None:
            return None
        values = np.array(differences[link])
        middle = int(np.median(values))
        spread = int(np.median(np.abs(values - middle)))
        known, new, sign = (link[0], link[1], 1) if link[0] in offset else (link[1], link[0], -1)
        base, before = offset[known]
        offset[new] = (base + sign * middle, max(before, spread))
    columns = np.array([offset[trace] for trace in range(count)], dtype=np.int64)
    return Alignment(columns[:, 0], columns[:, 1], len(operations))


def waits(graph: ReplayGraph, matching: Matching, starts_ns: np.ndarray) -> np.ndarray:
    """int64[N]: ns that each matched node waited for the last member of its operation, 0 for other nodes.

    ``starts_ns`` int64[N]: recorded start times on a common clock.
    """
    wait = np.zeros(len(graph), dtype=np.int64)
    key, complete = _complete(graph, matching)
    nodes = np.flatnonzero(complete)
    if len(nodes):
        _, group = np.unique(key[nodes], axis=0, return_inverse=True)
        group = group.reshape(-1)
        latest = np.full(int(group.max()) + 1, np.iinfo(np.int64).min)
        np.maximum.at(latest, group, starts_ns[nodes])
        wait[nodes] = np.clip(latest[group] - starts_ns[nodes], 0, graph.duration_ns[nodes])
    return wait


def _complete(graph: ReplayGraph, matching: Matching) -> tuple[np.ndarray, np.ndarray]:
    """(channel, ordinal) of each node, int64[N, 2], and whether all sides of its operation are present."""
    key = np.stack([matching.channel, matching.ordinals(graph.position)], axis=1)
    complete = matching.channel >= 0
    sides = np.array([len(channel.sides) for channel in matching.channels] or [0], dtype=np.int64)
    nodes = np.flatnonzero(complete)
    if len(nodes):
        _, group, count = np.unique(key[nodes], axis=0, return_inverse=True, return_counts=True)
        complete[nodes] = count[group.reshape(-1)] == sides[matching.channel[nodes]]
    return key, complete


def _operations(graph: ReplayGraph, matching: Matching) -> list[list[int]]:
    """The nodes of each symmetric collective whose members are all present."""
    key, complete = _complete(graph, matching)
    kind = graph.attribute("comm_type", -1)
    wanted = complete & (graph.types == NodeType.COMM_COLL) & np.isin(kind, SYMMETRIC)
    found: dict[tuple[int, int], list[int]] = {}
    for node in np.flatnonzero(wanted).tolist():
        found.setdefault((int(key[node, 0]), int(key[node, 1])), []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]
