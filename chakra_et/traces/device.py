"""Kineto's device trace (Chrome trace JSON) as columns.

Times are int64 nanoseconds since the first event of the trace. Only the fields that the conversion needs are
decoded; ``device_format`` has the field names of all known writers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.traces.device_format import (
    ANNOTATION,
    CODE_OF_CATEGORY,
    KERNEL,
    MODULE,
    NO_ARGS,
    NO_TEXT,
    NOT_A_NODE,
    SYNC,
    Args,
    Event,
    Header,
    HeaderFields,
    OperatorArgs,
    OperatorHeader,
)
from chakra_et.traces.fields import Number, as_column, as_number, copies, indices
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits
from chakra_et.traces.memory import MEMORY, Memory, no_memory, read_memory
from chakra_et.traces.records import read_records

# Getters for map, which takes half the time of a comprehension over a million records.
_name, _category, _pid, _tid = map(attrgetter, ("name", "cat", "pid", "tid"))
_ts, _dur, _args = map(attrgetter, ("ts", "dur", "args"))
_OF_ARGS = {
    name: attrgetter(name)
    for name in ("rf_id", "external_id", "correlation", "sequence", "forward_thread")
}  # fmt: skip
_device, _stream, _original_stream = map(attrgetter, ("device", "stream", "original_stream"))
_bytes, _graph, _grid, _block = map(attrgetter, ("bytes", "graph_id", "grid", "block"))
_collective, _group_name, _in_elements = map(attrgetter, ("collective", "group_name", "in_elements"))
_TEXTS = ("grid", "block", "dims", "types", "concrete")
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
      memsets), ``graph`` (CUDA or HIP graph): -1 if absent
    - ``shape``: index into ``shapes`` (grid and block of a kernel), -1 for none
    - ``communication``: row → arguments that describe communication; ``waits``: row → cuda_sync arguments
    - ``forward_backward`` int64[K, 2, 2]: (thread, time) of the start and finish of each fwdbwd flow
    - ``origin_ns``: absolute time of the first event; ``events_in``: number of events in the file
    - ``findings``: counts of what was left out or repaired
    - ``memory``: allocations and frees, if they were recorded
    - ``inputs``: None unless requested; ``launched``: row of a launch call → name of the kernel (only HIP
      records it), empty unless requested
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
    memory: Memory = field(default_factory=no_memory)

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> DeviceTrace:
        """The same trace with only ``rows`` (ascending)."""
        place = {int(row): at for at, row in enumerate(rows)}
        changes: dict[str, Any] = {column: getattr(self, column)[rows] for column in _PER_ROW}
        for sparse in ("communication", "waits", "launched"):
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
    columns = _Columns(operators)
    layout = OperatorHeader if operators else Header
    header = read_records(path, "traceEvents", lambda head: layout, columns, limits)
    if columns.rows == 0:
        raise TraceError(
            f"{path}: has no operator, runtime call or kernel; did the run reach an active profiler step?"
        )
    return _finish(path, columns, header)


class _Columns:
    """Collects columns piece by piece."""

    def __init__(self, operators: bool) -> None:
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.names: dict[str, int] = {}
        self.shapes: dict[tuple[str, str], int] = {}
        self.shape_of: dict[tuple[bytes, bytes], int] = {(b"", b""): -1}  # by their texts as recorded
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.communication: dict[int, Args] = {}
        self.waits: dict[int, Args] = {}
        self.flows: dict[Any, list[Any]] = {}
        self.modules: list[Event] = []
        self.memory: list[Event] = []
        self.inputs: tuple[list[bytes], list[bytes], list[bytes]] | None = ([], [], []) if operators else None
        self.launched: dict[int, str] = {}
        self.findings = Findings()
        self.events_in = 0
        self.rows = 0

    def take(self, events: list[Event]) -> None:
        work = [event for event in events if event.ph == "X"]
        self.events_in += len(work)
        if len(work) < len(events):
            self._take_marks([event for event in events if event.ph != "X"])
        codes = list(map(CODE_OF_CATEGORY.get, map(_category, work)))
        if None in codes:
            for event, code in zip(work, codes, strict=True):
                if code is None:
                    self._leave_out(event)
            work = [event for event, code in zip(work, codes, strict=True) if code is not None]
            codes = [code for code in codes if code is not None]
        if work:
            self._take_work(work, np.array(codes, dtype=np.int8))

    def _take_marks(self, events: list[Event]) -> None:
        for event in events:
            if event.ph == "i" and event.name == MEMORY and event.args is not None:
                self.memory.append(event)
            elif event.cat == "fwdbwd" and event.ph in "sf":
                self.flows.setdefault(event.id, [None, None])[event.ph == "f"] = event
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_names[(event.pid, event.tid)] = str(event.args.name)

    def _leave_out(self, event: Event) -> None:
        category = str(event.cat)
        if category in NOT_A_NODE:
            self.findings.add(NOT_A_NODE[category])
            if category == "python_function" and str(event.name).startswith(MODULE):
                self.modules.append(event)
        else:
            self.findings.add("unknown-category", detail=category)

    def leave_out(self, record: bytes) -> None:
        fields = msgspec.json.decode(record)
        if isinstance(fields, dict) and fields.get("ph") == "X":
            self.events_in += 1
            self.findings.add("bad-field")
        else:
            self.findings.add("bad-record")

    def _take_work(self, work: list[Event], category: np.ndarray) -> None:
        args: list[Any] = [args or NO_ARGS for args in map(_args, work)]
        absent = np.full(len(work), -1, dtype=np.int64)
        columns = {
            "start": as_column(list(map(_ts, work)), np.float64),
            "length": as_column(list(map(_dur, work)), np.float64),
            "category": category,
            "name": indices(list(map(_name, work)), self.names),
            **{name: as_column(list(map(get, args))) for name, get in _OF_ARGS.items()},
            **{name: absent.copy() for name in ("device", "stream", "bytes", "graph")},
            **{name: absent.astype(np.int32) for name in ("thread", "shape")},
        }
        cpu = np.flatnonzero(category < KERNEL)
        on_cpu = [work[row] for row in cpu.tolist()] if len(cpu) < len(work) else work
        threads = list(zip(map(_pid, on_cpu), map(_tid, on_cpu), strict=True))
        columns["thread"][cpu] = indices(threads, self.threads, tuple)
        gpu = np.flatnonzero(category >= KERNEL)
        if len(gpu):
            rows = gpu.tolist()
            self._take_gpu([work[row] for row in rows], [args[row] for row in rows], columns, gpu)
        if self.inputs is not None:
            for target, name in zip(self.inputs, ("concrete", "dims", "types"), strict=True):
                target += copies(list(map(attrgetter(name), args)))
            self.launched |= {self.rows + row: str(a.kernel) for row, a in enumerate(args) if a.kernel}
        waits = np.flatnonzero(category == SYNC).tolist()
        self.waits |= {self.rows + row: _without_texts(args[row]) for row in waits}
        self.communication |= {self.rows + row: _without_texts(args[row]) for row in _communicating(args)}
        for name, column in columns.items():
            self.numbers.setdefault(name, []).append(column)
        self.rows += len(work)

    def _take_gpu(
        self, work: list[Event], args: list[Args], columns: dict[str, np.ndarray], gpu: np.ndarray
    ) -> None:
        """Fill the columns of the rows ``gpu``, whose events are ``work``."""
        devices, streams = list(map(_device, args)), list(map(_original_stream, args))
        if None in devices:
            devices = [_either(number, event.pid) for number, event in zip(devices, work, strict=True)]
        for get, of in ((_stream, args), (_tid, work)):
            if None in streams:
                streams = [_either(number, get(one)) for number, one in zip(streams, of, strict=True)]
        columns["device"][gpu], columns["stream"][gpu] = as_column(devices), as_column(streams)
        columns["bytes"][gpu] = as_column(list(map(_bytes, args)))
        columns["graph"][gpu] = as_column(list(map(_graph, args)))
        recorded = list(zip(copies(list(map(_grid, args))), copies(list(map(_block, args))), strict=True))
        columns["shape"][gpu] = list(map(self._shape, recorded))

    def _shape(self, recorded: tuple[bytes, bytes]) -> int:
        """The index of a grid and block, from their JSON texts."""
        index = self.shape_of.get(recorded)
        if index is None:
            grid, block = (msgspec.json.decode(text or b"null") for text in recorded)
            key = (_triple(grid), _triple(block))
            index = -1 if grid is None else self.shapes.setdefault(key, len(self.shapes))
            self.shape_of[recorded] = index
        return index


def _communicating(args: list[Args]) -> list[int]:
    """The rows with an argument that describes communication."""
    columns = [list(map(get, args)) for get in (_collective, _group_name, _in_elements)]
    if all(column.count(None) == len(args) for column in columns):
        return []
    return [row for row, values in enumerate(zip(*columns, strict=True)) if values.count(None) < len(columns)]


def _without_texts(args: Args) -> Args:
    """``args`` without its raw texts, each of which would keep a whole piece of the trace in memory."""
    for name in _TEXTS if isinstance(args, OperatorArgs) else _TEXTS[:2]:
        setattr(args, name, NO_TEXT)
    return args


def _triple(value: Any) -> str:
    """A grid or block as ``x,y,z``, from a list or text."""
    numbers = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return ",".join(str(number).strip()[:12] for number in numbers[:3])


def _finish(path: Path, columns: _Columns, header: HeaderFields) -> DeviceTrace:
    joined = {name: np.concatenate(parts) for name, parts in columns.numbers.items()}
    start_us, length = joined.pop("start"), joined.pop("length")
    findings = columns.findings
    # The comparison is false for NaN, so this also rejects events without a time.
    sane = (np.abs(start_us) < MAX_MICROSECONDS) & (length < MAX_SPAN) & (length > -MAX_SPAN)
    if sane.any():
        # np.median imports numpy.ma, which takes as long as reading a small trace.
        middle = np.partition(start_us[sane], int(sane.sum()) // 2)[int(sane.sum()) // 2]
        sane &= np.abs(start_us - middle) < MAX_SPAN
    findings.add("bad-time", int((~sane).sum()))
    negative = sane & (length < 0)
    if negative.any():
        findings.add("negative-duration", int(negative.sum()))
        length = np.where(negative, 0.0, length)
    if not (sane & (joined["category"] != SYNC)).any():
        raise TraceError(f"{path}: has no operator, runtime call or kernel with a usable time stamp.")
    origin_us = float(np.floor(start_us[sane].min()))
    start = np.zeros(len(start_us), dtype=np.int64)
    end = start.copy()
    start[sane] = np.rint((start_us[sane] - origin_us) * 1000).astype(np.int64)
    end[sane] = start[sane] + np.rint(length[sane] * 1000).astype(np.int64)
    # With equal times, a runtime call is inside an operator and a driver call inside a runtime call; of two
    # operators, the outer one has the lower id.
    depth = np.maximum(joined["category"], ANNOTATION)
    order = np.lexsort((joined["external_id"], depth, -end, start))
    order = order[sane[order]]
    place = np.full(len(start), -1, dtype=np.int64)
    place[order] = np.arange(len(order))

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
        device_name=str(first.get("name") or "") if isinstance(first, dict) else "",
        inputs=inputs,
        launched=placed(columns.launched),
        memory=read_memory(columns.memory, columns.threads, origin_us, 2 * MAX_SPAN, findings),
        **{name: column[order] for name, column in joined.items()},
    )


def _flows(columns: _Columns, origin_us: float) -> np.ndarray:
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


def _modules(columns: _Columns, origin_us: float) -> Modules:
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


def _either(value: Number, otherwise: Number) -> Number:
    return otherwise if value is None else value
