"""A job from our own .et files, which the joint device replay simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.sets import RankSet
from chakra_et.job.axes import stages_of
from chakra_et.names import run_at
from chakra_et.simulate.joint import ReplayGraph, build_graph
from chakra_et.simulate.longest_path import Schedule, make_schedule
from chakra_et.simulate.matching import Matching, match
from chakra_et.simulate.timing import Timing, timing
from chakra_et.stragglers.operations import JobMeta, JobOperations, WhatIf
from chakra_et.stragglers.stretches import find_stretches
from chakra_et.stragglers.table import NS, Table, make_table

# Ranks that begin further apart than this are reported.
LATE_S = 1e-3


@dataclass
class RecordedJob:
    """A ``Job`` from .et files. ``step_of_node`` int64[N]: index into ``steps``."""

    meta: JobMeta
    steps: list[int]
    measured_s: np.ndarray
    notes: list[str]
    graph: ReplayGraph
    schedule: Schedule
    step_of_node: np.ndarray
    table: Table

    @property
    def operations(self) -> JobOperations:
        return self.table.operations

    def simulate(self, settings: Sequence[WhatIf]) -> list[np.ndarray]:
        """Step times in s, float64[steps], of each setting; see ``Job``."""
        return [self._step_times(setting) for setting in settings]

    def _step_times(self, setting: WhatIf) -> np.ndarray:
        """The delays of a rank's operations hold up its beginning."""
        own = self.table.durations(self.graph.own_ns, setting.work_s / NS)
        release = np.zeros(len(self.graph.traces))
        if setting.delay_s is not None:
            np.add.at(release, self.table.trace, setting.delay_s)
        release_ns = np.rint(release / NS).astype(np.int64)[self.graph.trace_of]
        _, end = self.schedule.run(own, own, release_ns)
        return _step_times(end, self.step_of_node, len(self.steps), 0)


def recorded_job(run: RankSet) -> RecordedJob:
    """The job of a run's files.

    Raises ``TraceError`` for files that can't be replayed together.
    """
    traces, ranks = _read(run)
    graph = build_graph(traces, ranks)
    matching = match(graph, run.comm_groups() or {})
    job = job_of(run.name, graph, matching, timing(graph, matching))
    return replace(job, notes=run.notes + job.notes)


def job_of(name: str, graph: ReplayGraph, matching: Matching, times: Timing) -> RecordedJob:
    """The job of traces that are already joined; ``name``: the run, or its path.

    Raises ``TraceError`` for ranks without common communication and for those that recorded different steps.
    """
    if not matching.channels:
        raise TraceError(
            f"{name}: its ranks have no communication in common, so none waits for another: give the .et "
            "files of one job"
        )
    schedule = make_schedule(graph, matching)
    found = find_stretches(name, graph)
    stages = stages_of(graph.traces, graph.ranks)
    table = make_table(graph, found, matching, times, stages)
    apart_s = max(times.release_ns) * NS
    step_s = None
    if graph.local_start_ns is not None and graph.clock_ns is not None:
        starts = graph.local_start_ns + graph.clock_ns[graph.trace_of]
        step_s = _step_times(starts + graph.duration_ns, found.step, len(found.steps), int(starts.min()))
    job = RecordedJob(
        meta=JobMeta(
            trial_name=run_at(name).name,
            dp_size=int(table.operations.dp_rank.max()) + 1,
            pp_size=len(set(stages.values())),
            world_size=len(graph.ranks),
        ),
        steps=found.steps,
        measured_s=np.empty(0),
        notes=matching.notes + times.notes + table.notes,
        graph=graph,
        schedule=schedule,
        step_of_node=found.step,
        table=table,
    )
    if apart_s > LATE_S:
        job.notes.append(
            f"the ranks' traces begin up to {apart_s * 1e3:.1f} ms apart, which counts as a delay "
            "before the first step"
        )
    if step_s is None:
        job.notes.append("the files hold no start times on one clock: step_t_base is simulated")
        (step_s,) = job.simulate([WhatIf(job.operations.work_s, job.operations.delay_s)])
    return replace(job, measured_s=step_s)


def _read(run: RankSet) -> tuple[list[ExecutionTrace], list[int]]:
    ranks = [rank for rank in run.files if rank is not None]
    if len(ranks) < 2:
        raise TraceError(
            f"{run.name}: one rank has no others to compare it with: give the NAME of a run with NAME.0.et, "
            "NAME.1.et, …"
        )
    traces = [et_file.read(path) for path in run.files.values()]
    return traces, ranks


def _step_times(ends_ns: np.ndarray, step_of_node: np.ndarray, steps: int, began_ns: int) -> np.ndarray:
    """From the end of the step before, on all ranks, to the end of the step; float64[steps] in s."""
    last = np.full(steps, began_ns, dtype=np.int64)
    np.maximum.at(last, step_of_node, ends_ns)
    return np.diff(np.maximum.accumulate(last), prepend=began_ns) * NS
