"""Stages that each choose their own tp, micro-batch and recomputation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fasop.commands.plan import Config
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan
from fasop.plans.shapes import Shape
from fasop.search.planner import Planner
from fasop.search.search import search
from tests.fasop import fasop_cases as cases


def found(
    model: Model,
    cluster: Cluster,
    options: tuple[Options, ...] = (Options(per_stage=True),),
    max_tp: int = 4,
    **goal: int,
) -> list[Plan]:
    # Without costs all times come from the datasheet: any tp, experts and recomputation.
    return search(model, [cluster], [], options, Goal(**goal, max_tp=max_tp, workers=1, idle=True))


def cluster(nodes: dict[str, tuple[int, int]], **settings: object) -> Cluster:
    changes = {name: {"gpus_per_node": size, **settings} for name, (_, size) in nodes.items()}
    return cases.cluster({name: count for name, (count, _) in nodes.items()}, 2, **changes)


def test_stages_of_their_own_spread_experts_as_plans_of_one_tp_do() -> None:
    model = Model("m", 1024, 1024, 6, 1000, 16, 16, experts=4, top_k=2)
    on = cluster({"H100": (2, 4)}, intra_bandwidth=3e12, inter_bandwidth=4e11)
    plain = found(model, on, (Options(),))
    own = found(model, on)
    assert any(plan.ep > 1 for plan in plain) and any(plan.ep > 1 for plan in own)
    assert own[0].step_time <= plain[0].step_time * (1 + 1e-9)


def test_a_type_that_cannot_make_a_stage_alone_is_no_traceback() -> None:
    # 6 replicas on the nodes of 2 share out no 16 sequences; what is known of such a shape is nothing.
    model = cases.model(8, 16, heads=4)
    on = cluster({"A10": (3, 2), "V100": (2, 8)})
    plans = found(model, on)
    assert plans and all(np.isfinite(plan.step_time) for plan in plans)
    assert found(model, on, pp=2)


def degrees(model: Model, ep: int = 1, max_tp: float = math.inf) -> set[int]:
    """The tp that a stage on one node of 8 can choose."""
    planner = Planner(model, cluster({"H100": (1, 8)}), [], Options(per_stage=True), max_tp=max_tp)
    return {one.tp for one in planner.tables(Shape(1, 8, 1, 2, ep)).choices((("H100", 8),))}


def test_a_tp_that_leaves_fewer_replicas_than_share_experts_is_no_choice() -> None:
    model = replace(cases.model(4, 16, heads=8), experts=4, top_k=2)
    assert degrees(model) == {1, 2, 4, 8}
    assert degrees(model, ep=4) == {1, 2}


def test_stages_choose_no_tp_above_the_largest_nor_one_that_splits_key_heads() -> None:
    model = cases.model(4, 16, heads=8)
    assert degrees(model, max_tp=2) == {1, 2}
    assert degrees(replace(model, kv_heads=4)) == {1, 2, 4}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputation_that_is_given_holds_for_every_stage(recompute: str) -> None:
    options = (Options(per_stage=True, recompute=recompute),)
    plans = found(cases.model(4, 16), cluster({"H100": (2, 4)}), options)
    assert {choice.recompute for plan in plans for choice in plan.choices} == {recompute}


def test_recompute_auto_gives_each_plan_of_its_own_stages_once() -> None:
    model, on = cases.model(4, 16), cluster({"H100": (2, 4)})
    ways = Config("small", "it", per_stage=True, recompute="auto").options(measured=True)
    assert found(model, on, tuple(ways)) == found(model, on)
