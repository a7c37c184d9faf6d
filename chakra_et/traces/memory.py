"""Allocations and frees in a device trace: the ``[memory]`` events that profile_memory records.

Each has the bytes that were allocated (or freed, negative) and, from PyTorch 1.12 on, how much of the device
is then allocated and reserved. The caching allocator counts from the start of the process, the CPU's from the
start of the recording. Source: torch/csrc/profiler and c10/core/DeviceType.h.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.arrays import coded_pairs
from chakra_et.findings import Findings
from chakra_et.traces.device_format import Event
from chakra_et.traces.fields import as_column

# Names of c10::DeviceType. AMD's GPUs are "cuda" in PyTorch and "gpu" here, like NVIDIA's.
DEVICE_TYPES = {0: "cpu", 1: "gpu", 6: "gpu", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia"}
MOST_DEVICES = 64
"""A process has fewer devices; more are numbers from a damaged file."""


@dataclass(eq=False, repr=False)
class Memory:
    """K allocations and frees in order of time; int64[K].

    ``thread``: index into the trace's threads, -1 for one without other events; ``time``: ns on the trace's
    clock; ``device``: index into ``devices`` (``cpu``, ``gpu0``, …); ``bytes``: allocated, or freed where
    negative; ``allocated``, ``reserved``: bytes of the device after it.
    """

    thread: np.ndarray
    time: np.ndarray
    device: np.ndarray
    bytes: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray
    devices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.time)

    def take(self, rows: np.ndarray) -> Memory:
        """The same with only ``rows``."""
        columns = {name: value[rows] for name, value in vars(self).items() if name != "devices"}
        return dataclasses.replace(self, **columns)


def no_memory() -> Memory:
    """Of a trace that has no such events."""
    nothing = np.zeros(0, dtype=np.int64)
    return Memory(nothing, nothing, nothing, nothing, nothing, nothing)


def read_memory(
    events: list[Event],
    threads: dict[tuple[Any, Any], int],
    origin_us: float,
    most_us: float,
    found: Findings,
) -> Memory:
    """The events as columns. Those without a usable size, or ``most_us`` from the first event of the trace,
    are left out; totals that are not recorded are counted from the start. Both become findings."""
    if not events:
        return no_memory()
    args: list[Any] = [event.args for event in events]
    after = as_column([event.ts for event in events], np.float64) - origin_us
    names = ("memory_bytes", "allocated", "reserved", "device_type", "device_id")
    columns = [as_column([getattr(each, name) for each in args], np.float64) for name in names]
    size, allocated, reserved, kind, number = (
        np.where(np.abs(column) < 2**63, column, np.nan) for column in columns
    )
    good = (np.abs(after) < most_us) & (np.abs(size) < 2**53) & (kind >= 0) & (np.abs(number) < 2**15)
    devices, device = _devices(kind[good], number[good])
    if len(devices) > MOST_DEVICES:
        found.add("bad-memory-event", len(events))
        return no_memory()
    found.add("bad-memory-event", int((~good).sum()))
    thread = np.array([threads.get((event.pid, event.tid), -1) for event in events], dtype=np.int64)
    time = np.rint(after[good] * 1000).astype(np.int64)
    order = np.argsort(time, kind="stable")
    columns = [np.nan_to_num(column[good][order], nan=-1.0) for column in (size, allocated, reserved)]
    size, allocated, reserved = (column.astype(np.int64) for column in columns)
    of_device = device[order]
    for at in range(len(devices)):
        own = np.flatnonzero(of_device == at)
        if (allocated[own] < 0).any():
            # Older writers don't record totals: count from where the lowest level is 0.
            level = np.cumsum(size[own])
            allocated[own] = level - min(0, int(level.min()))
            found.add("memory-total", len(own))
    reserved = np.maximum(reserved, 0)
    return Memory(thread[good][order], time[order], of_device, size, allocated, reserved, devices)


def _devices(kind: np.ndarray, number: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the devices, and the index of each event's."""
    keys, index = coded_pairs(kind.astype(np.int64), number.astype(np.int64))
    names = []
    for code, which in keys:
        name = DEVICE_TYPES.get(code, f"type{code}_")
        names.append(name if code == 0 else f"{name}{max(which, 0)}")
    known = sorted(set(names))
    place = np.array([known.index(name) for name in names], dtype=np.int64)
    return tuple(known), place[index] if names else np.zeros(0, dtype=np.int64)
