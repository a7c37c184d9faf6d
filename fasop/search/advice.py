"""What to do where no plan is left: the nearest setting that would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.plans.goal import Goal
from fasop.plans.options import Options, Recompute
from fasop.plans.shapes import shapes
from fasop.search.planner import Planner
from fasop.search.search import search

RECOMPUTE: tuple[Recompute, ...] = ("selective", "full")


def no_plan(
    model: Model,
    clusters: Sequence[Cluster],
    cost_files: list[CostFile],
    options: Sequence[Options],
    goal: Goal,
    max_tp: int,
) -> str:
    """One sentence: why a search found nothing, and what would find something."""
    names = clusters[0].name if len(clusters) == 1 else f"any of {len(clusters)} clusters"
    one = replace(goal, top=1, objective="time", max_step_time=None)
    if goal.max_step_time is not None:
        fastest = search(model, clusters, cost_files, options, one, max_tp)
        if fastest:
            return (
                f"no plan of {model.name} on {names} takes at most {goal.max_step_time:g} s per step: the "
                f"fastest takes {fastest[0].step_time:.4f} s, so raise --max-step-time or use more GPUs."
            )
    given = options[0]
    for recompute in (given.recompute, *RECOMPUTE):
        for zero in sorted({given.zero, max(given.zero, 1)}):
            other = replace(given, recompute=recompute, zero=zero)
            if other in options or not search(model, clusters, cost_files, [other], one, max_tp):
                continue
            flags = [f"--recompute {recompute}"] if recompute != given.recompute else []
            flags += ["--sharded-optimizer"] if zero != given.zero else []
            return f"no plan of {model.name} on {names} fits into memory: {' '.join(flags)} would."
    most = replace(given, recompute="full", zero=max(given.zero, 1))
    needs = _needs(model, max(clusters, key=_memory), cost_files, most, goal, max_tp)
    more = f": about {min(needs):.1f} times the memory per GPU would" if needs else ""
    return (
        f"no plan of {model.name} on {names} fits into memory, not even with --recompute full "
        f"--sharded-optimizer{more}."
    )


def _memory(cluster: Cluster) -> float:
    return sum(gpu.memory_gib * n for gpu, n in zip(cluster.gpus, cluster.nodes, strict=True))


def _needs(
    model: Model, cluster: Cluster, cost_files: list[CostFile], options: Options, goal: Goal, max_tp: int
) -> list[float]:
    """How many times its memory the fullest GPU of each shape would need."""
    planner = Planner(model, cluster, cost_files, options)
    needs = []
    for shape in shapes(model, cluster, max_tp):
        if goal.fits(shape) and shape.mbs == 1 and (found := planner.best(shape, fit=False)):
            plan = planner.plan(shape, *found)
            needs.append(max(size / cap for size, cap in zip(plan.stage_memory, plan.stage_cap, strict=True)))
    return needs
