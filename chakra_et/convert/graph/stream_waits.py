"""Edges between streams: from the work before an event record to the work after the wait for the event.

With cuda_sync records (``enable_cuda_sync_events``), each wait has its event. Without them, the calls that
record events and let streams wait tell most, by their order among the launches of their thread.
Waits of calls that aren't recorded are inferred: an idle stream that resumes right after work on another
stream ended was waiting for that work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from chakra_et.arrays import nearest
from chakra_et.convert.graph.communication_arguments import LAUNCHERS
from chakra_et.convert.graph.launches import BEFORE_RECORDING, Launches, call_by_correlation
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.convert.graph.timeline import LAST, named
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import RUNTIME
from chakra_et.traces.fields import as_number

# A stream resumes within this time after the event (14 to 19 µs on an MI300X, 2 to 8 µs on CUDA).
RESUME_NS = 30_000
# A kernel starts within this time after its launch if nothing else delays it.
LAUNCH_NS = 25_000
# The gap between back-to-back kernels on a stream is below this.
BACK_TO_BACK_NS = 6_000
# Launches among which a stream that was just made to wait goes on.
LOOK_AHEAD = 8
# Launches among which the work is that a stream waits for.
LOOK_BACK = 256


def find(rank: LinkedRank, launches: Launches, found: Dependencies) -> None:
    """Add the edges between streams."""
    if _recorded(rank, launches, found):
        return
    sources = _resumptions(rank, launches)
    found.findings.add("stream-wait-inferred", len(sources))
    _by_calls(rank, launches, sources, found)
    for target, source in sources.items():
        _stream_edge(rank, source, target, found)


def _recorded(rank: LinkedRank, launches: Launches, found: Dependencies) -> bool:
    """Add the waits in cuda_sync records; returns whether there are any."""
    device = rank.device
    call_of = call_by_correlation(device)
    recorded = False
    for row, args in device.waits.items():
        if args.sync_kind != "Stream Wait Event":
            continue
        here = _stream(device, row)
        waiting_call = call_of.get(int(device.correlation[row]))
        record_call = call_of.get(int(as_number(args.record_correlation)))
        stream = as_number(args.wait_on_stream)
        if waiting_call is None or record_call is None or stream < 0:
            found.findings.add("stream-wait-no-record")
            continue
        recorded = True
        source = launches.last_before((here[0], int(stream)), int(device.start[record_call]))
        target = launches.first_after(here, int(device.start[waiting_call]))
        if source >= 0 and target >= 0:
            _stream_edge(rank, source, target, found)
    return recorded


def _resumptions(rank: LinkedRank, launches: Launches) -> dict[int, int]:
    """Target → source. Targets start on an idle stream right after the source ended on another stream, and
    were launched long before."""
    time, gpu = rank.timeline, launches.gpu
    start, end = time.start, time.end
    communication = rank.communication_rows.gpu
    by_end, ends = launches.by_end, launches.ends
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
            of_other_kind = communication[source] != communication[row]
            if of_other_kind and launches.time[source] <= start[row] and _is_before(rank, source, row):
                found[row] = source
                break
            at -= 1
    return found


def _by_calls(rank: LinkedRank, launches: Launches, sources: dict[int, int], found: Dependencies) -> None:
    """Match calls that make a stream wait with the work that they wait for.

    The waiting stream is that of the thread's next launch. A communication kernel waits for the compute
    stream that feeds it. Any other kernel waits for what the thread launched last before an event that it
    recorded just before the call; or else for the oldest work that an event was recorded after (all
    communication has one) and that nothing has waited for yet.
    """
    device, time, gpu, launch_time = rank.device, rank.timeline, launches.gpu, launches.time
    on_thread = (device.category == RUNTIME) & (time.lane >= 0)
    waits = np.flatnonzero(on_thread & named(device, lambda name: name.endswith("StreamWaitEvent")))
    records = np.flatnonzero(on_thread & named(device, lambda name: name.endswith("EventRecord")))
    starts = named(device, lambda name: name.startswith((*LAUNCHERS, "nccl:")))
    inside = nearest(starts, time.parent)  # an operator that starts communication
    communication = rank.communication_rows.gpu
    launched = gpu[launch_time[gpu] >= time.begin]
    launched = launched[np.lexsort((time.start[launched], launch_time[launched]))]
    thread_of = np.where(rank.calls >= 0, device.thread[rank.calls], -1)
    of_thread: dict[int, tuple[np.ndarray, ...]] = {}
    recorded = set(launched[communication[launched]].tolist())
    for thread in np.unique(device.thread[waits]).tolist():
        rows = launched[thread_of[launched] == thread]
        moments = device.start[records[device.thread[records] == thread]]
        asked = device.start[waits[device.thread[waits] == thread]]
        of_thread[thread] = launch_time[rows], rows, moments, asked
        before = np.searchsorted(launch_time[rows], moments) - 1
        recorded |= set(rows[before[before >= 0]].tolist())
    pending: dict[tuple[int, int], deque[int]] = {}
    for row in launched[np.isin(launched, list(recorded))].tolist():
        pending.setdefault(_stream(device, row), deque()).append(row)
    waited: dict[tuple[int, int], int] = {}  # stream → launch of the last work on it that was waited for

    def is_waited(row: int) -> bool:
        return int(launch_time[row]) <= waited.get(_stream(device, row), BEFORE_RECORDING)

    def oldest(target: int, moment: int) -> int:
        """The oldest pending work that ``target`` may wait for, -1 for none."""
        ready = []
        for queue in pending.values():
            while queue and is_waited(queue[0]):
                queue.popleft()
            if queue and launch_time[queue[0]] < moment and _is_before(rank, queue[0], target):
                ready.append(queue[0])
        return min(ready, key=lambda row: int(launch_time[row]), default=-1)

    for call in waits.tolist():
        moment = int(device.start[call])
        times, rows, moments, asked = of_thread[int(device.thread[call])]
        at = int(np.searchsorted(times, moment, side="left"))
        if not len(rows):
            continue
        goes_on = _stream(device, int(rows[min(at, len(rows) - 1)]))
        target = launches.first_after(goes_on, moment)  # of any thread
        # What the thread launched last before an event that it recorded since.
        last = int(rows[at - 1]) if at else -1
        just = at > 0 and bool(np.searchsorted(moments, moment) > np.searchsorted(moments, times[at - 1]))
        if target < 0 or inside[call] >= 0 and not communication[target]:
            continue  # among these a wait of NCCL's own streams, after its kernel
        earlier = rows[:at][::-1]
        source = sources.get(target, -1)
        if source < 0 and communication[target]:
            source = _first_before(rank, earlier[~communication[earlier]][:LOOK_BACK].tolist(), target)
        elif source < 0:
            if just and _stream(device, last) == goes_on:
                # It records on the stream that another one waits for, and goes on with the first.
                after = int(np.searchsorted(asked, times[min(at, len(times) - 1)], side="right"))
                until = np.searchsorted(times, asked[after] if after < len(asked) else LAST)
                others = rows[at : min(at + LOOK_AHEAD, until)].tolist()
                other = next((row for row in others if _is_before(rank, last, row)), -1)
                if other in sources:
                    continue  # a further stream that waits for the same event
                if other >= 0 and not communication[other]:
                    target, source = other, last
            elif just and _is_before(rank, last, target):
                source = last
            if source < 0:
                source = oldest(target, moment)
            if source < 0 and just:
                not_waited = (row for row in earlier[:LOOK_BACK].tolist() if not is_waited(row))
                source = _first_before(rank, not_waited, target)
            elif source < 0 and not len(records):
                # The work on another stream that ended last.
                ended = launches.by_end[: np.searchsorted(launches.ends, time.start[target], side="right")]
                known = ended[launch_time[ended] <= moment][::-1]
                source = _first_before(rank, known.tolist(), target)
        if source >= 0:
            stream = _stream(device, source)
            waited[stream] = max(waited.get(stream, BEFORE_RECORDING), int(launch_time[source]))
            found.findings.add("stream-wait-inferred", target not in sources)
            sources[target] = source


def _stream(device: DeviceTrace, row: int) -> tuple[int, int]:
    return int(device.device[row]), int(device.stream[row])


def _is_before(rank: LinkedRank, source: int, target: int) -> bool:
    """Whether ``target`` may have waited for ``source``: it starts later, on another stream."""
    time, device = rank.timeline, rank.device
    return bool(time.end[source] <= time.start[target]) and _stream(device, source) != _stream(device, target)


def _first_before(rank: LinkedRank, rows: Iterable[int], target: int) -> int:
    return next((row for row in rows if _is_before(rank, row, target)), -1)


def _stream_edge(rank: LinkedRank, source: int, target: int, found: Dependencies) -> None:
    time = rank.timeline
    contradicted = source != target and time.end[source] > time.start[target]
    found.findings.add("stream-wait-contradicted", contradicted)
    if source != target and not contradicted:
        found.connect(EdgeKind.SYNCHRONISATION, time, source, target)
