"""The longest path through all ranks' graph, with numpy, for one setting of durations after another.

Threads, streams and communicators are lanes: chains of thousands of nodes that other lanes enter at few
places. The nodes are cut into rounds. In one round each lane goes on as far as the rounds before it allow, so
that the ends of its nodes are a running maximum: a round takes a few numpy calls, however many nodes it has.
Which nodes a round holds depends on the dependencies alone, and is found once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching, check_same, deadlock, differing


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


@dataclass(frozen=True)
class Lanes:
    """The lane of each node, ``lane[N]``, and ``nodes[N]`` by lane and position, in which node i has the
    ``spot[i]``; lane L begins at spot ``first[L]``. A node that is on no thread, stream or communicator has a
    lane to itself."""

    lane: np.ndarray
    nodes: np.ndarray
    spot: np.ndarray
    first: np.ndarray


def find_lanes(graph: ReplayGraph) -> Lanes:
    """The lanes of a graph."""
    lane = graph.lanes()
    alone = lane < 0
    lane = np.where(alone, lane.max(initial=0) + np.cumsum(alone), lane)
    lane = np.unique(lane, return_inverse=True)[1].reshape(-1)
    nodes = np.lexsort((graph.position, lane))
    return Lanes(lane, nodes, _inverse(nodes), np.searchsorted(lane[nodes], np.arange(int(lane.max()) + 2)))


def make_schedule(graph: ReplayGraph, matching: Matching) -> Schedule:
    """The rounds of a graph. Raises ``TraceError`` where ranks disagree or wait for each other for ever."""
    lanes = find_lanes(graph)
    # From here on nodes are numbered by their spots.
    nodes, spot, lane = lanes.nodes, lanes.spot, lanes.lane[lanes.nodes]
    source, target = spot[graph.source], spot[graph.target]
    # A dependency within a lane is its order, unless time has to pass in between.
    needed = (lane[source] != lane[target]) | (graph.lag_ns > 0)
    source, target, lag = source[needed], target[needed], graph.lag_ns[needed]
    blocks, bounds, joint = _find_rounds(graph, matching, lanes, source, target)
    begin, end, group = np.array(blocks).T
    first = np.append(0, np.cumsum(end - begin))  # the place of each block
    order = np.repeat(begin - first[:-1], end - begin) + np.arange(len(nodes))
    place = _inverse(order)
    # The first node of a block follows the node before it on its lane.
    follows = begin[(begin > 0) & (lane[begin] == lane[begin - 1])]
    into = place[np.append(target, follows)]
    by_target = np.argsort(into, kind="stable")
    into = into[by_target]
    apart = (1 << 62) // (int(np.diff(bounds).max()) + 1)
    rounds = []
    for low, high, is_joint in zip(bounds, bounds[1:], joint, strict=False):
        edges = slice(*np.searchsorted(into, (first[low], first[high])).tolist())
        entered, first_edge = np.unique(into[edges] - first[low], return_index=True)
        number = np.repeat(np.arange(high - low), (end - begin)[low:high])
        new = np.diff(group[low:high], prepend=-1) != 0
        rounds.append(
            Round(
                nodes=slice(first[low], first[high]),
                edges=edges,
                entered=entered,
                first_edge=first_edge,
                groups=(first[low:high] - first[low])[new],
                apart_ns=number * apart,
                joint=is_joint,
            )
        )
    return Schedule(
        nodes[order],
        place[spot],
        place[np.append(source, follows - 1)][by_target],
        np.append(lag, np.zeros(len(follows), np.int64))[by_target],
        rounds,
        apart // 4,
    )


def _inverse(order: np.ndarray) -> np.ndarray:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place


def _find_rounds(
    graph: ReplayGraph,
    matching: Matching,
    lanes: Lanes,
    source: np.ndarray,
    target: np.ndarray,
) -> tuple[list[tuple[int, int, int]], list[int], list[bool]]:
    """Stretches of lanes in the order in which they can be computed: blocks (first spot, spot behind the
    last, lane); the first block of each round, and the number of blocks; whether a round holds matched
    communication. There each block is one member, with the number of its operation in place of the lane, and
    the members of an operation stand side by side.

    ``source``, ``target``: spots of the dependencies that a lane's order doesn't imply. Raises ``TraceError``
    where the ranks' collectives differ, or where they wait for each other for ever.
    """
    nodes, lane = lanes.nodes, lanes.lane[lanes.nodes]
    by_target = np.argsort(target, kind="stable")
    edge = np.searchsorted(target[by_target], lanes.first).tolist()  # the next one into each lane
    last_edge = edge[1:]
    target_spot, source_spot = target[by_target].tolist(), source[by_target].tolist()
    source_lane = lane[source[by_target]].tolist()
    done, size = (
        lanes.first[:-1].tolist(),
        lanes.first[1:].tolist(),
    )  # the spots behind those done, and the lane
    spots = np.flatnonzero(matching.channel[nodes] >= 0)
    members_of = nodes[spots]
    channels, ordinals = matching.channel[members_of].tolist(), matching.ordinal[members_of].tolist()
    differ = differing(graph, matching)[matching.operation[members_of]].tolist()
    communication = [*spots.tolist(), len(nodes)]
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)
    blocks: list[tuple[int, int, int]] = []
    bounds, joint, operations = [0], [], 0
    active = list(range(len(done)))
    while active:
        alone, together, following = [], [], []
        for number in active:
            begin = done[number]
            next_one = bisect_left(communication, begin)
            end = stop = min(communication[next_one], size[number])
            at = edge[number]
            while at < last_edge[number] and target_spot[at] <= stop:
                if done[source_lane[at]] <= source_spot[at]:
                    end = target_spot[at]
                    waiting[source_lane[at]].append((source_spot[at], number))
                    break
                at += 1
            else:
                if end > begin:
                    following.append(number)
                elif stop < size[number]:
                    key = channels[next_one], ordinals[next_one]
                    channel, members = matching.channels[key[0]], arrived[key]
                    members.append(stop)
                    if len(members) == len(channel.sides):
                        del arrived[key]
                        if differ[next_one]:
                            check_same(graph, channel, key[1], nodes[members].tolist())
                        together += [(spot, spot + 1, operations) for spot in members]
                        operations += 1
            edge[number] = at
            if end > begin:
                alone.append((begin, end, number))
        moved = [number for _, _, number in alone]
        for _, end, number in alone:
            done[number] = end
        for spot, end, _ in together:
            number = int(lane[spot])
            done[number] = end
            moved.append(number)
            following.append(number)
        for some, is_joint in ((alone, False), (together, True)):
            if some:
                blocks += some
                bounds.append(len(blocks))
                joint.append(is_joint)
        active = [number for number in following if done[number] < size[number]]
        for number in moved:
            for spot, waiter in waiting.pop(number, ()):
                if done[number] > spot:
                    active.append(waiter)
                else:
                    waiting[number].append((spot, waiter))
    unfinished = nodes[np.arange(len(nodes)) >= np.array(done)[lane]]
    if len(unfinished):
        at_nodes = {key: nodes[spots].tolist() for key, spots in arrived.items()}
        raise deadlock(graph, matching, at_nodes, np.sort(unfinished))
    return blocks, bounds, joint
