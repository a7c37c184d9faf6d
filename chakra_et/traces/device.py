"""Kineto's device trace (Chrome trace JSON) as columns.

Times are int64 nanoseconds since the first event of the trace. Only what the conversion needs is
decoded; the field names of all known writers stand in the two structs below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et.errors import TraceError
from chakra_et.traces.fields import Number, as_column, as_number, count
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits
from chakra_et.traces.records import read_records

CPU_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SYNC_CATEGORY = "cuda_sync"
CATEGORIES = (*CPU_CATEGORIES, *GPU_CATEGORIES, SYNC_CATEGORY)
CPU_OP, ANNOTATION, RUNTIME, DRIVER, KERNEL, MEMCPY, MEMSET, SYNC = range(len(CATEGORIES))
# Older writers and other vendors: another name for one of the above.
CATEGORY_ALIASES = {
    "Operator": "cpu_op",
    "cpu_instant_event": "cpu_op",
    "Runtime": "cuda_runtime",
    "hip_runtime": "cuda_runtime",
    "xpu_runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
WHY_NOT_A_NODE = {
    "Trace": "span of the profiler itself",
    "gpu_user_annotation": "annotation drawn on a device lane: no work of its own",
    "python_function": "Python frame: its time stays with the enclosing annotation or gap",
    "cuda_event": "event record: used for synchronisation, no work of its own",
    "overhead": "the profiler's own overhead",
}
MAX_MICROSECONDS = 2.0**53
MAX_SPAN = 7 * 86_400e6
"""µs from the middle of a trace to any event of it, and of one event: profiling takes minutes."""
MAX_RANKS = 1_000_000


class Args(msgspec.Struct, gc=False):
    external_id: Number = msgspec.field(name="External id", default=None)
    rf_id: Number = msgspec.field(name="Record function id", default=None)
    sequence: Number = msgspec.field(name="Sequence number", default=None)
    forward_thread: Number = msgspec.field(name="Fwd thread id", default=None)
    correlation: Number = None
    stream: Number = None
    original_stream: Number = None
    device: Number = None
    sync_kind: str | None = msgspec.field(name="cuda_sync_kind", default=None)
    wait_on_stream: Number = None
    record_correlation: Number = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    dtype: str | None = None
    in_elements: Number = msgspec.field(name="In msg nelems", default=None)
    out_elements: Number = msgspec.field(name="Out msg nelems", default=None)
    group_name: Number = msgspec.field(name="Process Group Name", default=None)
    group_description: str | None = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    source_rank: Number = msgspec.field(name="Src Rank", default=None)
    target_rank: Number = msgspec.field(name="Dst Rank", default=None)
    seq: Number = msgspec.field(name="Seq", default=None)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    ph: str
    name: Any = ""
    cat: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: float | int | str = 0.0
    dur: float | int | str = 0.0
    id: int | float | str | None = None
    args: Args | None = None


class Header(msgspec.Struct):
    traceEvents: list[Event]
    schemaVersion: Any = None
    distributedInfo: Any = None
    baseTimeNanoseconds: Any = None
    traceName: Any = None
    host_name: Any = None


NO_ARGS = Args()


@dataclass
class DeviceTrace:
    """The events of one rank that did work, one row each, ordered by start time.

    ``category``: index into ``CATEGORIES``. ``start``, ``end``: ns. ``thread``: index into ``threads``
    (pid, tid) for rows on the CPU, -1 otherwise. ``device``, ``stream``: for rows on the GPU, -1
    otherwise. ``rf_id``, ``external_id``, ``correlation``, ``sequence``, ``forward_thread``: -1 where
    absent. ``name`` indexes ``names``. ``communication`` holds the NCCL arguments of the rows that carry
    them; ``waits`` the cuda_sync arguments. ``forward_backward`` is int64[K, 2, 2]: (thread, time) of the
    start and finish of each fwdbwd flow. ``losses`` counts events that become no node, by reason.
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
    communication: dict[int, Args]
    waits: dict[int, Args]
    forward_backward: np.ndarray
    origin_ns: int
    events_in: int
    losses: dict[str, int]
    repairs: dict[str, int]
    distributed: dict[str, Any] = field(default_factory=dict)
    host_name: str = ""

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> DeviceTrace:
        """The same trace with only ``rows`` (ascending)."""
        import dataclasses

        columns = ["name", "category", "start", "end", "thread", "device", "stream", "rf_id", "external_id",
                   "correlation", "sequence", "forward_thread"]  # fmt: skip
        place = {int(row): at for at, row in enumerate(rows)}
        changes: dict[str, Any] = {column: getattr(self, column)[rows] for column in columns}
        for sparse in ("communication", "waits"):
            table = getattr(self, sparse)
            changes[sparse] = {place[row]: value for row, value in table.items() if row in place}
        return dataclasses.replace(self, **changes)


class _Columns:
    """Collects columns over the pieces of the file."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.communication: dict[int, Args] = {}
        self.waits: dict[int, Args] = {}
        self.flows: dict[Any, list[Any]] = {}
        self.losses: dict[str, int] = {}
        self.repairs: dict[str, int] = {}
        self.events_in = 0
        self.rows = 0

    def take(self, events: list[Event]) -> None:
        work = []
        codes = []
        code_of = {name: code for code, name in enumerate(CATEGORIES)}
        code_of |= {alias: code_of[name] for alias, name in CATEGORY_ALIASES.items()}
        for event in events:
            ph = event.ph
            if ph == "X":
                self.events_in += 1
                code = code_of.get(event.cat)
                if code is None:
                    count(self.losses, WHY_NOT_A_NODE.get(event.cat, f"category {event.cat!r} is not known"))
                else:
                    work.append(event)
                    codes.append(code)
            elif event.cat == "fwdbwd" and ph in "sf":
                self.flows.setdefault(event.id, [None, None])[ph == "f"] = event
            elif ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_names[(event.pid, event.tid)] = str(event.args.name)
        if work:
            self._take_work(work, codes)

    def leave_out(self, record: bytes) -> None:
        fields = msgspec.json.decode(record)
        if isinstance(fields, dict) and fields.get("ph") == "X":
            self.events_in += 1
            count(self.losses, "field of the wrong type")
        else:
            count(self.repairs, "record with a field of the wrong type left out")

    def _take_work(self, work: list[Event], codes: list[int]) -> None:
        args = [event.args or NO_ARGS for event in work]
        names, threads = self.names, self.threads
        start = as_column([event.ts for event in work], np.float64)
        length = as_column([event.dur for event in work], np.float64)
        category = np.array(codes, dtype=np.int8)
        on_cpu = category < KERNEL
        columns = {
            "start": start,
            "length": length,
            "category": category,
            "name": np.array([names.setdefault(str(e.name), len(names)) for e in work], dtype=np.int32),
            "thread": np.array(
                [
                    threads.setdefault((e.pid, e.tid), len(threads)) if code < KERNEL else -1
                    for e, code in zip(work, codes, strict=True)
                ],
                dtype=np.int32,
            ),
            "rf_id": as_column([a.rf_id for a in args]),
            "external_id": as_column([a.external_id for a in args]),
            "correlation": as_column([a.correlation for a in args]),
            "sequence": as_column([a.sequence for a in args]),
            "forward_thread": as_column([a.forward_thread for a in args]),
            "device": np.full(len(work), -1, dtype=np.int64),
            "stream": np.full(len(work), -1, dtype=np.int64),
        }
        gpu = np.flatnonzero(~on_cpu)
        rows = gpu.tolist()
        columns["device"][gpu] = as_column([_either(args[row].device, work[row].pid) for row in rows])
        streams = [_either(args[row].original_stream, args[row].stream) for row in rows]
        columns["stream"][gpu] = as_column(
            [_either(stream, work[row].tid) for stream, row in zip(streams, rows, strict=True)]
        )
        for row in rows:
            a = args[row]
            if codes[row] == SYNC:
                self.waits[self.rows + row] = a
            elif a.collective is not None or a.group_name is not None or a.in_elements is not None:
                self.communication[self.rows + row] = a
        for name, column in columns.items():
            self.numbers.setdefault(name, []).append(column)
        self.rows += len(work)


def load(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> DeviceTrace:
    """Read a device trace (``.json`` or ``.json.gz``).

    Raises ``TraceError`` if it is not readable, beyond the limits or holds no event that did work.
    """
    path = Path(path)
    columns = _Columns()
    header = read_records(path, "traceEvents", lambda head: Header, columns, limits)
    if columns.rows == 0:
        raise TraceError(
            f"{path}: no operator, runtime call or kernel in it; was the profiler's active step reached?"
        )
    return _finish(path, columns, header)


def _finish(path: Path, columns: _Columns, header: Header) -> DeviceTrace:
    joined = {name: np.concatenate(parts) for name, parts in columns.numbers.items()}
    start_us, length = joined.pop("start"), joined.pop("length")
    repairs, losses = columns.repairs, columns.losses
    # The comparison is false for NaN, so that what can't be placed in time is refused here as well.
    sane = (np.abs(start_us) < MAX_MICROSECONDS) & (length < MAX_SPAN) & (length > -MAX_SPAN)
    if sane.any():
        sane &= np.abs(start_us - np.median(start_us[sane])) < MAX_SPAN
    if not sane.all():
        losses["time stamp or duration out of range"] = int((~sane).sum())
    negative = sane & (length < 0)
    if negative.any():
        repairs["negative duration set to 0"] = int(negative.sum())
        length = np.where(negative, 0.0, length)
    if not (sane & (joined["category"] != SYNC)).any():
        raise TraceError(f"{path}: no operator, runtime call or kernel in it has a usable time stamp.")
    origin_us = np.floor(start_us[sane].min())
    start = np.zeros(len(start_us), dtype=np.int64)
    end = start.copy()
    start[sane] = np.rint((start_us[sane] - origin_us) * 1000).astype(np.int64)
    end[sane] = start[sane] + np.rint(length[sane] * 1000).astype(np.int64)
    # Same start and end: a runtime call is in its operator, a driver call in a runtime call; of two operators
    # the outer was recorded first and has the lower id.
    depth = np.maximum(joined["category"], ANNOTATION)
    order = np.lexsort((joined["external_id"], depth, -end, start))
    order = order[sane[order]]
    place = np.full(len(start), -1, dtype=np.int64)
    place[order] = np.arange(len(order))

    base = header.baseTimeNanoseconds
    distributed = header.distributedInfo if isinstance(header.distributedInfo, dict) else {}
    trace = DeviceTrace(
        path=path,
        names=list(columns.names),
        start=start[order],
        end=end[order],
        threads=list(columns.threads),
        thread_names=columns.thread_names,
        communication={
            int(place[row]): args for row, args in columns.communication.items() if place[row] >= 0
        },
        waits={int(place[row]): args for row, args in columns.waits.items() if place[row] >= 0},
        forward_backward=_flows(columns, origin_us),
        origin_ns=int(as_number(base, 0)) + int(origin_us) * 1000,
        events_in=columns.events_in,
        losses=losses,
        repairs=repairs,
        distributed=distributed,
        host_name=str(header.host_name or ""),
        **{name: column[order] for name, column in joined.items()},
    )
    return trace


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


def _either(value: Number, otherwise: Number) -> Number:
    return otherwise if value is None else value
