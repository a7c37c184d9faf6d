"""Edges between streams: from the work before an event record to the work after the wait for the event.

With cuda_sync records (``enable_cuda_sync_events``), each wait has its event. Without them, the event of a
wait is unknown, and waits from before the recording are missing. Edges are then inferred: each asynchronous
communication is waited for once, in launch order; and an idle stream that resumes right after work on another
stream ended was waiting for that work.
"""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.blocking_calls import call_by_correlation
from chakra_et.convert.graph.dependencies import Collector, EdgeKind
from chakra_et.convert.graph.launches import BEFORE_RECORDING, Launches, StreamOrder
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import RUNTIME
from chakra_et.traces.fields import as_number

# A stream resumes within this time after the event (14 to 19 µs on an MI300X, 2 to 8 µs on CUDA).
RESUME_NS = 30_000
# A kernel starts within this time after its launch if nothing else delays it.
LAUNCH_NS = 25_000
# The gap between back-to-back kernels on a stream is below this.
BACK_TO_BACK_NS = 6_000


def find(rank: LinkedRank, launches: Launches, order: StreamOrder, found: Collector) -> None:
    """Add the edges between streams."""
    if _recorded(rank, order, found):
        return
    sources = _resumptions(rank, launches)
    found.findings.add("stream-wait-inferred", len(sources))
    _by_calls(rank, launches, sources, found)
    for target, source in sources.items():
        _stream_edge(rank, source, target, found)


def _recorded(rank: LinkedRank, order: StreamOrder, found: Collector) -> bool:
    """Add the waits in cuda_sync records; returns whether there are any."""
    device = rank.device
    call_of = call_by_correlation(device)
    recorded = False
    for row, args in device.waits.items():
        if args.sync_kind != "Stream Wait Event":
            continue
        here = (int(device.device[row]), int(device.stream[row]))
        waiting_call = call_of.get(int(device.correlation[row]))
        record_call = call_of.get(int(as_number(args.record_correlation)))
        stream = as_number(args.wait_on_stream)
        if waiting_call is None or record_call is None or stream < 0:
            found.findings.add("stream-wait-no-record")
            continue
        recorded = True
        source = order.last_before((here[0], int(stream)), int(device.start[record_call]))
        target = order.first_after(here, int(device.start[waiting_call]))
        if source >= 0 and target >= 0:
            _stream_edge(rank, source, target, found)
    return recorded


def _resumptions(rank: LinkedRank, launches: Launches) -> dict[int, int]:
    """Target → source. Targets start on an idle stream right after the source ended on another stream, and
    were launched long before."""
    device, time, gpu = rank.device, rank.timeline, launches.gpu
    start, end = time.start, time.end
    communication = rank.communication_rows.gpu
    stream_of = np.stack([device.device, device.stream], axis=1)
    by_end = gpu[np.argsort(end[gpu], kind="stable")]
    ends = end[by_end]
    found: dict[int, int] = {}
    before = launches.before[gpu]
    free = np.where(before >= 0, end[before], time.begin)
    # The end of the call, limited by the start: a slow launch ends after its kernel has started.
    called = np.where(rank.calls[gpu] >= 0, np.minimum(end[rank.calls[gpu]], start[gpu]), time.begin)
    early = (launches.time[gpu] == BEFORE_RECORDING) | (start[gpu] - called > LAUNCH_NS)
    idle = (start[gpu] - free > BACK_TO_BACK_NS) & early
    for row in gpu[idle].tolist():
        at = int(np.searchsorted(ends, start[row], side="right")) - 1
        while at >= 0 and start[row] - ends[at] <= RESUME_NS:
            source = int(by_end[at])
            other = (stream_of[source] != stream_of[row]).any()
            if other and communication[source] != communication[row] and launches.time[source] <= start[row]:
                found[row] = source
                break
            at -= 1
    return found


def _by_calls(rank: LinkedRank, launches: Launches, sources: dict[int, int], found: Collector) -> None:
    """Match calls that make a stream wait with the work that they wait for.

    The target of a call is the thread's next launch. A communication kernel waits for the compute stream that
    feeds it. Any other kernel waits for the oldest communication that was launched before and not yet waited
    for, or else for the work on another stream that ended last.
    """
    device, time, gpu = rank.device, rank.timeline, launches.gpu
    waiting = np.array([name.endswith("StreamWaitEvent") for name in device.names], dtype=bool)[device.name]
    waits = np.flatnonzero(waiting & (device.category == RUNTIME) & (time.lane >= 0))
    communication = rank.communication_rows.gpu
    launched = gpu[launches.time[gpu] >= time.begin]
    launched = launched[np.lexsort((time.start[launched], launches.time[launched]))]
    thread_of = np.where(rank.calls >= 0, device.thread[rank.calls], -1)
    of_thread: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for thread in unique(device.thread[waits]).tolist():
        rows = launched[thread_of[launched] == thread]
        of_thread[thread] = launches.time[rows], rows
    pending = [row for row in launched.tolist() if communication[row]]
    waited = set(sources.values())
    for call in waits.tolist():
        moment = int(device.start[call])
        times, rows = of_thread[int(device.thread[call])]
        at = int(np.searchsorted(times, moment, side="left"))
        if at == len(rows):
            continue
        target = int(rows[at])
        if target in sources:
            waited |= {row for row in pending if launches.time[row] <= launches.time[sources[target]]}
            continue
        if communication[target]:
            source = _feeding(rank, rows[:at], target)
        elif _inside_communication(rank, call):
            continue  # a wait of NCCL's own streams, after its kernel
        else:
            ready = (
                row
                for row in pending
                if row not in waited
                and launches.time[row] < moment
                and time.end[row] <= time.start[target]
                and _other_stream(device, row, target)
            )
            source = next(ready, -1)
            if source < 0:
                source = _last_elsewhere(rank, launches, target, moment)
        if source >= 0:
            waited.add(source)
            sources[target] = source
            found.findings.add("stream-wait-inferred")


def _inside_communication(rank: LinkedRank, call: int) -> bool:
    """Whether a call is part of an operator that starts communication."""
    row, names = call, rank.device.names
    while row >= 0:
        if names[rank.device.name[row]].startswith(("c10d::", "_c10d_functional", "nccl:")):
            return True
        row = int(rank.timeline.parent[row])
    return False


def _other_stream(device: DeviceTrace, a: int, b: int) -> bool:
    return bool(device.stream[a] != device.stream[b] or device.device[a] != device.device[b])


def _feeding(rank: LinkedRank, launched_before: np.ndarray, target: int) -> int:
    """The last work that ``target``'s thread launched before it on another stream, -1 for none."""
    device, time = rank.device, rank.timeline
    compute = launched_before[~rank.communication_rows.gpu[launched_before]]
    for row in compute[::-1][:256].tolist():
        if _other_stream(device, row, target) and time.end[row] <= time.start[target]:
            return int(row)
    return -1


def _last_elsewhere(rank: LinkedRank, launches: Launches, target: int, moment: int) -> int:
    """The work on another stream, launched by ``moment``, that ended last before ``target``, -1 for none."""
    device, time, gpu = rank.device, rank.timeline, launches.gpu
    other = (device.stream[gpu] != device.stream[target]) | (device.device[gpu] != device.device[target])
    rows = gpu[other & (launches.time[gpu] <= moment) & (time.end[gpu] <= time.start[target])]
    return int(rows[np.argmax(time.end[rows])]) if len(rows) else -1


def _stream_edge(rank: LinkedRank, source: int, target: int, found: Collector) -> None:
    time = rank.timeline
    if source == target:
        return
    if time.end[source] > time.start[target]:
        found.findings.add("stream-wait-contradicted")
        return
    found.edge(
        EdgeKind.SYNCHRONISATION,
        (int(time.lane[source]), int(time.end[source])),
        (int(time.lane[target]), int(time.start[target])),
    )
