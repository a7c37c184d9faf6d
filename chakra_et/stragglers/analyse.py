"""Slowdowns of a job against its ideal, and which workers and operations they come from.

Sources: equations 1 to 5 of the paper, and for the names of the fields its artifact
(``analyzer/metatypes.py``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chakra_et.stragglers import heatmap
from chakra_et.stragglers.operations import Job, JobMeta, JobOperations, Typical, WhatIf, typical

# As the artifact groups the types of messages.
_MESSAGES = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
# The part of the workers, in percent, that counts as the worst.
WORST_PERCENT = 3
# The name under which the delays of a step's first operations are counted.
FIRST_OP = "first-op"

Slowdowns = dict[Any, float]


@dataclass
class Analysis:
    """What the artifact reports, under its names: ``result-X.json`` without its ``job_meta``.

    Step times in s by step. ``base``: measured; ``nodelay``: simulated with the recorded durations and no
    launch delays; ``noblk``: simulated with typical durations. ``blocking_*`` are slowdowns of nodelay
    against noblk, ``launch_*`` of base against nodelay. ``*_decompose_by_X[x]``: the slowdown where only x
    keeps what was recorded; None where the slowdown is below the threshold. Steps and parts with the largest
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
    launch_decompose_by_dp_rank: Slowdowns | None = None
    blocking_decompose_by_stage: Slowdowns | None = None
    launch_decompose_by_stage: Slowdowns | None = None
    blocking_decompose_by_optype: Slowdowns | None = None
    launch_decompose_by_optype: Slowdowns | None = None
    blocking_decompose_by_dp_rank_per_step: dict[int, Slowdowns] | None = None
    launch_decompose_by_dp_rank_per_step: dict[int, Slowdowns] | None = None
    blocking_decompose_by_stage_per_step: dict[int, Slowdowns] | None = None
    launch_decompose_by_stage_per_step: dict[int, Slowdowns] | None = None
    blocking_decompose_by_optype_per_step: dict[int, Slowdowns] | None = None
    launch_decompose_by_optype_per_step: dict[int, Slowdowns] | None = None


@dataclass
class Restored:
    """What some operations account for, under the names of ``ms-X.json`` and ``mw-X.json``; mean step times
    in s.

    ``tori``: recorded durations; ``tideal``: typical ones; ``trem``: recorded but for these operations;
    ``tadd``: typical but for these. ``rem`` and ``add``: what of the slowdown goes, or comes, with them (1 is
    all of it); None where there is none.
    """

    trem: float
    tadd: float
    tori: float
    tideal: float
    rem: float | None
    add: float | None


@dataclass
class Stragglers:
    """The whole answer. ``last_stage``, ``worst_workers``: ``Restored`` for those operations;
    ``worst_ranks``: the workers that count as the worst. ``worker_slowdown``: rank → slowdown, largest first.
    ``rank_by_step``, ``stage_by_dp_rank``: heat maps. All but ``last_stage`` are None where the slowdown is
    below the threshold."""

    job_meta: JobMeta
    analysis: Analysis
    last_stage: Restored
    worst_workers: Restored | None
    worst_ranks: list[int] | None
    worker_slowdown: Slowdowns | None
    rank_by_step: heatmap.HeatMap | None
    stage_by_dp_rank: heatmap.HeatMap | None
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The fields of ``result-X.json``; ``ms`` and ``mw``, those of the files of that name;
        ``worst_ranks``; ``worker_slowdown``; ``heatmap`` {``rank_by_step``, ``stage_by_dp_rank``};
        ``notes``."""
        last, worst = asdict(self.last_stage), self.worst_workers and asdict(self.worst_workers)
        return {
            "job_meta": asdict(self.job_meta),
            **asdict(self.analysis),
            "ms": {**last, "Ms": last["rem"]},
            "mw": worst and {**worst, "Mw": worst["rem"]},
            "worst_ranks": self.worst_ranks,
            "worker_slowdown": self.worker_slowdown,
            "heatmap": {
                "rank_by_step": self.rank_by_step and self.rank_by_step.as_json(),
                "stage_by_dp_rank": self.stage_by_dp_rank and self.stage_by_dp_rank.as_json(),
            },
            "notes": self.notes,
        }


def analyse(job: Job, compute: Typical = "mean", threshold: float = 1.03) -> Stragglers:
    """Simulate the job with recorded and typical durations.

    ``compute``: what is typical of computation. ``threshold``: the slowdown from which on it is attributed to
    workers, stages and types of operations.
    """
    operations = job.operations
    recorded, ideal = operations.work_s, typical(operations, compute)
    nodelay, noblk = job.simulate([WhatIf(recorded), WhatIf(ideal)])
    base = job.measured_s
    blocking, launch = float(nodelay.mean() / noblk.mean()), float(base.mean() / nodelay.mean())
    decomposed: dict[str, Any] = {}
    parts = _parts(operations)
    if blocking >= threshold:
        chosen = _each(parts)
        settings = [WhatIf(np.where(keeps, recorded, ideal)) for _, _, keeps in chosen]
        times = dict(zip([(name, x) for name, x, _ in chosen], job.simulate(settings), strict=True))
        decomposed |= _decomposed("blocking", job.steps, times, nodelay, noblk)
    if launch >= threshold:
        chosen = _each(parts | {"optype": np.where(operations.is_first, FIRST_OP, parts["optype"])})
        settings = [WhatIf(recorded, np.where(keeps, operations.delay_s, 0)) for _, _, keeps in chosen]
        times = dict(zip([(name, x) for name, x, _ in chosen], job.simulate(settings), strict=True))
        decomposed |= _decomposed("launch", job.steps, times, base, nodelay)
    analysis = Analysis(
        step_t_base=_by_step(job.steps, base),
        step_t_nodelay=_by_step(job.steps, nodelay),
        step_t_noblk=_by_step(job.steps, noblk),
        launch_slowdown=launch,
        blocking_slowdown=blocking,
        blocking_step_slowdown=_largest_first(_by_step(job.steps, nodelay / noblk)),
        launch_step_slowdown=_largest_first(_by_step(job.steps, base / nodelay)),
        **decomposed,
    )

    def restored(chosen: np.ndarray) -> Restored:
        without, alone = np.where(chosen, ideal, recorded), np.where(chosen, recorded, ideal)
        trem, tadd = (float(times.mean()) for times in job.simulate([WhatIf(without), WhatIf(alone)]))
        tori, tideal = float(nodelay.mean()), float(noblk.mean())
        lost = tori - tideal
        rem, add = ((tori - trem) / lost, (tadd - tideal) / lost) if lost else (None, None)
        return Restored(trem, tadd, tori, tideal, rem, add)

    places = workers(operations)
    slowdowns = worker_slowdowns(places, analysis)
    ranks = None if slowdowns is None else _worst(slowdowns)
    return Stragglers(
        job_meta=job.meta,
        analysis=analysis,
        last_stage=restored(operations.stage == operations.stage.max()),
        worst_workers=None if ranks is None else restored(np.isin(operations.rank, ranks)),
        worst_ranks=ranks,
        worker_slowdown=slowdowns,
        **_heat_maps(job.steps, places, analysis),
        notes=job.notes,
    )


@dataclass(frozen=True)
class RankSlowdowns:
    """``slowdown``: mean step time with recorded durations over that of the ideal job. ``rank_by_step``,
    ``stage_by_dp_rank``: the same where only that rank, or stage of a data-parallel rank, keeps its own."""

    slowdown: float
    rank_by_step: heatmap.HeatMap
    stage_by_dp_rank: heatmap.HeatMap
    notes: list[str]


def rank_slowdowns(job: Job, compute: Typical = "mean") -> RankSlowdowns:
    """The heat maps of ``analyse`` alone, whatever the slowdown is; ``compute`` as there."""
    operations = job.operations
    recorded, ideal = operations.work_s, typical(operations, compute)
    nodelay, noblk = job.simulate([WhatIf(recorded), WhatIf(ideal)])
    parts = {"dp_rank": operations.dp_rank, "stage": operations.stage}
    slow: dict[str, dict[int, np.ndarray]] = {"dp_rank": {}, "stage": {}}
    for name, part, keeps in _each(parts):
        (times,) = [nodelay] if keeps.all() else job.simulate([WhatIf(np.where(keeps, recorded, ideal))])
        slow[name][part] = times
    per_step = {
        name: {
            step: {part: float(times[at] / noblk[at]) for part, times in own.items()}
            for at, step in enumerate(job.steps)
        }
        for name, own in slow.items()
    }
    means = {
        name: {part: float(times.mean() / noblk.mean()) for part, times in own.items()}
        for name, own in slow.items()
    }
    by_step = heatmap.rank_by_step(job.steps, workers(operations), per_step["dp_rank"], per_step["stage"])
    by_stage = heatmap.stage_by_dp_rank(means["dp_rank"], means["stage"])
    return RankSlowdowns(float(nodelay.mean() / noblk.mean()), by_step, by_stage, job.notes)


def worker_slowdowns(places: dict[int, tuple[int, int]], analysis: Analysis) -> Slowdowns | None:
    """Rank → slowdown, the smaller one of its data-parallel rank and its stage (equation 4); largest first.

    ``places``: see ``workers``. None where the analysis has no decompositions.
    """
    by_dp_rank, by_stage = analysis.blocking_decompose_by_dp_rank, analysis.blocking_decompose_by_stage
    if by_dp_rank is None or by_stage is None:
        return None
    return _largest_first(
        {rank: min(by_dp_rank[dp], by_stage[stage]) for rank, (dp, stage) in places.items()}
    )


def workers(operations: JobOperations) -> dict[int, tuple[int, int]]:
    """Rank → (data-parallel rank, stage), in the order of ranks."""
    rank, row = np.unique(operations.rank, return_index=True)
    places = zip(operations.dp_rank[row].tolist(), operations.stage[row].tolist(), strict=True)
    return dict(zip(rank.tolist(), places, strict=True))


def _heat_maps(
    steps: list[int], places: dict[int, tuple[int, int]], analysis: Analysis
) -> dict[str, heatmap.HeatMap | None]:
    """``rank_by_step`` and ``stage_by_dp_rank``, None without decompositions."""
    by_dp_rank, by_stage = analysis.blocking_decompose_by_dp_rank, analysis.blocking_decompose_by_stage
    dp_rank_per_step = analysis.blocking_decompose_by_dp_rank_per_step
    stage_per_step = analysis.blocking_decompose_by_stage_per_step
    if by_dp_rank is None or by_stage is None or dp_rank_per_step is None or stage_per_step is None:
        return {"rank_by_step": None, "stage_by_dp_rank": None}
    return {
        "rank_by_step": heatmap.rank_by_step(steps, places, dp_rank_per_step, stage_per_step),
        "stage_by_dp_rank": heatmap.stage_by_dp_rank(by_dp_rank, by_stage),
    }


def _parts(operations: JobOperations) -> dict[str, np.ndarray]:
    """What slowdowns are attributed to: name → the part of each operation, [N]."""
    types = np.array([_MESSAGES.get(name, name) for name in operations.optypes])
    return {
        "optype": types[operations.optype],
        "dp_rank": operations.dp_rank,
        "stage": operations.stage,
    }


def _each(parts: dict[str, np.ndarray]) -> list[tuple[str, Any, np.ndarray]]:
    """(name, part, whether each operation belongs to it) of all parts."""
    return [(name, x, part == x) for name, part in parts.items() for x in np.unique(part).tolist()]


def _decomposed(
    kind: str, steps: list[int], times: dict[tuple[str, Any], np.ndarray], slow: np.ndarray, ideal: np.ndarray
) -> dict[str, Any]:
    """The fields ``KIND_decompose_by_NAME`` and ``…_per_step`` from the step times for each (name, part);
    ``slow`` orders the steps."""
    fields: dict[str, Any] = {}
    order = list(_largest_first(_by_step(steps, slow / ideal)))
    for name in dict.fromkeys(name for name, _ in times):
        own = {part: time for (of, part), time in times.items() if of == name}
        per_step = {
            step: _largest_first({part: float(time[at] / ideal[at]) for part, time in own.items()})
            for at, step in enumerate(steps)
        }
        slowdowns = {part: float(time.mean() / ideal.mean()) for part, time in own.items()}
        fields[f"{kind}_decompose_by_{name}"] = _largest_first(slowdowns)
        fields[f"{kind}_decompose_by_{name}_per_step"] = {step: per_step[step] for step in order}
    return fields


def _by_step(steps: list[int], values: np.ndarray) -> dict[int, float]:
    return dict(zip(steps, values.tolist(), strict=True))


def _largest_first(slowdowns: Slowdowns) -> Slowdowns:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))


def _worst(slowdowns: Slowdowns) -> list[int]:
    """The ``WORST_PERCENT`` of the ranks, rounded up, with the largest slowdowns; of equal ones the
    lowest."""
    count = -(-len(slowdowns) * WORST_PERCENT // 100)
    return sorted(slowdowns, key=lambda rank: (-slowdowns[rank], rank))[:count]
