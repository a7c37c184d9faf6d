"""Dependencies around a device: launches, blocking copies, and calls that wait for the device."""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import first_rows
from chakra_et.convert.graph import stream_waits
from chakra_et.convert.graph.dependencies import Collector, EdgeKind
from chakra_et.convert.graph.launches import BEFORE_RECORDING, Launches, StreamOrder, launches_of
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.timeline import Lane, Timeline
from chakra_et.traces.device_format import DRIVER, MEMCPY, RUNTIME
from chakra_et.traces.fields import as_number

# Kineto aligns the clocks of host and device up to this difference.
CLOCK_TOLERANCE_NS = 5_000


def find(rank: LinkedRank, found: Collector) -> None:
    """Add the dependencies of device work, and of the threads that wait for it."""
    launches = launches_of(rank.device, rank.timeline, rank.calls)
    if len(launches.gpu):
        _launches(rank, launches, found)
        _overlapping_lanes(rank.timeline, found)
        _further_messages(rank, found)
        order = StreamOrder(rank.device, launches)
        stream_waits.find(rank, launches, order, found)
        _device_waits(rank, launches, order, found)


def _launches(rank: LinkedRank, launches: Launches, found: Collector) -> None:
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
    blocking = (device.category[known] == MEMCPY) & (end[known] <= end[call]) & (end[known] > start[call])
    free = np.where(before >= 0, end[before], BEFORE_RECORDING)
    # A blocking copy on a busy stream blocks the caller from the start of the call.
    at = np.where(blocking & (free > start[call]), np.minimum(start[call], start[known]), at)
    kind = np.full(len(known), EdgeKind.LAUNCH)
    found.edges.append(np.stack([kind, time.lane[call], at, time.lane[known], start[known]], axis=1))
    for k in np.flatnonzero(blocking).tolist():
        lane, done = int(time.lane[call[k]]), int(end[known[k]])
        found.wait(lane, int(at[k]), done)
        found.edge(EdgeKind.SYNCHRONISATION, (int(time.lane[known[k]]), done), (lane, done))
    found.findings.add("blocking-copy", int(blocking.sum()))
    orphans = gpu[calls[gpu] < 0]
    found.findings.add("no-launch", len(orphans))
    first_of_lane = gpu[first_rows(time.lane[gpu])[1]]
    for row in orphans[np.isin(orphans, first_of_lane)].tolist():
        moment = int(start[row])
        found.edge(EdgeKind.INTER_THREAD, (time.main, moment), (int(time.lane[row]), moment))


def _overlapping_lanes(time: Timeline, found: Collector) -> None:
    """Add stream-order edges between kernels that overlap on a stream and that stream's other kernels."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for number, lane in enumerate(time.lanes):
        if lane.kind == "gpu":
            lanes.setdefault((lane.device, lane.stream), []).append(number)
    for of_stream in lanes.values():
        if len(of_stream) < 2:
            continue
        rows = {lane: np.flatnonzero(time.lane == lane) for lane in of_stream}
        for own, other in ((a, b) for a in of_stream for b in of_stream if a != b):
            start, end = time.start[rows[own]], time.end[rows[other]]
            at = np.searchsorted(end, start, side="right") - 1
            first = np.flatnonzero(np.diff(at, prepend=-1) > 0)  # the order on the lane implies the rest
            kind = np.full(len(first), EdgeKind.STREAM_ORDER)
            places = np.full(len(first), other), end[at[first]], np.full(len(first), own), start[first]
            found.edges.append(np.stack([kind, *places], axis=1))


def _further_messages(rank: LinkedRank, found: Collector) -> None:
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


def _device_waits(rank: LinkedRank, launches: Launches, order: StreamOrder, found: Collector) -> None:
    """Edges for calls that block the CPU until the device is done."""
    device, time, gpu = rank.device, rank.timeline, launches.gpu
    blocking = np.array([name.endswith("Synchronize") for name in device.names], dtype=bool)[device.name]
    calls = np.flatnonzero(
        blocking & ((device.category == RUNTIME) | (device.category == DRIVER)) & (time.lane >= 0)
    )
    if not len(calls):
        return
    call_of = stream_waits.call_by_correlation(device)
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
            stream = (int(device.device[sync_row]), int(as_number(args.wait_on_stream)))
            sources = [order.last_before(stream, moment)]
        else:
            at = int(np.searchsorted(ends, end + CLOCK_TOLERANCE_NS, side="right")) - 1
            while at >= 0 and ends[at] > begin and launches.time[by_end[at]] >= begin:
                at -= 1
            sources = [int(by_end[at])] if at >= 0 and ends[at] > begin else []
            found.findings.add("sync-by-time", len(sources))
        for source in sources:
            if source < 0 or time.end[source] > end + CLOCK_TOLERANCE_NS:
                continue
            done = int(time.end[source])
            found.wait(lane, begin, min(done, end))
            found.edge(EdgeKind.SYNCHRONISATION, (int(time.lane[source]), done), (lane, max(done, begin)))
