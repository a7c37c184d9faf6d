"""Kineto's device trace (Chrome trace JSON) as columns.

Times are int64 nanoseconds since the first event of the trace. Only the fields that the conversion needs are
decoded; ``device_format`` has the field names of all known writers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.arrays import narrowed
from chakra_et.errors import TraceError
from chakra_et.et.wire import byte_strings
from chakra_et.files import path_of
from chakra_et.findings import Findings
from chakra_et.traces.device_columns import SPARSE, DeviceColumns, Memory, no_memory, read_memory
from chakra_et.traces.device_format import (
    ANNOTATION,
    CPU_OP,
    KERNEL,
    MODULE,
    SYNC,
    Args,
    Header,
    Recording,
    read_recording,
)
from chakra_et.traces.fields import add_repairs, as_number
from chakra_et.traces.host import HostTrace
from chakra_et.traces.records import MAX_BYTES, read_records

MAX_MICROSECONDS = 2.0**53
MAX_SPAN = 7 * 86_400e6
"""Longest time in µs from the median event to any other event, and of one event: profiling takes minutes."""
_TYPE = re.compile(rb'"([^"\\]*)"')
_NOT_TENSORS = frozenset((b"", b"Scalar", b"ScalarList", b"TensorList", b"Device", b"Layout", b"Generator"))
_NOTHING = b"[]"
Arguments = tuple[list[bytes], ...]


@dataclass(eq=False, repr=False)
class Modules:
    """K forward calls of modules, sorted by start. All columns are int64[K].

    ``start``, ``end``: ns; ``name``: index into ``names`` (``ResNet_0``, without the prefix).
    """

    thread: np.ndarray
    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    names: list[str]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(eq=False, repr=False)
class DeviceTrace:
    """The events of one rank that become nodes or edges, one row each, sorted by start time.

    - ``category``: index into ``CATEGORIES``; ``start``, ``end``: ns; ``name``: index into ``names``
    - ``thread``: index into ``threads`` (pid, tid) for rows on the CPU, otherwise -1
    - ``device``, ``stream``: for rows on the GPU, otherwise -1
    - ``rf_id``, ``external_id``, ``correlation``, ``sequence``, ``forward_thread``, ``bytes`` (of copies and
      memsets), ``graph`` (CUDA or HIP graph): -1 if absent; int64, or int32 where that suffices
    - ``shape``: index into ``shapes`` (grid and block of a kernel), -1 for none
    - ``communication``: row → arguments that describe communication; ``waits``: row → cuda_sync arguments
    - ``origin_ns``: absolute time of the first event; ``events_in``: number of events in the file
    - ``findings``: counts of what was left out or repaired
    - ``memory``: allocations and frees, if they were recorded
    - ``recording``: what our tracer wrote about steps and costs, see ``device_format.Recording``
    - ``inputs``: values, shapes and types of the operators' arguments, one JSON text per row, empty for none;
      None unless requested, and for a selection
    - ``strides``: row → strides of an operator's arguments, as JSON text, if one isn't contiguous; empty
      unless requested
    """

    path: Path
    name: np.ndarray
    names: list[str]
    category: np.ndarray
    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    threads: list[tuple[Any, Any]]
    thread_names: dict[tuple[Any, Any], str]
    device: np.ndarray
    stream: np.ndarray
    rf_id: np.ndarray
    external_id: np.ndarray
    correlation: np.ndarray
    sequence: np.ndarray
    forward_thread: np.ndarray
    bytes: np.ndarray
    graph: np.ndarray
    shape: np.ndarray
    shapes: list[tuple[str, str]]
    communication: dict[int, Args]
    waits: dict[int, Args]
    modules: Modules
    origin_ns: int
    events_in: int
    findings: Findings
    distributed: dict[str, Any] = field(default_factory=dict)
    host_name: str = ""
    device_name: str = ""
    inputs: Arguments | None = None
    strides: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=no_memory)
    recording: Recording | None = None

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> DeviceTrace:
        """The same trace with only ``rows`` (ascending)."""
        place = {int(row): at for at, row in enumerate(rows)}
        changes: dict[str, Any] = {
            name: column[rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        for name in SPARSE:
            table = getattr(self, name)
            changes[name] = {place[row]: value for row, value in table.items() if row in place}
        return dataclasses.replace(self, **changes, inputs=None)


STEP = re.compile(r"ProfilerStep#([0-9]{1,18})")


def steps(device: DeviceTrace) -> list[tuple[int, int]]:
    """The active steps as (number, row of the annotation), in time order; annotations of the program that are
    named like one, within a step, aren't steps."""
    numbers = {code: int(m[1]) for code, name in enumerate(device.names) if (m := STEP.fullmatch(name))}
    rows = np.flatnonzero(np.isin(device.name, list(numbers)) & (device.category < KERNEL))
    earlier = np.maximum.accumulate(np.append(-1, device.end[rows]))[:-1]
    return [(numbers[device.name[row]], row) for row in rows[device.end[rows] > earlier].tolist()]


def load(path: str | Path, max_bytes: int = MAX_BYTES, operators: bool = False) -> DeviceTrace:
    """Read a device trace (``.json`` or ``.json.gz``). ``operators``: also read the operators' arguments.

    Raises ``TraceError`` if it is not readable, is too long or has no operator, call or kernel.
    """
    path = path_of(path)
    columns = DeviceColumns(operators)
    header = read_records(path, "traceEvents", lambda head: Header, columns, max_bytes)
    if columns.rows == 0:
        raise TraceError(
            f"{path}: has no operator, runtime call or kernel: did the run reach an active profiler step?"
        )
    findings = columns.findings
    numbers = {name: np.concatenate(columns.numbers.pop(name)) for name in list(columns.numbers)}
    add_repairs(findings, "device", header.chakra_et_repairs)
    sane, origin_us = _times(path, numbers, findings)
    order = _order(sane, numbers, findings)
    place = np.full(len(sane), -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    inputs = columns.inputs and tuple([column[row] for row in order.tolist()] for column in columns.inputs)
    properties = header.deviceProperties
    first = properties[0] if isinstance(properties, list) and properties else {}
    rows: dict[str, Any] = {
        name: {int(place[row]): value for row, value in table.items() if place[row] >= 0}
        for name, table in columns.sparse.items()
    }
    start, end = (numbers.pop(name)[order] for name in ("start", "end"))
    rows |= {name: narrowed(numbers.pop(name)[order]) for name in list(numbers)}
    return DeviceTrace(
        path=path,
        names=list(columns.names),
        start=start,
        end=end,
        threads=list(columns.threads),
        thread_names=columns.thread_names,
        shapes=list(columns.shapes),
        modules=_modules(columns, origin_us),
        origin_ns=int(as_number(header.baseTimeNanoseconds, 0)) + int(origin_us) * 1000,
        events_in=columns.events_in,
        findings=findings,
        distributed=header.distributedInfo if isinstance(header.distributedInfo, dict) else {},
        host_name=str(header.host_name or ""),
        recording=read_recording(header.chakra_et),
        device_name=str(first.get("name") or "") if isinstance(first, dict) else "",
        inputs=inputs,
        memory=read_memory(columns.memory, columns.threads, origin_us, 2 * MAX_SPAN, findings),
        **rows,
    )


def _times(path: Path, numbers: dict[str, np.ndarray], findings: Findings) -> tuple[np.ndarray, float]:
    """Put ``start`` and ``end`` (int64, ns) in place of ``start`` and ``length`` as recorded; returns which
    events have a usable time, and the first whole µs."""
    start_us, length, category = numbers["start"], numbers.pop("length"), numbers["category"]
    # The comparison is false for NaN, so this also rejects events without a time.
    sane = (np.abs(start_us) < MAX_MICROSECONDS) & (length < MAX_SPAN) & (length > -MAX_SPAN)
    if sane.any():
        # np.median imports numpy.ma, which takes as long as reading a small trace.
        middle = np.partition(start_us[sane], int(sane.sum()) // 2)[int(sane.sum()) // 2]
        sane &= np.abs(start_us - middle) < MAX_SPAN
    findings.add("bad-time", int((~sane).sum()))
    findings.add("negative-duration", int((sane & (length < 0)).sum()))
    length = np.maximum(length, 0.0)
    if not (sane & (category != SYNC)).any():
        raise TraceError(f"{path}: has no operator, runtime call or kernel with a usable time stamp.")
    origin_us = float(np.floor(start_us[sane].min()))
    start = np.zeros(len(start_us), dtype=np.int64)
    end = start.copy()
    start[sane] = np.rint((start_us[sane] - origin_us) * 1000).astype(np.int64)
    end[sane] = start[sane] + np.rint(length[sane] * 1000).astype(np.int64)
    numbers["start"], numbers["end"] = start, end
    rounding_ns = int(np.spacing(np.abs(start_us[sane]).max()) * 1000)
    if rounding_ns:
        # PyTorch 2.2 and 2.3 write microseconds since 1970, of which a double holds a quarter, and later
        # versions write them since baseTimeNanoseconds. What the rounding made late ends before the next work
        # of its stream begins.
        rows = np.flatnonzero(sane & (category >= KERNEL) & (category != SYNC))
        rows = rows[np.lexsort((start[rows], numbers["stream"][rows], numbers["device"][rows]))]
        before, after = rows[:-1], rows[1:]
        late = end[before] - start[after]
        cut = (late > 0) & (late <= rounding_ns) & (start[before] < start[after])
        for name in ("stream", "device"):
            cut &= numbers[name][before] == numbers[name][after]
        end[before[cut]] = start[after[cut]]
    return sane, origin_us


def _order(sane: np.ndarray, numbers: dict[str, np.ndarray], findings: Findings) -> np.ndarray:
    """The usable rows by time, without those that are another row once more, as where a writer wrote a buffer
    twice: one that lasts, or has an id or a stream, can't be there beside itself, and one with the unique id
    of a call isn't on two threads: the busier one keeps it."""
    start, end = numbers["start"], numbers["end"]
    category, outer = numbers["category"], numbers["external_id"]
    # With equal times, a runtime call is inside an operator and a driver call inside a runtime call; of two
    # operators, the outer one has the lower id.
    order = np.lexsort((outer, np.maximum(category, ANNOTATION), -end, start))
    order = order[sane[order]]
    same = np.ones(len(order) - 1, bool)
    for column in (start, end, category, outer):
        same &= np.diff(column[order]) == 0
    rows = order[np.append(same, False) | np.insert(same, 0, False)]
    thread = numbers["thread"]
    rows = rows[np.argsort(-np.bincount(thread + 1)[thread[rows] + 1], kind="stable")]
    ids = ("external_id", "rf_id", "correlation", "stream")
    others = ("start", "end", "category", "name", "device", "sequence")
    columns = [numbers[name][rows].astype(np.int64) for name in (*ids, *others)]
    columns.append(np.where(np.max(columns[:3], axis=0) > 0, -1, thread[rows]))
    first = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)[1]
    repeated: np.ndarray = (np.max(columns[: len(ids)], axis=0) >= 0) | (end[rows] > start[rows])
    repeated[first] = False
    repeats = int(repeated.sum())
    findings.add("duplicate-event", repeats)
    findings.add("duplicate-events", repeats)
    return order[~np.isin(order, rows[repeated])] if repeats else order


def _modules(columns: DeviceColumns, origin_us: float) -> Modules:
    names: dict[str, int] = {}
    rows = []
    for event in columns.modules:
        thread, length = columns.threads.get((event.pid, event.tid), -1), as_number(event.dur, -1)
        after = as_number(event.ts, -MAX_SPAN) - origin_us
        if thread >= 0 and abs(after) < 2 * MAX_SPAN and 0 <= length < MAX_SPAN:
            name = names.setdefault(str(event.name).removeprefix(MODULE), len(names))
            rows.append((round(after * 1000), -round(length * 1000), thread, name))
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    start, end = table[:, 0], table[:, 0] - table[:, 1]
    return Modules(table[:, 2], start, end, table[:, 3], list(names))


def operators_of(device: DeviceTrace) -> HostTrace:
    """The operators and annotations as host nodes, in the order of the rows, of a rank without a host trace:
    most frameworks only write Kineto's. They have no tensor ids, storages and schemas.

    The record-function id of a node is its row + 1, which makes it unique. ``device`` must be loaded with
    ``operators=True``.
    """
    rows = np.flatnonzero((device.category == CPU_OP) | (device.category == ANNOTATION))
    count = len(rows)
    argument_values, shapes, types = device.inputs or ([b""] * len(device),) * 3
    taken = rows.tolist()
    pid = next((pid for pid, _ in device.threads if isinstance(pid, int) and pid > 0), 0)
    none = np.zeros(count, dtype=np.int64)
    nothing = byte_strings([_NOTHING]).take(none)
    return HostTrace(
        path=device.path,
        name=device.name[rows],
        names=device.names,
        op_schema=none,
        schemas=[""],
        rf_id=rows + 1,
        fw_parent=none,
        seq_id=device.sequence[rows],
        scope=none,
        tid=device.thread[rows].astype(np.int64) + 1,
        fw_tid=np.maximum(device.forward_thread[rows], 0),
        inputs=(
            byte_strings([argument_values[row] or _NOTHING for row in taken]),
            byte_strings([shapes[row] or _NOTHING for row in taken]),
            byte_strings([_host_types(types[row]) for row in taken]),
        ),
        outputs=(nothing, nothing, nothing),
        communication={},
        strides={row: device.strides[at] for row, at in enumerate(taken) if at in device.strides},
        groups=[],
        header={"schema": "", "pid": pid, "time": "", "start_ts": 0, "finish_ts": 0},
        recorded=False,
    )


@functools.lru_cache(maxsize=65536)
def _host_types(types: bytes) -> bytes:
    """Kineto's types in the observer's notation: ``"float"`` of a tensor becomes ``"Tensor(float)"``."""
    if not types:
        return _NOTHING

    def name(match: re.Match[bytes]) -> bytes:
        return match[0] if match[1] in _NOT_TENSORS else b'"Tensor(' + match[1] + b')"'

    return _TYPE.sub(name, types)
