"""Dependencies between threads: CPU communication and its waits, threads that wake each other, backward."""

from __future__ import annotations

import re
from bisect import bisect_left

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.convert.graph.timeline import Lane, Timeline, named
from chakra_et.et.columns import FOR_ALL
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, KERNEL, RUNTIME
from chakra_et.traces.host import tensors

# A blocked wait ends within this time after the end of the communication.
WAKE_UP_NS = 200_000
# A preempted worker may record the end of communication up to LATE_NS after the waiting thread resumed, if
# that thread had waited at least LATE_FACTOR times as long.
LATE_NS = 5_000_000
LATE_FACTOR = 20
WAIT_OPERATOR = re.compile(r"(^|::|\.)wait(_tensor)?$")
"""Operators that only wait, however late the thread resumes."""


def find(rank: LinkedRank, found: Dependencies) -> None:
    """Add the dependencies between threads, and a lane for each group that communicates on the CPU."""
    _communication(rank, found)
    _threads(rank.device, rank.timeline, found)
    _forward_backward(rank.device, rank.timeline, found)


def _communication(rank: LinkedRank, found: Dependencies) -> None:
    """Place CPU communication on lanes of its group, with edges from its operator and to its waiter."""
    device, time, items = rank.device, rank.timeline, rank.communication.items
    lanes: dict[tuple[object, ...], list[int]] = {}
    busy: dict[int, int] = {}
    started: dict[tuple[object, ...], int] = {}
    callers: dict[int, _Caller] = {}
    # (lane, storage) → start times of the operators with an input tensor in that storage, ascending.
    users: dict[tuple[int, int], list[int]] = {}
    storages = frozenset().union(*(item.storages for item in items if not item.on_gpu))
    host_row = rank.host_row
    rows = np.flatnonzero((host_row >= 0) & (time.lane >= 0)) if storages else host_row[:0]
    columns = (column[rows].tolist() for column in (time.lane, time.start, host_row))
    for on_lane, begin, at in zip(*columns, strict=True):
        for storage, _, _ in tensors(rank.host.inputs[0][at]):
            if storage in storages:
                users.setdefault((on_lane, storage), []).append(begin)
    copying = np.isin(device.thread, device.thread[[item.event for item in items if not item.on_gpu]])
    copying = np.isin(device.thread, device.thread[copying & (device.category == RUNTIME)])
    of_thread = rows_by_value(device.thread, np.flatnonzero(copying & (time.lane >= 0)))
    for number, item in enumerate(items):
        if item.on_gpu:
            continue
        begin, end = int(device.start[item.event]), int(device.end[item.event])
        lane = int(time.lane[item.launch]) if item.launch >= 0 else time.main
        issued = min(begin, int(time.end[item.launch])) if item.launch >= 0 else begin
        if lane not in callers:
            callers[lane] = _Caller(rank, lane, users)
        caller = callers[lane]
        resumed = caller.resumed_before(item, begin, issued, end)
        if resumed is not None:
            end = resumed
            found.findings.add("communication-ends-late")
        # With tensors on a GPU the backend's thread copies them to the host, and back afterwards.
        rows = of_thread.get(int(device.thread[item.event]), np.zeros(0, int))
        ended, copies = end, _between_copies(time, rows[time.lane[rows] != caller.lane], begin, end)
        worker = caller.lane
        if copies is not None:
            worker, first, since, end = copies
            found.edge(EdgeKind.LAUNCH, (caller.lane, issued), (worker, first))
            found.wait(worker, since, end)
            issued = since
        key = (item.group.name, item.type, item.peer) if item.is_message else (item.group.name,)
        # The group's lane, or a further one if this operation ended before the previous one on that lane.
        own = lanes.setdefault(key, [])
        lane = next((each for each in own if busy[each] <= end), -1)
        if lane < 0:
            direction = f" {item.type.name[5:].lower()} {item.peer}" if item.is_message else ""
            label = f"group {item.group.name}{direction}" + (f" #{len(own)}" if own else "")
            lane = found.new_lane(Lane("communication", label))
            own.append(lane)
        # Time in the backend's queue counts as communication, unless the group was still busy.
        from_ = max(issued, busy.get(lane, issued))
        # Of two threads of gloo, the one with the later call may start first. Simulators match the
        # collectives of a group by their order, so it waits for the earlier one to start, unless it ended
        # before.
        after = started.get(key, from_ - 1) + 1
        if from_ < after < end and not item.is_message:
            from_ = after
        started[key] = max(from_, after - 1)
        found.placed[number] = (lane, from_, end)
        busy[lane] = end
        found.edge(EdgeKind.LAUNCH, (worker, issued), (lane, from_))
        if copies is not None:
            found.edge(EdgeKind.COLLECTIVE, (lane, end), (worker, end))
        caller.wait_for(item, worker if copies else lane, ended, found)


def _between_copies(
    time: Timeline, rows: np.ndarray, begin: int, end: int
) -> tuple[int, int, int, int] | None:
    """Lane of the thread with these rows, the start of its first one within a communication from ``begin`` to
    ``end``, and from when to when it does nothing between two of them; None without such a time."""
    rows = rows[(time.start[rows] >= begin) & (time.end[rows] <= end)]
    gaps = time.start[rows[1:]] - np.maximum.accumulate(time.end[rows[:-1]])
    if gaps.max(initial=0) <= 0:
        return None
    at = int(gaps.argmax()) + 1
    until = int(time.start[rows[at]])
    return int(time.lane[rows[0]]), int(time.start[rows[0]]), until - int(gaps.max()), until


class _Caller:
    """A thread that starts communication: its self time, the starts of its events and of its collectives by
    group, in time order."""

    def __init__(self, rank: LinkedRank, lane: int, users: dict[tuple[int, int], list[int]]) -> None:
        self.device, self.time, self.lane, self.users = rank.device, rank.timeline, lane, users
        time = rank.timeline
        self.segments = np.flatnonzero(time.self_time.lane == lane)
        self.segment_starts = time.self_time.start[self.segments]
        self.starts = time.start[time.lane == lane]
        self.calls: dict[str, list[int]] = {}
        for item in rank.communication.items:
            if item.launch >= 0 and not item.is_message and time.lane[item.launch] == lane:
                self.calls.setdefault(item.group.name, []).append(int(time.start[item.launch]))
        for calls in self.calls.values():
            calls.sort()

    def segment(self, at: int) -> tuple[int, int, int]:
        """Start, end and owner of the thread's self time number ``at``."""
        time, row = self.time.self_time, self.segments[at]
        return int(time.start[row]), int(time.end[row]), int(time.owner[row])

    def last_before(self, moment: int) -> int:
        """The number of the last self time that started before ``moment``, -1 for none."""
        return int(np.searchsorted(self.segment_starts, moment, side="left")) - 1

    def uses(self, item: Communication, since: int) -> int | None:
        """When the thread first uses the data of ``item`` from ``since`` on, None for never."""
        found = [times[at] for storage in item.storages if (times := self.users.get((self.lane, storage)))
                 and (at := bisect_left(times, since)) < len(times)]  # fmt: skip
        return min(found, default=None)

    def was_idle(self, since: int, until: int) -> bool:
        """Whether the thread began nothing in this time."""
        began = np.searchsorted(self.starts, (since, until), side="left")
        return bool(began[0] >= began[1])

    def went_on(self, item: Communication, moment: int) -> bool:
        """Whether the thread had other work after it started ``item``, and starts the group's next collective
        after ``moment`` and before it uses the data: then it didn't wait for ``item`` at ``moment``.

        gloo's worker may take the core of the thread in the middle of a backward pass, which then seems to
        wait until the worker is done.
        """
        # Of other collectives a rank may wait and not use the data.
        if item.launch < 0 or item.collective not in FOR_ALL:
            return False
        used, calls = self.uses(item, moment), self.calls[item.group.name]
        at = bisect_left(calls, moment)
        idle = self.was_idle(self.time.end[item.launch], moment)
        return not idle and used is not None and at < len(calls) and calls[at] < used

    def can_wait(self, owner: int) -> bool:
        """Whether self time with this owner may be a wait: outside operators, or in one that may block."""
        if _outside(self.device, owner):
            return True
        name = self.device.names[self.device.name[owner]]
        return name.startswith(("c10d::", "autograd::engine::")) or "wait" in name

    def resumed_before(self, item: Communication, begin: int, issued: int, end: int) -> int | None:
        """When the thread that waited for a communication resumed, if that is before the recorded end.

        ``begin``, ``end``: of the record; ``issued``: launch time. None if the thread still waited at ``end``
        or did not wait.
        """
        for at in range(self.last_before(end), -1, -1):
            started, until, owner = self.segment(at)
            started = max(started, issued)
            waits = self.can_wait(owner) and not self.went_on(item, until)
            if until >= end:
                if waits and end - started > LATE_FACTOR * (until - end):
                    return None
            elif end - until > LATE_NS or until <= begin:
                return None
            elif waits and until - started > LATE_FACTOR * (end - until):
                return until
        return None

    def wait_for(self, item: Communication, lane: int, end: int, found: Dependencies) -> None:
        """Add the wait of the thread for a communication that it started."""
        at = self.last_before(end)
        launched = int(self.time.end[item.launch]) if item.launch >= 0 else end
        used = self.uses(item, end)
        begin, until, owner = self.segment(at) if at >= 0 else (end, end, -1)
        if begin < end <= until and self.can_wait(owner):
            prompt = until - end <= WAKE_UP_NS and end - begin > 4 * (until - end)
            prompt = prompt and not self.went_on(item, end)
            only_waits = owner >= 0 and bool(WAIT_OPERATOR.search(self.device.names[self.device.name[owner]]))
            if self.was_idle(launched, end) or used == until or prompt or only_waits:
                # For an operator that only waits, the time after the end is scheduling delay, not work.
                resumed = until if only_waits and until - end > WAKE_UP_NS else end
                found.wait(self.lane, max(begin, min(launched, end)), resumed)
                found.edge(EdgeKind.COLLECTIVE, (lane, end), (self.lane, resumed))
                found.findings.add("wait-blocked")
                return
        if used is None:
            found.findings.add("wait-not-found")
            return
        found.edge(EdgeKind.COLLECTIVE, (lane, end), (self.lane, used))
        found.findings.add("wait-done")


def _outside(device: DeviceTrace, owner: int) -> bool:
    """Whether self time with this owner is outside all operators."""
    return owner < 0 or bool(device.category[owner] == ANNOTATION)


def _threads(device: DeviceTrace, time: Timeline, found: Dependencies) -> None:
    """Edges to and from other CPU threads: the main thread wakes them, and waits for autograd threads."""
    segments = time.self_time
    main = np.flatnonzero(segments.lane == time.main)
    working = main[segments.owner[main] >= 0]
    main_start, main_end, main_owner = segments.start[main], segments.end[main], segments.owner[main]
    boundaries = np.sort(np.concatenate([segments.start[working], segments.end[working]]), kind="stable")
    autograd = named(device, lambda name: name.startswith("autograd::engine") or "Backward" in name)
    # Starts, and running maximum of the ends, of the operators that autograd runs on the main thread.
    engine = named(device, lambda name: name.startswith("autograd::engine")) & (time.lane == time.main)
    engine_starts, engine_ends = time.start[engine], np.maximum.accumulate(time.end[engine])

    def in_backward(moments: np.ndarray) -> np.ndarray:
        at = np.searchsorted(engine_starts, moments, side="right") - 1
        return (np.append(engine_ends, -1)[at] >= moments) & (at >= 0)

    outside_backward = boundaries[~in_backward(boundaries)]
    for lane, own in rows_by_value(segments.lane).items():
        if lane == time.main:
            continue
        own_start, own_end, owner = segments.start[own], segments.end[own], segments.owner[own]
        idle = own[owner < 0]
        # A thread was woken from outside if the main thread made progress while it was idle. While the main
        # thread only accumulates gradients, the backward pass continues: a gap is the engine's own time.
        moments = outside_backward if autograd[owner[owner >= 0]].any() else boundaries
        seen = np.searchsorted(moments, segments.end[idle], "left")
        seen -= np.searchsorted(moments, segments.start[idle], "right")
        woken = idle[(seen > 0) | (segments.start[idle] == time.begin)]
        sleeps = [*segments.start[woken].tolist()[1:], int(own_end[-1])]
        for segment, until in zip(woken.tolist(), sleeps, strict=False):
            moment = int(segments.end[segment])
            found.wait(lane, int(segments.start[segment]), moment)
            found.edge(EdgeKind.INTER_THREAD, (time.main, moment), (lane, moment))
            first = np.searchsorted(own_start, moment, side="left")
            burst = owner[first : np.searchsorted(own_end, until, side="right")]
            if not autograd[burst[burst >= 0]].any():
                continue
            low = int(np.searchsorted(main_end, moment, side="right"))
            high = int(np.searchsorted(main_start, until, side="left"))
            blocked = [at for at in range(low, high) if _outside(device, int(main_owner[at]))]
            for at in blocked:
                # The main thread may wake in between for a task of its own, such as a gradient to accumulate.
                freed = min(until, int(main_end[at]))
                found.wait(time.main, max(moment, int(main_start[at])), freed)
                found.edge(EdgeKind.INTER_THREAD, (lane, freed), (time.main, freed))
            if high - 1 not in blocked and in_backward(np.array([until]))[0]:
                # Busy with a task of its own when the other thread finished, it would have waited afterwards.
                later = (at for at in range(high, len(main)) if _outside(device, int(main_owner[at])))
                rest = next(later, -1)
                if rest >= 0:
                    found.edge(EdgeKind.INTER_THREAD, (lane, until), (time.main, int(main_start[rest])))
            found.findings.add("backward-waited", bool(blocked))


def _forward_backward(device: DeviceTrace, time: Timeline, found: Dependencies) -> None:
    """Edges from forward operators to their backward on another thread, by sequence number."""
    numbered = np.flatnonzero((device.sequence >= 0) & (time.lane >= 0) & (device.category < KERNEL))
    is_backward = device.forward_thread[numbered] > 0
    forward, backward = numbered[~is_backward], numbered[is_backward][::-1]
    by_number = dict(zip(device.sequence[forward].tolist(), forward.tolist(), strict=True))
    first: dict[int, int] = dict(zip(device.sequence[backward].tolist(), backward.tolist(), strict=True))
    for number, target in first.items():
        source = by_number.get(number, target)
        if time.lane[source] != time.lane[target] and time.end[source] <= time.start[target]:
            found.connect(EdgeKind.INTER_THREAD, time, source, target)
