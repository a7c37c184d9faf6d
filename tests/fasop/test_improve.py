"""Many assignments simulated at once, and the search for better ones near the dynamic program's."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest

from benchmarks import fasop_monotony
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model
from fasop.plans.shapes import Shape, stage_seats
from fasop.search.improve import Steps, improve
from fasop.search.partition import Assignment, Search
from fasop.search.planner import MANY, Planner
from tests.fasop import fasop_cases as cases

SECONDS = {"X": 0.010, "Y": 0.023}


def planner_of(name: str, cluster: str) -> Planner:
    return cases.planner(find_model(name), load_clusters(cluster)[0], [read_costs()])


@pytest.mark.parametrize("encoder", [None, 3])
@pytest.mark.parametrize("degrees", [(1, 1, 6, 1), (1, 2, 3, 1), (2, 1, 3, 2), (1, 6, 1, 1)])
def test_many_at_once_take_as_long_as_one_by_one(degrees: tuple[int, ...], encoder: int | None) -> None:
    model, shape, dice = cases.model(6, 24, encoder), Shape(*degrees), random.Random(7)
    cluster = cases.cluster({"X": 1, "Y": 2}, 2, Y={"inter_bandwidth": 3e8, "shared_bus": True})
    planner = cases.planner(model, cluster, cases.costs(model, SECONDS, uneven=True))
    tables = planner.tables(shape)
    places = [(nodes, stage_seats(cluster, nodes, shape)) for nodes in cases.placements(cluster)]
    chosen = list(cases.partitions(len(model.units), shape.pp))
    dice.shuffle(chosen)
    pairs = [(dice.randrange(len(places)), partition) for partition in chosen[:40]]
    which, partitions = np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])
    steps, _ = Steps(tables, places, which, partitions).all()
    for (place, partition), step in zip(pairs, steps, strict=True):
        if cases.crosses(model, partition):
            assert step == np.inf
            continue
        one = planner.plan(shape, Assignment(*places[place], partition))
        assert step == pytest.approx(one.step_time, rel=1e-12)


def test_what_does_not_fit_or_is_empty_takes_forever() -> None:
    model, shape = cases.model(4, 8), Shape(1, 1, 2, 1)
    costs = cases.costs(model, SECONDS)
    tables = cases.tables(model, cases.cluster({"X": 1}, 2), costs, shape)
    places, which = [(("X",), ((("X", 1),), (("X", 1),)))], np.zeros(3, dtype=int)
    steps, _ = Steps(tables, places, which, np.array([[3, 3], [6, 0], [0, 6]])).all()
    assert np.isfinite(steps).tolist() == [True, False, False]
    small = cases.cluster({"X": 1}, 2, X={"memory_gib": 1e-6})
    tables = cases.tables(model, small, costs, shape)
    assert not np.isfinite(Steps(tables, places, which[:1], np.array([[3, 3]])).all()[0]).any()


@pytest.mark.parametrize(
    ("name", "cluster", "degrees"),
    [
        ("gpt2-xl", "paper-gpt2xl-het", (1, 2, 16, 1)),
        ("gpt2-xl", "paper-gpt2xl-het", (1, 8, 4, 1)),
        ("t5", "paper-t5-het", (1, 4, 8, 2)),
    ],
)
def test_assignments_near_the_best_are_assignments_and_one_of_them_is_improved(
    name: str, cluster: str, degrees: tuple[int, ...]
) -> None:
    planner, shape = planner_of(name, cluster), Shape(*degrees)
    tables, counts = planner.tables(shape), planner.counts(shape.group, shape.pp)
    search = Search(tables, counts)
    best = search.best()
    near = search.near(best)
    assert len({(one.seats, one.partition) for one in near}) > 5
    for one in [best, *near]:
        assert len(one.partition) == len(one.seats) == shape.pp
        assert sum(one.partition) == len(planner.model.units) and min(one.partition) > 0
        counts = tuple(one.placement.count(gpu.name) for gpu in planner.cluster.gpus)
        assert counts == planner.cluster.nodes
        assert one.seats == stage_seats(planner.cluster, one.placement, shape)
        # Nothing is below the optimum, which is a bound on every simulated step.
        assert planner.plan(shape, one).step_time >= best.objective * (1 - 1e-12)
    better = improve(tables, [best, *near])
    steps = [planner.plan(shape, one).step_time for one in [best, *near]]
    assert planner.plan(shape, better).step_time <= min(steps)
    assert better == improve(tables, [best, *search.near(best)]), "the same dice each time"


SEARCHED = 1.004
"""Of large shapes the best division is searched for, not proven: the step of seed 1017 is 0.3% longer."""


# Clusters whose best plan became up to 2.7% slower on better hardware, while little more than the dynamic
# program's own optimum was simulated.
@pytest.mark.parametrize(
    "seed",
    [11, 81, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (18, 133, 159, 1017, 2132, 2182, 202))],
)
def test_better_hardware_gave_a_slower_plan(seed: int) -> None:
    found = fasop_monotony.steps(seed)
    assert len(found) == len(fasop_monotony.FACTORS)
    assert fasop_monotony.longest_ratio(found) <= SEARCHED


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_better_hardware_hardly_ever_gives_a_slower_plan_on_random_clusters(seed: int) -> None:
    assert fasop_monotony.longest_ratio(fasop_monotony.steps(seed)) <= SEARCHED


def test_a_search_is_gone_with_its_last_reference() -> None:
    # Results kept by functools.cache held every table of every search: 18 GB after some hundred plans.
    planner, shape = planner_of("bert-large", "paper-bert-het"), Shape(1, 2, 8, 8)
    tables = planner.tables(shape)
    search = Search(tables, planner.counts(shape.group, shape.pp))
    assert search.best() is not None
    kept = weakref.ref(search), weakref.ref(tables)
    # The planner keeps the tables of the last shapes, and of no more.
    for mbs in range(1, 2 * MANY):
        planner.tables(Shape(1, 2, 8, mbs))
    del search, tables
    assert [reference() for reference in kept] == [None, None]
