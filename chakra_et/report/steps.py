"""The steps of a run: how long each lasted on each rank, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.report.columns import PHASES
from chakra_et.report.run import ReportRun, text_column
from chakra_et.simulate.breakdown import Activity, Spans, activity, union_ns
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.simulate.replay_report import RankReplay, report
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

WHOLE = "whole trace"


@dataclass(frozen=True)
class ReportStep:
    """One step of one rank, or its whole trace where it has none.

    ``name``: the number of the ProfilerStep, or ``WHOLE``. It lasts from ``start_ns`` to the start of the
    next one, the last to the end of the rank's trace. ``parts_ns``: by ``replay.breakdown.ACTIVITIES``;
    they add up to the step's time. ``phases_ns``: by ``PHASES``, the time in which work or transfers of that
    phase run on the device, or on the threads of a rank without device work. ``replayed_ns``: its time in the
    joint device replay, None where there is none.
    """

    rank: int
    name: str
    start_ns: int
    end_ns: int
    parts_ns: tuple[int, ...]
    hidden_ns: int
    phases_ns: tuple[int, ...]
    replayed_ns: int | None

    @property
    def lasts_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class StepTimes:
    """``steps``: of all ranks, rank by rank. ``activities``: one for each trace of the run. ``replays``: the
    comparison with the replay, one for each trace, empty where there is no replay."""

    steps: list[ReportStep]
    activities: list[Activity]
    replays: list[RankReplay]


def find_times(run: ReportRun) -> StepTimes:
    """Where the time of each rank went, by the times that the run shows."""
    replays = report(run.traces, run.ranks, run.replay) if run.replay is not None else []
    steps: list[ReportStep] = []
    activities = []
    for number, rank in enumerate(run.ranks):
        trace = run.traces[number]
        start, end = run.of_trace(run.start_ns, number), run.of_trace(run.end_ns, number)
        found = activity(trace, start, end, run.of_trace(run.wait_ns, number))
        activities.append(found)
        names, rows = step_rows(trace)
        names = [name.partition("#")[2] for name in names] or [WHOLE]
        begins = start[rows] if len(rows) else start.min(keepdims=True)
        ends = np.append(begins[1:], end.max())
        parts, hidden = found.parts(begins, ends), found.hidden_ns(begins, ends)
        phases = _phases(run, number, begins, ends)
        simulated = _simulated(replays, number, len(names))
        steps += [
            ReportStep(
                rank, name, int(begins[at]), int(ends[at]), tuple(parts[at].tolist()), int(hidden[at]),
                tuple(int(phase[at]) for phase in phases), simulated[at],
            )
            for at, name in enumerate(names)
        ]  # fmt: skip
    return StepTimes(steps, activities, replays)


def _simulated(replays: list[RankReplay], number: int, count: int) -> list[int | None]:
    if not replays:
        return [None] * count
    times = [step.simulated_ns for step in replays[number].steps]
    return [*times] if times else [replays[number].total.simulated_ns]


def _phases(run: ReportRun, number: int, begins: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """ns of each window in which work of each phase runs, one int64[W] for each of ``PHASES``."""
    trace = run.traces[number]
    start, end = run.of_trace(run.start_ns + run.wait_ns, number), run.of_trace(run.end_ns, number)
    kind = np.array(KINDS)[node_kinds(trace)]
    on_device = np.isin(kind, ("kernel", "copy")) & (trace.column("is_cpu_op") == 0)
    works = on_device if on_device.any() else kind == "operator"
    names, index = text_column(trace, "phase")
    found = []
    for phase in PHASES:
        code = names.index(phase) if phase in names else -2
        at = np.flatnonzero((works | (kind == "transfer")) & (index == code))
        found.append(union_ns(Spans(start[at], end[at]), begins, ends))
    return found
