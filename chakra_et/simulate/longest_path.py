"""The longest path through all ranks' graph, with numpy, for one setting of durations after another.

Threads, streams and communicators are lanes: chains of thousands of nodes that other lanes enter at few
places. The nodes are cut into rounds. In one round each lane goes on as far as the rounds before it allow, so
that the ends of its nodes are a running maximum: a round takes a few numpy calls, however many nodes it has.
Which nodes a round holds depends on the dependencies alone, and is found once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching, check_same, deadlock


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


@dataclass(frozen=True)
class Lanes:
    """``lane[N]`` and ``place[N]`` of each node within it; ``nodes[N]``: the nodes by lane and place, those
    of lane L from ``first[L]`` on. A node that is on no thread, stream or communicator has a lane to
    itself."""

    lane: np.ndarray
    place: np.ndarray
    nodes: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class LaneBlocks:
    """Stretches of lanes in the order in which they can be computed: [``begin``, ``end``) of ``Lanes.nodes``.

    ``rounds``: the first block of each round. ``joint``: whether a round holds matched communication; then
    each block is one member, and the members of an operation stand side by side. ``group``: the lane of a
    block, or the number of its operation.
    """

    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    joint: list[bool] = field(default_factory=list)

    def add_round(self, blocks: list[tuple[int, int, int]], joint: bool) -> None:
        """Append a round of blocks (begin, end, group), if there are any."""
        if not blocks:
            return
        self.rounds.append(len(self.begin))
        self.joint.append(joint)
        begin, end, group = zip(*blocks, strict=True)
        self.begin.extend(begin)
        self.end.extend(end)
        self.group.extend(group)


def find_lanes(graph: ReplayGraph) -> Lanes:
    """The lanes of a graph, each in the order of ``position``."""
    lane = graph.lanes()
    alone = lane < 0
    lane = np.where(alone, lane.max(initial=0) + np.cumsum(alone), lane)
    lane = np.unique(lane, return_inverse=True)[1].reshape(-1)
    nodes = np.lexsort((graph.position, lane))
    first = np.searchsorted(lane[nodes], np.arange(int(lane.max()) + 2))
    place = np.empty(len(nodes), dtype=np.int64)
    place[nodes] = np.arange(len(nodes)) - first[lane[nodes]]
    return Lanes(lane, place, nodes, first)


def find_rounds(
    graph: ReplayGraph, matching: Matching, lanes: Lanes, source: np.ndarray, target: np.ndarray
) -> LaneBlocks:
    """The blocks of all rounds; ``source`` and ``target``: the dependencies that a lane's order doesn't
    imply.

    Raises ``TraceError`` where the ranks' collectives differ, or where they wait for each other for ever.
    """
    count, first = len(lanes.first) - 1, lanes.first.tolist()
    size = np.diff(lanes.first).tolist()
    reach = _Reach(lanes, source, target, count)
    stops = _communication(matching, lanes, count)
    ordinal, channel = matching.ordinals(graph.position).tolist(), matching.channel.tolist()
    node_at = lanes.nodes.tolist()
    done = [0] * count
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)
    blocks, operations = LaneBlocks(), 0
    active = list(range(count))
    while active:
        alone, joint = [], []
        moved: list[int] = []
        following: list[int] = []
        for lane in active:
            begin = done[lane]
            stop = stops[lane][-1] if stops[lane] else size[lane]
            end, blocker = reach.of(lane, stop, done)
            if end > begin:
                alone.append((first[lane] + begin, first[lane] + end, lane))
                moved.append(lane)
            if blocker is not None:
                waiting[blocker[0]].append((blocker[1], lane))
            elif end > begin:
                following.append(lane)
            elif stop < size[lane]:
                node = node_at[first[lane] + stop]
                key = channel[node], ordinal[node]
                arrived[key].append(node)
                if len(arrived[key]) == len(matching.channels[key[0]].sides):
                    members = arrived.pop(key)
                    check_same(graph, matching.channels[key[0]], key[1], members)
                    joint += [(at, at + 1, operations) for at in _places(lanes, members)]
                    operations += 1
        blocks.add_round(alone, False)
        blocks.add_round(joint, True)
        for begin, end, lane in alone:
            done[lane] += end - begin
        for at, _, _ in joint:
            lane = int(lanes.lane[node_at[at]])
            done[lane] += 1
            stops[lane].pop()
            moved.append(lane)
            following.append(lane)
        active = [lane for lane in following if done[lane] < size[lane]]
        for lane in moved:
            still: list[tuple[int, int]] = []
            for place, waiter in waiting.pop(lane, ()):
                if done[lane] > place:
                    active.append(waiter)
                else:
                    still.append((place, waiter))
            if still:
                waiting[lane] = still
    unfinished = lanes.nodes[lanes.place[lanes.nodes] >= np.array(done)[lanes.lane[lanes.nodes]]]
    if len(unfinished):
        raise deadlock(graph, matching, arrived, np.sort(unfinished))
    return blocks


class _Reach:
    """How far each lane can go before it needs a node of another lane that is not done."""

    def __init__(self, lanes: Lanes, source: np.ndarray, target: np.ndarray, count: int) -> None:
        order = np.lexsort((lanes.place[target], lanes.lane[target]))
        source, target = source[order], target[order]
        bounds = np.searchsorted(lanes.lane[target], np.arange(count + 1)).tolist()
        self.next, self.last = bounds[:-1], bounds[1:]
        self.place = lanes.place[target].tolist()
        self.source_lane = lanes.lane[source].tolist()
        self.source_place = lanes.place[source].tolist()

    def of(self, lane: int, stop: int, done: list[int]) -> tuple[int, tuple[int, int] | None]:
        """The place up to which the lane can go, at most ``stop``, and the (lane, place) that it waits
        for.
        """
        at, last = self.next[lane], self.last[lane]
        while at < last and self.place[at] <= stop:
            if done[self.source_lane[at]] <= self.source_place[at]:
                self.next[lane] = at
                return self.place[at], (self.source_lane[at], self.source_place[at])
            at += 1
        self.next[lane] = at
        return stop, None


def _communication(matching: Matching, lanes: Lanes, count: int) -> list[list[int]]:
    """The places of each lane's matched communication, the last one first."""
    matched = lanes.nodes[matching.channel[lanes.nodes] >= 0]
    stops: list[list[int]] = [[] for _ in range(count)]
    for lane, place in zip(lanes.lane[matched].tolist(), lanes.place[matched].tolist(), strict=True):
        stops[lane].append(place)
    for places in stops:
        places.reverse()
    return stops


def _places(lanes: Lanes, nodes: list[int]) -> list[int]:
    """Where the nodes are in ``Lanes.nodes``."""
    found: list[int] = (lanes.first[lanes.lane[nodes]] + lanes.place[nodes]).tolist()
    return found
