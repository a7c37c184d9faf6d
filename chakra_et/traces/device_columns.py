"""Collects the events of a device trace as columns, piece by piece while it is read.

``[memory]`` events, which profile_memory records, have the bytes that were allocated (or freed, negative)
and how much of the device is then allocated and reserved. The caching allocator counts
from the start of the process, the CPU's from the start of the recording. Source: torch/csrc/profiler and
c10/core/DeviceType.h.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from chakra_et.arrays import coded_pairs
from chakra_et.findings import Findings
from chakra_et.traces.device_format import CODES, KERNEL, MEMORY, MODULE, NOT_A_NODE, SYNC, Args, Event
from chakra_et.traces.fields import as_column, as_number, copies, each, indices, strided
from chakra_et.traces.records import Taker

_IDS = ("rf_id", "external_id", "correlation", "sequence", "forward_thread")
# Each raw text would keep a whole piece of the trace in memory.
_NO_TEXTS = dict.fromkeys(("grid", "block", "dims", "types", "concrete", "strides"), msgspec.Raw(b""))
_NO_ARGS = Args()
# Names of c10::DeviceType. AMD's GPUs are "cuda" in PyTorch and "gpu" here, like NVIDIA's.
DEVICE_TYPES = {0: "cpu", 1: "gpu", 6: "gpu", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia"}
MOST_DEVICES = 64
"""A process has fewer devices; more are numbers from a damaged file."""
SPARSE = ("communication", "waits", "strides")
"""What only a few events have; see ``DeviceTrace``."""


class DeviceColumns(Taker):
    """Columns so far; ``read_records`` hands it the events."""

    def __init__(self, operators: bool) -> None:
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.names: dict[str, int] = {}
        self.shapes: dict[tuple[str, str], int] = {}
        self.shape_of: dict[tuple[bytes, bytes], int] = {(b"", b""): -1}  # by their texts as recorded
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.sparse: dict[str, dict[int, Any]] = {name: {} for name in SPARSE}  # by row
        self.modules: list[Event] = []
        self.memory: list[Event] = []
        self.inputs: tuple[list[bytes], list[bytes], list[bytes]] | None = ([], [], []) if operators else None
        self.findings = Findings()
        self.events_in = 0
        self.rows = 0

    def take(self, events: list[Event]) -> None:
        work = [event for event in events if event.ph == "X"]
        self.events_in += len(work)
        if len(work) < len(events):
            self._take_marks([event for event in events if event.ph != "X"])
        codes = list(map(CODES.get, each("cat", work)))
        if None in codes:
            codes = [self._code(code, event) for code, event in zip(codes, work, strict=True)]
            self._leave_out([event for event, code in zip(work, codes, strict=True) if code is None])
            work = [event for event, code in zip(work, codes, strict=True) if code is not None]
            codes = [code for code in codes if code is not None]
        if work:
            self._take_work(work, np.array(codes, dtype=np.int8))

    def _take_marks(self, events: list[Event]) -> None:
        for event in events:
            if event.ph == "i" and event.name == MEMORY and event.args is not None:
                self.memory.append(event)
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_names[(event.pid, event.tid)] = str(event.args.name)

    def _code(self, code: int | None, event: Event) -> int | None:
        """The category of an event: work on a stream of an unknown category counts as a kernel."""
        if code is not None or event.cat in NOT_A_NODE or event.args is None:
            return code
        if as_number(event.args.stream) < 0 or as_number(event.args.device) < 0:
            return None
        self.findings.add("unknown-device-work", detail=str(event.cat))
        return KERNEL

    def _leave_out(self, events: list[Event]) -> None:
        for category, count in Counter(each("cat", events)).items():
            if category in NOT_A_NODE:
                self.findings.add(NOT_A_NODE[category], count)
            else:
                self.findings.add("unknown-category", count, detail=str(category))
        frames = [event for event in events if event.cat == "python_function"]
        self.modules += [frame for frame in frames if str(frame.name).startswith(MODULE)]

    def leave_out(self, record: bytes) -> None:
        fields = msgspec.json.decode(record)
        if isinstance(fields, dict) and fields.get("ph") == "X":
            self.events_in += 1
            self.findings.add("bad-field")
        else:
            self.findings.add("bad-record")

    def _take_work(self, work: list[Event], category: np.ndarray) -> None:
        args: list[Any] = [args or _NO_ARGS for args in each("args", work)]
        absent = np.full(len(work), -1, dtype=np.int64)
        columns = {
            "start": as_column(each("ts", work), np.float64),
            "length": as_column(each("dur", work), np.float64),
            "category": category,
            "name": indices(each("name", work), self.names),
            **{name: as_column(each(name, args)) for name in _IDS},
            **{name: absent.copy() for name in ("device", "stream", "bytes", "graph")},
            **{name: absent.astype(np.int32) for name in ("thread", "shape")},
        }
        cpu = np.flatnonzero(category < KERNEL)
        on_cpu = [work[row] for row in cpu.tolist()] if len(cpu) < len(work) else work
        threads = list(zip(each("pid", on_cpu), each("tid", on_cpu), strict=True))
        columns["thread"][cpu] = indices(threads, self.threads, tuple)
        gpu = np.flatnonzero(category >= KERNEL)
        if len(gpu):
            rows = gpu.tolist()
            self._take_gpu([work[row] for row in rows], [args[row] for row in rows], columns, gpu)
        sparse = self.sparse
        if self.inputs is not None:
            names = ("concrete", "dims", "types", "strides")
            values, dims, types, strides = (copies(each(name, args)) for name in names)
            for target, texts in zip(self.inputs, (values, dims, types), strict=True):
                target += texts
            sparse["strides"] |= strided(dims, strides, self.rows)
        waits = np.flatnonzero(category == SYNC).tolist()
        for name, found in (("waits", waits), ("communication", _communicating(args))):
            for row in found:
                sparse[name][self.rows + row] = msgspec.structs.replace(args[row], **_NO_TEXTS)
        for name, column in columns.items():
            self.numbers.setdefault(name, []).append(column)
        self.rows += len(work)

    def _take_gpu(
        self, work: list[Event], args: list[Args], columns: dict[str, np.ndarray], gpu: np.ndarray
    ) -> None:
        """Fill the columns of the rows ``gpu``, whose events are ``work``."""
        for name, numbers, *others in (
            ("device", each("device", args), each("pid", work)),
            ("stream", each("original_stream", args), each("stream", args), each("tid", work)),
            ("bytes", each("bytes", args)),
            ("graph", each("graph_id", args)),
        ):
            for other in others:
                if None in numbers:
                    numbers = [b if a is None else a for a, b in zip(numbers, other, strict=True)]
            columns[name][gpu] = as_column(numbers)
        recorded = list(zip(copies(each("grid", args)), copies(each("block", args)), strict=True))
        for texts in [texts for texts in dict.fromkeys(recorded) if texts not in self.shape_of]:
            grid, block = (msgspec.json.decode(text or b"null") for text in texts)
            key = (_triple(grid), _triple(block))
            self.shape_of[texts] = -1 if grid is None else self.shapes.setdefault(key, len(self.shapes))
        columns["shape"][gpu] = list(map(self.shape_of.__getitem__, recorded))


def _communicating(args: list[Args]) -> list[int]:
    """The rows with an argument that describes communication."""
    columns = [each(name, args) for name in ("collective", "group_name", "in_elements")]
    if all(column.count(None) == len(args) for column in columns):
        return []
    return [row for row, values in enumerate(zip(*columns, strict=True)) if values.count(None) < len(columns)]


def _triple(value: Any) -> str:
    """A grid or block as ``x,y,z``, from a list or text."""
    numbers = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return ",".join(str(number).strip()[:12] for number in numbers[:3])


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
    """The events as columns. Those without a usable size and total, or ``most_us`` from the first event of
    the trace, are left out and counted."""
    if not events:
        return no_memory()
    args = each("args", events)
    after = as_column(each("ts", events), np.float64) - origin_us
    names = ("memory_bytes", "allocated", "reserved", "device_type", "device_id")
    columns = [as_column(each(name, args), np.float64) for name in names]
    size, allocated, reserved, kind, number = (
        np.where(np.abs(column) < 2**63, column, np.nan) for column in columns
    )
    good = (np.abs(after) < most_us) & (np.abs(size) < 2**53) & (allocated >= 0)
    good &= (kind >= 0) & (np.abs(number) < 2**15)
    devices, device = _devices(kind[good], number[good])
    if len(devices) > MOST_DEVICES:
        found.add("bad-memory-event", len(events))
        return no_memory()
    found.add("bad-memory-event", int((~good).sum()))
    thread = np.array([threads.get((event.pid, event.tid), -1) for event in events], dtype=np.int64)
    time = np.rint(after[good] * 1000).astype(np.int64)
    order = np.argsort(time, kind="stable")
    columns = [np.nan_to_num(column[good][order]) for column in (size, allocated, np.maximum(reserved, 0))]
    size, allocated, reserved = (column.astype(np.int64) for column in columns)
    return Memory(thread[good][order], time[order], device[order], size, allocated, reserved, devices)


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
