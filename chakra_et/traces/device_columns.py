"""Collects the events of a device trace as columns, piece by piece while it is read."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from chakra_et.findings import Findings
from chakra_et.traces.device_format import (
    CODE_OF_CATEGORY,
    KERNEL,
    MEMORY,
    MODULE,
    NOT_A_NODE,
    SYNC,
    Args,
    Event,
    OperatorArgs,
)
from chakra_et.traces.fields import Number, Strided, as_column, as_number, copies, indices

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
_TEXTS = ("grid", "block", "dims", "types", "concrete", "strides")
_NO_ARGS = OperatorArgs()
SPARSE = ("communication", "waits", "launched", "strides")
"""What only a few events have; see ``DeviceTrace``."""


class DeviceColumns:
    """Columns so far; ``read_records`` hands it the events."""

    def __init__(self, operators: bool) -> None:
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.names: dict[str, int] = {}
        self.shapes: dict[tuple[str, str], int] = {}
        self.shape_of: dict[tuple[bytes, bytes], int] = {(b"", b""): -1}  # by their texts as recorded
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.sparse: dict[str, dict[int, Any]] = {name: {} for name in SPARSE}  # by row
        self.flows: dict[Any, list[Any]] = {}
        self.modules: list[Event] = []
        self.memory: list[Event] = []
        self.inputs: tuple[list[bytes], list[bytes], list[bytes]] | None = ([], [], []) if operators else None
        self.strided = Strided()
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
            codes = [self._code(*each) for each in zip(codes, work, strict=True)]
            self._leave_out([event for event, code in zip(work, codes, strict=True) if code is None])
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

    def _code(self, code: int | None, event: Event) -> int | None:
        """The category of an event: work on a stream of an unknown category counts as a kernel."""
        if code is not None or event.cat in NOT_A_NODE or event.args is None:
            return code
        if as_number(event.args.stream) < 0 or as_number(event.args.device) < 0:
            return None
        self.findings.add("unknown-device-work", detail=str(event.cat))
        return KERNEL

    def _leave_out(self, events: list[Event]) -> None:
        for category, count in Counter(map(_category, events)).items():
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
        args: list[Any] = [args or _NO_ARGS for args in map(_args, work)]
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
        sparse = self.sparse
        if self.inputs is not None:
            names = ("concrete", "dims", "types", "strides")
            values, dims, types, strides = (copies(list(map(attrgetter(name), args))) for name in names)
            for target, texts in zip(self.inputs, (values, dims, types), strict=True):
                target += texts
            for row in self.strided.rows(dims, strides):
                sparse["strides"][self.rows + row] = strides[row].decode("utf-8", "replace")
            sparse["launched"] |= {self.rows + row: str(a.kernel) for row, a in enumerate(args) if a.kernel}
        waits = np.flatnonzero(category == SYNC).tolist()
        for name, found in (("waits", waits), ("communication", _communicating(args))):
            sparse[name] |= {self.rows + row: _without_texts(args[row]) for row in found}
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
        for texts in [texts for texts in dict.fromkeys(recorded) if texts not in self.shape_of]:
            grid, block = (msgspec.json.decode(text or b"null") for text in texts)
            key = (_triple(grid), _triple(block))
            self.shape_of[texts] = -1 if grid is None else self.shapes.setdefault(key, len(self.shapes))
        columns["shape"][gpu] = list(map(self.shape_of.__getitem__, recorded))


def _communicating(args: list[Args]) -> list[int]:
    """The rows with an argument that describes communication."""
    columns = [list(map(get, args)) for get in (_collective, _group_name, _in_elements)]
    if all(column.count(None) == len(args) for column in columns):
        return []
    return [row for row, values in enumerate(zip(*columns, strict=True)) if values.count(None) < len(columns)]


def _without_texts(args: Args) -> Args:
    """``args`` without its raw texts, each of which would keep a whole piece of the trace in memory."""
    for name in _TEXTS if isinstance(args, OperatorArgs) else _TEXTS[:2]:
        setattr(args, name, msgspec.Raw(b""))
    return args


def _triple(value: Any) -> str:
    """A grid or block as ``x,y,z``, from a list or text."""
    numbers = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return ",".join(str(number).strip()[:12] for number in numbers[:3])


def _either(value: Number, otherwise: Number) -> Number:
    return otherwise if value is None else value
