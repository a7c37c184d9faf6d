"""The longest path through all ranks' graph, with numpy, for one setting of durations after another.

Threads, streams and communicators are lanes: chains of thousands of nodes that other lanes enter at few
places. The nodes are cut into rounds. In one round each lane goes on as far as the rounds before it allow, so
that the ends of its nodes are a running maximum: a round takes a few numpy calls, however many nodes it has.
Which nodes a round holds depends on the dependencies alone, and is found once. Where lanes wait for each
other at nearly every node, so that rounds would hold but a few, nodes are taken one by one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching, deadlock, differing, disagreement

Kind = Literal["lanes", "joint", "sequence"]
FEW, PATIENCE = 16, 32  # nodes of a round, and such rounds, until nodes are taken one by one
SEQUENCE = 4096  # of which so many are one round

_Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of each block the first spot, the spot behind the last, and the lane."""


@dataclass(frozen=True)
class Round:
    """``nodes`` and ``edges``: slices of the schedule's nodes, and of the edges that enter them from earlier
    rounds. ``entered``: the entered nodes, counted from the first of the round; ``first_edge``: where the
    edges of each begin. ``groups``: where the nodes of each lane begin, or, in a round of matched
    communication (``joint``), those of each operation. ``apart_ns[nodes]``: set lanes apart in a running
    maximum. In a ``sequence`` each node may depend on those before it in the round."""

    nodes: slice
    edges: slice
    entered: np.ndarray
    first_edge: np.ndarray
    groups: np.ndarray
    apart_ns: np.ndarray
    kind: Kind


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
        own, end = own_ns[self.order], np.empty_like(own_ns)
        start = release_ns[self.order] if release_ns.any() else np.zeros_like(own)
        for each in self.rounds:
            if each.kind == "sequence":
                self._one_by_one(each, own, start, end)
                continue
            begin = start[each.nodes]
            if len(each.entered):
                arrivals = end[self.source[each.edges]] + self.lag_ns[each.edges]
                latest = np.maximum.reduceat(arrivals, each.first_edge)
                begin[each.entered] = np.maximum(begin[each.entered], latest)
            if each.kind == "joint":
                last = np.maximum.reduceat(begin, each.groups)
                members = np.diff(np.append(each.groups, len(begin)))
                end[each.nodes] = np.repeat(last, members) + lasting_ns[self.order[each.nodes]]
                continue
            length = own[each.nodes]
            passed = np.cumsum(length) - each.apart_ns
            ended = begin + length - passed
            np.maximum.accumulate(ended, out=ended)
            ended += passed
            end[each.nodes] = ended
            np.subtract(ended, length, out=begin)
        return start[self.place], end[self.place]

    def _one_by_one(self, each: Round, own: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Set ``start`` and ``end`` of a sequence's nodes. Single numbers are read fastest by memoryview."""
        end[each.nodes] = start[each.nodes] + own[each.nodes]
        arrays = own, start, end, self.source[each.edges], self.lag_ns[each.edges]
        lengths, starts, ends, source, lag = (array.data for array in arrays)
        first = [*each.first_edge.tolist(), len(source)]
        for place, *edges in zip((each.entered + each.nodes.start).tolist(), first, first[1:], strict=False):
            arrivals = [ends[source[edge]] + lag[edge] for edge in range(*edges)]
            starts[place] = max(starts[place], *arrivals)
            ends[place] = starts[place] + lengths[place]


def make_schedule(graph: ReplayGraph, matching: Matching) -> Schedule:
    """The rounds of a graph. Raises ``TraceError`` where ranks disagree or wait for each other for ever."""
    lanes = graph.in_lanes
    # From here on nodes are numbered by their spots.
    nodes, spot, lane = lanes.nodes, lanes.spot, lanes.lane[lanes.nodes]
    source, target = spot[graph.source], spot[graph.target]
    # A dependency within a lane is its order, unless time has to pass in between.
    needed = (lane[source] != lane[target]) | (graph.lag_ns > 0)
    source, target, lag = source[needed], target[needed], graph.lag_ns[needed]
    found = _find_rounds(graph, matching, source, target)
    begin, end, group = (np.concatenate(each) for each in zip(*(blocks for blocks, _ in found), strict=True))
    bounds = np.cumsum([0, *(len(blocks[0]) for blocks, _ in found)])
    first = np.append(0, np.cumsum(end - begin))  # the place of each block
    order = np.repeat(begin - first[:-1], end - begin) + np.arange(len(nodes))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # The first node of a block follows the node before it on its lane.
    follows = begin[(begin > 0) & (lane[begin] == lane[begin - 1])]
    into = place[np.append(target, follows)]
    by_target = np.argsort(into, kind="stable")
    into = into[by_target]
    begins = np.diff(into, prepend=-1) != 0
    entered, first_edge = into[begins], np.flatnonzero(begins)
    new = np.diff(group, prepend=-1) != 0
    new[bounds[:-1]] = True
    groups = first[:-1][new]
    apart = (1 << 62) // (max(len(blocks[0]) for blocks, kind in found if kind != "sequence") + 1)
    in_round = np.arange(len(begin)) - np.repeat(bounds[:-1], np.diff(bounds))
    apart_ns = np.repeat(in_round * apart, end - begin)
    at = first[bounds]
    into_at, entered_at, groups_at = (np.searchsorted(each, at).tolist() for each in (into, entered, groups))
    rounds = []
    for number, (low, high) in enumerate(zip(at.tolist(), at[1:].tolist(), strict=False)):
        enters = slice(*entered_at[number : number + 2])
        rounds.append(
            Round(
                nodes=slice(low, high),
                edges=slice(*into_at[number : number + 2]),
                entered=entered[enters] - low,
                first_edge=first_edge[enters] - into_at[number],
                groups=groups[slice(*groups_at[number : number + 2])] - low,
                apart_ns=apart_ns[low:high],
                kind=found[number][1],
            )
        )
    source = place[np.append(source, follows - 1)][by_target]
    lag = np.append(lag, np.zeros(len(follows), np.int64))[by_target]
    return Schedule(nodes[order], place[spot], source, lag, rounds, apart // 4)


def _find_rounds(
    graph: ReplayGraph, matching: Matching, source: np.ndarray, target: np.ndarray
) -> list[tuple[_Blocks, Kind]]:
    """Stretches of lanes in the order in which they can be computed, by round, and the kind of round. In one
    of matched communication each block is one member, with the number of its operation in place of the lane,
    and the members of an operation stand side by side. In a sequence each block is one node.

    ``source``, ``target``: spots of the dependencies that a lane's order doesn't imply. Raises ``TraceError``
    where the ranks' collectives differ, or where they wait for each other for ever.
    """
    lanes = graph.in_lanes
    nodes, lane = lanes.nodes, lanes.lane[lanes.nodes]
    by_target = np.argsort(target, kind="stable")
    target, source = target[by_target], source[by_target]
    source_lane = lane[source]
    done, size = lanes.first[:-1].copy(), lanes.first[1:]  # the spots behind those done, and the lane
    edge = np.searchsorted(target, lanes.first)  # the next one into each lane
    edge, last_edge = edge[:-1], edge[1:]
    operation = matching.operation[nodes]
    communication = np.append(np.flatnonzero(operation >= 0), len(nodes))
    members = communication[np.argsort(operation[communication[:-1]], kind="stable")]
    of_member = operation[members]
    first_member = np.searchsorted(of_member, np.arange(int(of_member.max(initial=-1)) + 2))
    sides = np.array([len(channel.sides) for channel in matching.channels])
    missing = sides[matching.channel[nodes[members[first_member[:-1]]]]] if len(members) else np.zeros(0, int)
    differ = differing(graph, matching)
    rounds: list[tuple[_Blocks, Kind]] = []
    patience, front = PATIENCE * FEW, 0
    trace, line, within = graph.trace_of[nodes], *np.zeros((2, 0), np.int64)
    active = np.arange(len(done))
    waiting = np.zeros((3, 0), np.int64)  # lane, and the lane and spot that it waits for
    while len(active):
        begin = done[active]
        stop = np.minimum(communication[np.searchsorted(communication, begin)], size[active])
        behind = np.minimum(np.searchsorted(target, stop, side="right"), last_edge[active])
        at = _first_unmet(edge[active], behind, done, source_lane, source)
        edge[active] = at
        held = at < behind
        end = np.where(held, target[np.minimum(at, len(target) - 1)] if len(target) else stop, stop)
        moves = end > begin
        if moves.any():
            rounds.append(((begin[moves], end[moves], active[moves]), "lanes"))
        patience = min(patience + int((end - begin)[moves].sum()) - FEW, PATIENCE * FEW)
        done[active] = end
        waiting = np.append(waiting, [active[held], source_lane[at[held]], source[at[held]]], axis=1)
        following = active[moves & ~held]
        arriving = stop[~moves & ~held & (stop < size[active])]
        if len(arriving):
            arrived = operation[arriving]
            np.subtract.at(missing, arrived, 1)
            complete = np.unique(arrived[missing[arrived] == 0])
            for number in complete[differ[complete]].tolist():
                together = nodes[members[first_member[number] : first_member[number + 1]]]
                raise disagreement(graph, matching, int(matching.ordinal[together[0]]), together.tolist())
            if len(complete):
                count = first_member[complete + 1] - first_member[complete]
                offset = np.cumsum(count) - count
                spots = members[np.repeat(first_member[complete] - offset, count) + np.arange(count.sum())]
                rounds.append(((spots, spots + 1, np.repeat(complete, count)), "joint"))
                done[lane[spots]] = spots + 1
                following = np.append(following, lane[spots])
        if patience < 0:
            patience = 0
            if not len(line):
                line, within = _by_rank(graph, nodes)
            window = line[front : front + SEQUENCE]
            left = window >= done[lane[window]]
            front += int(left.argmax()) if left.any() else len(window)
            window = window[left]
            # In their topological order, up to the next communication of each rank.
            held = window[operation[window] >= 0]
            until = np.full(len(graph.traces), len(nodes))
            np.minimum.at(until, trace[held], within[held])
            spots = window[within[window] < until[trace[window]]]
            if len(spots):
                rounds.append(((spots, spots + 1, lane[spots]), "sequence"))
                done += np.bincount(lane[spots], minlength=len(done))
        ready = done[waiting[1]] > waiting[2]
        active = np.append(following, waiting[0, ready])
        active = active[done[active] < size[active]]
        waiting = waiting[:, ~ready]
    unfinished = nodes[np.arange(len(nodes)) >= done[lane]]
    if len(unfinished):
        stuck = np.setdiff1d(np.flatnonzero(done < size), waiting[0])
        arrived_at: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node in nodes[done[stuck]].tolist():
            arrived_at[int(matching.channel[node]), int(matching.ordinal[node])].append(node)
        raise deadlock(graph, matching, arrived_at, np.sort(unfinished))
    return rounds


def _by_rank(graph: ReplayGraph, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spots in topological order, one of each rank after another; and the number of each in its rank's."""
    trace, within = graph.trace_of[nodes], np.empty(len(nodes), np.int64)
    within[np.lexsort((graph.position[nodes], trace))] = np.arange(len(nodes))
    within -= graph.first[trace]
    return within.argsort(kind="stable"), within


def _first_unmet(
    edge: np.ndarray, behind: np.ndarray, done: np.ndarray, source_lane: np.ndarray, source: np.ndarray
) -> np.ndarray:
    """Of the dependencies from ``edge[i]`` to before ``behind[i]`` the first that isn't done, or
    ``behind[i]``; few are tried of each at first, then more and more."""
    at, width = edge.copy(), 4
    left = np.flatnonzero(at < behind)
    while len(left):
        count = np.minimum(behind[left] - at[left], width)
        first = np.cumsum(count) - count
        tried = np.repeat(at[left] - first, count) + np.arange(int(count.sum()))
        unmet = np.where(done[source_lane[tried]] > source[tried], len(tried), np.arange(len(tried)))
        passed = np.minimum(np.minimum.reduceat(unmet, first) - first, count)
        at[left] += passed
        left = left[(passed == count) & (at[left] < behind[left])]
        width *= 8
    return at
