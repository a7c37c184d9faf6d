"""What threads wait for on a device: calls that block, launches into a full queue, and hosts that spin.

Times are by the host's clock, so a wait is matched with work by order: what was launched before the call.
Time in a call after that work has ended is the call's own.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from chakra_et.arrays import median, unique
from chakra_et.convert.graph.launches import (
    QUERY,
    BlockingCall,
    Launches,
    Scope,
    StreamOrder,
    blocking_calls,
    is_call,
)
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.convert.graph.timeline import POLLING, named
from chakra_et.traces.device_format import ANNOTATION, CPU_OP, RUNTIME

# Launches that a stream holds before the next one blocks: CUDA's, where the trace doesn't tell.
QUEUE = 1024
LEAST_QUEUE, QUEUE_SPREAD = 64, 0.05
# A launch that takes as many times as long as the quickest quarter was blocked, or loaded its module.
BLOCKED = 3
# A shorter gap of the host needs no cause.
LONG_NS = 50_000
# A host that spins goes on within this time after the work has ended, and within this part of the gap.
PROMPT_NS, PROMPT = 10_000, 0.02
LEAST_QUERIES = 3
LAST_LAUNCH = np.iinfo(np.int64).max
# Of gaps that end when a stream falls idle by chance alone.
CHANCE = 1e-3


class _Work:
    """Lookup of device work by its end, and by the thread that launched it."""

    def __init__(self, rank: LinkedRank, launches: Launches) -> None:
        end, calls, gpu = rank.timeline.end, rank.calls, launches.gpu
        self.rows = gpu[np.argsort(end[gpu], kind="stable")]
        self.ends, self.launched = end[self.rows], launches.time[self.rows]
        known = gpu[calls[gpu] >= 0]
        known = known[np.argsort(launches.time[known], kind="stable")]
        thread = rank.device.thread[calls[known]]
        self.of_thread = {number: known[thread == number] for number in unique(thread).tolist()}
        self.time = launches.time

    def last_ended(self, begin: int, end: int, launched_before: int) -> int:
        """What ended last after ``begin`` and up to ``end``, of what was launched before a moment; -1 for
        none."""
        low, high = np.searchsorted(self.ends, (begin, end), side="right").tolist()
        fitting = np.flatnonzero(self.launched[low:high] < launched_before)
        return int(self.rows[low + fitting[-1]]) if len(fitting) else -1

    def last_launched(self, thread: int, moment: int) -> int:
        """What ``thread`` launched last before ``moment``, -1 for nothing."""
        rows = self.of_thread.get(thread, self.rows[:0])
        at = int(np.searchsorted(self.time[rows], moment)) - 1
        return int(rows[at]) if at >= 0 else -1


def find(rank: LinkedRank, launches: Launches, order: StreamOrder, found: Dependencies) -> None:
    """Add the waits of calls for the device."""
    time, work = rank.timeline, _Work(rank, launches)
    for call in blocking_calls(rank.device):
        if time.lane[call.row] >= 0:
            begin, end = int(time.start[call.row]), int(time.end[call.row])
            sources = _sources(rank, order, work, call, begin, end)
            guessed = call.stream < 0 and call.scope is not Scope.DEVICE and len(order.streams) > 1
            found.findings.add("sync-by-time", guessed and max(sources, default=-1) >= 0)
            for source in sources:
                if source >= 0 and time.end[source] <= end:
                    _wait(rank, int(time.lane[call.row]), begin, source, found)
    _full_queues(rank, launches, order, found)


def _wait(rank: LinkedRank, lane: int, begin: int, source: int, found: Dependencies) -> None:
    """Let a lane wait from ``begin`` until the work ``source`` has ended."""
    done = int(rank.timeline.end[source])
    found.wait(lane, begin, done)
    found.edge(EdgeKind.SYNCHRONISATION, (int(rank.timeline.lane[source]), done), (lane, max(done, begin)))


def _sources(
    rank: LinkedRank, order: StreamOrder, work: _Work, call: BlockingCall, begin: int, end: int
) -> list[int]:
    """The work that a call waits for (-1: none): the last before it on each stream that it may concern."""
    device, time = rank.device, rank.timeline
    if call.stream >= 0:
        moment = int(device.start[call.recorded]) if call.recorded >= 0 else begin
        return [order.last_before((call.device, call.stream), moment)]
    last = [order.last_before(each, begin) for each in order.streams if call.device in (-1, each[0])]
    if call.scope is Scope.DEVICE or (call.scope is Scope.STREAM and len(last) == 1):
        return last
    if call.scope is Scope.STREAM:
        # That of the thread's last launch, if it was busy until some moment of the call.
        own = work.last_launched(int(device.thread[call.row]), begin)
        last = [row for row in last if row >= 0 and begin < time.end[row] <= end]
        return [own] if own in last else sorted(last, key=lambda row: int(time.end[row]))[-1:]
    return [work.last_ended(begin, end, begin)]


def _full_queues(rank: LinkedRank, launches: Launches, order: StreamOrder, found: Dependencies) -> None:
    """Waits of launches for the work that leaves a full queue: what was launched as many places before as a
    stream holds. How many follows from the launches that last long while much work is pending."""
    device, time, calls = rank.device, rank.timeline, rank.calls
    own = launches.gpu[calls[launches.gpu] >= 0]
    own = own[device.category[calls[own]] >= RUNTIME]
    if len(own) < LEAST_QUEUE:
        return
    lasts = time.end[calls] - time.start[calls]
    quick = np.partition(lasts[own], len(own) // 4)[len(own) // 4]
    blocked = []
    for _, rows in order.streams.values():
        ends = np.maximum.accumulate(time.end[rows])
        place = np.flatnonzero((calls[rows] >= 0) & (lasts[rows] > BLOCKED * quick))
        call = calls[rows[place]]
        gone = np.searchsorted(ends, time.end[call], side="right")
        deep = place - gone >= LEAST_QUEUE
        blocked += list(zip([rows] * int(deep.sum()), place[deep], gone[deep], call[deep], strict=True))
    depths = np.array([place - gone for _, place, gone, _ in blocked])
    if not len(depths):
        return
    holds = int(median(depths)) if len(depths) >= LEAST_QUERIES else QUEUE
    alike = np.abs(depths - holds) <= QUEUE_SPREAD * holds
    if alike.mean() < 0.5:
        return
    for (rows, place, gone, call), fits in zip(blocked, alike, strict=True):
        begin = int(time.start[call])
        source = int(rows[min(place - holds, gone - 1)]) if place >= holds else -1
        if fits and source >= 0 and time.end[source] > begin:
            _wait(rank, int(time.lane[call]), begin, source, found)
            found.findings.add("queue-full", detail=str(holds))


def find_spinning(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Waits of threads that spin until the device is done: gaps between operators, whatever fills them, that
    end when work on the device does.

    A loop of queries tells when: between the last but one and the last. Other gaps may end so by chance, even
    where the stream has nothing left to do: it is none if most gaps after launches of the same kernel do.
    """
    time, device = rank.timeline, rank.device
    work = _Work(rank, launches)
    drained = np.full(len(device), LAST_LAUNCH)  # the launch of the next work on the stream
    follows = launches.gpu[launches.before[launches.gpu] >= 0]
    drained[launches.before[follows]] = launches.time[follows]
    queries = named(device, QUERY.fullmatch)
    total: Counter[int] = Counter()
    prompt: dict[int, list[tuple[float, int, int, int]]] = {}
    for thread, lane, begin, end, rows in _gaps(rank, found):
        asked = rows[queries[rows]]
        if len(asked) >= LEAST_QUERIES:
            first, before, last = (int(time.start[asked[at]]) for at in (0, -2, -1))
            source = work.last_ended(before, int(time.end[asked[-1]]), first)
            if source >= 0 and last - first >= LONG_NS:
                _wait(rank, lane, first, source, found)
                found.findings.add("host-spun")
            continue
        kernel = work.last_launched(thread, begin)
        if kernel >= 0 and time.end[kernel] <= begin:
            continue  # nothing of its own that it could wait for
        name = int(device.name[kernel])
        total[name] += 1
        soon = min(PROMPT_NS, int(PROMPT * (end - begin)))
        source = work.last_ended(end - soon, end + soon, begin)
        if source >= 0 and drained[source] >= end:
            if time.end[source] > end:  # it tells the host before it ends: at least what is before it is over
                source = int(launches.before[source])
            prompt.setdefault(name, []).append((2 * soon / (end - begin), lane, begin, source))
    for name, ended in prompt.items():
        if 2 * len(ended) > total[name] and math.prod(chance for chance, *_ in ended) < CHANCE:
            for _, lane, begin, source in ended:
                if source >= 0 and time.end[source] > begin:
                    _wait(rank, lane, begin, source, found)
                    found.findings.add("host-spun")


def _gaps(rank: LinkedRank, found: Dependencies) -> list[tuple[int, int, int, int, np.ndarray]]:
    """(thread, lane, begin, end, rows of the polling calls in it) of each long time of a thread without work:
    outside of operators, in polling calls, or long in an operator itself, and not yet a wait."""
    device, time = rank.device, rank.timeline
    polling = named(device, POLLING.fullmatch) & is_call(device)
    segments, waits, gaps = time.self_time, found.waits, []
    for lane in unique(segments.lane).tolist():
        at = np.flatnonzero((segments.lane == lane) & (segments.start < segments.end))
        owner, start, end = segments.owner[at], segments.start[at], segments.end[at]
        category = np.where(owner >= 0, device.category[owner], ANNOTATION)
        asks = polling[owner] & (owner >= 0)
        between = np.append(False, asks[:-1]) & np.append(asks[1:], False)
        idle = (category == ANNOTATION) | asks
        idle |= (category == CPU_OP) & (between | (end - start >= LONG_NS))
        first = np.flatnonzero(idle & ~np.append(False, idle[:-1]))
        last = np.flatnonzero(idle & ~np.append(idle[1:], False))
        own, thread = waits[waits[:, 0] == lane], int(device.thread[np.argmax(time.lane == lane)])
        own = own[np.argsort(own[:, 1], kind="stable")]
        reach = np.maximum.accumulate(np.append(-1, own[:, 2]))
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            begin, until = int(start[a]), int(end[b])
            if until - begin >= LONG_NS and reach[np.searchsorted(own[:, 1], until)] <= begin:
                gaps.append((thread, lane, begin, until, owner[a : b + 1][asks[a : b + 1]]))
    return gaps
