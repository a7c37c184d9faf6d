"""Found around a device: launches, blocking copies, streams that wait for events, calls that wait for it."""

from __future__ import annotations

import numpy as np

from chakra_et.graph.dependencies import EdgeKind, Found
from chakra_et.graph.linked import LinkedRank
from chakra_et.graph.timeline import Timeline
from chakra_et.traces.device import DRIVER, KERNEL, MEMCPY, RUNTIME, SYNC, DeviceTrace
from chakra_et.traces.fields import as_number

# Clocks of host and device differ by up to this much after Kineto has aligned them.
CLOCK_TOLERANCE_NS = 5_000


def find(rank: LinkedRank, found: Found) -> None:
    """Add the dependencies of the work on devices, and of the threads that wait for it."""
    device, time, calls, causes = rank.device, rank.timeline, rank.calls, found
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    if len(gpu):
        launched = _launches(device, time, calls, gpu, causes)
        _beside_each_other(time, causes)
        _stream_waits(device, time, launched, gpu, causes)
        _device_waits(device, time, launched, gpu, causes)


def _launches(
    device: DeviceTrace, time: Timeline, calls: np.ndarray, gpu: np.ndarray, causes: Found
) -> np.ndarray:
    """Launch edges, and blocking copies. Returns for each row the ns at which it was launched."""
    start, end = time.start, time.end
    launched = device.start.copy()
    known = gpu[calls[gpu] >= 0]
    call = calls[known]
    launched[known] = np.minimum(start[call], start[known])
    at = np.minimum(start[known], end[call])
    before = _before_on_stream(time, gpu)
    for k in np.flatnonzero(device.category[call] < RUNTIME).tolist():
        # Only the operator is known, not the call in it: no sooner than what the stream was given before.
        row, previous = known[k], before[known[k]]
        launched[row] = at[k] = min(
            max(start[call[k]], launched[previous] if previous >= 0 else 0), start[row]
        )
    causes.note(
        "device work that starts before the call that launches it", int((start[known] < start[call]).sum())
    )
    blocking = (device.category[known] == MEMCPY) & (end[known] <= end[call]) & (end[known] > start[call])
    free = np.where(before[known] >= 0, end[before[known]], np.iinfo(np.int64).min)
    # A blocking copy whose stream was busy held the caller from the beginning of the call.
    at = np.where(blocking & (free > start[call]), np.minimum(start[call], start[known]), at)
    rows = np.stack(
        [np.full(len(known), EdgeKind.LAUNCH), time.lane[call], at, time.lane[known], start[known]], axis=1
    )
    causes.edges.append(rows)
    for k in np.flatnonzero(blocking).tolist():
        lane, done = int(time.lane[call[k]]), int(end[known[k]])
        causes.wait(lane, int(at[k]), done)
        causes.edge(EdgeKind.SYNCHRONISATION, (int(time.lane[known[k]]), done), (lane, done))
    causes.note("blocking copies", int(blocking.sum()))
    orphans = gpu[calls[gpu] < 0]
    causes.note("device work without a launching call, attached by stream and time", len(orphans))
    first_of_lane = gpu[np.unique(time.lane[gpu], return_index=True)[1]]
    for row in np.intersect1d(orphans, first_of_lane).tolist():
        moment = int(start[row])
        causes.edge(EdgeKind.INTER_THREAD, (time.main, moment), (int(time.lane[row]), moment))
    return launched


def _before_on_stream(time: Timeline, gpu: np.ndarray) -> np.ndarray:
    """For each row the row that its stream did before it, -1 for the first (and off the GPU)."""
    before = np.full(len(time.lane), -1, dtype=np.int64)
    order = gpu[np.lexsort((time.start[gpu], time.lane[gpu]))]
    same = time.lane[order[1:]] == time.lane[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _beside_each_other(time: Timeline, causes: Found) -> None:
    """Order work that has a lane of its own, as it overlaps on its stream, with what it does not overlap."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for number, lane in enumerate(time.lanes):
        if lane.kind == "gpu":
            lanes.setdefault((lane.device, lane.stream), []).append(number)
    for of_stream in lanes.values():
        if len(of_stream) < 2:
            continue
        rows = {lane: np.flatnonzero(time.lane == lane) for lane in of_stream}
        for lane, other in ((a, b) for a in of_stream for b in of_stream if a != b):
            start, end = time.start[rows[lane]], time.end[rows[other]]
            at = np.searchsorted(end, start, side="right") - 1
            first = np.flatnonzero(np.diff(at, prepend=-1) > 0)  # the order on its lane says the rest
            kind = np.full(len(first), EdgeKind.STREAM_ORDER)
            places = np.full(len(first), other), end[at[first]], np.full(len(first), lane), start[first]
            causes.edges.append(np.stack([kind, *places], axis=1))


class _Launched:
    """The work of each stream in launch order, to ask what was last launched before a moment."""

    def __init__(self, device: DeviceTrace, launched: np.ndarray, gpu: np.ndarray) -> None:
        self.streams: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        keys = np.stack([device.device[gpu], device.stream[gpu]], axis=1)
        for d, s in np.unique(keys, axis=0).tolist():
            rows = gpu[(keys == (d, s)).all(axis=1)]
            rows = rows[np.argsort(launched[rows], kind="stable")]
            self.streams[d, s] = (launched[rows], rows)

    def last_before(self, stream: tuple[int, int], moment: int) -> int:
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        at = int(np.searchsorted(times, moment, side="right")) - 1
        return int(rows[at]) if at >= 0 else -1

    def first_after(self, stream: tuple[int, int], moment: int) -> int:
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        at = int(np.searchsorted(times, moment, side="left"))
        return int(rows[at]) if at < len(rows) else -1


def _stream_waits(
    device: DeviceTrace, time: Timeline, launched: np.ndarray, gpu: np.ndarray, causes: Found
) -> None:
    """cudaStreamWaitEvent: from the work before the event's record to the work after the wait."""
    order = _Launched(device, launched, gpu)
    call_of = _call_by_correlation(device)
    recorded = 0
    for row, args in device.waits.items():
        if args.sync_kind != "Stream Wait Event":
            continue
        here = (int(device.device[row]), int(device.stream[row]))
        waiting_call = call_of.get(int(device.correlation[row]))
        record_call = call_of.get(int(as_number(args.record_correlation)))
        stream = as_number(args.wait_on_stream)
        if waiting_call is None or record_call is None or stream < 0:
            causes.note("stream waits whose event record is not in the trace")
            continue
        recorded += 1
        source = order.last_before((here[0], int(stream)), int(device.start[record_call]))
        target = order.first_after(here, int(device.start[waiting_call]))
        _stream_edge(time, source, target, causes)
    waiting = np.array([name.endswith("StreamWaitEvent") for name in device.names], dtype=bool)[device.name]
    calls = np.flatnonzero(waiting & (device.category == RUNTIME))
    if recorded or not len(calls):
        return
    by_thread = {}
    launching = np.flatnonzero(np.isin(np.arange(len(device)), gpu))
    causes.note("stream waits guessed by time, as the trace has no cuda_sync events", len(calls))
    launch_rows = launching[np.argsort(launched[launching], kind="stable")]
    launch_times = launched[launch_rows]
    for call in calls.tolist():
        moment = int(device.start[call])
        at = int(np.searchsorted(launch_times, moment, side="left"))
        if at == len(launch_rows):
            continue
        target = int(launch_rows[at])
        here = (int(device.device[target]), int(device.stream[target]))
        candidates = [order.last_before(stream, moment) for stream in order.streams if stream != here]
        done = [row for row in candidates if row >= 0 and time.end[row] <= time.start[target]]
        if done:
            source = max(done, key=lambda row: int(time.end[row]))
            by_thread[source, target] = True
    for source, target in by_thread:
        _stream_edge(time, source, target, causes)


def _stream_edge(time: Timeline, source: int, target: int, causes: Found) -> None:
    if source < 0 or target < 0 or source == target:
        return
    if time.end[source] > time.start[target]:
        causes.note("stream waits that contradict the times, left out")
        return
    causes.edge(
        EdgeKind.SYNCHRONISATION,
        (int(time.lane[source]), int(time.end[source])),
        (int(time.lane[target]), int(time.start[target])),
    )


def _call_by_correlation(device: DeviceTrace) -> dict[int, int]:
    rows = np.flatnonzero((device.category == RUNTIME) | (device.category == DRIVER))
    return dict(zip(device.correlation[rows].tolist(), rows.tolist(), strict=True))


def _device_waits(
    device: DeviceTrace, time: Timeline, launched: np.ndarray, gpu: np.ndarray, causes: Found
) -> None:
    """Calls that block the CPU until the device is done: the wait becomes an edge."""
    blocking = np.array([name.endswith("Synchronize") for name in device.names], dtype=bool)[device.name]
    calls = np.flatnonzero(blocking & ((device.category == RUNTIME) | (device.category == DRIVER)))
    if not len(calls):
        return
    order = _Launched(device, launched, gpu)
    call_of = _call_by_correlation(device)
    known = {int(device.correlation[row]): (row, args) for row, args in device.waits.items()}
    by_end = gpu[np.argsort(time.end[gpu], kind="stable")]
    ends = time.end[by_end]
    for call in calls.tolist():
        begin, end, lane = int(time.start[call]), int(time.end[call]), int(time.lane[call])
        sync_row, args = known.get(int(device.correlation[call]), (-1, None))
        name = device.names[device.name[call]]
        if "Device" in name or "Ctx" in name or "Context" in name:
            here = int(device.device[sync_row]) if sync_row >= 0 else -1
            sources = [
                order.last_before(stream, begin) for stream in order.streams if here in (-1, stream[0])
            ]
        elif args is not None and args.sync_kind == "Stream Sync":
            sources = [order.last_before((int(device.device[sync_row]), int(device.stream[sync_row])), begin)]
        elif args is not None and as_number(args.wait_on_stream) >= 0:
            record = call_of.get(int(as_number(args.record_correlation)))
            moment = int(device.start[record]) if record is not None else begin
            sources = [
                order.last_before((int(device.device[sync_row]), int(as_number(args.wait_on_stream))), moment)
            ]
        else:
            at = int(np.searchsorted(ends, end + CLOCK_TOLERANCE_NS, side="right")) - 1
            while at >= 0 and ends[at] > begin and launched[by_end[at]] >= begin:
                at -= 1
            sources = [int(by_end[at])] if at >= 0 and ends[at] > begin else []
            causes.note("synchronising calls matched by time", len(sources))
        for source in sources:
            if source < 0 or time.end[source] > end + CLOCK_TOLERANCE_NS:
                continue
            done = int(time.end[source])
            causes.wait(lane, begin, min(done, end))
            causes.edge(EdgeKind.SYNCHRONISATION, (int(time.lane[source]), done), (lane, max(done, begin)))
