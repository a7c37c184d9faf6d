"""Slowdowns of a job against its ideal, and which ranks and operations they come from.

Sources: equations 1 to 5 of the paper, and for the names of the fields its artifact
(``analyzer/metatypes.py`` of ByteDance-Seed/StragglerAnalysis on GitHub).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chakra_et.et.sets import MANY_RANKS, Skeletons
from chakra_et.simulate.run import load_run
from chakra_et.stragglers.heatmap import HeatMap, rank_by_step, stage_by_dp_rank
from chakra_et.stragglers.operations import JobMeta, TimedJob, typical
from chakra_et.stragglers.recorded import recorded_job

THRESHOLD = 1.03
"""The slowdown from which on it is attributed to ranks, stages and types of operations."""
# The part of the workers, in percent, that counts as the worst.
WORST_PERCENT = 3
MOST_TRIED = 8
"""Of more data-parallel ranks than ``MANY_RANKS``, as many are tried one by one."""
Slowdowns = dict[Any, float]


@dataclass
class Analysis:
    """What the artifact reports, under its names: ``result-X.json`` without its ``job_meta``.

    Step times in s by step. ``base``: measured; ``nodelay``: simulated with the recorded durations, all ranks
    beginning at once; ``noblk``: simulated with typical durations. ``blocking_*`` are slowdowns of nodelay
    against noblk, ``launch_*`` of base against nodelay. ``*_decompose_by_X[x]``: the slowdown where only x
    keeps what was recorded; None where the slowdown is below ``THRESHOLD``. Steps and parts with the largest
    slowdown come first.
    """

    step_t_base: dict[int, float]
    step_t_nodelay: dict[int, float]
    step_t_noblk: dict[int, float]
    launch_slowdown: float
    blocking_slowdown: float
    blocking_step_slowdown: Slowdowns
    launch_step_slowdown: Slowdowns
    blocking_decompose_by_dp_rank: Slowdowns | None = None
    blocking_decompose_by_stage: Slowdowns | None = None
    blocking_decompose_by_optype: Slowdowns | None = None
    blocking_decompose_by_dp_rank_per_step: dict[int, Slowdowns] | None = None
    blocking_decompose_by_stage_per_step: dict[int, Slowdowns] | None = None
    blocking_decompose_by_optype_per_step: dict[int, Slowdowns] | None = None


@dataclass
class Stragglers:
    """The whole answer. ``worst_ranks``: those that count as the worst. ``worker_slowdown``: rank → slowdown,
    largest first. ``rank_by_step``, ``stage_by_dp_rank``: heat maps. These are None where the slowdown is
    below the threshold."""

    job_meta: JobMeta
    analysis: Analysis
    worst_ranks: list[int] | None
    worker_slowdown: Slowdowns | None
    rank_by_step: HeatMap | None
    stage_by_dp_rank: HeatMap | None
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """``job_meta``; the fields of ``Analysis``; ``worst_ranks``; ``worker_slowdown``; ``heatmap``
        {``rank_by_step``, ``stage_by_dp_rank``}; ``notes``."""
        return {
            "job_meta": asdict(self.job_meta),
            **asdict(self.analysis),
            "worst_ranks": self.worst_ranks,
            "worker_slowdown": self.worker_slowdown,
            "heatmap": {
                "rank_by_step": self.rank_by_step and self.rank_by_step.as_json(),
                "stage_by_dp_rank": self.stage_by_dp_rank and self.stage_by_dp_rank.as_json(),
            },
            "notes": self.notes,
        }


def analyse(job: TimedJob) -> Stragglers:
    """Simulate the job with recorded and typical durations."""
    operations, steps, base = job.operations, job.steps, job.measured_s
    recorded, ideal = operations.work_s, typical(operations)
    nodelay, noblk = job.step_s(recorded), job.step_s(ideal)
    blocking, launch = float(nodelay.mean() / noblk.mean()), float(base.mean() / nodelay.mean())
    types = np.array(operations.optypes)[operations.optype]
    parts = {"optype": types, "dp_rank": operations.dp_rank, "stage": operations.stage}
    fields: dict[str, Any] = {}
    slowdowns = maps = None
    if blocking >= THRESHOLD:
        found = _blocking(job, parts, ideal, nodelay, noblk)
        fields = _fields(found, _by_step(steps, nodelay / noblk))
        by_dp_rank, by_stage = found["dp_rank"][0], found["stage"][0]
        slowdowns = _largest_first(
            {
                rank: min(by_dp_rank[dp], by_stage[stage])
                for rank, (dp, stage) in _workers(job).items()
                if dp in by_dp_rank
            }
        )
        maps = _heat_maps(job, found)
    analysis = Analysis(
        step_t_base=_by_step(steps, base),
        step_t_nodelay=_by_step(steps, nodelay),
        step_t_noblk=_by_step(steps, noblk),
        launch_slowdown=launch,
        blocking_slowdown=blocking,
        blocking_step_slowdown=_largest_first(_by_step(steps, nodelay / noblk)),
        launch_step_slowdown=_largest_first(_by_step(steps, base / nodelay)),
        **fields,
    )

    ranks = None
    if slowdowns is not None:
        count = -(-len(slowdowns) * WORST_PERCENT // 100)
        ranks = sorted(slowdowns, key=lambda rank: (-slowdowns[rank], rank))[:count]
    return Stragglers(
        job_meta=job.meta,
        analysis=analysis,
        worst_ranks=ranks,
        worker_slowdown=slowdowns,
        rank_by_step=maps and maps[0],
        stage_by_dp_rank=maps and maps[1],
        notes=job.notes + _about_tried(job) * (blocking >= THRESHOLD),
    )


def _about_tried(job: TimedJob) -> list[str]:
    if job.meta.dp_size <= MANY_RANKS:
        return []
    return [
        f"slowdowns are those of the {MOST_TRIED} of {job.meta.dp_size:,} data-parallel ranks whose work "
        "exceeds the typical most"
    ]


# Of each name: the mean slowdown of its parts, and the slowdowns of each step.
_Parts = dict[str, tuple[Slowdowns, dict[int, Slowdowns]]]


def _blocking(
    job: TimedJob, parts: dict[str, np.ndarray], ideal: np.ndarray, nodelay: np.ndarray, noblk: np.ndarray
) -> _Parts:
    """The slowdowns where only one part keeps its recorded durations; ``parts``: name → the part of each
    operation, [N]."""
    found = {}
    for name, part in parts.items():
        keeps = {x: part == x for x in _tried(part, job.operations.work_s - ideal)}
        times = {
            x: nodelay if kept.all() else job.step_s(np.where(kept, job.operations.work_s, ideal))
            for x, kept in keeps.items()
        }
        found[name] = _slowdowns(job.steps, times, noblk)
    return found


def _tried(part: np.ndarray, cost_s: np.ndarray) -> list[Any]:
    """The parts to try, as each takes a simulation: of very many those that cost most beyond the ideal."""
    values, index = np.unique(part, return_inverse=True)
    if len(values) <= MANY_RANKS:
        return list(values.tolist())
    most = np.argsort(-np.bincount(index, cost_s), kind="stable")[:MOST_TRIED]
    return list(values[np.sort(most)].tolist())


def _slowdowns(
    steps: list[int], times: dict[Any, np.ndarray], ideal: np.ndarray
) -> tuple[Slowdowns, dict[int, Slowdowns]]:
    per_step = {
        step: _largest_first({part: float(time[at] / ideal[at]) for part, time in times.items()})
        for at, step in enumerate(steps)
    }
    return _largest_first({part: float(time.mean() / ideal.mean()) for part, time in times.items()}), per_step


def _fields(found: _Parts, slowdown: dict[int, float]) -> dict[str, Any]:
    """The fields ``blocking_decompose_by_NAME`` and ``…_per_step``; ``slowdown`` orders the steps."""
    fields: dict[str, Any] = {}
    for name, (means, per_step) in found.items():
        fields[f"blocking_decompose_by_{name}"] = means
        fields[f"blocking_decompose_by_{name}_per_step"] = {
            step: per_step[step] for step in _largest_first(slowdown)
        }
    return fields


def _heat_maps(job: TimedJob, found: _Parts) -> tuple[HeatMap, HeatMap]:
    (by_dp_rank, dp_rank_per_step), (by_stage, stage_per_step) = found["dp_rank"], found["stage"]
    workers = {rank: place for rank, place in _workers(job).items() if place[0] in by_dp_rank}
    return (
        rank_by_step(job.steps, workers, dp_rank_per_step, stage_per_step),
        stage_by_dp_rank(by_dp_rank, by_stage),
    )


def _workers(job: TimedJob) -> dict[int, tuple[int, int]]:
    """Rank → (data-parallel rank, stage), in the order of ranks."""
    rank, row = np.unique(job.operations.rank, return_index=True)
    columns = (rank, job.operations.dp_rank[row], job.operations.stage[row])
    return {rank: (dp, stage) for rank, dp, stage in np.stack(columns, axis=1).tolist()}


def _by_step(steps: list[int], values: np.ndarray) -> dict[int, float]:
    return dict(zip(steps, values.tolist(), strict=True))


def _largest_first(slowdowns: Slowdowns) -> Slowdowns:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))


def find_stragglers(name: str, allow_missing: bool = False, skeletons: Skeletons = "auto") -> Stragglers:
    """``analyse`` of the run ``name``: ``find_stragglers("outputs/NAME").rank_by_step.slowdown`` is the heat
    map. Raises ``TraceError`` for files that can't be read, or are not one whole job, the latter unless
    ``allow_missing``."""
    return analyse(recorded_job(load_run(name, allow_missing=allow_missing, skeletons=skeletons)))
