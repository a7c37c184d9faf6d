"""The longest path through all ranks' graph, with numpy, for one setting of durations after another.

Threads, streams and communicators are lanes: chains of thousands of nodes that other lanes enter at few
places. The nodes are cut into rounds. In one round each lane goes on as far as the rounds before it allow, so
that the ends of its nodes are a running maximum: a round takes a few numpy calls, however many nodes it has.
Which nodes a round holds depends on the dependencies alone, and is found once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching
from chakra_et.simulate.rounds import LaneBlocks, find_lanes, find_rounds


@dataclass(frozen=True)
class Round:
    """``nodes`` and ``edges``: slices of the schedule's nodes, and of the edges that enter them from earlier
    rounds. ``entered``: the entered nodes, counted from the first of the round; ``first_edge``: where the
    edges of each begin. ``groups``: where the nodes of each lane begin, or, in a round of matched
    communication (``joint``), those of each operation. ``apart_ns[nodes]``: set lanes apart in a running
    maximum."""

    nodes: slice
    edges: slice
    entered: np.ndarray
    first_edge: np.ndarray
    groups: np.ndarray
    apart_ns: np.ndarray
    joint: bool


@dataclass(frozen=True)
class Schedule:
    """``order[N]``: node numbers, by round; ``place[N]``: its inverse; ``source[E]``: places; ``lag_ns[E]``.
    ``limit_ns``: all times are below this."""

    order: np.ndarray
    place: np.ndarray
    source: np.ndarray
    lag_ns: np.ndarray
    rounds: list[Round]
    limit_ns: int

    def run(
        self, own_ns: np.ndarray, lasting_ns: np.ndarray, release_ns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(start, end) of each node, ns; all arrays are int64[N] in the order of the graph.

        ``own_ns``: how long each node runs; ``lasting_ns``: how long a matched communication runs on after
        the last of its members has started; ``release_ns``: the earliest start. Raises ``TraceError`` for
        durations that add up to days.
        """
        total = float(own_ns.sum(dtype=np.float64) + lasting_ns.sum(dtype=np.float64) + release_ns.max())
        if total > self.limit_ns:
            raise TraceError(
                f"the durations add up to {total / 1e9:.3g} s, more than can be replayed: change them by less"
            )
        own, lasting, start = own_ns[self.order], lasting_ns[self.order], release_ns[self.order]
        end = np.empty_like(start)
        for each in self.rounds:
            begin = start[each.nodes]
            if len(each.entered):
                arrivals = end[self.source[each.edges]] + self.lag_ns[each.edges]
                latest = np.maximum.reduceat(arrivals, each.first_edge)
                begin[each.entered] = np.maximum(begin[each.entered], latest)
            if each.joint:
                last = np.maximum.reduceat(begin, each.groups)
                members = np.diff(np.append(each.groups, len(begin)))
                end[each.nodes] = np.repeat(last, members) + lasting[each.nodes]
                continue
            length = own[each.nodes]
            passed = np.cumsum(length) - each.apart_ns
            ended = begin + length - passed
            np.maximum.accumulate(ended, out=ended)
            ended += passed
            end[each.nodes] = ended
            np.subtract(ended, length, out=begin)
        return start[self.place], end[self.place]


def make_schedule(graph: ReplayGraph, matching: Matching) -> Schedule:
    """The rounds of a graph. Raises ``TraceError`` where ranks disagree or wait for each other for ever."""
    lanes = find_lanes(graph)
    # A dependency within a lane is its order, unless time has to pass in between.
    needed = (lanes.lane[graph.source] != lanes.lane[graph.target]) | (graph.lag_ns > 0)
    source, target, lag = graph.source[needed], graph.target[needed], graph.lag_ns[needed]
    blocks = find_rounds(graph, matching, lanes, source, target)
    begin, end = np.array(blocks.begin), np.array(blocks.end)
    order = lanes.nodes[_ranges(begin, end)]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    first = np.concatenate(([0], np.cumsum(end - begin)))  # of each block, in the order
    # The first node of a block follows the node before it on its lane.
    follows = order[first[:-1]]
    follows = follows[lanes.place[follows] > 0]
    before = lanes.nodes[lanes.first[lanes.lane[follows]] + lanes.place[follows] - 1]
    into = place[np.concatenate([target, follows])]
    by_target = np.argsort(into, kind="stable")
    return Schedule(
        order,
        place,
        place[np.concatenate([source, before])][by_target],
        np.concatenate([lag, np.zeros(len(follows), np.int64)])[by_target],
        *_rounds(blocks, first, into[by_target]),
    )


def _rounds(blocks: LaneBlocks, first: np.ndarray, into: np.ndarray) -> tuple[list[Round], int]:
    """The rounds and the limit of their times, from the ``first`` place of each block and the edges'
    targets.
    """
    edges = [*blocks.rounds, len(blocks.begin)]
    most = max(b - a for a, b in zip(edges, edges[1:], strict=False))
    apart = (1 << 62) // (most + 1)
    nodes = first[edges]
    edge_bounds = np.searchsorted(into, nodes)
    group = np.array(blocks.group)
    rounds = []
    for at, joint in enumerate(blocks.joint):
        low, high = edges[at], edges[at + 1]
        starts = first[low:high] - nodes[at]
        number = np.repeat(np.arange(high - low), np.diff(first[low : high + 1]))
        entered, first_edge = np.unique(
            into[edge_bounds[at] : edge_bounds[at + 1]] - nodes[at], return_index=True
        )
        rounds.append(
            Round(
                nodes=slice(nodes[at], nodes[at + 1]),
                edges=slice(edge_bounds[at], edge_bounds[at + 1]),
                entered=entered,
                first_edge=first_edge,
                groups=starts[np.r_[True, np.diff(group[low:high]) != 0]],
                apart_ns=number * apart,
                joint=joint,
            )
        )
    return rounds, apart // 4


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """All numbers of the ranges [begin, end), one range after the other."""
    length = end - begin
    shift = np.repeat(begin - np.concatenate(([0], np.cumsum(length)[:-1])), length)
    found: np.ndarray = shift + np.arange(len(shift))
    return found
