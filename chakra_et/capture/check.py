"""Check that the two traces of one rank can be linked, right after the capture, while it can be repeated.

PyTorch's ExecutionTraceObserver writes the host trace, Kineto the device trace. They share the id of each
record function: ``rf_id`` among the attributes of a host node, ``Record function id`` among the arguments of
a device event.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.host import GROUP_RECORD, HostTrace

# Written by the observer itself, or before Kineto starts: these have no counterpart in the device trace. Nor
# need operations of gloo's threads: torch 2.4 doesn't profile these, and the observer misses what they end
# after the training has gone on.
_ONE_SIDED = re.compile(r"\[pytorch\|profiler\|execution_trace\||gloo:|" + re.escape(GROUP_RECORD)).match
_LINKED_SHARE = 0.95
_DISPATCHED = re.compile(r"\w+::[\w.]+")
# What the readers say of a file that is not all there; "invalid number" if it ends after a sign or a point.
_CUT = re.compile('truncated|ended before|No such file|has no "|invalid number')


@dataclass
class PairReport:
    """What the host and device traces of one rank have in common.

    ``steps``: duration in µs of each traced step by number, from the device trace's ProfilerStep annotations.
    ``linked``, ``unlinked``: operators in both traces, and in only one of them.
    ``ended_early``: those of the latter that an exception ended, which the observer doesn't write: that of
    activation checkpointing when the forward pass that it repeats has got far enough, or one of the program.
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


def inspect_pair(host: Path | str, device: Path | str, active_steps: int) -> PairReport:
    """Compare the record-function ids, steps and processes of both traces of one rank, .json or .json.gz.

    ``active_steps``: the number of steps that the device trace must cover, besides a structure step of our
    tracer before them; the host trace covers that or else the same steps.
    """
    report = PairReport()
    nodes: HostTrace | None = _read(host_trace.load, host, "host", report)
    events: DeviceTrace | None = _read(device_trace.load, device, "device", report)
    if nodes is None or events is None:
        return report
    report.host_nodes, report.device_events = len(nodes), events.events_in
    structure = events.recording.structure_step if events.recording else -1
    marks = dict(device_trace.steps(events))
    report.steps = {n: float(events.end[row] - events.start[row]) / 1000 for n, row in marks.items()}
    _compare_steps(nodes, active_steps, structure, report)
    _compare_ids(nodes, events, marks.get(structure, -1), report)
    pids = {str(events.threads[events.thread[row]][0]) for row in marks.values()}
    if (pid := nodes.header["pid"]) and pids - {str(pid)}:
        others = ", ".join(sorted(pids))
        report.problems.append(f"the host trace is of process {pid}, the device trace of {others}")
    if events.distributed and GROUP_RECORD not in nodes.names:
        report.problems.append("the host trace has no record of the process groups")
    return report


def _read(load: Callable[[Path | str], Any], path: Path | str, label: str, report: PairReport) -> Any:
    try:
        return load(path)
    except TraceError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix(".")
        if _CUT.search(reason):
            report.truncated.append(label)
        report.problems.append(
            f"the {label} trace is not one complete JSON object ({reason}); try fix_host_traces.py"
        )
        return None


def _named(trace: HostTrace | DeviceTrace, fits: Callable[[str], object]) -> np.ndarray:
    """bool[rows]: whose names fit."""
    return np.isin(trace.name, [code for code, name in enumerate(trace.names) if fits(name)])


def _compare_steps(host: HostTrace, active_steps: int, structure: int, report: PairReport) -> None:
    device_steps = sorted(report.steps)
    host_steps = sorted(int(match[1]) for match in map(device_trace.STEP.fullmatch, host.names) if match)
    if not {*([structure] if structure in device_steps else device_steps)} <= {*host_steps}:
        report.problems.append(
            f"the host trace covers the steps {host_steps}, the device trace {device_steps}"
        )
    if structure in device_steps and len(device_steps) > active_steps:
        del report.steps[structure]
        device_steps.remove(structure)
    first = min(device_steps, default=0)
    if device_steps != list(range(first, first + active_steps)):
        report.problems.append(
            f"{active_steps} active step(s) in a row were requested, but {device_steps} are annotated"
        )


def _compare_ids(host: HostTrace, device: DeviceTrace, structure: int, report: PairReport) -> None:
    """``structure``: row of the annotation of the structure step, -1 for none."""
    of_step = within = np.ones(len(device), dtype=bool)
    if structure >= 0:  # the cost of recording is measured after it
        of_step = (device.start >= device.start[structure]) & (device.start <= device.end[structure])
        within = device.end <= device.end[structure]  # not a compiled function within which the step ends
    in_host = (host.rf_id > 0) & ~_named(host, _ONE_SIDED) & ~np.isin(host.rf_id, device.rf_id[~of_step])
    in_device = of_step & (device.rf_id > 0) & ~_named(device, _ONE_SIDED)
    for label, rows in (("host", in_host), ("device", in_device)):
        if not rows.any():
            report.problems.append(f"the {label} trace has no record-function ids")
    if not in_host.any() or not in_device.any():
        return
    host_ids, device_ids = np.unique(host.rf_id[in_host]), np.unique(device.rf_id[in_device])
    both = np.intersect1d(host_ids, device_ids)
    missing = in_device & within & ~np.isin(device.rf_id, both)
    # An exception ends all operators around the one it comes from, up to an annotation or a node of autograd.
    dispatched = _named(device, _DISPATCHED.fullmatch)
    early = []
    for row in np.flatnonzero(missing & dispatched).tolist():
        around = in_device & (device.thread == device.thread[row]) & (device.end >= device.end[row])
        parent = np.flatnonzero(around[:row])[-1:]
        if not (dispatched & ~missing)[parent].any():
            early.append(row)
    report.linked, report.unlinked = len(both), len(host_ids) + len(device_ids) - 2 * len(both)
    report.ended_early = len(early)
    if report.linked < _LINKED_SHARE * max(len(host_ids), len(device_ids) - len(early)):
        report.problems.append(
            f"only {report.linked} record-function ids are in both traces, of {len(host_ids)} in the host "
            f"trace and {len(device_ids)} in the device trace"
        )
        return
    # Operators of other threads may be missing from one trace, those of the training thread may not.
    own = np.isin(host.tid, host.tid[_named(host, re.compile("ProfilerStep#").match)])
    lost = Counter(host.names[code] for code in host.name[in_host & own & ~np.isin(host.rf_id, both)])
    missing &= np.isin(device.thread, [device.thread[row] for _, row in device_trace.steps(device)])
    missing[early] = False
    lost.update(device.names[code] for code in device.name[missing])
    if lost:
        some = ", ".join(f"{name} ×{count}" for name, count in lost.most_common(3))
        report.problems.append(
            f"{lost.total()} operators of the training thread are in one trace only: {some}"
        )
