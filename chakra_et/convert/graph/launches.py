"""Calls and device work: what launched what and when, which calls wait, and the clock of each device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.arrays import coded_pairs, rows_by_value
from chakra_et.convert.graph.timeline import Timeline, named, on_device
from chakra_et.et.edges import rows_of
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import DRIVER, MEMCPY, RUNTIME
from chakra_et.traces.fields import as_number

BEFORE_RECORDING = np.iinfo(np.int64).min

# ---- launches ----


def launch_calls(device: DeviceTrace) -> np.ndarray:
    """int64[rows]: the row of the call that launched each row on the GPU, -1 for none.

    By correlation id, or by external id (of the operator, not the call) if the runtime call is missing.
    """
    calls = np.full(len(device), -1, dtype=np.int64)
    gpu = on_device(device)
    for id_of, candidates in (
        (device.correlation, is_call(device)),
        (device.external_id, device.category < RUNTIME),
    ):
        missing = gpu[(calls[gpu] < 0) & (id_of[gpu] > 0)]
        rows = np.flatnonzero(candidates & (id_of > 0))
        # A runtime call encloses the driver call with the same id, and counts.
        rows = rows[np.argsort(device.category[rows], kind="stable")][::-1]
        at = rows_of(id_of[rows].astype(np.uint64), id_of[missing].astype(np.uint64))
        calls[missing] = np.append(rows, -1)[at]
    return calls


def is_call(device: DeviceTrace) -> np.ndarray:
    """bool[rows]: whether each event is a runtime or driver call."""
    return (device.category == RUNTIME) | (device.category == DRIVER)


class Launches:
    """The device work of a rank, and lookups in it; -1 stands for none.

    ``gpu``: its rows. ``time``: launch time of each row in ns, ``BEFORE_RECORDING`` without a launch in the
    trace. ``before``: the previous row on its stream. The latter two are int64[rows of the trace] and
    undefined for rows off the GPU. ``streams``: (device, stream) → launch times and rows, in order of launch.
    """

    def __init__(self, device: DeviceTrace, timeline: Timeline, calls: np.ndarray) -> None:
        self.gpu = gpu = on_device(device)
        start, lane = timeline.start, timeline.lane
        self.before = np.full(len(device), -1, dtype=np.int64)
        order = gpu[np.lexsort((start[gpu], lane[gpu]))]
        same = lane[order[1:]] == lane[order[:-1]]
        self.before[order[1:][same]] = order[:-1][same]

        self.time = time = np.full(len(device), BEFORE_RECORDING, dtype=np.int64)
        known = gpu[calls[gpu] >= 0]
        call = calls[known]
        time[known] = np.minimum(start[call], start[known])
        by_operator = device.category[call] < RUNTIME
        for row, at in zip(known[by_operator].tolist(), call[by_operator].tolist(), strict=True):
            # Only the operator is known, not the call: not before the previous launch on the stream.
            previous = int(time[self.before[row]]) if self.before[row] >= 0 else BEFORE_RECORDING
            time[row] = min(max(int(start[at]), previous), int(start[row]))

        streams, index = coded_pairs(device.device[gpu], device.stream[gpu])
        order = np.lexsort((device.start[gpu], time[gpu]))
        by_stream = rows_by_value(index, order)
        self.streams = {streams[number]: (time[gpu[rows]], gpu[rows]) for number, rows in by_stream.items()}
        self.by_end = gpu[np.argsort(timeline.end[gpu], kind="stable")]
        self.ends = timeline.end[self.by_end]
        known = known[np.argsort(time[known], kind="stable")]
        of_thread = rows_by_value(device.thread[calls[known]])
        self._of_thread = {number: known[rows] for number, rows in of_thread.items()}

    def last_before(self, stream: tuple[int, int], moment: int) -> int:
        """The last row launched on ``stream`` up to ``moment``."""
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64),) * 2)
        at = int(np.searchsorted(times, moment, side="right")) - 1
        return int(rows[at]) if at >= 0 else -1

    def first_after(self, stream: tuple[int, int], moment: int) -> int:
        """The first row launched on ``stream`` from ``moment`` on."""
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64),) * 2)
        at = int(np.searchsorted(times, moment, side="left"))
        return int(rows[at]) if at < len(rows) else -1

    def last_ended(self, begin: int, end: int, launched_before: int) -> int:
        """What ended last after ``begin`` and up to ``end``, of what was launched before a moment."""
        low, high = np.searchsorted(self.ends, (begin, end), side="right").tolist()
        rows = self.by_end[low:high]
        fitting = rows[self.time[rows] < launched_before]
        return int(fitting[-1]) if len(fitting) else -1

    def last_by_thread(self, thread: int, moment: int) -> int:
        """What ``thread`` launched last before ``moment``."""
        rows = self._of_thread.get(thread, self.gpu[:0])
        at = int(np.searchsorted(self.time[rows], moment)) - 1
        return int(rows[at]) if at >= 0 else -1


# ---- calls that return only when the device has done something, of every API ----


class Scope(IntEnum):
    """What a call waits for: all work of a device or of a stream, or the work before an event."""

    DEVICE = 0
    STREAM = 1
    EVENT = 2


# CUDA's runtime and driver, HIP, Level Zero, and MTIA's runtime, which names its calls after CUDA's.
_SCOPES = (
    (re.compile(r"(Device|Ctx|Context|Thread)_?Synchronize(_\w+)?$", re.IGNORECASE), Scope.DEVICE),
    # Memory may be in use, so the device has to be idle before it is freed.
    (re.compile(r"^(cuda|hip)Free$|^cuMemFree(_v2)?$"), Scope.DEVICE),
    (re.compile(r"(Stream|Queue|List)(Host)?_?Synchronize(_\w+)?$", re.IGNORECASE), Scope.STREAM),
    (re.compile(r"Synchronize(_\w+)?$", re.IGNORECASE), Scope.EVENT),
)
QUERY = re.compile(r"(cuda|hip|cu)(Event|Stream)Query(_\w+)?")
"""Asks whether work is done, and returns at once."""


@dataclass(frozen=True)
class BlockingCall:
    """``row``: of the call; ``device`` and ``stream`` that it waits for, -1 if not recorded; ``recorded``:
    the call that recorded the event, -1 if not known."""

    row: int
    scope: Scope
    device: int = -1
    stream: int = -1
    recorded: int = -1


def scope_of(name: str) -> Scope | None:
    """What a call with this name waits for, None if it doesn't wait."""
    return next((scope for pattern, scope in _SCOPES if pattern.search(name)), None)


def blocking_calls(device: DeviceTrace) -> Iterator[BlockingCall]:
    """The calls that wait for the device, with what their cuda_sync records tell; copies aside."""
    rows = np.flatnonzero(named(device, lambda name: scope_of(name) is not None) & is_call(device))
    call_of = call_by_correlation(device) if len(rows) else {}
    known = {int(device.correlation[row]): (row, args) for row, args in device.waits.items()}
    for row in rows.tolist():
        scope = scope_of(device.names[device.name[row]])
        assert scope is not None
        record, args = known.get(int(device.correlation[row]), (-1, None))
        if args is None:
            yield BlockingCall(row, scope)
        elif scope is Scope.DEVICE:
            yield BlockingCall(row, scope, int(device.device[record]))
        elif args.sync_kind == "Stream Sync":
            yield BlockingCall(row, Scope.STREAM, int(device.device[record]), int(device.stream[record]))
        else:
            recorded = call_of.get(int(as_number(args.record_correlation)), -1)
            stream = int(as_number(args.wait_on_stream))
            yield BlockingCall(row, scope, int(device.device[record]), stream, recorded)


def call_by_correlation(device: DeviceTrace) -> dict[int, int]:
    """Correlation id → row of the runtime or driver call."""
    rows = np.flatnonzero(is_call(device))
    return dict(zip(device.correlation[rows].tolist(), rows.tolist(), strict=True))


def waits_for_copy(call: str, copy: str) -> bool:
    """Whether ``call`` returns only when the copy or memset that it starts has been made.

    CUDA returns from a copy of pageable memory to the device when the memory has been staged.
    """
    staged = call.startswith("cu") and "Pageable -> Device" in copy
    if "Async" in call:
        return not staged and copy.endswith("-> Pageable)")
    return "Memcpy" in call and not staged


# ---- the clock of each device against the host's, from bounds that the trace itself holds ----
#
# No work starts before the call that launches it, and no call that waits for the device returns before the
# work that was launched up to then has ended. Each launch is a lower bound of what has to be added to the
# times of a device, and each such wait an upper one. Where they allow 0, times stay as they are.

# Bounds as close as this leave less doubt in their middle than at one of them. A wait that alone asks for a
# larger offset was for other work, such as that of another context: profilers align clocks to some µs.
CLOSE_NS = 50_000
# Oscillators differ by less; drift is only sought where a constant offset contradicts the bounds.
LARGEST_DRIFT = 2e-4
# The part of the bounds that single wrong pairs may be.
OUTLIERS = 0.01


@dataclass(frozen=True)
class Clock:
    """The clock of one device: its times get ``offset_ns`` + ``drift`` · time added.

    ``least_ns``, ``most_ns``: the bounds of the offset at that drift, None for none; ``pairs``: how many
    pairs of a call and device work there are, ``contradicting``: how many the result contradicts.
    """

    device: int
    offset_ns: int
    drift: float
    least_ns: int | None
    most_ns: int | None
    pairs: int
    contradicting: int


def on_host_clock(
    device: DeviceTrace, calls: np.ndarray, linked: np.ndarray
) -> tuple[DeviceTrace, np.ndarray, np.ndarray, list[Clock]]:
    """The trace with the times of device work by the host's clock, and rows still in the order of their
    times; ``calls`` and ``linked`` likewise."""
    gpu = on_device(device)
    clocks = [_estimate(device, calls, gpu, number) for number in np.unique(device.device[gpu]).tolist()]
    if not any(clock.offset_ns or clock.drift for clock in clocks):
        return device, calls, linked, clocks
    start, end = device.start.copy(), device.end.copy()
    for clock in clocks:
        rows = gpu[device.device[gpu] == clock.device]
        shift = np.rint(clock.offset_ns + clock.drift * start[rows]).astype(np.int64)
        shift = np.maximum(shift, -start[rows])  # the recording begins at 0
        start[rows] += shift
        end[rows] += shift
    device = dataclasses.replace(device, start=start, end=end)
    return *selected(device, calls, linked, np.argsort(start, kind="stable")), clocks


def selected(
    device: DeviceTrace, calls: np.ndarray, linked: np.ndarray, rows: np.ndarray
) -> tuple[DeviceTrace, np.ndarray, np.ndarray]:
    """The given rows only, in this order."""
    place = np.full(len(device) + 1, -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    return device.select(rows), place[calls[rows]], linked[rows]


def _estimate(device: DeviceTrace, calls: np.ndarray, gpu: np.ndarray, number: int) -> Clock:
    rows = gpu[(device.device[gpu] == number) & (calls[gpu] >= 0)]
    rows = rows[device.category[calls[rows]] >= RUNTIME]
    at, least = device.start[rows], device.start[calls[rows]] - device.start[rows]
    until, most = _waits(device, calls, gpu, number)

    def slack(drift: float) -> float:
        """By how much the bounds leave the offset free; negative if they contradict each other."""
        if not len(at) or not len(until):
            return np.inf
        return -_last(drift * until - most) - _last(least - drift * at)

    drift = 0.0
    if slack(0.0) < 0:  # then that at which the bounds agree best, if they ever do
        for width in (LARGEST_DRIFT, LARGEST_DRIFT / 50, LARGEST_DRIFT / 2500):
            drift = max((drift + np.linspace(-width, width, 101)).tolist(), key=slack)
        drift = drift if slack(drift) >= 0 else 0.0
    low = _last(least - drift * at) if len(rows) else -np.inf
    upper = most - drift * until
    near = (upper >= low) & ((upper <= low + CLOSE_NS) | (upper >= -CLOSE_NS))
    high = float(upper[near].min(initial=np.inf))
    offset = 0.0
    if not low <= 0 <= high:
        offset = (low + high) / 2 if high - low <= CLOSE_NS else low if low > 0 else high
    wrong = int((least - drift * at > offset).sum() + (upper < offset).sum())
    least_ns, most_ns = (round(bound) if np.isfinite(bound) else None for bound in (low, high))
    return Clock(number, round(offset), drift, least_ns, most_ns, len(rows) + len(most), wrong)


def _waits(
    device: DeviceTrace, calls: np.ndarray, gpu: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of the offset: the time of each on the device, and the bound, ns."""
    known = gpu[(calls[gpu] >= 0) & (device.device[gpu] == number)]
    bounds = []  # end on the device, and return of the call
    for row in known[device.category[known] == MEMCPY].tolist():
        if waits_for_copy(*(device.names[device.name[each]] for each in (calls[row], row))):
            bounds.append((device.end[row], device.end[calls[row]]))
    known = known[np.argsort(device.end[calls[known]], kind="stable")]
    one_device = len(np.unique(device.device[gpu])) == 1
    of_stream = rows_by_value(device.stream, known)
    latest: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}
    for each in blocking_calls(device):
        # An event may have been recorded long before.
        if each.scope is Scope.EVENT or not (each.device == number or (each.device < 0 and one_device)):
            continue
        of_device = each.scope is Scope.DEVICE or (each.stream < 0 and len(of_stream) == 1)
        stream = None if of_device else each.stream
        if stream not in latest:
            rows = known if of_device else of_stream.get(each.stream, known[:0])
            latest[stream] = device.end[calls[rows]], np.maximum.accumulate(device.end[rows])
        launched, ends = latest[stream]
        before = int(np.searchsorted(launched, device.start[each.row], side="right")) - 1
        if before >= 0:
            bounds.append((ends[before], device.end[each.row]))
    done, returned = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    return done, returned - done


def _last(values: np.ndarray) -> float:
    """The largest value, without the outliers."""
    skipped = int(len(values) * OUTLIERS)
    return float(np.partition(values, -1 - skipped)[-1 - skipped])
