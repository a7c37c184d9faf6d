"""Find the dependencies of one rank: launches, waits, streams, and threads that wake each other."""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import first_rows
from chakra_et.convert.graph import host_waits, stream_waits, thread_dependencies
from chakra_et.convert.graph.launches import BEFORE_RECORDING, Launches, StreamOrder, launches_of
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.convert.graph.timeline import Lane, Timeline, named
from chakra_et.traces.device_format import MEMCPY, RUNTIME


def find_dependencies(rank: LinkedRank) -> Dependencies:
    """All dependencies between threads, streams and communication of a rank."""
    found = Dependencies(rank.timeline.lanes)
    launches = launches_of(rank.device, rank.timeline, rank.calls)
    if len(launches.gpu):
        _launches(rank, launches, found)
        _overlapping_lanes(rank.timeline, found)
        _further_messages(rank, found)
        order = StreamOrder(rank.device, launches)
        stream_waits.find(rank, launches, order, found)
        host_waits.find(rank, launches, order, found)
    thread_dependencies.find(rank, found)
    if len(launches.gpu):
        host_waits.find_spinning(rank, launches, found)
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
    blocking = copies & (end[known] <= end[call]) & (end[known] > start[call])
    free = np.where(before >= 0, end[before], BEFORE_RECORDING)
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
    found.findings.add("no-launch", len(orphans))
    first_of_lane = gpu[first_rows(time.lane[gpu])[1]]
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
