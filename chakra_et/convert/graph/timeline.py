"""Assign events to lanes, and nest the events of each CPU thread by their times.

A lane runs one node at a time: a CPU thread, a device stream, or the communication of one process group (gloo
has threads of its own, whose events do not show which thread waits). Nesting is by the times of the device
trace only, as the parents in the host trace are wrong for a few percent of the nodes if worker threads are
active.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from chakra_et.arrays import coded_pairs, first_rows, unique
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL, SYNC

STEP = "ProfilerStep#"
LAST = 1 << 63
"""ns: after all events."""
POLLING = re.compile(
    r"(cuda|hip|cu)(Event(Query|Destroy\w*|ElapsedTime)|Stream(Query|IsCapturing|GetCaptureInfo\w*)|"
    r"ThreadExchangeStreamCaptureMode|(Get|Set)Device|GetLastError|PeekAtLastError|CtxGetCurrent)"
)
"""Calls by which a thread polls the device."""
WATCHDOG = re.compile(r"pt_nccl_(watchdg|heartbt)|watchdog|heartbeat", re.IGNORECASE)


@dataclass
class Lane:
    """``tid``: system thread id of a CPU lane; ``device``, ``stream``: of a GPU lane."""

    kind: Literal["cpu", "gpu", "communication"]
    label: str
    tid: int = -1
    device: int = -1
    stream: int = -1


@dataclass(eq=False, repr=False)
class Timeline:
    """Events on lanes.

    - ``lane[i]``: lane of event i, -1 for none (cuda_sync, polling, CPU communication)
    - ``start``, ``end``: ns, properly nested on each CPU lane; ``parent[i]``: row of the enclosing event, -1
      at the top
    - ``main``: lane of the thread that runs the training step; ``begin``: start of the graph, ns
    - ``self_time``: segments of each CPU lane by their owner, see ``SelfTime``
    - ``steps``: (number, row) of each ProfilerStep, in time order
    """

    lanes: list[Lane]
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    main: int
    begin: int
    self_time: SelfTime
    steps: list[tuple[int, int]]
    findings: Findings


@dataclass(eq=False, repr=False)
class SelfTime:
    """Segments of the CPU lanes, in order, all int64.

    ``owner``: the innermost event, -1 outside all events. Each event owns at least one segment, the first of
    which may have length 0.
    """

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    owner: np.ndarray


def build(device: DeviceTrace, communication: np.ndarray) -> Timeline:
    """Build the timeline. ``communication`` (bool[rows]) marks CPU rows that are placed on lanes later."""
    lane = np.full(len(device), -1, dtype=np.int64)
    start, end = device.start, device.end.copy()
    parent = np.full(len(device), -1, dtype=np.int64)
    lanes: list[Lane] = []
    findings = Findings()
    on_cpu = (device.category < KERNEL) & ~communication
    polling = on_cpu & np.isin(device.thread, _polling_threads(device, on_cpu))
    findings.add("polling-call", int(polling.sum()))
    on_cpu &= ~polling
    begin = int(start[device.category != SYNC].min()) if len(start) else 0

    parts = []
    known_steps = steps(device)
    for thread in _threads(device, on_cpu, known_steps):
        rows = np.flatnonzero(on_cpu & (device.thread == thread))
        lane[rows] = len(lanes)
        tid = device.threads[thread][1]
        lanes.append(Lane("cpu", str(tid), tid=tid if isinstance(tid, int) else thread))
        parts.append(_nest(rows, start, end, parent, begin, len(lanes) - 1, findings))
    if not lanes:
        lanes.append(Lane("cpu", "host", tid=0))
    _place_streams(device, lanes, lane)
    self_time = SelfTime(
        *(np.concatenate([part[k] for part in parts]) if parts else np.zeros(0, np.int64) for k in range(4))
    )
    return Timeline(lanes, lane, start, end, parent, 0, begin, self_time, known_steps, findings)


def steps(device: DeviceTrace) -> list[tuple[int, int]]:
    """The active steps as (number, row of the annotation), in time order."""
    numbers = {
        code: int(name[len(STEP) :])
        for code, name in enumerate(device.names)
        if name.startswith(STEP) and name[len(STEP) :].isdigit()
    }
    rows = np.flatnonzero(np.isin(device.name, list(numbers)) & (device.category < KERNEL))
    return [(numbers[int(device.name[row])], int(row)) for row in rows]


def _polling_threads(device: DeviceTrace, on_cpu: np.ndarray) -> list[int]:
    """Threads that only ask the device whether work has finished, such as NCCL's watchdog.

    Between polls they sleep, so their time is no work of the rank.
    """
    polls = np.array([bool(POLLING.fullmatch(name)) for name in device.names], dtype=bool)
    asks = np.array(["Query" in name for name in device.names], dtype=bool)
    found = []
    for thread in unique(device.thread[on_cpu]).tolist():
        names = device.name[on_cpu & (device.thread == thread)]
        if (polls[names].all() and asks[names].any()) or _is_watchdog(device, thread):
            found.append(thread)
    return found


def _is_watchdog(device: DeviceTrace, thread: int) -> bool:
    name = device.thread_names.get(device.threads[thread], "")
    return bool(WATCHDOG.search(name))


def _threads(device: DeviceTrace, on_cpu: np.ndarray, known_steps: list[tuple[int, int]]) -> list[int]:
    """CPU threads with events: the main thread first, then in the order of their first events."""
    used, first = first_rows(device.thread[on_cpu])
    order = used[np.argsort(first, kind="stable")].tolist()
    if not order:
        return []
    marked = [int(device.thread[row]) for _, row in known_steps]
    if marked:
        main = marked[0]
    else:
        length = (device.end - device.start)[on_cpu]
        main = max(order, key=lambda thread: int(length[device.thread[on_cpu] == thread].sum()))
    return [main] + [thread for thread in order if thread != main]


def _nest(
    rows: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    parent: np.ndarray,
    begin: int,
    lane: int,
    findings: Findings,
) -> tuple[np.ndarray, ...]:
    """Nest the events ``rows`` (by start, longest first) of one thread, and return its self time.

    Sets ``parent``, and clips ``end`` of events that end after the enclosing event.
    """
    parents, clips, moments = _stacked(start[rows].tolist(), end[rows].tolist())
    outer = np.array(parents, dtype=np.int64)
    outer = np.where(outer >= 0, rows[outer], -1)
    parent[rows] = outer
    at = np.array(list(clips), dtype=np.int64)
    clipped = np.array(list(clips.values()), dtype=np.int64)
    findings.add("clipped-event", len(clips))
    findings.add("clipped-ns", int((end[rows[at]] - clipped).sum()))
    end[rows[at]] = clipped
    # A segment lies between two moments, and belongs to the event that has been innermost.
    ended = np.array(moments, dtype=np.int64)
    begins = ended < 0
    owner = rows[ended]
    till = end[owner]
    owner[begins], till[begins] = outer, start[rows]
    since = np.append(begin, till[:-1])
    keep = since < till
    keep[1:] |= begins[:-1]  # keep the first segment of each event
    since, till, owner = since[keep], till[keep], owner[keep]
    return np.full(len(since), lane, dtype=np.int64), since, till, owner


def _stacked(starts: list[int], ends: list[int]) -> tuple[list[int], dict[int, int], list[int]]:
    """Nest spans (by start, longest first): (index of the enclosing span of each, -1 for none; spans that
    end after the enclosing one, and its end; -1 for each span that begins and the index of each that ends,
    in order of time)."""
    parents, clips, moments = [], {}, []
    stack, free = [-1], [LAST]
    until = LAST
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while until <= start:
            moments.append(stack.pop())
            free.pop()
            until = free[-1]
        if end > until:
            clips[at] = end = until
        parents.append(stack[-1])
        moments.append(-1)
        stack.append(at)
        free.append(end)
        until = end
    return parents, clips, moments + stack[:0:-1]


def _place_streams(device: DeviceTrace, lanes: list[Lane], lane: np.ndarray) -> None:
    """One lane per stream; work that overlaps on it (graphs, programmatic launch) gets further lanes."""
    on_gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    if not len(on_gpu):
        return
    streams, index = coded_pairs(device.device[on_gpu], device.stream[on_gpu])
    for stream, (d, s) in enumerate(streams):
        rows = on_gpu[index == stream]
        for number, part in enumerate(_without_overlap(rows, device.start, device.end)):
            lane[part] = len(lanes)
            label = f"gpu {d} stream {s}" + (f" overlap {number}" if number else "")
            lanes.append(Lane("gpu", label, device=d, stream=s))


def _without_overlap(rows: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    parts = []
    while len(rows):
        latest = np.maximum.accumulate(np.concatenate([[np.iinfo(np.int64).min], end[rows][:-1]]))
        overlaps = start[rows] < latest
        if not overlaps.any():
            parts.append(rows)
            break
        keep, rest, free_at = [], [], np.iinfo(np.int64).min
        for row in rows.tolist():
            if start[row] >= free_at:
                keep.append(row)
                free_at = int(end[row])
            else:
                rest.append(row)
        parts.append(np.array(keep, dtype=np.int64))
        rows = np.array(rest, dtype=np.int64)
    return parts
