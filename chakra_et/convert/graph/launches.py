"""The launching call and launch time of device work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import coded_pairs
from chakra_et.convert.graph.timeline import Timeline
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import DRIVER, KERNEL, RUNTIME, SYNC

BEFORE_RECORDING = np.iinfo(np.int64).min


def launch_calls(device: DeviceTrace) -> np.ndarray:
    """int64[rows]: the row of the call that launched each row on the GPU, -1 for none.

    By correlation id, or by external id (of the operator, not the call) if the runtime call is missing.
    """
    calls = np.full(len(device), -1, dtype=np.int64)
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    for id_of, candidates in (
        (device.correlation, (device.category == RUNTIME) | (device.category == DRIVER)),
        (device.external_id, device.category < RUNTIME),
    ):
        missing = gpu[(calls[gpu] < 0) & (id_of[gpu] > 0)]
        rows = np.flatnonzero(candidates & (id_of > 0))
        # A runtime call encloses the driver call with the same id and sorts before it.
        rows = rows[np.lexsort((device.category[rows], id_of[rows]))]
        if not len(missing) or not len(rows):
            continue
        at = np.searchsorted(id_of[rows], id_of[missing])
        found = at < len(rows)
        found[found] = id_of[rows[at[found]]] == id_of[missing[found]]
        calls[missing[found]] = rows[at[found]]
    return calls


@dataclass(eq=False, repr=False)
class Launches:
    """The device work of a rank.

    ``gpu``: its rows. ``time``: launch time of each row in ns, ``BEFORE_RECORDING`` without a launch in the
    trace. ``before``: the previous row on its stream, -1 for the first. The latter two are int64[rows of the
    trace] and undefined for rows that are not on the GPU.
    """

    gpu: np.ndarray
    time: np.ndarray
    before: np.ndarray


def launches_of(device: DeviceTrace, timeline: Timeline, calls: np.ndarray) -> Launches:
    """The launch times of all device work."""
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    start = timeline.start
    before = np.full(len(device), -1, dtype=np.int64)
    order = gpu[np.lexsort((start[gpu], timeline.lane[gpu]))]
    same = timeline.lane[order[1:]] == timeline.lane[order[:-1]]
    before[order[1:][same]] = order[:-1][same]

    time = np.full(len(device), BEFORE_RECORDING, dtype=np.int64)
    known = gpu[calls[gpu] >= 0]
    call = calls[known]
    time[known] = np.minimum(start[call], start[known])
    by_operator = device.category[call] < RUNTIME
    for row, at in zip(known[by_operator].tolist(), call[by_operator].tolist(), strict=True):
        # Only the operator is known, not the call: not before the previous launch on the stream.
        previous = int(time[before[row]]) if before[row] >= 0 else BEFORE_RECORDING
        time[row] = min(max(int(start[at]), previous), int(start[row]))
    return Launches(gpu, time, before)


class StreamOrder:
    """Lookup of the work that was launched on a stream before or after a moment."""

    def __init__(self, device: DeviceTrace, launches: Launches) -> None:
        self.streams: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        gpu = launches.gpu
        streams, index = coded_pairs(device.device[gpu], device.stream[gpu])
        for number, stream in enumerate(streams):
            rows = gpu[index == number]
            rows = rows[np.lexsort((device.start[rows], launches.time[rows]))]
            self.streams[stream] = (launches.time[rows], rows)

    def last_before(self, stream: tuple[int, int], moment: int) -> int:
        """The last row launched on ``stream`` up to ``moment``, -1 for none."""
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        at = int(np.searchsorted(times, moment, side="right")) - 1
        return int(rows[at]) if at >= 0 else -1

    def first_after(self, stream: tuple[int, int], moment: int) -> int:
        """The first row launched on ``stream`` from ``moment`` on, -1 for none."""
        times, rows = self.streams.get(stream, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        at = int(np.searchsorted(times, moment, side="left"))
        return int(rows[at]) if at < len(rows) else -1
