"""What to do where no plan is left: the nearest setting that would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.plans.goal import Goal
from fasop.plans.options import Options
from fasop.search.search import search


def no_plan(
    model: Model,
    clusters: Sequence[Cluster],
    cost_files: list[CostFile],
    options: Sequence[Options],
    goal: Goal,
    max_tp: int,
) -> str:
    """One sentence: why a search found nothing, and what would find something."""
    given = options[0]
    what = f"no plan of {model.name} on {clusters[0].name if len(clusters) == 1 else 'any cluster'}"
    one = replace(goal, top=1, objective="time", max_step_time=None)
    if goal.max_step_time is not None and (
        fastest := search(model, clusters, cost_files, options, one, max_tp)
    ):
        return (
            f"{what} takes at most {goal.max_step_time:g} s per step: the fastest takes "
            f"{fastest[0].step_time:.4f} s, so raise --max-step-time or use more GPUs."
        )
    most = replace(given, recompute="full", zero=max(given.zero, 1))
    for other, flags in (
        (replace(given, recompute="selective"), "--recompute selective"),
        (replace(given, recompute="full"), "--recompute full"),
        (replace(given, zero=most.zero), "--sharded-optimizer"),
        (most, "--recompute full --sharded-optimizer"),
    ):
        if other not in options and search(model, clusters, cost_files, [other], one, max_tp):
            return f"{what} fits into memory: {flags} would."
    least = search(model, clusters, cost_files, [most], replace(one, everything=True, mbs=1), max_tp)
    pairs = [zip(plan.stage_memory, plan.stage_cap, strict=True) for plan in least]
    needs = min(max(size / cap for size, cap in pair) for pair in pairs)
    return (
        f"{what} fits into memory, not even with --recompute full --sharded-optimizer: about {needs:.1f} "
        "times the memory per GPU would."
    )
