"""The steps of a run: how long each lasted on each rank, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.node_attributes import texts
from chakra_et.report.columns import PHASES
from chakra_et.report.run import ReportRun
from chakra_et.simulate.breakdown import activity, union_ns
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.simulate.replay_report import RankReplay, report
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

WHOLE = "whole trace"


@dataclass(frozen=True)
class ReportStep:
    """One step of one rank, or its whole trace where it has none.

    ``name``: the number of the ProfilerStep, or ``WHOLE``. It lasts from ``start_ns`` to the start of the
    next one, the last to the end of the rank's trace. ``parts_ns``: by ``simulate.breakdown.ACTIVITIES``;
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
    """``steps``: of all ranks, rank by rank. ``replays``: the comparison with the replay, one for each trace,
    empty where there is no replay."""

    steps: list[ReportStep]
    replays: list[RankReplay]


def find_times(run: ReportRun) -> StepTimes:
    """Where the time of each rank went, by the times that the run shows."""
    replays = report(run.traces, run.ranks, run.replay) if run.replay is not None else []
    steps: list[ReportStep] = []
    times = map(run.graph.scatter, (run.start_ns, run.end_ns, run.wait_ns))
    for number, (rank, start, end, wait) in enumerate(zip(run.ranks, *times, strict=True)):
        trace = run.traces[number]
        names, rows = step_rows(trace)
        begins = start[rows] if names else start.min(keepdims=True)
        ends = np.append(begins[1:], end.max())
        replayed: list[int | None] = [None] * max(len(names), 1)
        if replays:
            parts = replays[number].steps or [replays[number].total]
            replayed = [step.simulated_ns for step in parts]
        found = activity(trace, start, end, wait)
        columns = (
            begins.tolist(),
            ends.tolist(),
            map(tuple, found.parts(begins, ends).tolist()),
            found.hidden_ns(begins, ends).tolist(),
            zip(*_phases(trace, start + wait, end, begins, ends), strict=True),
        )
        names = [name.partition("#")[2] for name in names] or [WHOLE]
        steps += [ReportStep(rank, *each) for each in zip(names, *columns, replayed, strict=True)]
    return StepTimes(steps, replays)


def _phases(
    trace: ExecutionTrace, start: np.ndarray, end: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> list[list[int]]:
    """ns of each window in which work of each phase runs, a list for each of ``PHASES``."""
    kind = np.array(KINDS)[node_kinds(trace)]
    on_device = np.isin(kind, ("kernel", "copy")) & (trace.column("is_cpu_op") == 0)
    works = (on_device if on_device.any() else kind == "operator") | (kind == "transfer")
    names, index = texts(trace, "phase")
    found = []
    for phase in PHASES:
        at = np.flatnonzero(works & (index == (names.index(phase) if phase in names else -2)))
        found.append(union_ns(start[at], end[at], begins, ends).tolist())
    return found
