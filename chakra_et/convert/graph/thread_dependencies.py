"""Dependencies between threads: CPU communication and its waits, threads that wake each other, backward."""

from __future__ import annotations

import re
from bisect import bisect_left

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.dependencies import Collector, EdgeKind
from chakra_et.convert.graph.link import Link
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.timeline import Lane, Timeline
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, KERNEL
from chakra_et.traces.host import HostTrace, tensors

# A blocked wait ends within this time after the end of the communication.
WAKE_UP_NS = 200_000
# A preempted worker may record the end of communication up to LATE_NS after the waiting thread resumed, if
# that thread had waited at least LATE_FACTOR times as long.
LATE_NS = 5_000_000
LATE_FACTOR = 20
WAIT_OPERATOR = re.compile(r"(^|::|\.)wait(_tensor)?$")
"""Operators that only wait, however late the thread resumes."""

# Of other collectives a rank may wait and not use the data.
_RESULT_FOR_ALL = frozenset(
    (
        CollectiveType.ALL_REDUCE,
        CollectiveType.ALL_GATHER,
        CollectiveType.REDUCE_SCATTER,
        CollectiveType.ALL_TO_ALL,
    )
)

# (group,) or (group, type, peer), and the number of the lane.
_LaneKey = tuple[object, ...]


def find(rank: LinkedRank, found: Collector) -> None:
    """Add the dependencies between threads, and a lane for each group that communicates on the CPU."""
    items = rank.communication.items
    _communication(rank.host, rank.device, rank.link, rank.timeline, items, found)
    _threads(rank.device, rank.timeline, found)
    _forward_backward(rank.device, rank.timeline, found)


def _communication(
    host: HostTrace,
    device: DeviceTrace,
    linked: Link,
    time: Timeline,
    items: list[Communication],
    found: Collector,
) -> None:
    """Place CPU communication on lanes of its group, with edges from its operator and to its waiter."""
    lanes: dict[_LaneKey, int] = {}
    busy: dict[int, int] = {}
    started: dict[_LaneKey, int] = {}
    callers: dict[int, _Caller] = {}
    users = _users(
        host, linked, time, frozenset().union(*(item.storages for item in items if not item.on_gpu))
    )
    for number, item in enumerate(items):
        if item.on_gpu:
            continue
        begin, end = int(device.start[item.event]), int(device.end[item.event])
        caller = int(time.lane[item.launch]) if item.launch >= 0 else time.main
        issued = min(begin, int(time.end[item.launch])) if item.launch >= 0 else begin
        if caller not in callers:
            callers[caller] = _Caller(time, caller, users, items)
        if not item.ended:
            used = callers[caller].uses(item, max(begin, issued))
            end = min(end, used) if used is not None else end
        resumed = _resumed_before(device, time, callers[caller], item, begin, issued, end)
        if resumed is not None:
            end = resumed
            found.findings.add("communication-ends-late")
        key = (
            (item.group.name,) if item.type is NodeType.COMM_COLL else (item.group.name, item.type, item.peer)
        )
        lane = _free_lane(found, lanes, busy, key, item, end)
        # Time in the backend's queue counts as communication, unless the group was still busy.
        from_ = max(issued, busy.get(lane, issued))
        # Of two threads of gloo, the one with the later call may start first. Simulators match the
        # collectives of a group by their order, so it waits for the earlier one to start, unless it ended
        # before.
        after = started.get(key, from_ - 1) + 1
        if from_ < after < end and item.type is NodeType.COMM_COLL:
            from_ = after
        started[key] = max(from_, after - 1)
        found.placed[number] = (lane, from_, end)
        busy[lane] = end
        found.edge(EdgeKind.LAUNCH, (caller, issued), (lane, from_))
        _wait_for(device, time, item, callers[caller], lane, end, found)


def _free_lane(
    found: Collector,
    lanes: dict[_LaneKey, int],
    busy: dict[int, int],
    key: _LaneKey,
    item: Communication,
    end: int,
) -> int:
    """The group's lane, or a further one if this operation ended before the previous one on that lane."""
    for number in range(len(lanes) + 1):
        lane = lanes.get((*key, number))
        if lane is None:
            direction = (
                "" if item.type is NodeType.COMM_COLL else f" {item.type.name[5:].lower()} {item.peer}"
            )
            label = f"group {item.group.name}{direction}" + f" #{number}" * (number > 0)
            lane = lanes[(*key, number)] = found.new_lane(Lane("communication", label))
            return lane
        if busy[lane] <= end:
            return lane
    raise AssertionError("one of the lanes above is free")


def _users(
    host: HostTrace, linked: Link, time: Timeline, storages: frozenset[int]
) -> dict[tuple[int, int], list[int]]:
    """(lane, storage) → start times of the operators with an input tensor in that storage, ascending."""
    users: dict[tuple[int, int], list[int]] = {}
    if not storages:
        return users
    rows = np.flatnonzero((linked.host_row >= 0) & (time.lane >= 0))
    for row, host_row, lane in zip(
        rows.tolist(), linked.host_row[rows].tolist(), time.lane[rows].tolist(), strict=True
    ):
        for storage, _, _ in tensors(host.inputs[0][host_row]):
            if storage in storages:
                users.setdefault((lane, storage), []).append(int(time.start[row]))
    return users


class _Caller:
    """A thread that starts communication: its self time, the starts of its events and of its collectives by
    group, in time order."""

    def __init__(
        self, time: Timeline, lane: int, users: dict[tuple[int, int], list[int]], items: list[Communication]
    ) -> None:
        self.time, self.lane, self.users = time, lane, users
        self.segments = np.flatnonzero(time.self_time.lane == lane)
        self.segment_starts = time.self_time.start[self.segments]
        self.starts = time.start[time.lane == lane]
        self.calls: dict[str, list[int]] = {}
        for item in items:
            if item.launch >= 0 and not item.is_message and time.lane[item.launch] == lane:
                self.calls.setdefault(item.group.name, []).append(int(time.start[item.launch]))
        for calls in self.calls.values():
            calls.sort()

    def uses(self, item: Communication, since: int) -> int | None:
        """When the thread first uses the data of ``item`` from ``since`` on, None for never."""
        found = [times[at] for storage in item.storages if (times := self.users.get((self.lane, storage)))
                 and (at := bisect_left(times, since)) < len(times)]  # fmt: skip
        return min(found, default=None)

    def went_on(self, item: Communication, moment: int) -> bool:
        """Whether the thread had other work after it started ``item``, and starts the group's next collective
        after ``moment`` and before it uses the data: then it didn't wait for ``item`` at ``moment``.

        gloo's worker may take the core of the thread in the middle of a backward pass, which then seems to
        wait until the worker is done.
        """
        if item.launch < 0 or item.collective not in _RESULT_FOR_ALL:
            return False
        began = np.searchsorted(self.starts, (self.time.end[item.launch], moment), side="left")
        used, calls = self.uses(item, moment), self.calls[item.group.name]
        at = bisect_left(calls, moment)
        return bool(began[0] < began[1]) and used is not None and at < len(calls) and calls[at] < used


def _wait_for(
    device: DeviceTrace, time: Timeline, item: Communication, thread: _Caller, lane: int, end: int,
    found: Collector,
) -> None:  # fmt: skip
    """Add the wait of the thread that started a communication."""
    segments, of_lane, caller = time.self_time, thread.segments, thread.lane
    at = int(np.searchsorted(thread.segment_starts, end, side="left")) - 1
    launched = int(time.end[item.launch]) if item.launch >= 0 else end
    used = thread.uses(item, end)
    if at >= 0 and _can_wait(device, int(segments.owner[of_lane[at]])):
        begin, until = int(segments.start[of_lane[at]]), int(segments.end[of_lane[at]])
        began = np.searchsorted(thread.starts, (launched, end), side="left")
        at_once = began[0] >= began[1]
        prompt = until - end <= WAKE_UP_NS and end - begin > 4 * (until - end)
        prompt = prompt and not thread.went_on(item, end)
        only_waits = _only_waits(device, int(segments.owner[of_lane[at]]))
        if begin < end <= until and (at_once or used == until or prompt or only_waits):
            # For an operator that only waits, the time after the end is scheduling delay, not work.
            resumed = until if only_waits and until - end > WAKE_UP_NS else end
            found.wait(caller, max(begin, min(launched, end)), resumed)
            found.edge(EdgeKind.COLLECTIVE, (lane, end), (caller, resumed))
            found.findings.add("wait-blocked")
            return
    if used is None:
        found.findings.add("wait-not-found")
        return
    found.edge(EdgeKind.COLLECTIVE, (lane, end), (caller, used))
    found.findings.add("wait-done")


def _resumed_before(
    device: DeviceTrace, time: Timeline, thread: _Caller, item: Communication, begin: int, issued: int,
    end: int,
) -> int | None:  # fmt: skip
    """When the thread that waited for a communication resumed, if that is before the recorded end.

    ``begin``, ``end``: of the record; ``issued``: launch time. None if the thread still waited at ``end``
    or did not wait.
    """
    segments, of_lane = time.self_time, thread.segments
    at = int(np.searchsorted(thread.segment_starts, end, side="left")) - 1
    while at >= 0:
        segment = int(of_lane[at])
        started, until = max(int(segments.start[segment]), issued), int(segments.end[segment])
        waits = _can_wait(device, int(segments.owner[segment])) and not thread.went_on(item, until)
        if until >= end:
            if waits and end - started > LATE_FACTOR * (until - end):
                return None
        elif end - until > LATE_NS or until <= begin:
            return None
        elif waits and until - started > LATE_FACTOR * (end - until):
            return until
        at -= 1
    return None


def _outside(device: DeviceTrace, owner: int) -> bool:
    """Whether self time with this owner is outside all operators."""
    return owner < 0 or device.category[owner] == ANNOTATION


def _can_wait(device: DeviceTrace, owner: int) -> bool:
    """Whether self time with this owner may be a wait: outside operators, or in one that may block."""
    if _outside(device, owner):
        return True
    name = device.names[device.name[owner]]
    return name.startswith(("c10d::", "autograd::engine::")) or "wait" in name


def _only_waits(device: DeviceTrace, owner: int) -> bool:
    """Whether self time with this owner belongs to an operator that only waits."""
    return owner >= 0 and bool(WAIT_OPERATOR.search(device.names[device.name[owner]]))


def _threads(device: DeviceTrace, time: Timeline, found: Collector) -> None:
    """Edges to and from other CPU threads: the main thread wakes them, and waits for autograd threads."""
    others = [lane for lane, info in enumerate(time.lanes) if info.kind == "cpu" and lane != time.main]
    if not others:
        return
    segments = time.self_time
    main = np.flatnonzero(segments.lane == time.main)
    working = main[segments.owner[main] >= 0]
    main_start, main_end, main_owner = segments.start[main], segments.end[main], segments.owner[main]
    boundaries = (
        np.sort(np.concatenate([segments.start[working], segments.end[working]]), kind="stable")
        if len(working)
        else main_start
    )
    autograd = np.array(
        [n.startswith("autograd::engine") or "Backward" in n for n in device.names], dtype=bool
    )
    engine = _engine_spans(device, time)
    outside_backward = boundaries[~_inside(engine, boundaries)]
    for lane in others:
        own = np.flatnonzero(segments.lane == lane)
        own_start, own_end = segments.start[own], segments.end[own]
        idle = own[segments.owner[own] < 0]
        # A thread was woken from outside if the main thread made progress while it was idle. While the main
        # thread only accumulates gradients, the backward pass continues: a gap is the engine's own time.
        owners = unique(segments.owner[own])
        moments = outside_backward if autograd[device.name[owners[owners >= 0]]].any() else boundaries
        seen = np.searchsorted(moments, segments.end[idle], "left") - np.searchsorted(
            moments, segments.start[idle], "right"
        )
        woken = idle[(seen > 0) | (segments.start[idle] == time.begin)]
        for number, segment in enumerate(woken.tolist()):
            moment = int(segments.end[segment])
            found.waits.append((lane, int(segments.start[segment]), moment))
            found.edge(EdgeKind.INTER_THREAD, (time.main, moment), (lane, moment))
            until = (
                int(segments.start[woken[number + 1]])
                if number + 1 < len(woken)
                else int(segments.end[own[-1]])
            )
            first = np.searchsorted(own_start, moment, side="left")
            burst = own[first : np.searchsorted(own_end, until, side="right")]
            owners = unique(segments.owner[burst])
            if not autograd[device.name[owners[owners >= 0]]].any():
                continue
            low = int(np.searchsorted(main_end, moment, side="right"))
            high = int(np.searchsorted(main_start, until, side="left"))
            blocked = [at for at in range(low, high) if _outside(device, int(main_owner[at]))]
            for at in blocked:
                # The main thread may wake in between for a task of its own, such as a gradient to accumulate.
                freed = min(until, int(main_end[at]))
                found.wait(time.main, max(moment, int(main_start[at])), freed)
                found.edge(EdgeKind.INTER_THREAD, (lane, freed), (time.main, freed))
            if high - 1 not in blocked and _inside(engine, np.array([until]))[0]:
                # Busy with a task of its own when the other thread finished, it would have waited afterwards.
                later = (at for at in range(high, len(main)) if _outside(device, int(main_owner[at])))
                rest = next(later, high - 1)
                if rest >= high:
                    found.edge(EdgeKind.INTER_THREAD, (lane, until), (time.main, int(main_start[rest])))
            found.findings.add("backward-waited", bool(blocked))


def _engine_spans(device: DeviceTrace, time: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Starts, and running maximum of the ends, of the operators that autograd runs on the main thread."""
    engine = np.array([name.startswith("autograd::engine") for name in device.names], dtype=bool)
    rows = np.flatnonzero(engine[device.name] & (time.lane == time.main))
    return time.start[rows], np.maximum.accumulate(time.end[rows])


def _inside(spans: tuple[np.ndarray, np.ndarray], moments: np.ndarray) -> np.ndarray:
    """bool[moments]: whether each moment is in one of the spans."""
    starts, reach = spans
    at = np.searchsorted(starts, moments, side="right") - 1
    inside = at >= 0
    inside[inside] = reach[at[inside]] >= moments[inside]
    return inside


def _forward_backward(device: DeviceTrace, time: Timeline, found: Collector) -> None:
    """Edges from forward operators to their backward on another thread, by flow or sequence number."""
    if len([lane for lane in time.lanes if lane.kind == "cpu"]) < 2:
        return
    pairs: list[tuple[int, int]] = []
    by_place: dict[tuple[int, int], int] = {}
    for lane, info in enumerate(time.lanes):
        if info.kind == "cpu" and len(device.forward_backward):
            rows = np.flatnonzero(time.lane == lane)
            # Of events with the same start: the outermost with a sequence number, or else the outermost.
            for some in (rows, rows[device.sequence[rows] >= 0]):
                backwards = some[::-1]
                places = zip(device.thread[backwards].tolist(), time.start[backwards].tolist(), strict=True)
                by_place |= dict(zip(places, backwards.tolist(), strict=True))
    for (thread_f, ts_f), (thread_b, ts_b) in device.forward_backward.tolist():
        source, target = by_place.get((thread_f, ts_f)), by_place.get((thread_b, ts_b))
        if source is not None and target is not None:
            pairs.append((source, target))
    if not len(device.forward_backward):
        numbered = np.flatnonzero((device.sequence >= 0) & (time.lane >= 0) & (device.category < KERNEL))
        forward = {int(device.sequence[row]): int(row) for row in numbered if device.forward_thread[row] <= 0}
        backward = {
            int(device.sequence[row]): int(row) for row in numbered[::-1] if device.forward_thread[row] > 0
        }
        pairs = [(forward[number], row) for number, row in backward.items() if number in forward]
    for source, target in pairs:
        if time.lane[source] != time.lane[target] and time.end[source] <= time.start[target]:
            found.edge(
                EdgeKind.INTER_THREAD,
                (int(time.lane[source]), int(time.end[source])),
                (int(time.lane[target]), int(time.start[target])),
            )
