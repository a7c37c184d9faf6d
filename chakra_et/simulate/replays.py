"""The two replays: start and end times from durations and dependencies alone.

Recorded start times are not used here, except to separate the wait of a collective from its transfer (see
``timing``): comparing them with the simulated times is the test.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.edges import successor_lists
from chakra_et.simulate.joint import ReplayGraph, build_graph
from chakra_et.simulate.longest_path import make_schedule
from chakra_et.simulate.matching import OTHER_ORDERS, Matching, compared, deadlock, disagreement
from chakra_et.simulate.timing import Timing, timing

CPU, GPU, COMM, RECV = range(4)
Ends = Callable[[list[int], list[int]], list[int]]
"""When the members of an operation, the first list, end that start at the times in the second."""


def longest_path(trace: ExecutionTrace) -> int:
    """Length in ns of the longest dependency chain, a lower bound on every replay of the trace."""
    graph = build_graph(trace)
    own: list[int] = graph.own_ns.tolist()
    end = own.copy()
    order = np.argsort(graph.position[graph.source], kind="stable")
    columns = (graph.source[order], graph.target[order], graph.lag_ns[order])
    for source, target, lag in zip(*(column.tolist() for column in columns), strict=True):
        end[target] = max(end[target], end[source] + lag + own[target])
    return max(end)


def astra_replay(
    graph: ReplayGraph, matching: Matching, times: Timing, ends: Ends | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Replay as ASTRA-sim issues nodes: per rank, one CPU, one GPU compute and one other node at a time.
    Returns the start and end of each node, int64[N] ns from the start of the earliest rank; a matched
    collective starts on each rank when that rank is ready for it.

    The ready node with the lowest id goes first, receives need no slot, and a duration of 0 becomes 1 ns.
    Unlike ASTRA-sim, which simulates collectives from their size, this uses their recorded durations. As in
    its event queue, completions at the same time are handled in the order in which they were scheduled, and
    each issues the nodes that it freed. ``ends``: in place of the recorded durations. Raises ``TraceError``
    as ``make_schedule`` does.
    """
    offsets, successors = successor_lists(len(graph), graph.source, graph.target)
    degrees = np.bincount(graph.target, minlength=len(graph))
    waiting = degrees.tolist()
    choices = [graph.is_cpu, graph.types == NodeType.COMP, graph.types == NodeType.COMM_RECV]
    slot = (graph.trace_of * 4 + np.select(choices, [CPU, GPU, RECV], COMM)).tolist()
    duration = np.maximum(graph.duration_ns, 1).tolist()
    # ASTRA-sim treats a communication node with is_cpu_op=true as computation, and replays a broadcast
    # without synchronising the ranks.
    what = compared(graph)
    is_broadcast = what[0] == CollectiveType.BROADCAST
    channel = np.where(graph.is_cpu | is_broadcast, -1, matching.channel).tolist()
    side = matching.side.tolist()
    start, end = [-1] * len(graph), [-1] * len(graph)
    transfer = times.transfer_ns.tolist()
    must_equal = list(zip(*what.tolist(), strict=True))

    ready: list[list[int]] = [[] for _ in range(4 * len(graph.traces))]
    for node in np.flatnonzero(degrees == 0).tolist():
        ready[slot[node]].append(node)
    busy = [False] * len(ready)
    issued: dict[tuple[int, int], int] = defaultdict(int)
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)
    # (time, scheduling order, node). The start of the rank with index i is the pseudo-node -1 - i.
    events = [(release, rank, -1 - rank) for rank, release in enumerate(times.release_ns)]
    heapq.heapify(events)
    scheduled = len(events)

    while events:
        now, _, node = heapq.heappop(events)
        if node < 0:
            first_slot = 4 * (-1 - node)
        else:
            end[node] = now
            busy[slot[node]] = False
            first_slot = slot[node] & ~3
            for successor in successors[offsets[node] : offsets[node + 1]]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    heapq.heappush(ready[slot[successor]], successor)

        while True:
            slots = range(first_slot, first_slot + 4)
            lowest = min((ready[at][0] for at in slots if ready[at] and not busy[at]), default=-1)
            if lowest < 0:
                break
            heapq.heappop(ready[slot[lowest]])
            busy[slot[lowest]] = slot[lowest] & 3 != RECV
            start[lowest] = now
            ended = [(lowest, now + duration[lowest])]
            if channel[lowest] >= 0:
                # Match in the order of issue, as ASTRA-sim does, not by id.
                key = channel[lowest], issued[channel[lowest], side[lowest]]
                issued[channel[lowest], side[lowest]] += 1
                members = arrived[key]
                members.append(lowest)
                ended = []
                if len(members) == len(matching.channels[key[0]].sides):
                    del arrived[key]
                    if len({must_equal[member] for member in members}) > 1:
                        raise disagreement(graph, matching, key[1], members)
                    # The last member has just started.
                    done = [now + transfer[member] for member in members]
                    if times.shortest:  # by id, other nodes may be members
                        done = [now + min(duration[member] for member in members)] * len(members)
                    if ends is not None:
                        done = ends(members, [start[member] for member in members])
                    ended = [(member, max(at, now + 1)) for member, at in zip(members, done, strict=True)]
            for member, at in ended:
                heapq.heappush(events, (at, scheduled, member))
                scheduled += 1
    unfinished = np.flatnonzero(np.array(end, np.int64) < 0)
    if len(unfinished):
        raise deadlock(graph, matching, arrived, unfinished, OTHER_ORDERS)
    return np.array(start, np.int64), np.array(end, np.int64)


def missing_order(graph: ReplayGraph, matching: Matching) -> np.ndarray:
    """One order of all communication, for simulators in which a rank communicates once at a time.

    On a GPU the collectives of two groups run beside each other on their streams. ASTRA-sim issues whichever
    is ready first, and holds all others of the rank up: where one rank is in a collective of group A and
    another in one of group B, and both belong to both, neither ends. In the order in which the capture's own
    dependencies let the operations begin, that can't be: what an operation waits for comes before it on every
    rank. Returns pairs (before, after) of nodes of one rank, int64[K, 2]: the dependencies that such an order
    needs and that aren't there. Where no order can make ranks wait for each other, as groups and pairs of
    ranks that exchange messages form no cycle, only collectives of groups in which they differ are in order:
    ASTRA-sim matches those of a group in the order of issue, and threads of gloo begin them in any."""
    what = compared(graph)
    matched = np.flatnonzero((matching.channel >= 0) & (what[0] != CollectiveType.BROADCAST))
    users = np.unique(np.stack([graph.trace_of[matched], matching.channel[matched]]), axis=1)
    if not _has_cycle(*users):
        channel = matching.channel[matched]
        kinds = np.unique(np.stack([channel, *what[:, matched]]), axis=1)[0]
        matched = matched[np.bincount(kinds)[channel] > 1]
    if not len(matched):
        return np.empty((0, 2), np.int64)
    times = timing(graph, matching)
    # At least 1 ns each: what depends on an operation then begins after it.
    lasting = np.where(matching.operation >= 0, np.maximum(times.transfer_ns, 1), 0)
    release = np.array(times.release_ns, np.int64)[graph.trace_of]
    start, _ = make_schedule(graph, matching).run(graph.own_ns, lasting, release)
    operation = matching.operation[matched]
    begin = np.zeros(operation.max() + 1, np.int64)
    np.maximum.at(begin, operation, start[matched])
    order = np.lexsort((operation, begin[operation], graph.trace_of[matched]))
    order = order[graph.types[matched[order]] != NodeType.COMM_RECV]  # a receive holds nothing up
    nodes = matched[order]
    same = graph.trace_of[nodes[1:]] == graph.trace_of[nodes[:-1]]
    pairs = np.stack([nodes[:-1][same], nodes[1:][same]], axis=1)
    return pairs[_unordered(graph, pairs)]


def _has_cycle(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the undirected edges close a cycle: some are left once all ends that stand alone are gone."""
    while True:
        kept = (np.bincount(left)[left] > 1) & (np.bincount(right)[right] > 1)
        if kept.all():
            return len(left) > 0
        left, right = left[kept], right[kept]


def _unordered(graph: ReplayGraph, pairs: np.ndarray) -> np.ndarray:
    """bool[K]: the pairs whose second node doesn't depend on the first."""
    offsets, successors = successor_lists(len(graph), graph.source, graph.target)
    position = graph.position.tolist()
    lacking = []
    for before, after in pairs.tolist():
        last, seen, ahead = position[after], {before}, [before]
        while ahead and after not in seen:
            node = ahead.pop()
            for following in successors[offsets[node] : offsets[node + 1]]:
                if following not in seen and position[following] <= last:
                    seen.add(following)
                    ahead.append(following)
        lacking.append(after not in seen)
    return np.array(lacking, bool)
