"""Kineto's device trace (Chrome trace JSON) as columns.

Times are int64 nanoseconds since the first event of the trace. Only the fields that the conversion needs are
decoded; ``device_format`` has the field names of all known writers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.arrays import narrowed
from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.traces.device_columns import DeviceColumns
from chakra_et.traces.device_format import (
    ANNOTATION,
    KERNEL,
    MODULE,
    SYNC,
    Args,
    Header,
    HeaderFields,
    OperatorHeader,
)
from chakra_et.traces.fields import as_number
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits
from chakra_et.traces.memory import Memory, no_memory, read_memory
from chakra_et.traces.recording import Recording, read_recording
from chakra_et.traces.records import read_records
from chakra_et.traces.repaired import add_repairs

MAX_MICROSECONDS = 2.0**53
MAX_SPAN = 7 * 86_400e6
"""Longest time in µs from the median event to any other event, and of one event: profiling takes minutes."""
_PER_ROW = (
    "name", "category", "start", "end", "thread", "device", "stream", "rf_id", "external_id", "correlation",
    "sequence", "forward_thread", "bytes", "graph", "shape",
)  # fmt: skip


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
class OperatorInputs:
    """The operators' arguments as recorded by Kineto: one JSON text per row, empty for none.

    ``values``: concrete inputs; ``shapes`` and ``types`` of the tensors.
    """

    values: list[bytes]
    shapes: list[bytes]
    types: list[bytes]


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
    - ``forward_backward`` int64[K, 2, 2]: (thread, time) of the start and finish of each fwdbwd flow
    - ``origin_ns``: absolute time of the first event; ``events_in``: number of events in the file
    - ``findings``: counts of what was left out or repaired
    - ``memory``: allocations and frees, if they were recorded
    - ``recording``: what our tracer wrote about steps and costs, see ``chakra_et.traces.recording``
    - ``inputs``: None unless requested; ``launched``: row of a launch call → name of the kernel (only HIP
      records it), empty unless requested
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
    forward_backward: np.ndarray
    modules: Modules
    origin_ns: int
    events_in: int
    findings: Findings
    distributed: dict[str, Any] = field(default_factory=dict)
    host_name: str = ""
    device_name: str = ""
    inputs: OperatorInputs | None = None
    launched: dict[int, str] = field(default_factory=dict)
    strides: dict[int, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=no_memory)
    recording: Recording | None = None

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> DeviceTrace:
        """The same trace with only ``rows`` (ascending)."""
        place = {int(row): at for at, row in enumerate(rows)}
        changes: dict[str, Any] = {column: getattr(self, column)[rows] for column in _PER_ROW}
        for sparse in ("communication", "waits", "launched", "strides"):
            table = getattr(self, sparse)
            changes[sparse] = {place[row]: value for row, value in table.items() if row in place}
        if self.inputs:
            texts = ([column[row] for row in rows.tolist()] for column in vars(self.inputs).values())
            changes["inputs"] = OperatorInputs(*texts)
        return dataclasses.replace(self, **changes)


def load(path: str | Path, limits: Limits = DEFAULT_LIMITS, operators: bool = False) -> DeviceTrace:
    """Read a device trace (``.json`` or ``.json.gz``). ``operators``: also read the operators' arguments.

    Raises ``TraceError`` if it is not readable, exceeds the limits or has no operator, call or kernel.
    """
    path = Path(path)
    columns = DeviceColumns(operators)
    layout = OperatorHeader if operators else Header
    header = read_records(path, "traceEvents", lambda head: layout, columns, limits)
    if columns.rows == 0:
        raise TraceError(
            f"{path}: has no operator, runtime call or kernel; did the run reach an active profiler step?"
        )
    return _finish(path, columns, header)


def _finish(path: Path, columns: DeviceColumns, header: HeaderFields) -> DeviceTrace:
    start_us, length = (np.concatenate(columns.numbers.pop(name)) for name in ("start", "length"))
    category, outer = (np.concatenate(columns.numbers[name]) for name in ("category", "external_id"))
    findings = columns.findings
    # The comparison is false for NaN, so this also rejects events without a time.
    sane = (np.abs(start_us) < MAX_MICROSECONDS) & (length < MAX_SPAN) & (length > -MAX_SPAN)
    if sane.any():
        # np.median imports numpy.ma, which takes as long as reading a small trace.
        middle = np.partition(start_us[sane], int(sane.sum()) // 2)[int(sane.sum()) // 2]
        sane &= np.abs(start_us - middle) < MAX_SPAN
    findings.add("bad-time", int((~sane).sum()))
    add_repairs(findings, "device", header.chakra_et_repairs)
    negative = sane & (length < 0)
    if negative.any():
        findings.add("negative-duration", int(negative.sum()))
        length = np.where(negative, 0.0, length)
    if not (sane & (category != SYNC)).any():
        raise TraceError(f"{path}: has no operator, runtime call or kernel with a usable time stamp.")
    origin_us = float(np.floor(start_us[sane].min()))
    start = np.zeros(len(start_us), dtype=np.int64)
    end = start.copy()
    start[sane] = np.rint((start_us[sane] - origin_us) * 1000).astype(np.int64)
    end[sane] = start[sane] + np.rint(length[sane] * 1000).astype(np.int64)
    rounding_ns = int(np.spacing(np.abs(start_us[sane]).max()) * 1000)
    if rounding_ns:
        work = np.flatnonzero(sane & (category >= KERNEL) & (category != SYNC))
        _cut_rounding(work, start, end, columns.numbers, rounding_ns)
    # With equal times, a runtime call is inside an operator and a driver call inside a runtime call; of two
    # operators, the outer one has the lower id.
    order = np.lexsort((outer, np.maximum(category, ANNOTATION), -end, start))
    order = order[sane[order]]
    repeated = _repeated(order, start, end, columns.numbers)
    findings.add("duplicate-event", len(repeated))
    findings.add("duplicate-events", len(repeated))
    order = order[~np.isin(order, repeated)] if len(repeated) else order
    del start_us, length, category, outer, negative
    place = np.full(len(start), -1, dtype=np.int64)
    place[order] = np.arange(len(order))

    def column_of(name: str) -> np.ndarray:
        return narrowed(np.concatenate(columns.numbers.pop(name))[order])

    def placed(table: dict[int, Any]) -> dict[int, Any]:
        return {int(place[row]): args for row, args in table.items() if place[row] >= 0}

    inputs = None
    if columns.inputs is not None:
        inputs = OperatorInputs(*([column[row] for row in order.tolist()] for column in columns.inputs))
    properties = header.deviceProperties
    first = properties[0] if isinstance(properties, list) and properties else {}
    return DeviceTrace(
        path=path,
        names=list(columns.names),
        start=start[order],
        end=end[order],
        threads=list(columns.threads),
        thread_names=columns.thread_names,
        shapes=list(columns.shapes),
        communication=placed(columns.communication),
        waits=placed(columns.waits),
        forward_backward=_flows(columns, origin_us),
        modules=_modules(columns, origin_us),
        origin_ns=int(as_number(header.baseTimeNanoseconds, 0)) + int(origin_us) * 1000,
        events_in=columns.events_in,
        findings=findings,
        distributed=header.distributedInfo if isinstance(header.distributedInfo, dict) else {},
        host_name=str(header.host_name or ""),
        recording=read_recording(header.chakra_et),
        device_name=str(first.get("name") or "") if isinstance(first, dict) else "",
        inputs=inputs,
        launched=placed(columns.launched),
        strides=placed(columns.strides),
        memory=read_memory(columns.memory, columns.threads, origin_us, 2 * MAX_SPAN, findings),
        **{name: column_of(name) for name in list(columns.numbers)},
    )


def _repeated(
    order: np.ndarray, start: np.ndarray, end: np.ndarray, parts: dict[str, list[np.ndarray]]
) -> np.ndarray:
    """Rows that are another row once more, as where a writer wrote a buffer twice: one that lasts, or
    has an id or a stream, can't be there beside itself. ``order``: the rows by time."""
    same = (np.diff(start[order]) == 0) & (np.diff(end[order]) == 0)
    for name in ("category", "external_id"):
        same &= np.diff(np.concatenate(parts[name])[order]) == 0
    rows = order[np.append(same, False) | np.insert(same, 0, False)]
    names = (
        "external_id",
        "rf_id",
        "correlation",
        "stream",
        "category",
        "name",
        "thread",
        "device",
        "sequence",
    )
    columns = [np.concatenate(parts[name])[rows].astype(np.int64) for name in names]
    first = np.unique(np.stack([start[rows], end[rows], *columns], axis=1), axis=0, return_index=True)[1]
    repeated: np.ndarray = (np.max(columns[:4], axis=0) >= 0) | (end[rows] > start[rows])
    repeated[first] = False
    found: np.ndarray = rows[repeated]
    return found


def _cut_rounding(
    rows: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    parts: dict[str, list[np.ndarray]],
    rounding_ns: int,
) -> None:
    """End device work (``rows``) before the next of its stream begins, where a double's rounding made it
    late.

    PyTorch 2.2 and 2.3 write microseconds since 1970, of which a double holds a quarter; later versions write
    them since ``baseTimeNanoseconds``.
    """
    stream, device = (np.concatenate(parts[name])[rows] for name in ("stream", "device"))
    order = np.lexsort((start[rows], stream, device))
    rows, stream, device = rows[order], stream[order], device[order]
    before, after = rows[:-1], rows[1:]
    late = end[before] - start[after]
    cut = (stream[:-1] == stream[1:]) & (device[:-1] == device[1:])
    cut &= (late > 0) & (late <= rounding_ns) & (start[before] < start[after])
    end[before[cut]] = start[after[cut]]


def _flows(columns: DeviceColumns, origin_us: float) -> np.ndarray:
    pairs = []
    for source, target in columns.flows.values():
        if source is None or target is None:
            continue
        ends = []
        for event in (source, target):
            thread = columns.threads.get((event.pid, event.tid), -1)
            after = as_number(event.ts, -MAX_SPAN) - origin_us
            if thread >= 0 and abs(after) < 2 * MAX_SPAN:
                ends.append((thread, round(after * 1000)))
        if len(ends) == 2:
            pairs.append(ends)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)


def _modules(columns: DeviceColumns, origin_us: float) -> Modules:
    names: dict[str, int] = {}
    rows = []
    for event in columns.modules:
        thread = columns.threads.get((event.pid, event.tid), -1)
        after, length = as_number(event.ts, -MAX_SPAN) - origin_us, as_number(event.dur, -1)
        if thread >= 0 and abs(after) < 2 * MAX_SPAN and 0 <= length < MAX_SPAN:
            name = names.setdefault(str(event.name).removeprefix(MODULE), len(names))
            rows.append((round(after * 1000), -round(length * 1000), thread, name))
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    start, end = table[:, 0], table[:, 0] - table[:, 1]
    return Modules(table[:, 2], start, end, table[:, 3], list(names))
