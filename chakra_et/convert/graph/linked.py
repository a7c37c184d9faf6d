"""The linked rank: both traces of a rank, matched, as the input of all later stages; and what it lacks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.arrays import coded_pairs, rows_by_value
from chakra_et.convert.graph import timeline
from chakra_et.convert.graph.communication import Communications
from chakra_et.convert.graph.communication_arguments import GROUP_MARK, marks, started_by
from chakra_et.convert.graph.groups import gloo_threads
from chakra_et.convert.graph.identify_communication import CommunicationRows, communication_rows, describe
from chakra_et.convert.graph.launches import QUERY, Clock, is_call, launch_calls, on_host_clock, selected
from chakra_et.convert.graph.link import aligned, check, link, operators_and_annotations, rate_of
from chakra_et.convert.graph.timeline import Timeline, named, on_device
from chakra_et.errors import TraceError
from chakra_et.findings import Findings, joined
from chakra_et.traces.device import STEP, DeviceTrace, steps
from chakra_et.traces.device_format import ANNOTATION, CPU_OP, KERNEL, MEMCPY, RUNTIME, SYNC
from chakra_et.traces.fields import as_number
from chakra_et.traces.host import HostTrace

POOLED = "gloo:"
LAUNCH = re.compile(
    r"(cuda|hip|cu)\w*(Launch\w*Kernel\w*|LaunchKernel\w*|ModuleLaunch\w*)$|^(cuda|hip|cu)GraphLaunch$"
)
CAPTURE = re.compile(r"(cuda|hip|cu)StreamBeginCapture\w*"), re.compile(r"(cuda|hip|cu)StreamEndCapture\w*")
SYNCHRONIZES = re.compile(r"synchronize(_\w+)?$", re.IGNORECASE)
CUDA_TENSOR = re.compile(rb'"(cuda|hip|xpu):\d+"')
# The part of launches that may have no kernel, as launches at the end of a recording lose theirs.
TOLERATED = 0.02
# No idle device takes as long from a launch to the start of its work.
LONGEST_LAUNCH_NS = 1_000_000
LONG_NS = 50_000  # a shorter wait or gap of the host needs no cause
WORK_BEFORE = "work before the recording"
"""The name of what a device was busy with when the recording began."""
ALWAYS = np.iinfo(np.int64)


@dataclass(eq=False, repr=False)
class LinkedRank:
    """Both traces of one rank, matched and nested, with communication identified.

    Built once by ``link_rank``; later stages do not change it. ``host_row[i]``: row of the host trace for
    device row i, -1 for none. ``calls[i]``: row of the call that launched
    device row i, -1 for none. ``link_rate``: part (0 to 1) of the host operators with a device record, over
    the whole recording. ``clocks``: of the devices, whose times are by the host's. ``per_operator_ns``: what
    recording took by the tracer's measurement, 0 if there is none. ``before``: rows for work from before the
    recording. ``findings``: those of all stages so far.
    """

    host: HostTrace
    device: DeviceTrace
    host_row: np.ndarray
    timeline: Timeline
    calls: np.ndarray
    communication_rows: CommunicationRows
    communication: Communications
    link_rate: float
    clocks: list[Clock]
    per_operator_ns: float
    before: np.ndarray
    findings: Findings


def link_rank(
    host: HostTrace,
    device: DeviceTrace,
    groups: Sequence[dict[str, Any]] = (),
    step: str = "all",
    allow_unlinked: bool = False,
    added_kernels: str = "",
    unfinished: int = -1,
) -> LinkedRank:
    """Match the two traces of a rank.

    ``groups``: process groups in the run's manifest; ``step``: "all", or the number of the one ProfilerStep
    to keep; ``added_kernels``: path of a user's kernel table; ``unfinished``: number of the step whose
    recording was cut, by the manifest: it is left out. Raises ``TraceError`` for traces of different
    runs (unless ``allow_unlinked``) and for a step that was not recorded.
    """
    linked, warnings = check(host, device, link(host, device), allow_unlinked)
    rate = rate_of(host, linked)
    findings = joined(host.findings, device.findings, warnings)
    device, calls, linked, clocks = on_host_clock(device, launch_calls(device), linked)
    for clock in clocks:
        findings.add("clock-offset", abs(clock.offset_ns), str(clock.device))
        findings.add("clock-contradicted", clock.contradicting)
    kept, per_operator_ns, device, linked, likeness = with_structure(device, calls, linked, groups)
    findings.add("structure-step", (~kept).sum())
    known = [(number, row) for number, row in steps(device) if kept[row]]
    begin, end, key = ALWAYS.min if kept.all() else int(device.start[kept].min()), ALWAYS.max, ""
    if step != "all":
        if not step.isdigit() or int(step) not in dict(known):
            names = ", ".join(str(number) for number, _ in known) or "none"
            raise TraceError(
                f"{device.path}: has no ProfilerStep#{step} (its steps: {names}); choose one, or --step all."
            )
        row = dict(known)[int(step)]
        begin, end, key = int(device.start[row]), int(device.end[row]), "outside-step"
    elif _is_cut(device, known, unfinished):
        step, row = str(known[-1][0]), known[-1][1]
        end, key = int(device.start[row]), "unfinished-step"
        findings.add("steps-unfinished", 1, step)
    if key:  # CPU events that start in this time, the work that they launch, and what was queued before it
        inside = (device.start >= begin) & (device.start < end)
        inside = kept & (np.where(calls >= 0, inside[calls], inside) | _queued(device, calls, begin))
        findings.add(key, kept.sum() - inside.sum(), step)
        kept = inside
    findings.add("structure-matched", (likeness[kept] > 0).sum())
    findings.add("structure-differs", (likeness[kept] < 0).sum())
    findings.add("structure-alone", (likeness == -2).sum())
    if not kept.all():
        memory = device.memory
        memory = memory.take(np.flatnonzero((memory.time >= begin) & (memory.time < end)))
        device = dataclasses.replace(device, memory=memory)
        device, calls, linked = selected(device, calls, linked, np.flatnonzero(kept))
    device, calls, linked, before = with_work_before(device, calls, linked)
    findings.add("work-before-recording", len(before))
    rows = communication_rows(device, added_kernels)
    time = timeline.build(device, rows.cpu)
    communication = describe(host, device, linked, time.parent, calls, rows, groups)
    findings = joined(findings, time.findings, communication.findings)
    return LinkedRank(
        host, device, linked, time, calls, rows, communication, rate, clocks, per_operator_ns, before,
        findings,
    )  # fmt: skip


def _queued(device: DeviceTrace, calls: np.ndarray, begin: int) -> np.ndarray:
    """bool[rows]: what the device still had to do at ``begin``: launched earlier, or before the recording."""
    found, work = np.zeros(len(device), bool), on_device(device)
    launched = calls[work] >= 0
    first = device.start[work[launched]].min(initial=ALWAYS.max)
    early = np.where(launched, device.start[calls[work]] < begin, device.start[work] < first)
    found[work] = early & (device.end[work] > begin)
    return found


def _is_cut(device: DeviceTrace, known: list[tuple[int, int]], number: int) -> bool:
    """Whether the recording of the last step was cut: it has that ``number``, our tracer didn't see its end,
    or it has less than half as many operators as each of the others."""
    if len(known) < 2:
        return False
    unseen = device.recording is not None and known[-1][0] >= len(device.recording.step_us)
    starts = device.start[[row for _, row in known]]
    counts = np.diff(np.searchsorted(np.sort(device.start[device.category == CPU_OP]), [*starts, 2**62]))
    return unseen or known[-1][0] == number or bool(2 * counts[-1] < counts[:-1].min())


# ---- structure of one step, times of those after it ----


def with_structure(
    device: DeviceTrace, calls: np.ndarray, linked: np.ndarray, groups: Sequence[dict[str, Any]]
) -> tuple[np.ndarray, float, DeviceTrace, np.ndarray, np.ndarray]:
    """Which rows' times count (bool), the ns that recording took per operator by the tracer's measurement,
    the trace with record-function ids in all steps, its link, and for each row 1 if the structure step has
    its like, -1 if not, -2 if it is of the structure step and a later one lacks its like, else 0.

    Our tracer runs the ExecutionTraceObserver in one step, which it slows down, and lets Kineto alone record
    the steps that follow, without record-function ids. Their operators are matched with those of the
    structure step and get their ids; in the second step and later, plus more than the highest one.
    """
    likeness = np.zeros(len(device), np.int8)
    known = dict(steps(device))
    recording = device.recording
    if recording is None or recording.structure_step not in known:
        return np.ones(len(device), bool), 0.0, device, linked, likeness
    structure = known[recording.structure_step]
    began, ended = device.start[structure], device.end[structure]
    begins = device.start[[row for number, row in known.items() if number > recording.structure_step]]
    step_of = np.searchsorted(begins, device.start, side="right")  # 0: the structure step or beside it
    on_cpu = operators_and_annotations(device)
    after = (step_of == 0) & (device.start > ended)
    measured = on_cpu & after
    called = device.start[after & (device.category == RUNTIME)].min(initial=ALWAYS.max)
    operators = int((measured & (device.start < called)).sum()) / recording.passes
    per_operator = recording.added_us("operators") * 1000 / max(operators, 1.0)
    if not len(begins):
        step_of = np.where(device.start <= ended, 1, 0)
    pooled = np.flatnonzero(named(device, lambda name: name.startswith(POOLED)))
    marked = marks(device)
    started = started_by(device, pooled, gloo_threads(device, groups), marked)
    step_of = np.where(started >= 0, step_of[started], step_of)
    host_row, record = linked.copy(), device.rf_id.copy()
    ids = int(record.max()) + 1
    source = np.flatnonzero(on_cpu & (step_of == 0) & (device.start >= began) & ~measured)
    for step in range(1, len(begins) + 1):
        rows = np.flatnonzero(on_cpu & (step_of == step))
        like, same = _matched(device, source, rows, started, marked).T
        host_row[same] = host_row[like]
        own = device.rf_id[like]
        record[same] = np.where(own > 0, own + (step - 1) * ids, own)
        likeness[np.setdiff1d(source, like)] = -2
        likeness[rows] = -1
        likeness[same] = 1
    kept = np.where(calls >= 0, step_of[calls], step_of) > 0
    device = dataclasses.replace(device, rf_id=record)
    return kept, per_operator, device, host_row, likeness


def _matched(
    device: DeviceTrace,
    source: np.ndarray,
    rows: np.ndarray,
    started: np.ndarray,
    marked: Mapping[int, object],
) -> np.ndarray:  # fmt: skip
    """Pairs of rows int64[K, 2]. Threads that are new in each step are matched with those that did the same;
    what is left, regardless of the thread, and at last the launchers alone. Operations of gloo, which any of
    a group's threads works on, are matched like the operators that ``started`` them, if ``marked`` alike."""
    code = np.where(named(device, STEP.fullmatch), -1, device.name)
    code = np.where(named(device, GROUP_MARK.fullmatch), -2, code)
    found: list[tuple[int, int]] = []

    def match(first: np.ndarray, second: np.ndarray) -> None:
        pairs = aligned(code[first].tolist(), code[second].tolist())
        found.extend((int(first[a]), int(second[b])) for a, b in pairs)

    sides = [side[started[side] < 0] for side in (source, rows)]
    old, new = (rows_by_value(device.thread, side) for side in sides)
    apart = {code[own].tobytes(): own for at, own in old.items() if at not in new}
    for at, own in new.items():
        match(old[at] if at in old else apart.pop(code[own].tobytes(), own[:0]), own)
    match(*(side[~np.isin(side, found)] for side in sides))
    match(*(side[np.isin(side, started) & ~np.isin(side, found)] for side in sides))
    old, new = (rows_by_value(started, side[started[side] >= 0]) for side in (source, rows))
    for like, call in [pair for pair in found if pair[0] in old and pair[1] in new]:
        if marked.get(like) == marked.get(call):
            found += zip(old[like].tolist(), new[call].tolist(), strict=False)
    return np.array(found, dtype=np.int64).reshape(-1, 2)


# ---- work from before the recording: a device trace has no work that began before it ----


def with_work_before(
    device: DeviceTrace, calls: np.ndarray, linked: np.ndarray
) -> tuple[DeviceTrace, np.ndarray, np.ndarray, np.ndarray]:
    """The trace with a row for each stream that was busy when the recording began, as far as something waited
    for it: the first work on the stream, or a call before any launch. And these rows."""
    gpu = on_device(device)
    gpu = gpu[np.argsort(device.start[gpu], kind="stable")]
    launched = calls[gpu] >= 0
    if 2 * launched.sum() < len(gpu) or not launched.any():  # calls aren't recorded
        return device, calls, linked, gpu[:0]
    begin, call = int(device.start[device.category != SYNC].min()), calls[gpu]
    start, end = device.start[gpu], device.end[gpu]
    latest_end = np.maximum.accumulate(np.append(begin, end))[:-1]
    # A blocking copy waits within its call.
    within = (device.category[gpu] == MEMCPY) & (end <= device.end[call])
    since = np.where(launched, np.where(within, device.start[call], device.end[call]), begin)
    delay = start - np.maximum(since, latest_end)
    streams, of_row = coded_pairs(device.device[gpu], device.stream[gpu])
    first = np.unique(of_row, return_index=True)[1]
    until = np.where(delay > np.where(launched, LONGEST_LAUNCH_NS, LONG_NS), start, begin)[first]
    # Nothing else that a call before the first launch could wait for, but cudaFree, which initializes CUDA.
    earliest = int(np.where(launched, device.start[call], begin).min())
    waits = np.flatnonzero(named(device, SYNCHRONIZES.search) & is_call(device) & (device.end <= earliest))
    spans = [(row, row) for row in waits.tolist()]
    # And loops of queries.
    launcher = device.thread[call[launched]][np.argmin(device.start[call[launched]])]
    calls_and_operators = (device.category < KERNEL) & (device.category != ANNOTATION)
    own = np.flatnonzero(calls_and_operators & (device.thread == launcher) & (device.end <= earliest))
    loops = np.flatnonzero(np.diff(named(device, QUERY.fullmatch)[own], prepend=False, append=False))
    spans += [(own[a], own[b - 1]) for a, b in loops.reshape(-1, 2).tolist() if b - a > 2]
    waited = [device.end[b] for a, b in spans if device.end[b] - device.start[a] > LONG_NS]
    until[of_row[0]] = max([until[of_row[0]], *waited])
    busy = np.flatnonzero(until > begin)
    if not len(busy):
        return device, calls, linked, gpu[:0]
    count, rows = len(busy), len(device)
    columns: dict[str, Any] = {
        name: np.append(column, np.full(count, -1, dtype=column.dtype))
        for name, column in vars(device).items()
        if isinstance(column, np.ndarray)
    }
    columns |= {"names": [*device.names, WORK_BEFORE]}
    filled = {"name": len(device.names), "category": KERNEL, "start": begin, "end": until[busy]}
    filled |= dict(zip(("device", "stream"), np.array(streams)[busy].T, strict=True))
    for name, values in filled.items():
        columns[name][rows:] = values
    device = dataclasses.replace(device, **columns)
    linked, calls = (np.append(column, np.full(count, -1)) for column in (linked, calls))
    order = np.argsort(device.start, kind="stable")
    return *selected(device, calls, linked, order), np.flatnonzero(order >= rows)


# ---- missing work: a device trace that was cut off loses its last events ----


def check_complete(rank: LinkedRank) -> Findings:
    """Warnings for launches, communication operators and CUDA tensors without device work."""
    device, findings, gpu = rank.device, Findings(), on_device(rank.device)
    # Launch calls outside graph captures, and whether device work has their correlation ids.
    launches = named(device, LAUNCH.search) & is_call(device) & (device.correlation > 0)
    marks = [named(device, pattern.fullmatch) for pattern in CAPTURE]
    for thread in np.unique(device.thread[marks[0]]).tolist():
        own = device.thread == thread
        begins, ends = (device.start[mark & own].tolist() for mark in marks)
        for begin, end in zip(begins, ends, strict=False):
            launches &= ~own | (device.start < begin) | (device.start > end)
    # A driver call within a runtime call has the same correlation id.
    lost = ~np.isin(device.correlation[launches], device.correlation[gpu])
    if lost.sum() > max(TOLERATED * len(lost), 2):
        findings.add("launch-without-work", int(lost.sum()))
    if not len(gpu) and rank.host.recorded and CUDA_TENSOR.search(rank.host.inputs[0].buffer.data):
        rows, values = rank.host_row[rank.host_row >= 0].tolist(), rank.host.inputs[0]
        findings.add("missing-gpu-work", any(CUDA_TENSOR.search(values[row]) for row in rows))
    if not rank.communication_rows.gpu.any() and as_number(device.distributed.get("world_size")) != 1:
        # Coalesced NCCL operators share a kernel, and those of a group of one rank launch none.
        operators = operators_and_annotations(device) & named(device, lambda name: name.startswith("nccl:"))
        alone = [_is_alone(rank, row) for row in np.flatnonzero(operators).tolist()]
        findings.add("missing-communication", len(alone) - sum(alone))
    # Device work that starts long after its launch although no work is known to have run in between.
    gpu = gpu[np.argsort(device.start[gpu], kind="stable")]
    latest_end = np.maximum.accumulate(np.append(-1, device.end[gpu]))[:-1]
    launched = np.where(rank.calls[gpu] >= 0, device.end[rank.calls[gpu]], device.start[gpu])
    delayed = device.start[gpu] - np.maximum(launched, latest_end) > LONGEST_LAUNCH_NS
    findings.add("work-unexplained-wait", int(delayed.sum()))
    if rank.host.recorded:
        operators = device.category == CPU_OP
        for _, row in rank.timeline.steps:
            inside = operators & (device.start >= device.start[row]) & (device.start < device.end[row])
            without = inside.any() and not (rank.host_row[inside] >= 0).any()
            findings.add("steps-without-host", int(without))
    return findings


def _is_alone(rank: LinkedRank, row: int) -> bool:
    """Whether the operator at ``row``, or one around it, is of a group of one rank."""
    while row >= 0:
        args = rank.device.communication.get(row)
        attributes = rank.host.communication.get(int(rank.host_row[row]), {})
        size = as_number(attributes.get("pg_size") if args is None else args.group_size)
        group = rank.communication.groups.get(str((args and args.group_name) or attributes.get("pg_name")))
        if size == 1 or (group is not None and len(group.ranks) == 1):
            return True
        row = int(rank.timeline.parent[row])
    return False
