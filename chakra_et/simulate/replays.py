"""The two replays: start and end times from durations and dependencies alone.

Recorded start times are not used here, except to separate the wait of a collective from its transfer (see
``timing``): comparing them with the simulated times is the test.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.edges import successor_lists
from chakra_et.simulate.joint import ReplayGraph, build_graph
from chakra_et.simulate.matching import Matching, compared, deadlock, disagreement
from chakra_et.simulate.timing import Timing

CPU, GPU, COMM, RECV = range(4)


@dataclass
class ReplayResult:
    """The result of one replay. Times are in ns, 0 is the start of the earliest rank.

    ``start_ns``, ``end_ns``: one int64[rows] per trace, in its row order. A matched collective starts on each
    rank when that rank is ready for it. ``release_ns``: the start of each rank.
    """

    start_ns: list[np.ndarray]
    end_ns: list[np.ndarray]
    release_ns: list[int]
    notes: list[str] = field(default_factory=list)

    @property
    def makespan_ns(self) -> int:
        """The end of the last node."""
        return max(int(end.max()) for end in self.end_ns)


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
    graph: ReplayGraph,
    matching: Matching,
    times: Timing,
    ends: Callable[[list[int], list[int]], list[int]] | None = None,
) -> ReplayResult:
    """Replay as ASTRA-sim issues nodes: per rank, one CPU, one GPU compute and one other node at a time.

    The ready node with the lowest id goes first, receives need no slot, and a duration of 0 becomes 1 ns.
    Unlike ASTRA-sim, which simulates collectives from their size, this uses their recorded durations. As in
    its event queue, completions at the same time are handled in the order in which they were scheduled, and
    each issues the nodes that it freed. ``ends``: when the members of an operation end that start at given
    times, instead of the recorded durations. Raises ``TraceError`` as ``make_schedule`` does.
    """
    offsets, successors = successor_lists(len(graph), graph.source, graph.target)
    degrees = np.bincount(graph.target, minlength=len(graph))
    waiting = degrees.tolist()
    choices = [graph.is_cpu, graph.types == NodeType.COMP, graph.types == NodeType.COMM_RECV]
    slot = (graph.trace_of * 4 + np.select(choices, [CPU, GPU, RECV], COMM)).tolist()
    duration = np.maximum(graph.duration_ns, 1).tolist()
    # ASTRA-sim treats a communication node with is_cpu_op=true as computation, and replays a broadcast
    # without synchronising the ranks.
    is_broadcast = (graph.types == NodeType.COMM_COLL) & (
        graph.attribute("comm_type", -1) == CollectiveType.BROADCAST
    )
    channel = np.where(graph.is_cpu | is_broadcast, -1, matching.channel).tolist()
    side = matching.side.tolist()
    start, end = [-1] * len(graph), [-1] * len(graph)
    transfer = times.transfer_ns.tolist()
    what = list(zip(*compared(graph).tolist(), strict=True))

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
                    if len({what[member] for member in members}) > 1:
                        raise disagreement(graph, matching.channels[key[0]], key[1], members)
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
        raise deadlock(graph, matching, arrived, unfinished)
    notes = matching.notes + times.notes
    return ReplayResult(graph.scatter(start), graph.scatter(end), times.release_ns, notes)
