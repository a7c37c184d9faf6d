"""Assign events to lanes, and nest the events of each CPU thread by their times.

A lane runs one node at a time: a CPU thread, a device stream, or the communication of one process group (gloo
has threads of its own, whose events do not show which thread waits). Nesting is by the times of the device
trace only, as the parents in the host trace are wrong for a few percent of the nodes if worker threads
are active.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from chakra_et.arrays import coded_pairs, rows_by_value, stacked
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace, steps
from chakra_et.traces.device_format import KERNEL, SYNC

LAST = 1 << 63
"""ns: after all events."""
MOST_ROUNDS = 1000  # of comparing all events at once; deeper nesting takes less time event by event
POLLING = re.compile(
    r"(cuda|hip|cu)(Event(Query|Destroy\w*|ElapsedTime)|Stream(Query|IsCapturing|GetCaptureInfo\w*)|"
    r"ThreadExchangeStreamCaptureMode|(Get|Set)Device|GetLastError|PeekAtLastError|CtxGetCurrent)"
)
"""Calls by which a thread polls the device."""
WATCHDOG = re.compile(r"pt_nccl_(watchdg|heartbt)|watchdog|heartbeat", re.IGNORECASE)


@dataclass
class Lane:
    """``device``, ``stream``: of a GPU lane."""

    kind: Literal["cpu", "gpu", "communication"]
    label: str
    device: int = -1
    stream: int = -1


@dataclass(eq=False, repr=False)
class Timeline:
    """Events on lanes.

    - ``lane[i]``: lane of event i, -1 for none (cuda_sync, polling, CPU communication)
    - ``start``, ``end``: ns, properly nested on each CPU lane; ``parent[i]``: row of the enclosing event, -1
      at the top
    - ``begin``: start of the graph, ns
    - ``self_time``: segments of each CPU lane by their owner, see ``SelfTime``
    - ``steps``: (number, row) of each ProfilerStep, in time order
    """

    lanes: list[Lane]
    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    begin: int
    self_time: SelfTime
    steps: list[tuple[int, int]]
    findings: Findings

    main = 0
    """Lane of the thread that runs the training step."""


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


def on_device(device: DeviceTrace) -> np.ndarray:
    """The rows of kernels, copies and memsets."""
    return np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))


def named(device: DeviceTrace, test: Callable[[str], object]) -> np.ndarray:
    """bool[rows]: whether the name of each event passes ``test``."""
    return np.array([bool(test(name)) for name in device.names], dtype=bool)[device.name]


def build(device: DeviceTrace, communication: np.ndarray) -> Timeline:
    """Build the timeline. ``communication`` (bool[rows]) marks CPU rows that are placed on lanes later."""
    lane, parent = (np.full(len(device), -1, dtype=np.int64) for _ in range(2))
    start, end = device.start, device.end.copy()
    lanes: list[Lane] = []
    findings = Findings()
    on_cpu = (device.category < KERNEL) & ~communication
    # Threads that only ask the device whether work has finished, such as NCCL's watchdog: between polls they
    # sleep, so their time is no work of the rank.
    polls, asks = named(device, POLLING.fullmatch), named(device, lambda name: "Query" in name)
    of_thread, threads = rows_by_value(device.thread, np.flatnonzero(on_cpu)), list[int]()
    for thread, rows in of_thread.items():
        is_watchdog = WATCHDOG.search(device.thread_names.get(device.threads[thread], ""))
        if is_watchdog or (polls[rows].all() and asks[rows].any()):
            findings.add("polling-call", len(rows))
        else:
            threads.append(thread)
    begin = int(start[device.category != SYNC].min()) if len(start) else 0
    known_steps = steps(device)
    parts = [np.zeros((4, 0), dtype=np.int64)]
    # The main thread first, then in the order of their first events.
    threads.sort(key=lambda thread: of_thread[thread][0])
    if threads:
        busy = np.bincount(device.thread[on_cpu], (device.end - start)[on_cpu])
        main = int(device.thread[known_steps[0][1]] if known_steps else max(threads, key=lambda t: busy[t]))
        threads = [main, *(thread for thread in threads if thread != main)]
    for thread in threads:
        rows = of_thread[thread]
        lane[rows] = len(lanes)
        parts.append(_nest(rows, start, end, parent, begin, len(lanes), findings))
        lanes.append(Lane("cpu", str(device.threads[thread][1])))
    if not lanes:
        lanes.append(Lane("cpu", "host"))
    # One lane per stream; work that overlaps on it (graphs, programmatic launch) gets further lanes.
    gpu = on_device(device)
    streams, index = coded_pairs(device.device[gpu], device.stream[gpu])
    for stream, rows in rows_by_value(index).items():
        d, s = streams[stream]
        own = gpu[rows]
        for number, part in rows_by_value(stacked(start[own], end[own])).items():
            lane[own[part]] = len(lanes)
            label = f"gpu {d} stream {s}" + (f" overlap {number}" if number else "")
            lanes.append(Lane("gpu", label, device=d, stream=s))
    self_time = SelfTime(*np.concatenate(parts, axis=1))
    return Timeline(lanes, lane, start, end, parent, begin, self_time, known_steps, findings)


def _nest(
    rows: np.ndarray, start: np.ndarray, end: np.ndarray, parent: np.ndarray, begin: int, lane: int,
    findings: Findings,
) -> np.ndarray:  # fmt: skip
    """Nest the events ``rows`` (by start, longest first) of one thread, and return its self time.

    Sets ``parent``, and clips ``end`` of events that end after the enclosing event.
    """
    since, until = start[rows], end[rows]
    outer, clipped = _enclosing(since, until)
    findings.add("clipped-event", int((clipped < until).sum()))
    findings.add("clipped-ns", int((until - clipped).sum()))
    outer = np.where(outer >= 0, rows[outer], -1)
    parent[rows], end[rows] = outer, clipped
    # In order of time: -1 for each event that begins, and the index of each that ends, the innermost first,
    # before the first event that begins when it has ended.
    places = np.arange(len(rows))
    following = np.maximum(np.searchsorted(since, clipped), places + 1)
    order = len(rows) - 1 - np.argsort(following[::-1], kind="stable")
    ended = np.full(2 * len(rows), -1)
    ended[places + following[order]] = order
    # A segment lies between two moments, and belongs to the event that has been innermost.
    begins = ended < 0
    owner = rows[ended]
    till = end[owner]
    owner[begins], till[begins] = outer, start[rows]
    since = np.append(begin, till[:-1])
    keep = since < till
    keep[1:] |= begins[:-1]  # keep the first segment of each event
    return np.stack([np.full(len(since), lane), since, till, owner])[:, keep]


def _enclosing(since: np.ndarray, until: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each event, by start: the last before it that hasn't ended when it starts, -1 for none; and the end
    of each, at most that of the one around it."""
    outer, left = np.arange(-1, len(since) - 1), np.arange(len(since))
    for _ in range(MOST_ROUNDS):
        left = left[outer[left] >= 0]
        left = left[until[outer[left]] <= since[left]]
        if not len(left):
            inner = np.flatnonzero(outer >= 0)
            if (until[inner] <= until[outer[inner]]).all():
                return outer, until
            break
        outer[left] = outer[outer[left]]  # all between the two have ended as well
    # Events that overlap without being nested, or are nested deeply, one after the other.
    until, stack, free = until.copy(), [-1], [LAST]
    for at, (begins, ends) in enumerate(zip(since.tolist(), until.tolist(), strict=True)):
        while free[-1] <= begins:
            stack.pop()
            free.pop()
        outer[at] = stack[-1]
        stack.append(at)
        free.append(min(ends, free[-1]))
        until[at] = free[-1]
    return outer, until
