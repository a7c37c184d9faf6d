"""The search over shapes: nothing better is skipped, and better hardware never gives a slower plan."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster, load_clusters
from fasop.inputs.costs import CostFile, read_costs
from fasop.inputs.models import find_model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan, by_time_and_price, pareto_front, plans_json
from fasop.plans.shapes import Shape, shapes, stage_seats
from fasop.search import search as search_module
from fasop.search.partition import Assignment
from fasop.search.planner import Planner
from fasop.search.search import Task, _evaluate, search
from tests.fasop import fasop_cases as cases

SECONDS = {"X": 0.010, "Y": 0.023}
SLOW = {"Y": {"inter_bandwidth": 3e8, "intra_bandwidth": 2e9, "shared_bus": True}}


def best(cluster: Cluster, seconds: dict[str, float] = SECONDS, encoder: int | None = None) -> Plan:
    model = cases.model(4, 8, encoder)
    return search(model, [cluster], cases.costs(model, seconds), [Options()], Goal(top=1, workers=1))[0]


@functools.cache
def real() -> list[CostFile]:
    return [read_costs()]


@pytest.mark.parametrize("nodes", [{"X": 1, "Y": 2}, {"X": 2, "Y": 2}, {"Y": 3}])
@pytest.mark.parametrize("encoder", [None, 2])
def test_the_best_plan_is_the_best_of_an_unpruned_search(nodes: dict[str, int], encoder: int | None) -> None:
    model, cluster = cases.model(4, 8, encoder), cases.cluster(nodes, 2, **SLOW)
    planner = cases.planner(model, cluster, cases.costs(model, SECONDS))
    slowest = math.inf
    for shape in shapes(model, cluster, 4):
        tables = planner.tables(shape)
        for placement in cases.placements(cluster):
            seats = stage_seats(cluster, placement, shape)
            for partition in cases.partitions(len(model.units), shape.pp):
                if cases.crosses(model, partition):
                    continue
                assignment = Assignment(placement, seats, partition)
                step = planner.plan(shape, assignment).step_time
                # Nothing is below the bounds of its shape.
                assert planner.bounds.lower(shape) <= step * (1 + 1e-9)
                # What the dynamic program minimises bounds the simulated step of every assignment.
                assert cases.objective(tables, placement, partition) <= step * (1 + 1e-9)
                slowest = min(slowest, step)
    assert best(cluster, encoder=encoder).step_time == pytest.approx(slowest, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([{"X": 1, "Y": 2}, {"X": 2, "Y": 1}, {"X": 1, "Y": 1}]),
    st.sampled_from(["inter_bandwidth", "intra_bandwidth", "speed", "memory_gib"]),
    st.sampled_from(["X", "Y", "both"]),
    st.floats(1.0, 8.0),
    st.floats(1e8, 1e11),
)
def test_better_hardware_never_gives_a_slower_plan(
    nodes: dict[str, int], setting: str, who: str, factor: float, bandwidth: float
) -> None:
    cluster = cases.cluster(nodes, 2, **{"Y": {**SLOW["Y"], "inter_bandwidth": bandwidth}})
    better = replace(
        cluster,
        gpus=tuple(
            replace(gpu, **{setting: getattr(gpu, setting) * factor}) if who in (gpu.name, "both") else gpu
            for gpu in cluster.gpus
        ),
    )
    assert best(better).step_time <= best(cluster).step_time * (1 + 1e-9)


@pytest.mark.parametrize("name", ["paper-bert-het", "paper-bert"])
@pytest.mark.parametrize("setting", ["inter_bandwidth", "intra_bandwidth", "speed"])
def test_better_hardware_never_gives_a_slower_plan_on_the_paper_clusters(name: str, setting: str) -> None:
    (cluster,) = load_clusters(name)
    model, times = find_model("bert-large"), []
    for factor in (1.0, 1.3, 2.0, 5.0):
        gpus = tuple(replace(gpu, **{setting: getattr(gpu, setting) * factor}) for gpu in cluster.gpus)
        plans = search(model, [replace(cluster, gpus=gpus)], real(), [Options()], Goal(top=3))
        times.append(plans[0].step_time)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in zip(times, times[1:], strict=False))


def test_the_bound_skips_no_plan_of_the_best_ten() -> None:
    model, clusters = find_model("bert-large"), load_clusters("paper-bert-het")
    asked = search(model, clusters, real(), [Options()], Goal(top=10))
    everything = search(model, clusters, real(), [Options()], Goal(everything=True))
    fitting = [plan for plan in everything if not plan.is_oom]
    assert len(everything) == len(shapes(model, clusters[0], 4))
    for mine, theirs in zip(asked, fitting, strict=False):
        # The first few were improved once more.
        assert mine.step_time <= theirs.step_time * (1 + 1e-12)
    for plan in everything:
        assert 0 < plan.lower_bound <= plan.step_time


@pytest.mark.parametrize("name", ["paper-bert", "paper-bert-het"])
@pytest.mark.parametrize("options", [{}, {"recompute": "full", "zero": 1}, {"overlap": True}])
def test_no_plan_is_below_the_bounds_of_its_shape(name: str, options: dict[str, object]) -> None:
    model, (cluster,) = find_model("bert-large"), load_clusters(name)
    planner = Planner(model, cluster, real(), Options(**options), idle=True)
    for shape in shapes(model, cluster, 4, idle=True):
        found = planner.best(shape, fit=False)
        step = found.step_time if found else math.inf
        assert 0 < planner.bounds.lower(shape) <= step * (1 + 1e-9), shape


def test_several_processes_find_the_same() -> None:
    model, clusters = find_model("bert-large"), load_clusters("paper-bert-het")
    alone = search(model, clusters, real(), [Options()], Goal(top=5, workers=1))
    together = search(model, clusters, real(), [Options()], Goal(top=5, workers=2))
    assert alone == together


def test_a_pareto_search_gives_what_no_other_plan_beats_in_both() -> None:
    model, clusters = cases.model(4, 8), []
    for x, y in [(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 1)]:
        nodes = {name: count for name, count in (("X", x), ("Y", y)) if count}
        clusters.append(cases.cluster(nodes, 2, X={"price_per_hour": 3.0}, **SLOW))
    costs = cases.costs(model, SECONDS)
    front = search(model, clusters, costs, [Options()], Goal("pareto"))
    each = [search(model, [c], costs, [Options()], Goal(top=1))[0] for c in clusters]
    expected = pareto_front(each, by_time_and_price)
    assert [p.step_time for p in front] == pytest.approx([p.step_time for p in expected])
    assert [p.cluster for p in front] == [p.cluster for p in expected]
    assert len(front) > 1


def test_cheapest_and_within_a_step_time() -> None:
    model = cases.model(4, 8)
    clusters = [cases.cluster({"X": 2}, 2, X={"price_per_hour": 9.0}), cases.cluster({"Y": 1}, 2)]
    costs = cases.costs(model, SECONDS)
    fastest = search(model, clusters, costs, [Options()], Goal("time", top=1))[0]
    cheapest = search(model, clusters, costs, [Options()], Goal("cost", top=1))[0]
    assert cheapest.price_per_step < fastest.price_per_step
    limit = (fastest.step_time + cheapest.step_time) / 2
    kept = search(model, clusters, costs, [Options()], Goal("cost", max_step_time=limit))
    assert kept and all(plan.step_time <= limit for plan in kept)


def test_the_cheapest_plan_names_its_nodes_as_its_cluster_does() -> None:
    # Parts of the cluster numbered their nodes anew: a plan on Y's only said node0, which is an X.
    model = cases.model(4, 8)
    cluster = cases.cluster({"X": 2, "Y": 2}, 2, X={"price_per_hour": 99.0, "hosts": ("a0", "a1")})
    costs = cases.costs(model, SECONDS)
    for on in (cluster, replace(cluster, gpus=(replace(cluster.gpus[0], hosts=()), cluster.gpus[1]))):
        plans = search(model, [on], costs, [Options()], Goal("cost", idle=True))
        assert set(plans[0].placement) == {"Y"}
        types = dict(on.hosts())
        for plan in plans:
            assert tuple(types[host] for host in plan.hosts) == plan.placement


def test_of_plans_that_cost_the_same_the_fastest_is_first() -> None:
    model = cases.model(4, 8)
    free = {"price_per_hour": 0.0}
    clusters = [cases.cluster({"Y": 1}, 2, Y=free), cases.cluster({"X": 2}, 2, X=free)]
    costs = cases.costs(model, SECONDS)
    fastest = search(model, clusters, costs, [Options()], Goal("time", top=1))[0]
    assert search(model, clusters, costs, [Options()], Goal("cost", top=1))[0] == fastest
    assert search(model, clusters, costs, [Options()], Goal("pareto")) == [fastest]


def test_a_step_time_that_only_an_improved_plan_reaches() -> None:
    model, clusters, costs = find_model("gpt2-xl"), load_clusters("paper-gpt2xl-het"), real()
    goal = Goal(dp=4, pp=8, mbs=1)
    fastest = search(model, clusters, costs, [Options()], goal)[0]
    planner = cases.planner(model, clusters[0], costs)
    first = planner.best(Shape(1, 4, 8, 1))
    assert first.step_time > fastest.step_time
    found = search(model, clusters, costs, [Options()], replace(goal, max_step_time=fastest.step_time))
    assert found[0].step_time == fastest.step_time


def test_gpus_that_no_degrees_make_up_are_refused_with_what_would_work() -> None:
    model, cluster = cases.model(4, 8), cases.cluster({"X": 7}, 1)
    with pytest.raises(PlanError, match="no tp × dp × pp makes 7 GPUs.*: give another number of nodes"):
        search(model, [cluster], cases.costs(model, SECONDS), [Options()], Goal())


def test_plans_that_do_not_fit_are_left_out_unless_all_are_asked_for() -> None:
    model = cases.model(4, 8)
    cluster = cases.cluster({"X": 1}, 2, X={"memory_gib": 1e-3})
    costs = cases.costs(model, SECONDS)
    few = search(model, [cluster], costs, [Options()], Goal())
    everything = search(model, [cluster], costs, [Options()], Goal(everything=True))
    assert all(not plan.is_oom for plan in few)
    assert any(plan.is_oom for plan in everything)
    assert len(few) == sum(not plan.is_oom for plan in everything)


def test_the_decoder_is_divided_by_its_own_costs() -> None:
    model = find_model("t5")
    (plan, *_) = search(model, load_clusters("paper-t5"), real(), [Options()], Goal(top=1, workers=1))
    compute = cases.planner(model, plan.cluster, real()).compute
    layer = compute.of(plan.cluster.gpus[0], plan.tp, plan.mbs).forward
    ends = np.cumsum(plan.partition)
    for seconds, size, end in zip(plan.stage_forward, plan.partition, ends, strict=True):
        assert seconds == pytest.approx(sum(layer[end - size : end]))
    # A decoder layer takes 1.8 times an encoder layer: its stages hold fewer.
    split = plan.split_stage
    assert plan.pp > 1 and max(plan.partition[:split]) > max(plan.partition[split:])
    assert sum(plan.partition[: plan.split_stage]) == 25
    assert plan.embedding_allreduce > 0


def _evaluate_where_sigterm_kills(*task: object) -> Plan | None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return _evaluate(*task)


def test_processes_of_a_search_die_of_sigterm_where_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They inherited the caller's handler, could live on, and the search then waited for them without end.
    monkeypatch.setattr(search_module, "_evaluate", _evaluate_where_sigterm_kills)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        model, clusters = find_model("bert-large"), load_clusters("paper-bert-het")
        assert search(model, clusters, real(), [Options()], Goal(top=1, workers=2))
    finally:
        signal.signal(signal.SIGTERM, before)


def _evaluate_late(task: Task, everything: bool, limit: float) -> Plan | None:
    # Some tasks end long after those begun behind them, others in each process and run.
    time.sleep(0.05 * ((os.getpid() + task[1] + task[2].pp) % 3 == 0))
    return _evaluate(task, everything, limit)


def test_plans_do_not_depend_on_which_process_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each plan has equals on other clusters, so that only the order of results tells them apart.
    (cluster,) = load_clusters("paper-bert")
    clusters = [replace(cluster, name=name) for name in "abc"]
    goal = Goal(workers=1)
    alone = search(find_model("bert-large"), clusters, real(), [Options()], goal)
    monkeypatch.setattr(search_module, "_evaluate", _evaluate_late)
    for workers in (2, 3, 3):
        goal = replace(goal, workers=workers)
        late = search(find_model("bert-large"), clusters, real(), [Options()], goal)
        assert plans_json(late) == plans_json(alone)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_search_whose_time_is_over_says_what_it_left_out(workers: int) -> None:
    model, (cluster,) = find_model("gpt2-xl"), load_clusters("paper-gpt2xl-het")
    goal = Goal(top=3, workers=workers)
    whole = search(model, [cluster], real(), [Options()], goal)
    cut = search(model, [cluster], real(), [Options()], replace(goal, time_limit=1e-9))
    assert not any("weren't tried" in note for plan in whole for note in plan.notes)
    assert cut[0].step_time >= whole[0].step_time and all(
        "weren't tried in 1e-09 s" in p.notes[-1] for p in cut
    )
    left, tasks = (int(word) for word in cut[0].notes[-1].replace(" shapes", "").split()[:3:2])
    assert 0 < left < tasks
