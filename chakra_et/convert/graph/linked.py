"""The linked rank: both traces of a rank, matched, as the input of all later stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.convert.graph import pairing, timeline
from chakra_et.convert.graph.clocks import Clock, on_host_clock
from chakra_et.convert.graph.communication import Communications
from chakra_et.convert.graph.identify_communication import CommunicationRows, communication_rows, describe
from chakra_et.convert.graph.launches import launch_calls
from chakra_et.convert.graph.link import Link, link
from chakra_et.convert.graph.structure import with_structure
from chakra_et.convert.graph.timeline import Timeline
from chakra_et.errors import TraceError
from chakra_et.findings import Findings, joined
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import CPU_OP
from chakra_et.traces.host import HostTrace


@dataclass(eq=False, repr=False)
class LinkedRank:
    """Both traces of one rank, matched and nested, with communication identified.

    Built once by ``link_rank``; later stages do not change it. ``calls[i]``: row of the call that launched
    device row i, -1 for none. ``link_rate``: part (0 to 1) of the host operators with a device record, over
    the whole recording. ``clocks``: of the devices, whose times are by the host's. ``per_operator_ns``: what
    recording took by the tracer's measurement, 0 if there is none. ``findings``: those of all stages so far.
    """

    host: HostTrace
    device: DeviceTrace
    link: Link
    timeline: Timeline
    calls: np.ndarray
    communication_rows: CommunicationRows
    communication: Communications
    link_rate: float
    clocks: list[Clock]
    per_operator_ns: float
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
    linked, warnings = pairing.check(host, device, link(host, device), allow_unlinked)
    rate = linked.rate(host)
    findings = joined(host.findings, device.findings, warnings)
    device, calls, linked, clocks = on_host_clock(device, launch_calls(device), linked)
    for clock in clocks:
        findings.add("clock-offset", abs(clock.offset_ns), str(clock.device))
        findings.add("clock-contradicted", clock.contradicting)
    kept, per_operator_ns, device, linked, matched = with_structure(device, calls, linked)
    findings = joined(findings, matched)
    if len(kept) < len(device):
        memory = device.memory.take(np.flatnonzero(device.memory.time >= device.start[kept].min()))
        device, linked, calls = _selected(dataclasses.replace(device, memory=memory), linked, calls, kept)
    if step != "all":
        kept = _rows_of_step(device, calls, step)
        findings.add("outside-step", len(device) - len(kept), step)
        memory = device.memory.take(_memory_of_step(device, step))
        device, linked, calls = _selected(dataclasses.replace(device, memory=memory), linked, calls, kept)
    elif (last := _unfinished(device, unfinished)) is not None:
        number, row = last
        before = device.start < device.start[row]
        kept = np.flatnonzero(np.where(calls >= 0, before[calls], before))
        findings.add("unfinished-step", len(device) - len(kept), str(number))
        findings.add("steps-unfinished", 1, str(number))
        memory = device.memory.take(np.flatnonzero(device.memory.time < device.start[row]))
        device, linked, calls = _selected(dataclasses.replace(device, memory=memory), linked, calls, kept)
    rows = communication_rows(device, added_kernels)
    time = timeline.build(device, rows.cpu)
    communication = describe(host, device, linked, time.parent, calls, rows, groups)
    findings = joined(findings, time.findings, communication.findings)
    return LinkedRank(
        host, device, linked, time, calls, rows, communication, rate, clocks, per_operator_ns, findings
    )


def _unfinished(device: DeviceTrace, number: int) -> tuple[int, int] | None:
    """(number, row) of the last step if its recording was cut: by the manifest, or as it has less than half
    as many operators as each of the others; None for one step only."""
    known = timeline.steps(device)
    if len(known) < 2:
        return None
    starts = device.start[[row for _, row in known]]
    counts = np.diff(np.searchsorted(np.sort(device.start[device.category == CPU_OP]), [*starts, 2**62]))
    return known[-1] if known[-1][0] == number or 2 * counts[-1] < counts[:-1].min() else None


def _selected(
    device: DeviceTrace, linked: Link, calls: np.ndarray, kept: np.ndarray
) -> tuple[DeviceTrace, Link, np.ndarray]:
    """The ``kept`` rows only."""
    place = np.full(len(device) + 1, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    linked = dataclasses.replace(linked, host_row=linked.host_row[kept])
    return device.select(kept), linked, place[calls[kept]]


def _rows_of_step(device: DeviceTrace, calls: np.ndarray, step: str) -> np.ndarray:
    """The rows of one ProfilerStep: CPU events that start in it, and the work that they launch."""
    known = dict(timeline.steps(device))
    if not step.isdigit() or int(step) not in known:
        names = ", ".join(str(number) for number in known) or "none"
        raise TraceError(
            f"{device.path}: has no ProfilerStep#{step} (its steps: {names}); choose one, or use --step all."
        )
    row = known[int(step)]
    inside = (device.start >= device.start[row]) & (device.start < device.end[row])
    return np.flatnonzero(np.where(calls >= 0, inside[calls], inside))


def _memory_of_step(device: DeviceTrace, step: str) -> np.ndarray:
    """The allocations and frees during one ProfilerStep that is in the trace."""
    row = dict(timeline.steps(device))[int(step)]
    return np.flatnonzero((device.memory.time >= device.start[row]) & (device.memory.time < device.end[row]))
