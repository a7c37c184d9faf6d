"""Slowdowns of a job against its ideal, and which ranks and operations they come from.

Sources: equations 1 to 5 of the paper, and for the names of the fields its artifact
(``analyzer/metatypes.py`` of ByteDance-Seed/StragglerAnalysis on GitHub).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.convert.inputs import load_run
from chakra_et.et.sets import MANY_RANKS, Skeletons
from chakra_et.stragglers.recorded import TimedJob, recorded_job, typical

THRESHOLD = 1.03
"""The slowdown from which on it is attributed to ranks, stages and types of operations."""
MOST_TRIED = 8
"""Of more data-parallel ranks than ``MANY_RANKS``, as many are tried one by one."""
Slowdowns = dict[Any, float]


@dataclass(frozen=True)
class HeatMap:
    """``slowdown`` float64[ranks, steps]."""

    ranks: list[int]
    steps: list[int]
    slowdown: np.ndarray


@dataclass
class Stragglers:
    """What the artifact reports, under its names.

    Step times in s by step. ``base``: measured, each rank from its own start; ``nodelay``: simulated with the
    recorded durations, all ranks beginning at once; ``noblk``: simulated with typical durations.
    ``blocking_*`` are slowdowns of nodelay against noblk, ``launch_*`` of base against nodelay.
    ``*_decompose_by_X[x]``: the slowdown where only x keeps what was recorded. ``worker_slowdown``: of
    each rank, ``rank_by_step``: also of each step. Steps and parts with the largest slowdown come first.
    What can be None is None where the slowdown is below ``THRESHOLD``.
    """

    job_meta: dict[str, Any]
    step_t_base: dict[int, float]
    step_t_nodelay: dict[int, float]
    step_t_noblk: dict[int, float]
    launch_slowdown: float
    blocking_slowdown: float
    blocking_step_slowdown: Slowdowns
    launch_step_slowdown: Slowdowns
    notes: list[str]
    blocking_decompose_by_dp_rank: Slowdowns | None = None
    blocking_decompose_by_stage: Slowdowns | None = None
    blocking_decompose_by_optype: Slowdowns | None = None
    worker_slowdown: Slowdowns | None = None
    rank_by_step: HeatMap | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields, with ``heatmap`` {``rank_by_step`` {``ranks``, ``steps``, ``slowdown``}}."""
        answer, heat = dict(vars(self)), self.rank_by_step
        del answer["rank_by_step"]
        by_step = heat and vars(heat) | {"slowdown": heat.slowdown.tolist()}
        return answer | {"heatmap": {"rank_by_step": by_step}}


def analyse(job: TimedJob) -> Stragglers:
    """Simulate the job with recorded and typical durations."""
    operations, base = job.operations, job.measured_s
    ideal = typical(operations)
    nodelay, noblk = job.step_s(operations.work_s), job.step_s(ideal)

    def by_step(values: np.ndarray) -> dict[int, float]:
        return dict(zip(job.steps, values.tolist(), strict=True))

    found = Stragglers(
        job_meta=job.meta,
        step_t_base=by_step(base),
        step_t_nodelay=by_step(nodelay),
        step_t_noblk=by_step(noblk),
        launch_slowdown=float(base.mean() / nodelay.mean()),
        blocking_slowdown=float(nodelay.mean() / noblk.mean()),
        blocking_step_slowdown=_largest_first(by_step(nodelay / noblk)),
        launch_step_slowdown=_largest_first(by_step(base / nodelay)),
        notes=list(job.notes),
    )
    if found.blocking_slowdown < THRESHOLD:
        return found

    def kept_alone(part: np.ndarray) -> dict[Any, np.ndarray]:
        """Step times where only one part keeps its recorded durations; ``part``: of each operation, [N]."""
        values, index = np.unique(part, return_inverse=True)
        if len(values) > MANY_RANKS:  # each takes a simulation: those that cost most beyond the ideal
            most = np.argsort(-np.bincount(index, operations.work_s - ideal), kind="stable")[:MOST_TRIED]
            values = values[np.sort(most)]
        keeps = {x: part == x for x in values.tolist()}
        return {
            x: nodelay if kept.all() else job.step_s(np.where(kept, operations.work_s, ideal))
            for x, kept in keeps.items()
        }

    def means(times: dict[Any, np.ndarray]) -> Slowdowns:
        return {x: float(each.mean() / noblk.mean()) for x, each in times.items()}

    dp_rank, stage = kept_alone(operations.dp_rank), kept_alone(operations.stage)
    optype = kept_alone(np.array(operations.optypes)[operations.optype])
    by_dp_rank, by_stage = means(dp_rank), means(stage)
    found.blocking_decompose_by_dp_rank = _largest_first(by_dp_rank)
    found.blocking_decompose_by_stage = _largest_first(by_stage)
    found.blocking_decompose_by_optype = _largest_first(means(optype))
    # The slowdown of a worker is the smaller one of its data-parallel rank and its stage (equation 4).
    row = np.unique(operations.rank, return_index=True)[1]
    columns = (each[row].tolist() for each in (operations.rank, operations.dp_rank, operations.stage))
    workers = {worker: (dp, at) for worker, dp, at in zip(*columns, strict=True) if dp in dp_rank}
    slowdowns = {worker: min(by_dp_rank[dp], by_stage[at]) for worker, (dp, at) in workers.items()}
    found.worker_slowdown = _largest_first(slowdowns)
    cells = [np.minimum(dp_rank[dp], stage[at]) / noblk for dp, at in workers.values()]
    found.rank_by_step = HeatMap(list(workers), list(job.steps), np.array(cells))
    if job.meta["dp_size"] > MANY_RANKS:
        found.notes.append(
            f"slowdowns are those of the {MOST_TRIED} of {job.meta['dp_size']:,} data-parallel ranks whose "
            "work exceeds the typical most"
        )
    return found


def _largest_first(slowdowns: Slowdowns) -> Slowdowns:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))


def find_stragglers(name: str, allow_missing: bool = False, skeletons: Skeletons = "auto") -> Stragglers:
    """``analyse`` of the run ``name``: ``find_stragglers("outputs/NAME").rank_by_step.slowdown`` is the heat
    map. Raises ``TraceError`` for files that can't be read, or are not one whole job, the latter unless
    ``allow_missing``."""
    return analyse(recorded_job(load_run(name, allow_missing, skeletons, among_given=True)))
