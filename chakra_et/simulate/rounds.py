"""Which nodes can be computed together: how far each lane goes once the rounds before are known."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching, check_same, deadlock


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
