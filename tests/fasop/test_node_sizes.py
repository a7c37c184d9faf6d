"""Clusters whose nodes differ in size: placements agree with their stages, and no nodes are out of reach."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from fasop.exact.estimate import estimate
from fasop.inputs.clusters import Cluster
from fasop.plans.layout import of_plan
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan
from fasop.plans.shapes import MOST_BLOCKS, Shape, blocks, shapes, stage_seats
from fasop.search.dynamic_program import DynamicProgram
from fasop.search.improve import improve
from fasop.search.node_counts import NodeCounts
from fasop.search.search import search
from tests.fasop import fasop_cases as cases

SECONDS = {"X": 0.010, "Y": 0.023, "Z": 0.016}


def mixed(nodes: dict[str, tuple[int, int]], **settings: object) -> Cluster:
    """nodes: of each type how many, and the GPUs of each."""
    changes = {name: {"gpus_per_node": size, **settings} for name, (_, size) in nodes.items()}
    return cases.cluster({name: count for name, (count, _) in nodes.items()}, 2, **changes)


def found(cluster: Cluster, layers: int = 6, batch: int = 8, idle: bool = False, top: int = 10) -> list[Plan]:
    model = cases.model(layers, batch)
    costs = cases.costs(model, SECONDS)
    return search(model, [cluster], costs, [Options()], Goal(top=top, workers=1, idle=idle))


def reversed_types(cluster: Cluster) -> Cluster:
    return replace(cluster, gpus=cluster.gpus[::-1], nodes=cluster.nodes[::-1])


@pytest.mark.parametrize("seed", range(12))
def test_placements_agree_with_stages_where_nodes_differ_in_size(seed: int) -> None:
    # Blocks were swapped as if all had as many nodes: plans named other GPUs than their stages ran on.
    dice = random.Random(seed)
    names = dice.sample(sorted(SECONDS), dice.choice([2, 2, 3]))
    cluster = mixed({name: (dice.randint(1, 3), dice.choice([1, 2, 4])) for name in names})
    idle = dice.random() < 0.5
    first = {}
    for given in (cluster, reversed_types(cluster)):
        plans = found(given, 12, 16, idle)
        for plan in plans:
            seats = stage_seats(given, plan.placement, plan.shape)
            assert plan.stage_gpu == tuple("+".join(dict.fromkeys(name for name, _ in of)) for of in seats)
            if any(count < plan.tp for of in seats for _, count in of):
                continue  # a tensor-parallel group over nodes of two types counts as the slower one's
            stages = estimate(of_plan(plan), cases.costs(plan.model, SECONDS), plan.options)
            assert [one.forward for one in stages.stages] == pytest.approx(plan.stage_forward, rel=1e-9)
            assert [one.backward for one in stages.stages] == pytest.approx(plan.stage_backward, rel=1e-9)
            assert [one.reduction for one in stages.stages] == pytest.approx(plan.dp_allreduce, rel=1e-9)
            assert stages.p2p == pytest.approx(plan.p2p, rel=1e-9)
            assert np.isfinite(plan.step_time) and not plan.is_oom
        first[given.nodes] = plans[0].step_time
    assert min(first.values()) == pytest.approx(max(first.values()), rel=1e-9)


def test_swapped_blocks_of_nodes_of_other_sizes_stay_on_their_own_nodes() -> None:
    cluster, shape = mixed({"X": (2, 2), "Y": (2, 4)}), Shape(1, 4, 3, 1)
    model = cases.model(6, 16)
    planner = cases.planner(model, cluster, cases.costs(model, SECONDS))
    best = planner.best(shape)
    assert best is not None
    better = improve(
        planner.tables(shape), [cases.assignment(cluster, shape, best.placement, best.partition)]
    )
    assert better.seats == stage_seats(cluster, better.placement, shape)


@pytest.mark.parametrize(
    ("nodes", "degrees"),
    [
        ({"X": (1, 2), "Y": (2, 4)}, (1, 2, 5, 1)),
        ({"X": (3, 2), "Y": (1, 4)}, (1, 2, 5, 1)),
        ({"X": (1, 1), "Y": (2, 2)}, (1, 1, 5, 1)),
        ({"X": (2, 1), "Y": (2, 2)}, (1, 3, 2, 1)),
    ],
)
def test_nodes_that_fill_no_common_multiple_of_node_sizes_are_used(
    nodes: dict[str, tuple[int, int]], degrees: tuple[int, int, int, int]
) -> None:
    cluster, shape, model = mixed(nodes), Shape(*degrees), cases.model(6, 24)
    planner = cases.planner(model, cluster, cases.costs(model, SECONDS))
    best = planner.best(shape)
    assert best is not None
    steps = [
        planner.plan(shape, cases.assignment(cluster, shape, placement, partition)).step_time
        for placement in cases.placements(cluster)
        for partition in cases.partitions(len(model.units), shape.pp)
    ]
    assert best.step_time == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize("nodes", [{"X": (1, 4), "Y": (2, 8)}, {"X": (2, 8), "Y": (1, 4)}, {"X": (1, 2)}])
def test_the_best_plan_of_one_type_alone_is_never_missed(nodes: dict[str, tuple[int, int]]) -> None:
    whole = found(mixed(nodes), idle=True, top=1)[0]
    for name, each in nodes.items():
        alone = found(mixed({name: each}), idle=True, top=1)[0]
        assert whole.step_time <= alone.step_time * (1 + 1e-9)


def test_a_stage_may_leave_gpus_of_its_last_node_idle() -> None:
    # Three of four GPUs: the block of three nodes that holds whole stages is more than there is.
    cluster, shape, model = mixed({"X": (2, 2)}), Shape(1, 3, 1, 1), cases.model(6, 24)
    assert shape in shapes(model, cluster, 1, idle=True)
    counts = NodeCounts(cluster, blocks(cluster, 3)[0], 1, idle=True)
    assert counts.possible and not NodeCounts(cluster, blocks(cluster, 3)[0], 1).possible


def test_first_blocks_that_lead_nowhere_have_no_sums() -> None:
    # Ended in a traceback: a block that leaves GPUs over can only be the last.
    cluster, shape, model = mixed({"X": (3, 1), "Y": (1, 2)}), Shape(1, 2, 2, 1), cases.model(6, 8)
    tables = cases.planner(model, cluster, cases.costs(model, SECONDS)).tables(shape)
    kinds = blocks(cluster, 2)[0]
    program = DynamicProgram(tables, NodeCounts(cluster, [*kinds, replace(kinds[0], is_full=False)], 2, True))
    assert program.sums(np.array([1.0, 9.0]), [len(kinds)]).tolist() == [np.inf, np.inf]


def test_mixed_sizes_make_few_kinds_of_block_on_many_nodes() -> None:
    # 1,024 GPUs of three types, of which one has nodes of 4: 52 kinds of stage took minutes.
    cluster = mixed({"X": (48, 8), "Y": (48, 8), "Z": (64, 4)})
    for gpus in (1, 4, 8, 16, 64, 128):
        assert len(blocks(cluster, gpus)[0]) <= 9
    begin = time.perf_counter()
    for gpus in (12, 36, 100):
        assert len(blocks(cluster, gpus)[0]) <= MOST_BLOCKS
    assert time.perf_counter() - begin < 1


def test_a_plan_says_which_orders_of_nodes_were_not_tried() -> None:
    cluster = mixed({"X": (6, 4), "Y": (6, 4), "Z": (6, 4)})
    model = cases.model(6, 9)
    planner = cases.planner(model, cluster, cases.costs(model, SECONDS))
    for degrees, is_said in (((1, 9, 2, 1), True), ((1, 3, 6, 1), False)):
        nodes, seats = next(
            (nodes, stage_seats(cluster, nodes, Shape(*degrees))) for nodes in cases.placements(cluster)
        )
        partition = (9 - len(seats), *[1] * (len(seats) - 1))
        plan = planner.estimate(Shape(*degrees), nodes, partition)
        assert any("were tried" in note for note in plan.notes) == is_said
