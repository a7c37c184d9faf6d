"""Search all shapes of some clusters with the ``exact`` cost model, best bound first."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from chakra_et.text import progress_bar
from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan, by_time_and_price, pareto_front
from fasop.plans.shapes import Shape, shapes
from fasop.search.planner import Planner

Task = tuple[float, int, Shape]  # a bound on the objective, planner, shape
Start = Callable[[Task, bool, float], Callable[[], Plan | None]]  # begins ``_evaluate``, returns its end
SPREAD = 400  # tasks, and
LARGE = 256  # GPUs, from which more processes are worth their start
KEPT = 10  # plans at least, until those that could be the best are improved
SMALL = 10_000  # stages³ × micro-batches up to which any other plan that is asked for is improved too
MOST_PARTS = 200  # sub-clusters that a search for the cheapest plan tries

_planners: list[Planner] = []  # of the running search; forked processes find them here


def search(
    model: Model, clusters: list[Cluster], cost_files: list[CostFile], options: list[Options], goal: Goal
) -> list[Plan]:
    """The best plans, or all, sorted by the objective.

    options: the ways to run the job that are tried. Shapes are taken in the order of a lower bound on the
    objective, until none that is left can be among those asked for, or the goal's time is over: then the
    plans' notes tell what was left out. Raises ``PlanError`` where a cluster has no shape at all.
    """
    end = time.monotonic() + (goal.time_limit or math.inf)
    by_time = goal.objective == "time"
    tried = parts_of(clusters[0]) if goal.idle and not by_time and len(clusters) == 1 else clusters
    _planners[:] = [
        Planner(model, cluster, cost_files, each, goal.idle and by_time, goal.max_tp)
        for cluster, each in itertools.product(tried, options)
    ]
    tasks, problem = _tasks(model, goal)
    if not tasks:
        raise problem or PlanError(goal.no_shape)
    kept = _Kept(goal)
    exact = sum(task[2].pp * task[2].group == _planners[task[1]].cluster.gpu_count for task in tasks)
    large = max(cluster.gpu_count for cluster in tried) > LARGE
    processes = goal.workers or (os.cpu_count() or 1 if exact > SPREAD or large else 1)
    if processes == 1:
        left = _work(tasks, kept, 1, lambda *of: functools.partial(_evaluate, *of), end)
    else:
        # Not worth their start-up where one process does.
        import multiprocessing
        import signal

        # Forked, so that planners and costs need no copying. The pool ends its processes by SIGTERM, which
        # the caller may handle otherwise, and so would its forks.
        to_die = signal.SIGTERM, signal.SIG_DFL
        with multiprocessing.get_context("fork").Pool(processes, signal.signal, to_die) as pool:
            left = _work(tasks, kept, 2 * processes, lambda *of: pool.apply_async(_evaluate, of).get, end)
    plans = kept.refined(only_best=bool(left))
    if not left:
        return plans
    least = min(task[0] for task in left)
    bound = f"; their steps take at least {least:.3g} s" if by_time else ""
    note = (
        f"{len(left):,} of {len(tasks):,} shapes weren't tried in {goal.time_limit:g} s, and only the best "
        f"plan was improved{bound} (--time-limit 0: try all)"
    )
    return [replace(plan, notes=(*plan.notes, note)) for plan in plans]


def parts_of(cluster: Cluster) -> list[Cluster]:
    """The cluster and parts of it: every count of a type's nodes where they are few, else quarters."""
    for steps in (4, 3, 2, 1):
        # Of as many nodes as steps or fewer, these are all counts.
        counts = [sorted({math.ceil(n * step / steps) for step in range(steps + 1)}) for n in cluster.nodes]
        if math.prod(len(each) for each in counts) <= MOST_PARTS:
            break
    found = []
    for nodes in itertools.product(*counts):
        used = [(gpu, n) for gpu, n in zip(cluster.gpus, nodes, strict=True) if n]
        if used:
            # Named as in the whole.
            gpus = tuple(replace(gpu, hosts=tuple(cluster.assigned([gpu.name] * n))) for gpu, n in used)
            found.append(replace(cluster, gpus=gpus, nodes=tuple(n for _, n in used)))
    return found


def _tasks(model: Model, goal: Goal) -> tuple[list[Task], PlanError | None]:
    """Every shape of every planner, and why one has none."""
    tasks: list[Task] = []
    problem = None
    for index, planner in enumerate(_planners):
        try:
            found = shapes(model, planner.cluster, goal.max_tp, planner.idle)
        except PlanError as error:
            problem = error
            continue
        rate = _rate(planner.cluster, goal)
        seen: set[tuple[int, int, int, int]] = set()
        for shape in found:
            if not goal.fits(shape):
                continue
            # Where tp, dp and mbs are each stage's own, one of these shapes stands for all.
            key = (shape.group, shape.pp, shape.batch, shape.ep)
            if planner.options.per_stage and key in seen:
                continue
            seen.add(key)
            tasks.append((planner.bounds.lower(shape, rough=True) * rate, index, shape))
    return tasks, problem


class _Kept:
    """The plans found so far that may be asked for, best first."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.plans: list[tuple[int, Plan]] = []

    def add(self, planner: int, plan: Plan) -> None:
        goal = self.goal
        if goal.max_step_time is not None and plan.step_time > goal.max_step_time:
            if plan.lower_bound <= goal.max_step_time and not plan.is_oom:
                plan = _planners[planner].refine(plan)
            if plan.step_time > goal.max_step_time:
                return
        self.plans.append((planner, plan))
        if goal.everything:
            return
        self.plans.sort(key=lambda pair: self._order(pair[1]))
        if goal.objective == "pareto":
            self.plans = pareto_front(self.plans, lambda pair: by_time_and_price(pair[1]))
        else:
            del self.plans[max(goal.top, KEPT) :]

    def limit(self, task: Task) -> float:
        """Seconds per step that a task's plan must stay below to be asked for."""
        goal, cluster = self.goal, _planners[task[1]].cluster
        if goal.everything:
            return math.inf
        if self.plans and not _planners[task[1]].is_deepest(task[2]):
            # Fewer stages than there are GPUs for: only where that is best of all.
            return self._value(self.plans[0][1])
        if goal.objective == "pareto":
            # From there on no plan on the cluster is faster or cheaper than one that is kept.
            price = cluster.price_per_hour / 3600 or 1e-300  # of a free cluster
            each = (max(plan.step_time, plan.price_per_step / price) for _, plan in self.plans)
            return min(each, default=math.inf)
        rate = _rate(cluster, goal)
        if not rate or len(self.plans) < max(goal.top, KEPT):
            return math.inf
        return self._value(self.plans[-1][1]) / rate

    def is_hopeless(self, task: Task) -> bool:
        """Whether nothing of a task could still be asked for."""
        rate = _rate(_planners[task[1]].cluster, self.goal)
        return bool(rate) and task[0] >= self.limit(task) * rate

    def refined(self, only_best: bool) -> list[Plan]:
        """The plans that are asked for; those that could be the best, or are small, improved once more."""
        goal = self.goal
        best = min((self._value(plan) for _, plan in self.plans if not plan.is_oom), default=-math.inf)
        plans = []
        for index, plan in sorted(self.plans, key=lambda pair: pair[1].lower_bound):
            wanted = plan.pp**3 * plan.micro_batches <= SMALL or goal.objective == "pareto"
            record = plan.lower_bound * _rate(plan.cluster, goal) < best
            # Where its bound is reached, no other assignment is better.
            proven = plan.lower_bound >= plan.step_time
            skipped = only_best and self._value(plan) > best
            if not (proven or skipped or plan.is_oom) and (record or wanted and not goal.everything):
                plan = _planners[index].refine(plan)
                best = min(best, self._value(plan))
            plans.append(plan)
        plans.sort(key=self._order)
        if goal.everything:
            return plans
        if goal.objective == "pareto":
            return pareto_front(plans, by_time_and_price)
        return plans[: goal.top]

    def _order(self, plan: Plan) -> tuple[float, float, int]:
        return self._value(plan), plan.step_time, len(plan.placement)

    def _value(self, plan: Plan) -> float:
        return plan.price_per_step if self.goal.objective == "cost" else plan.step_time


def _rate(cluster: Cluster, goal: Goal) -> float:
    """What turns seconds per step into the objective, where all nodes are used."""
    return cluster.price_per_hour / 3600 if goal.objective == "cost" else 1.0


def _work(tasks: list[Task], kept: _Kept, window: int, start: Start, end: float) -> list[Task]:
    """Try the tasks; those that are left at the time ``end``, once there is a plan, are returned."""
    pending: deque[tuple[int, Callable[[], Plan | None]]] = deque()

    def take() -> None:
        planner, result = pending.popleft()
        if plan := result():
            kept.add(planner, plan)

    # Shapes that leave out stages come last: most of them are beaten by then.
    heap = [(not _planners[task[1]].is_deepest(task[2]), task[0], at) for at, task in enumerate(tasks)]
    heapq.heapify(heap)
    whole: set[int] = set()  # the tasks whose bound is that of a whole step
    with progress_bar(len(tasks), "trying", "shape") as done:
        while heap and not (time.monotonic() > end and kept.plans):
            shallow, bound, at = heapq.heappop(heap)
            index, shape = tasks[at][1:]
            task = bound, index, shape
            if at not in whole and not kept.is_hopeless(task):
                whole.add(at)
                bound = _planners[index].bounds.lower(shape) * _rate(_planners[index].cluster, kept.goal)
                heapq.heappush(heap, (shallow, bound, at))
                continue
            while len(pending) >= window and not kept.is_hopeless(task):
                take()
            if not kept.is_hopeless(task):
                pending.append((index, start(task, kept.goal.everything, kept.limit(task))))
            done()
    while pending:
        take()
    left = [(bound, *tasks[at][1:]) for _, bound, at in heap]
    return [task for task in left if not kept.is_hopeless(task)]


def _evaluate(task: Task, everything: bool, limit: float) -> Plan | None:
    *_, index, shape = task
    planner = _planners[index]
    found = planner.best(shape, limit=limit)
    return planner.best(shape, fit=False) if found is None and everything else found
