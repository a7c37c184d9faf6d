"""Check that the two traces of one rank can be linked, right after the capture, while it can be repeated.

PyTorch's ExecutionTraceObserver writes the host trace, Kineto the device trace. They share the id of each
record function: ``rf_id`` among the attributes of a host node, ``Record function id`` among the arguments of
a device event.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chakra_et.traces.device_format import read_recording

STEP = "ProfilerStep#"
# Written by the observer itself, or before Kineto starts: these have no counterpart in the device trace.
_HOST_ONLY = ("[pytorch|profiler|execution_trace|", "## process_group:init ##")
_LINKED_SHARE = 0.95
_BACKWARD = "autograd::engine::evaluate_function"


class _Attribute(msgspec.Struct):
    name: str = ""
    value: Any = None


class _Node(msgspec.Struct):
    name: str
    attrs: list[_Attribute] = []

    def get(self, name: str) -> Any:
        return next((attribute.value for attribute in self.attrs if attribute.name == name), None)


class _Host(msgspec.Struct):
    nodes: list[_Node]
    finish_ts: int
    pid: int | None = None


class _Arguments(msgspec.Struct, frozen=True):
    record_id: int = msgspec.field(name="Record function id", default=0)
    finished: bool = True


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str | None = None
    tid: int | str | None = None
    args: _Arguments = _Arguments()


class _Device(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    distributed: dict[str, Any] | None = msgspec.field(name="distributedInfo", default=None)
    recording: Any = msgspec.field(name="chakra_et", default=None)


@dataclass
class PairReport:
    """What the host and device traces of one rank have in common.

    ``steps``: duration in µs of each traced step by number, from the device trace's ProfilerStep annotations.
    ``linked``, ``unlinked``: operators in both traces, and in only one of them.
    ``ended_early``: those of the latter in a backward pass that the observer didn't see end: activation
    checkpointing ends the forward pass that it repeats by an exception once it has what it needs.
    ``problems``: one sentence per reason why the pair can't be linked; empty if it can.
    ``truncated``: the traces whose end is missing, as after a full disk.
    """

    host_nodes: int = 0
    device_events: int = 0
    linked: int = 0
    unlinked: int = 0
    ended_early: int = 0
    steps: dict[int, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)


def check_pair(host: Path | str, device: Path | str, active_steps: int) -> list[str]:
    """Reasons why the host and device traces of one rank can't be linked; empty if they can.

    ``active_steps``: the number of steps that the device trace must cover, besides a structure step of our
    tracer before them; the host trace covers that or else the same steps. Either file may be compressed with
    gzip.
    """
    return inspect_pair(host, device, active_steps).problems


def inspect_pair(host: Path | str, device: Path | str, active_steps: int) -> PairReport:
    """Compare the record-function ids, steps and processes of both traces of one rank."""
    report = PairReport()
    host_trace = _read(Path(host), _Host, "host", report)
    device_trace = _read(Path(device), _Device, "device", report)
    if host_trace is None or device_trace is None:
        return report
    report.host_nodes = len(host_trace.nodes)
    report.device_events = len(device_trace.events)
    recording = read_recording(device_trace.recording)
    structure = recording.structure_step if recording else None
    _compare_steps(host_trace, device_trace, active_steps, structure, report)
    # The events that begin in the structure step, and all others: the cost of recording is measured there.
    inside, outside = device_trace.events, []
    steps = [event for event in inside if _is_step(event) and _number(event) == structure]
    if steps:
        begin, end = steps[0].ts, steps[0].ts + steps[0].dur
        outside = [event for event in inside if not begin <= event.ts <= end]
        inside = [event for event in inside if begin <= event.ts <= end]
    _compare_ids(host_trace, inside, outside, report)
    pids = {event.pid for event in device_trace.events if _is_step(event)}
    if host_trace.pid is not None and pids - {host_trace.pid}:
        others = ", ".join(sorted(map(str, pids)))
        report.problems.append(f"the host trace is of process {host_trace.pid}, the device trace of {others}")
    has_group = any(node.name == "## process_group:init ##" for node in host_trace.nodes)
    if device_trace.distributed and not has_group:
        report.problems.append("the host trace has no record of the process groups")
    return report


def _read(path: Path, kind: type, label: str, report: PairReport) -> Any:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return msgspec.json.decode(data, type=kind)
    except (OSError, EOFError, ValueError, zlib.error, msgspec.DecodeError) as error:
        if isinstance(error, EOFError) or "truncated" in str(error) or not path.is_file():
            report.truncated.append(label)
        report.problems.append(
            f"the {label} trace is not one complete JSON object ({error}); try fix_host_traces.py"
        )
        return None


def _compare_steps(
    host: _Host, device: _Device, active_steps: int, structure: int | None, report: PairReport
) -> None:
    annotations = [event for event in device.events if _is_step(event)]
    report.steps = {_number(event): event.dur for event in annotations}
    device_steps = sorted(_number(event) for event in annotations)
    host_steps = sorted(_number(node) for node in host.nodes if _is_step(node))
    if host_steps != ([structure] if structure in device_steps else device_steps):
        report.problems.append(
            f"the host trace covers the steps {host_steps}, the device trace {device_steps}"
        )
    if structure in device_steps and len(device_steps) > active_steps:
        del report.steps[structure]
        device_steps.remove(structure)
    if len(device_steps) != active_steps:
        report.problems.append(
            f"{active_steps} active step(s) were requested, but {len(device_steps)} are annotated"
        )
    elif device_steps and device_steps != list(range(device_steps[0], device_steps[0] + active_steps)):
        report.problems.append(f"the annotated steps {device_steps} are not consecutive")


def _compare_ids(host: _Host, events: list[_Event], outside: list[_Event], report: PairReport) -> None:
    host_ids = {node.get("rf_id"): node for node in host.nodes if not node.name.startswith(_HOST_ONLY)}
    host_ids.pop(None, None)
    host_ids.pop(0, None)
    for event in outside:
        host_ids.pop(event.args.record_id, None)
    # The observer writes what has ended. The record of a gloo operator may end after who waited for it went
    # on.
    device_ids = {event.args.record_id: event for event in events if event.args.finished}
    device_ids.pop(0, None)
    for label, ids in (("host", host_ids), ("device", device_ids)):
        if not ids:
            report.problems.append(f"the {label} trace has no record-function ids")
    if not host_ids or not device_ids:
        return

    linked = host_ids.keys() & device_ids.keys()
    report.linked = len(linked)
    report.unlinked = len(host_ids.keys() ^ device_ids.keys())
    if report.linked < _LINKED_SHARE * len(host_ids) or report.linked < _LINKED_SHARE * len(device_ids):
        report.problems.append(
            f"of {len(host_ids)} host ids and {len(device_ids)} device ids, only {report.linked} are in both"
        )
        return
    # Operators of other threads may be missing from one trace (torch 2.4 does not profile gloo's threads),
    # those of the training thread may not.
    main_host = {node.get("tid") for node in host_ids.values() if _is_step(node)}
    main_device = {event.tid for event in events if _is_step(event)}
    lost = Counter(host_ids[i].name for i in host_ids.keys() - linked if host_ids[i].get("tid") in main_host)
    backward = [event for event in events if event.name.startswith(_BACKWARD)]
    for i in device_ids.keys() - linked:
        event = device_ids[i]
        if any(node.tid == event.tid and node.ts <= event.ts < node.ts + node.dur for node in backward):
            report.ended_early += 1
        elif event.tid in main_device:
            lost[event.name] += 1
    if lost:
        some = ", ".join(f"{name} ×{count}" for name, count in lost.most_common(3))
        report.problems.append(
            f"{lost.total()} operators of the training thread are in one trace only: {some}"
        )


def _is_step(record: _Node | _Event) -> bool:
    # On a GPU the annotation appears a second time, on its stream.
    on_stream = isinstance(record, _Event) and record.cat.startswith("gpu_")
    return record.name.startswith(STEP) and record.name[len(STEP) :].isdecimal() and not on_stream


def _number(record: _Node | _Event) -> int:
    return int(record.name[len(STEP) :])
