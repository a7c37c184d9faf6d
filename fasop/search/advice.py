"""What to do where no plan is left: the nearest setting that would work."""

from __future__ import annotations

from dataclasses import replace

from fasop.exact.stage_costs import Options
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import Costs
from fasop.inputs.models import Model
from fasop.plans.shapes import shapes
from fasop.search.planner import Planner
from fasop.search.search import Goal, search


def no_plan(
    model: Model, clusters: list[Cluster], costs: Costs, options: Options, goal: Goal, max_tp: int
) -> str:
    """One sentence: why a search found nothing, and what would find something."""
    names = clusters[0].name if len(clusters) == 1 else f"any of {len(clusters)} clusters"
    one = replace(goal, top=1, objective="time", max_step_time=None)
    if goal.max_step_time is not None:
        fastest = search(model, clusters, costs, options, one, max_tp)
        if fastest:
            return (
                f"no plan of {model.name} on {names} takes at most {goal.max_step_time:g} s a step: the "
                f"fastest takes {fastest[0].step_time:.4f} s, so raise --max-step-time or use more GPUs."
            )
    tried = []
    for recompute in (options.recompute, "selective", "full"):
        for sharded in (options.sharded_optimizer, True):
            other = replace(options, recompute=recompute, sharded_optimizer=sharded)
            if other == options or other in tried:
                continue
            tried.append(other)
            if search(model, clusters, costs, other, one, max_tp):
                flags = [f"--recompute {recompute}"] if recompute != options.recompute else []
                flags += ["--sharded-optimizer"] if sharded and not options.sharded_optimizer else []
                return f"no plan of {model.name} on {names} fits into memory: {' '.join(flags)} would."
    cluster = max(clusters, key=lambda c: sum(g.memory_gib * n for g, n in zip(c.gpus, c.nodes, strict=True)))
    planner = Planner(model, cluster, costs, replace(options, recompute="full", sharded_optimizer=True))
    needs = []
    for shape in shapes(model, cluster, max_tp):
        if goal.fits(shape) and shape.mbs == 1 and (found := planner.best(shape, fit=False)):
            plan = planner.plan(shape, *found)
            needs.append(max(size / cap for size, cap in zip(plan.stage_memory, plan.stage_cap, strict=True)))
    more = f": about {min(needs):.1f} times the memory a GPU would" if needs else ""
    return (
        f"no plan of {model.name} on {names} fits into memory, not even with --recompute full "
        f"--sharded-optimizer{more}."
    )
