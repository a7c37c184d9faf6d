"""The clock of each device against the host's, from bounds that the trace itself holds.

No work starts before the call that launches it, and no call that waits for the device returns before the work
that was launched up to then has ended. Each launch is a lower bound of what has to be added to the times of a
device, and each such wait an upper one. Where they allow 0, times stay as they are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.blocking_calls import Scope, blocking_calls, waits_for_copy
from chakra_et.convert.graph.link import Link
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL, MEMCPY, RUNTIME, SYNC

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

    def as_dict(self) -> dict[str, float | None]:
        """For the report, in µs and parts per million."""
        least, most = (None if ns is None else ns / 1e3 for ns in (self.least_ns, self.most_ns))
        return {
            "offset_us": self.offset_ns / 1e3, "drift_ppm": round(self.drift * 1e6, 3), "least_us": least,
            "most_us": most, "pairs": self.pairs, "contradicting": self.contradicting,
        }  # fmt: skip


def on_host_clock(
    device: DeviceTrace, calls: np.ndarray, linked: Link
) -> tuple[DeviceTrace, np.ndarray, Link, list[Clock]]:
    """The trace with the times of device work by the host's clock, and rows still in the order of their
    times; ``calls`` and ``linked`` likewise."""
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    clocks = [_estimate(device, calls, gpu, number) for number in unique(device.device[gpu]).tolist()]
    if not any(clock.offset_ns or clock.drift for clock in clocks):
        return device, calls, linked, clocks
    start, end = device.start.copy(), device.end.copy()
    for clock in clocks:
        rows = gpu[device.device[gpu] == clock.device]
        shift = np.rint(clock.offset_ns + clock.drift * start[rows]).astype(np.int64)
        shift = np.maximum(shift, -start[rows])  # the recording begins at 0
        start[rows] += shift
        end[rows] += shift
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[order], place[-1] = np.arange(len(order)), -1
    device = dataclasses.replace(device, start=start, end=end).select(order)
    linked = dataclasses.replace(linked, host_row=linked.host_row[order])
    return device, place[calls[order]], linked, clocks


def _estimate(device: DeviceTrace, calls: np.ndarray, gpu: np.ndarray, number: int) -> Clock:
    rows = gpu[(device.device[gpu] == number) & (calls[gpu] >= 0)]
    rows = rows[device.category[calls[rows]] >= RUNTIME]
    at, least = device.start[rows], device.start[calls[rows]] - device.start[rows]
    until, most = _waits(device, calls, gpu, number)
    drift = 0.0
    if _slack(0.0, at, least, until, most) < 0:
        drift = _drift(at, least, until, most)
    low = _last(least - drift * at) if len(rows) else -np.inf
    upper = most - drift * until
    high = float(
        upper[(upper >= low) & ((upper <= low + CLOSE_NS) | (upper >= -CLOSE_NS))].min(initial=np.inf)
    )
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
    call = calls[known]
    done, returned = [], []
    for row in known[device.category[known] == MEMCPY].tolist():
        if waits_for_copy(*(device.names[device.name[each]] for each in (calls[row], row))):
            done.append(device.end[row])
            returned.append(device.end[calls[row]])
    known = known[np.argsort(device.end[call], kind="stable")]
    streams = device.stream[known]
    of_stream = {stream: known[streams == stream] for stream in unique(streams).tolist()}
    if len(of_stream) == 1:
        of_stream[-1] = known
    one_device = len(unique(device.device[gpu])) == 1
    latest: dict[tuple[Scope, int], tuple[np.ndarray, np.ndarray]] = {}
    for each in blocking_calls(device):
        if each.device != number and not (each.device < 0 and one_device):
            continue
        if each.scope is Scope.EVENT:
            continue  # the event may be long before
        rows = known if each.scope is Scope.DEVICE else of_stream.get(each.stream, known[:0])
        if (each.scope, each.stream) not in latest:
            latest[each.scope, each.stream] = device.end[calls[rows]], np.maximum.accumulate(device.end[rows])
        launched, ends = latest[each.scope, each.stream]
        before = int(np.searchsorted(launched, device.start[each.row], side="right")) - 1
        if before >= 0:
            done.append(ends[before])
            returned.append(device.end[each.row])
    at = np.array(done, dtype=np.int64)
    return at, np.array(returned, dtype=np.int64) - at


def _slack(drift: float, at: np.ndarray, least: np.ndarray, until: np.ndarray, most: np.ndarray) -> float:
    """By how much the bounds leave the offset free at a drift; negative if they contradict each other."""
    if not len(at) or not len(until):
        return np.inf
    return -_last(drift * until - most) - _last(least - drift * at)


def _drift(at: np.ndarray, least: np.ndarray, until: np.ndarray, most: np.ndarray) -> float:
    """The drift at which the bounds agree best, 0 if they never do."""
    best = 0.0
    for width in (LARGEST_DRIFT, LARGEST_DRIFT / 50, LARGEST_DRIFT / 2500):
        tried = best + np.linspace(-width, width, 101)
        best = max(tried.tolist(), key=lambda drift: _slack(drift, at, least, until, most))
    return best if _slack(best, at, least, until, most) >= 0 else 0.0


def _last(values: np.ndarray) -> float:
    """The largest value, without the outliers."""
    skipped = int(len(values) * OUTLIERS)
    return float(np.partition(values, -1 - skipped)[-1 - skipped])
