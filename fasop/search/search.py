"""Search all shapes of some clusters with the ``exact`` cost model, best bound first."""

from __future__ import annotations

import functools
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fasop.errors import PlanError
from fasop.exact.stage_costs import Options
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import Costs
from fasop.inputs.models import Model
from fasop.plans.plan import Plan
from fasop.plans.shapes import Degrees, Shape, shapes
from fasop.search.planner import Planner

Task = tuple[float, int, Shape]  # a bound on the objective, the cluster's index, the shape
Start = Callable[[Task], Callable[[], Plan | None]]  # begins a task; what it returns waits for it
SPREAD = 400  # tasks, and
LARGE = 256  # GPUs, from which more processes are worth their start
KEPT = 10  # plans at least, until those that could be the best are improved
SMALL = 10_000  # stages³ × micro-batches up to which any other plan that is asked for is improved too


@dataclass(frozen=True)
class Goal:
    """What is asked for. objective: time, cost ($ a step) or pareto (whatever no plan beats in both)."""

    objective: str = "time"
    top: int = 10
    max_step_time: float | None = None
    everything: bool = False  # every shape, those that do not fit too
    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    mbs: int | None = None

    def fits(self, shape: Degrees) -> bool:
        """Whether a shape has the degrees that are asked for."""
        return all(getattr(self, key) in (None, getattr(shape, key)) for key in ("tp", "dp", "pp", "mbs"))

    def no_shape(self, found: Sequence[Degrees]) -> str:
        """What can be had instead of degrees that no shape has."""
        asked = [(key, getattr(self, key)) for key in ("tp", "dp", "pp", "mbs")]
        asked = [(key, value) for key, value in asked if value is not None]

        def distance(shape: Degrees) -> float:
            return sum(abs(math.log(getattr(shape, key) / value)) for key, value in asked)

        near = min(found, key=distance)
        wanted = ", ".join(f"{key} {value}" for key, value in asked)
        return (
            f"no plan has {wanted}: tp × dp × pp must make up all GPUs, tp divide the heads and a node, "
            "dp × mbs the global batch; the nearest is "
            f"tp {near.tp}, dp {near.dp}, pp {near.pp}, mbs {near.mbs}."
        )


_planners: list[Planner] = []  # of the running search; forked processes find them here


def search(
    model: Model,
    clusters: list[Cluster],
    costs: Costs,
    options: Options,
    goal: Goal,
    max_tp: int = 4,
    iterations: int = 0,
    workers: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Plan]:
    """The best plans, or all, sorted by the objective.

    Shapes are taken in the order of a lower bound on the objective, until none that is left can be among
    those asked for. ``workers`` 0: as many processes as there are cores, where there is enough to do.
    ``progress`` is told of shapes done, and of all. Raises ``PlanError`` where a cluster has no shape at
    all, or nothing fits.
    """
    _planners[:] = [Planner(model, cluster, costs, options, iterations) for cluster in clusters]
    tasks: list[Task] = []
    problem = None
    for index, planner in enumerate(_planners):
        try:
            found = shapes(model, planner.cluster, max_tp)
        except PlanError as error:
            problem = error
            continue
        rate = _rate(planner.cluster, goal)
        wanted = [shape for shape in found if goal.fits(shape)]
        tasks += [(planner.lower_bound(shape) * rate, index, shape) for shape in wanted]
    if not tasks:
        raise problem or PlanError(goal.no_shape(found))
    tasks.sort(key=lambda task: task[0])
    kept = _Kept(goal)
    large = max(cluster.gpu_count for cluster in clusters) > LARGE
    processes = workers or (os.cpu_count() or 1 if len(tasks) > SPREAD or large else 1)
    if processes == 1:
        run: Start = lambda task: functools.partial(_evaluate, task, goal.everything, kept.limit(task))  # noqa: E731
        _work(tasks, kept, progress, 1, run)
    else:
        import multiprocessing  # not worth its start-up where one process does

        # Forked, so that planners and costs need no copying.
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            run = lambda task: pool.apply_async(_evaluate, (task, goal.everything, kept.limit(task))).get  # noqa: E731
            _work(tasks, kept, progress, 2 * processes, run)
    return kept.refined()


class _Kept:
    """The plans found so far that may be asked for, best first."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.plans: list[tuple[int, Plan]] = []

    def add(self, cluster: int, plan: Plan) -> None:
        goal = self.goal
        if goal.max_step_time is not None and plan.step_time > goal.max_step_time:
            if plan.lower_bound <= goal.max_step_time and not plan.is_oom:
                plan = _planners[cluster].refine(plan)
            if plan.step_time > goal.max_step_time:
                return
        self.plans.append((cluster, plan))
        if goal.everything:
            return
        self.plans.sort(key=lambda pair: self._order(pair[1]))
        if goal.objective == "pareto":
            front = pareto_front([plan for _, plan in self.plans])
            self.plans = [pair for pair in self.plans if any(pair[1] is plan for plan in front)]
        else:
            del self.plans[max(goal.top, KEPT) :]

    def limit(self, task: Task) -> float:
        """Seconds a step that a task's plan must stay below to be asked for."""
        goal, cluster = self.goal, _planners[task[1]].cluster
        if goal.everything:
            return math.inf
        if goal.objective == "pareto":
            return min((_beaten(plan, cluster) for _, plan in self.plans), default=math.inf)
        rate = _rate(cluster, goal)
        if not rate or len(self.plans) < max(goal.top, KEPT):
            return math.inf
        return self._value(self.plans[-1][1]) / rate

    def hopeless(self, task: Task) -> bool:
        """Whether nothing of a task could still be asked for."""
        rate = _rate(_planners[task[1]].cluster, self.goal)
        return bool(rate) and task[0] >= self.limit(task) * rate

    def refined(self) -> list[Plan]:
        """The plans that are asked for; those that could be the best, or are small, improved once more."""
        goal = self.goal
        best = min((self._value(plan) for _, plan in self.plans if not plan.is_oom), default=-math.inf)
        plans = []
        for index, plan in sorted(self.plans, key=lambda pair: pair[1].lower_bound):
            wanted = plan.pp**3 * plan.micro_batches <= SMALL or goal.objective == "pareto"
            record = plan.lower_bound * _rate(plan.cluster, goal) < best
            # Where its bound is reached, no other division is better.
            proven = plan.lower_bound >= plan.step_time
            if not (proven or plan.is_oom) and (record or wanted and not goal.everything):
                plan = _planners[index].refine(plan)
                best = min(best, self._value(plan))
            plans.append(plan)
        plans.sort(key=self._order)
        if goal.everything:
            return plans
        return pareto_front(plans) if goal.objective == "pareto" else plans[: goal.top]

    def _order(self, plan: Plan) -> tuple[float, float]:
        return self._value(plan), plan.step_time

    def _value(self, plan: Plan) -> float:
        """A plan's objective."""
        return plan.step_time * _rate(plan.cluster, self.goal)


def pareto_front(plans: list[Plan]) -> list[Plan]:
    """The plans than which no other is both as fast and as cheap a step, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_time, plan.price_per_step)):
        if not front or plan.price_per_step < front[-1].price_per_step:
            front.append(plan)
    return front


def _beaten(plan: Plan, cluster: Cluster) -> float:
    """Seconds a step from which on no plan on a cluster is faster or cheaper than ``plan``."""
    price = cluster.price_per_hour / 3600
    if price == 0:
        return plan.step_time if plan.price_per_step == 0 else math.inf
    return max(plan.step_time, plan.price_per_step / price)


def _rate(cluster: Cluster, goal: Goal) -> float:
    """What turns seconds a step into the objective."""
    return cluster.price_per_hour / 3600 if goal.objective == "cost" else 1.0


def _work(
    tasks: list[Task],
    kept: _Kept,
    progress: Callable[[int, int], object],
    window: int,
    start: Start,
) -> None:
    pending: deque[tuple[int, Callable[[], Plan | None]]] = deque()
    done = 0

    def take() -> None:
        nonlocal done
        cluster, result = pending.popleft()
        plan = result()
        if plan is not None:
            kept.add(cluster, plan)
        done += 1
        progress(done, len(tasks))

    for task in tasks:
        while len(pending) >= window:
            take()
        if kept.hopeless(task):
            done += 1
            continue
        pending.append((task[1], start(task)))
    while pending:
        take()


def _evaluate(task: Task, everything: bool, limit: float) -> Plan | None:
    _, index, shape = task
    planner = _planners[index]
    found = planner.best(shape, limit=limit)
    if found is None and everything:
        found = planner.best(shape, fit=False)
    return planner.plan(shape, *found) if found else None
