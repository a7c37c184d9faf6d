"""Find the dependencies of one rank: launches, streams, what threads wait for on a device, and each other.

Times are by the host's clock, so a wait of a thread is matched with work by order: what was launched before
the call. Time in a call after that work has ended is the call's own.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.convert.graph import stream_waits, thread_dependencies
from chakra_et.convert.graph.launches import (
    BEFORE_RECORDING,
    QUERY,
    BlockingCall,
    Launches,
    Scope,
    blocking_calls,
    is_call,
)
from chakra_et.convert.graph.linked import LONG_NS, LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.convert.graph.timeline import POLLING, Lane, Timeline, named
from chakra_et.traces.device_format import ANNOTATION, CPU_OP, MEMCPY, MEMSET, RUNTIME

# Launches that a stream holds before the next one blocks: CUDA's, where the trace doesn't tell.
QUEUE = 1024
LEAST_QUEUE, QUEUE_SPREAD = 64, 0.05
# A launch that takes as many times as long as the quickest quarter was blocked, or loaded its module. In a
# step that the device bounds most may be blocked, but no host takes longer than this for one that isn't.
BLOCKED, QUICK_NS = 3, 8_000
# A host that spins goes on within this time after the work has ended, and within this part of the gap.
PROMPT_NS, PROMPT = 10_000, 0.02
LEAST_QUERIES = 3
LAST_LAUNCH = np.iinfo(np.int64).max
# Of gaps that end when a stream falls idle by chance alone.
CHANCE = 1e-3


def find_dependencies(rank: LinkedRank) -> Dependencies:
    """All dependencies between threads, streams and communication of a rank."""
    found = Dependencies(rank.timeline.lanes)
    launches = Launches(rank.device, rank.timeline, rank.calls)
    if len(launches.gpu):
        _launches(rank, launches, found)
        _overlapping_lanes(rank.timeline, found)
        _further_messages(rank, found)
        stream_waits.find(rank, launches, found)
        _blocking(rank, launches, found)
        _full_queues(rank, launches, found)
    thread_dependencies.find(rank, found)
    _spinning(rank, launches, found)
    return found


def _launches(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Launch edges, and blocking copies."""
    device, time, calls, gpu = rank.device, rank.timeline, rank.calls, launches.gpu
    start, end = time.start, time.end
    known = gpu[calls[gpu] >= 0]
    call, before = calls[known], launches.before[known]
    # The edge starts at the end of the call, or at the start of work that began during the call.
    at = np.minimum(start[known], end[call])
    by_operator = device.category[call] < RUNTIME
    at[by_operator] = launches.time[known[by_operator]]
    found.findings.add("early-start", int((start[known] < start[call]).sum()))
    copies = device.category[known] == MEMCPY
    free = np.where(before >= 0, end[before], BEFORE_RECORDING)
    # A memset only blocks on some memory, and on an idle stream nothing tells.
    blocking = copies | ((device.category[known] == MEMSET) & (free > start[call]))
    blocking &= (end[known] <= end[call]) & (end[known] > start[call])
    # A blocking copy on a busy stream blocks the caller from the start of the call.
    at = np.where(blocking & (free > start[call]), np.minimum(start[call], start[known]), at)
    found.add_edges(EdgeKind.LAUNCH, time.lane[call], at, time.lane[known], start[known])
    found.findings.add("blocking-copy", int(blocking.sum()))
    # CUDA stages a copy of pageable memory when the stream is free, and may return before it ends.
    synchronous = named(device, lambda name: "Async" not in name)[call]
    staged = copies & ~blocking & synchronous & (free > start[call]) & (free <= end[call])
    for chosen, since, source in ((blocking, at, known), (staged, start[call], before)):
        for k in np.flatnonzero(chosen).tolist():
            lane, done = int(time.lane[call[k]]), int(end[source[k]])
            found.wait(lane, int(since[k]), done)
            found.edge(EdgeKind.SYNCHRONISATION, (int(time.lane[source[k]]), done), (lane, done))
    orphans = gpu[calls[gpu] < 0]
    found.findings.add("no-launch", len(orphans) - len(rank.before))
    first_of_lane = gpu[np.unique(time.lane[gpu], return_index=True)[1]]
    first = orphans[np.isin(orphans, first_of_lane)]
    found.add_edges(EdgeKind.INTER_THREAD, time.main, start[first], time.lane[first], start[first])


def _overlapping_lanes(time: Timeline, found: Dependencies) -> None:
    """Add stream-order edges between kernels that overlap on a stream and that stream's other kernels."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for number, lane in enumerate(time.lanes):
        if lane.kind == "gpu":
            lanes.setdefault((lane.device, lane.stream), []).append(number)
    for of_stream in lanes.values():
        for own, other in ((a, b) for a in of_stream for b in of_stream if a != b):
            start, end = time.start[time.lane == own], time.end[time.lane == other]
            at = np.searchsorted(end, start, side="right") - 1
            first = np.flatnonzero(np.diff(at, prepend=-1) > 0)  # the order on the lane implies the rest
            found.add_edges(EdgeKind.STREAM_ORDER, other, end[at[first]], own, start[first])


def _further_messages(rank: LinkedRank, found: Dependencies) -> None:
    """Place further messages of a kernel on lanes of their own: they start and end with the kernel."""
    time, calls = rank.timeline, rank.calls
    lanes: dict[tuple[int, int], int] = {}
    for number, item in enumerate(rank.communication.items):
        if not item.on_gpu or not item.part:
            continue
        lane, start, end = (int(column[item.event]) for column in (time.lane, time.start, time.end))
        key = lane, item.part
        if key not in lanes:
            label = f"{time.lanes[lane].label} message {item.part + 1}"
            lanes[key] = found.new_lane(Lane("communication", label))
        beside = lanes[key]
        found.placed[number] = (beside, start, end)
        found.edge(EdgeKind.STREAM_ORDER, (lane, start), (beside, start))
        found.edge(EdgeKind.STREAM_ORDER, (beside, end), (lane, end))
        call = int(calls[item.event])
        if call >= 0:
            at = min(start, int(time.end[call]))
            found.edge(EdgeKind.LAUNCH, (int(time.lane[call]), at), (beside, start))


def _blocking(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Add the waits of calls for the device."""
    time = rank.timeline
    for call in blocking_calls(rank.device):
        if time.lane[call.row] >= 0:
            begin, end = int(time.start[call.row]), int(time.end[call.row])
            sources = _sources(rank, launches, call, begin, end)
            guessed = call.stream < 0 and call.scope is not Scope.DEVICE and len(launches.streams) > 1
            found.findings.add("sync-by-time", guessed and max(sources, default=-1) >= 0)
            for source in sources:
                if source >= 0 and time.end[source] <= end:
                    _wait(rank, int(time.lane[call.row]), begin, source, found)


def _wait(rank: LinkedRank, lane: int, begin: int, source: int, found: Dependencies) -> None:
    """Let a lane wait from ``begin`` until the work ``source`` has ended."""
    done = int(rank.timeline.end[source])
    found.wait(lane, begin, done)
    found.edge(EdgeKind.SYNCHRONISATION, (int(rank.timeline.lane[source]), done), (lane, max(done, begin)))


def _sources(rank: LinkedRank, launches: Launches, call: BlockingCall, begin: int, end: int) -> list[int]:
    """The work that a call waits for (-1: none): the last before it on each stream that it may concern."""
    device, time = rank.device, rank.timeline
    if call.stream >= 0:
        moment = int(device.start[call.recorded]) if call.recorded >= 0 else begin
        return [launches.last_before((call.device, call.stream), moment)]
    last = [launches.last_before(each, begin) for each in launches.streams if call.device in (-1, each[0])]
    if call.scope is Scope.DEVICE or (call.scope is Scope.STREAM and len(last) == 1):
        return last
    if call.scope is Scope.STREAM:
        # That of the thread's last launch, if it was busy until some moment of the call.
        own = launches.last_by_thread(int(device.thread[call.row]), begin)
        last = [row for row in last if row >= 0 and begin < time.end[row] <= end]
        return [own] if own in last else sorted(last, key=lambda row: int(time.end[row]))[-1:]
    return [launches.last_ended(begin, end, begin)]


def _full_queues(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Waits of launches for the work that leaves a full queue: what was launched as many places before as a
    stream holds. How many follows from the launches that last long while much work is pending."""
    device, time, calls = rank.device, rank.timeline, rank.calls
    own = launches.gpu[calls[launches.gpu] >= 0]
    own = own[device.category[calls[own]] >= RUNTIME]
    if len(own) < LEAST_QUEUE:
        return
    lasts = time.end[calls] - time.start[calls]
    quick = min(np.partition(lasts[own], len(own) // 4)[len(own) // 4], QUICK_NS)
    blocked = []
    for _, rows in launches.streams.values():
        ends = np.maximum.accumulate(time.end[rows])
        place = np.flatnonzero((calls[rows] >= 0) & (lasts[rows] > BLOCKED * quick))
        call = calls[rows[place]]
        gone = np.searchsorted(ends, time.end[call], side="right")
        deep = place - gone >= LEAST_QUEUE
        blocked += list(zip([rows] * int(deep.sum()), place[deep], gone[deep], call[deep], strict=True))
    depths = np.array([place - gone for _, place, gone, _ in blocked])
    if not len(depths):
        return
    holds = int(np.median(depths)) if len(depths) >= LEAST_QUERIES else QUEUE
    alike = np.abs(depths - holds) <= QUEUE_SPREAD * holds
    if alike.mean() < 0.5:
        return
    for (rows, place, gone, call), fits in zip(blocked, alike, strict=True):
        begin = int(time.start[call])
        source = int(rows[min(place - holds, gone - 1)]) if place >= holds else -1
        if fits and source >= 0 and time.end[source] > begin:
            _wait(rank, int(time.lane[call]), begin, source, found)
            found.findings.add("queue-full", detail=str(holds))


def _spinning(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Waits of threads that sleep or spin until the device or another thread is done: gaps between operators,
    whatever fills them, that end when its work does.

    A loop of queries tells when: between the last but one and the last. Other gaps may end so by chance, even
    where the stream or thread has nothing left to do: it is none if most gaps after launches of the same
    kernel, or in which the same thread worked, do.
    """
    time, device = rank.timeline, rank.device
    drained = np.full(len(device), LAST_LAUNCH)  # the launch of the next work on the stream
    follows = launches.gpu[launches.before[launches.gpu] >= 0]
    drained[launches.before[follows]] = launches.time[follows]
    queries = named(device, QUERY.fullmatch)
    falls_idle = _falls_idle(time)
    total: Counter[tuple[str, int]] = Counter()
    prompt: dict[tuple[str, int], list[tuple[float, int, int, int, int]]] = {}
    for thread, lane, begin, end, rows in _gaps(rank, found):
        asked = rows[queries[rows]]
        if len(asked) >= LEAST_QUERIES:
            first, before, last = (int(time.start[asked[at]]) for at in (0, -2, -1))
            source = launches.last_ended(before, int(time.end[asked[-1]]), first)
            if source >= 0 and last - first >= LONG_NS:
                _wait(rank, lane, first, source, found)
                found.findings.add("host-spun")
            continue
        soon = min(PROMPT_NS, int(PROMPT * (end - begin)))
        chance = 2 * soon / (end - begin)
        for other, moments in falls_idle.items():
            low, high = np.searchsorted(moments, (begin, end + soon), side="right").tolist()
            if other != lane and low < high:
                total["thread-waited", other] += 1
                if moments[high - 1] >= end - soon:
                    done = min(int(moments[high - 1]), end)
                    of_thread = prompt.setdefault(("thread-waited", other), [])
                    of_thread.append(((high - low) * chance, lane, begin, other, done))
        kernel = launches.last_by_thread(thread, begin)
        if kernel >= 0 and time.end[kernel] <= begin:
            continue  # nothing of its own that it could wait for
        key = "host-spun", int(device.name[kernel])
        total[key] += 1
        source = launches.last_ended(end - soon, end + soon, begin)
        if source >= 0 and drained[source] >= end:
            if time.end[source] > end:  # it tells the host before it ends: at least what is before it is over
                source = int(launches.before[source])
            ended = (int(time.lane[source]), int(time.end[source])) if source >= 0 else (lane, begin)
            prompt.setdefault(key, []).append((chance, lane, begin, *ended))
    for key, ended_so in prompt.items():
        if 2 * len(ended_so) > total[key] and math.prod(chance for chance, *_ in ended_so) < CHANCE:
            kind = EdgeKind.INTER_THREAD if key[0] == "thread-waited" else EdgeKind.SYNCHRONISATION
            for _, lane, begin, source, done in ended_so:
                if done > begin:
                    found.wait(lane, begin, done)
                    found.edge(kind, (source, done), (lane, done))
                    found.findings.add(key[0])


def _falls_idle(time: Timeline) -> dict[int, np.ndarray]:
    """CPU lane → the moments from which on it has no event for long, ns; none for a single lane."""
    segments = time.self_time
    idle = (segments.owner < 0) & (segments.end - segments.start >= LONG_NS) & (segments.start > time.begin)
    of_lane = rows_by_value(segments.lane)
    return {
        lane: np.append(segments.start[rows[idle[rows]]], segments.end[rows[-1]])
        for lane, rows in (of_lane.items() if len(of_lane) > 1 else ())
    }


def _gaps(rank: LinkedRank, found: Dependencies) -> list[tuple[int, int, int, int, np.ndarray]]:
    """(thread, lane, begin, end, rows of the polling calls in it) of each long time of a thread without work:
    outside of operators, in polling calls, or long in an operator itself, and not yet a wait."""
    device, time = rank.device, rank.timeline
    polling = named(device, POLLING.fullmatch) & is_call(device)
    segments, waits, gaps = time.self_time, found.waits, []
    lasting = rows_by_value(segments.lane, np.flatnonzero(segments.start < segments.end))
    waits = waits[np.argsort(waits[:, 1], kind="stable")]
    of_lane, none = rows_by_value(waits[:, 0]), waits[:0]
    lanes, first_of = np.unique(time.lane, return_index=True)
    threads = dict(zip(lanes.tolist(), device.thread[first_of].tolist(), strict=True))
    for lane, at in lasting.items():
        owner, start, end = segments.owner[at], segments.start[at], segments.end[at]
        category = np.where(owner >= 0, device.category[owner], ANNOTATION)
        asks = polling[owner] & (owner >= 0)
        between = np.append(False, asks[:-1]) & np.append(asks[1:], False)
        in_operator = category == CPU_OP
        idle = np.where(in_operator & (end - start >= LONG_NS), 2, 0)
        idle[(category == ANNOTATION) | asks | (in_operator & between)] = 1
        first = np.flatnonzero((idle > 0) & (idle != np.append(0, idle[:-1])))
        last = np.flatnonzero((idle > 0) & (idle != np.append(idle[1:], 0)))
        own, thread = waits[of_lane[lane]] if lane in of_lane else none, threads.get(lane, -1)
        reach = np.maximum.accumulate(np.append(-1, own[:, 2]))
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            begin, until = int(start[a]), int(end[b])
            if until - begin >= LONG_NS and reach[np.searchsorted(own[:, 1], until)] <= begin:
                gaps.append((thread, lane, begin, until, owner[a : b + 1][asks[a : b + 1]]))
    return gaps
