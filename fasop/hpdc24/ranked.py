"""The published tool's rows as a user asks for them: filtered, and sorted by an objective."""

from __future__ import annotations

from collections.abc import Callable

from fasop.errors import PlanError
from fasop.exact.unit_times import Compute
from fasop.hpdc24.search import Row, search
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.goal import Goal, pareto_front


def ranked(
    model: Model,
    clusters: list[Cluster],
    costs: Compute,
    goal: Goal,
    sharded_optimizer: bool,
    max_tp: int,
    progress: Callable[[int, int], object],
    every_row: bool,
) -> list[Row]:
    """Rows by the goal's objective; with ``every_row`` all of them as the tool sorts them.

    Raises ``PlanError`` where none is left.
    """
    found = search(model, clusters, costs, progress)
    kept = [row for row in found if row.candidate.tp <= max_tp and goal.fits(row.candidate)]
    if not kept:
        raise PlanError(goal.no_shape([row.candidate for row in found]))
    if not goal.everything:
        kept = [row for row in kept if not (row.sharded if sharded_optimizer else row.plain)[0]]
        if not kept:
            raise PlanError(
                f"no plan of {model.name} on {clusters[0].name} fits into memory by hpdc24: try "
                "--sharded-optimizer, or --cost-model exact, which can also plan with --recompute full."
            )
    if goal.max_step_time is not None:
        fastest = min(row.step_time for row in kept)
        kept = [row for row in kept if row.step_time <= goal.max_step_time]
        if not kept:
            raise PlanError(
                f"no plan takes at most {goal.max_step_time:g} s: the fastest takes {fastest:.4f} s."
            )
    if every_row:
        return kept

    def price(row: Row) -> float:
        return clusters[row.candidate.cluster].price_per_hour * row.step_time

    if goal.objective == "cost":
        kept.sort(key=price)
    if goal.objective == "pareto":
        return pareto_front(kept, lambda row: (row.step_time, price(row)))
    return kept[: goal.top]
