"""What a stage takes, by hand."""

from __future__ import annotations

import pytest

from fasop.exact.stage_costs import GIB, Options, StageCosts
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import Costs, read_costs
from fasop.inputs.models import find_model
from fasop.plans.shapes import Shape
from fasop.search.partition import Division
from fasop.search.planner import Planner, division_memory
from tests.fasop import fasop_cases as cases

SECONDS = {"X": 0.010, "Y": 0.023}


def gpt2_tables(shape: Shape, cluster: str = "paper-gpt2xl", **options: object) -> StageCosts:
    model = find_model("gpt2-xl")
    costs = Costs([read_costs()], model)
    return StageCosts(model, load_clusters(cluster)[0], costs, shape, Options(**options))


def test_memory_of_a_stage() -> None:
    s, b, h, v, a = 1024, 2, 1600, 50257, 16
    tables = gpt2_tables(Shape(2, 1, 16, b))
    layer = (12 * h * h + 13 * h) / 2
    activations = s * b * h * (10 + 24 / 2 + 5 * a * s / (h * 2))
    expected = 18 * 3 * layer + 3 * activations * 14
    assert float(tables.memory(14)[5, 8]) == pytest.approx(expected * 1.1 / GIB)
    first = 18 * (h * v / 2 + layer) + (s * b * h + activations) * 16
    assert float(tables.memory(16)[0, 2]) == pytest.approx(first * 1.1 / GIB)
    last = 18 * (h * v / 2) + (4 * s * b * h + 4 * s * b * v) / 2
    assert float(tables.memory(1)[49, 50]) == pytest.approx(last * 1.1 / GIB)


def test_earlier_stages_keep_more_micro_batches() -> None:
    tables = gpt2_tables(Shape(1, 4, 8, 1))
    memory = division_memory(tables, (7, 6, 6, 6, 6, 6, 6, 7))
    assert list(memory[1:7]) == sorted(memory[1:7], reverse=True)


def test_a_sharded_optimizer_and_recomputation_need_less() -> None:
    shape = Shape(1, 4, 8, 2)
    sizes = [
        float(gpt2_tables(shape, **options).memory(8)[0, 7])
        for options in (
            {},
            {"sharded_optimizer": True},
            {"recompute": "selective"},
            {"recompute": "full"},
            {"recompute": "full", "sharded_optimizer": True},
        )
    ]
    plain, sharded, selective, full, both = sizes
    assert sharded < plain and full < selective < plain and both < min(sharded, full)
    params = gpt2_tables(shape).params[0, 7]
    assert (plain - sharded) * GIB / 1.1 == pytest.approx((18 - 6 - 12 / 4) * params)


def test_recomputation_takes_another_forward() -> None:
    shape = Shape(1, 4, 8, 1)
    forward, backward = gpt2_tables(shape).unit_times(("A10",))
    again, longer = gpt2_tables(shape, recompute="full").unit_times(("A10",))
    assert list(again) == list(forward)
    assert longer[3] == pytest.approx(backward[3] + forward[3]) and longer[0] == backward[0]


def test_a_stage_on_two_types_goes_at_the_slower_pace_with_the_smaller_memory() -> None:
    tables = gpt2_tables(Shape(1, 8, 4, 1), "paper-gpt2xl-het")
    mixed, slow = ("A10", "A100"), ("A10",)
    assert float(tables.compute(mixed)[1, 5]) == float(tables.compute(slow)[1, 5])
    assert tables.cap(mixed) == 22.20


def test_messages_share_the_node_and_have_a_latency() -> None:
    model, shape = cases.model(), Shape(1, 2, 4, 1)
    plain = cases.tables(model, cases.cluster({"X": 4}, 2), cases.costs(model, SECONDS), shape)
    bits = 32 * 64 * 16
    assert plain.p2p(("X",), ("X",), False) == pytest.approx(bits * 2 * 1.05 / 1e9)
    assert plain.p2p(("X",), ("X",), True) == pytest.approx(bits * 3.5 / 8e9)
    late = cases.cluster({"X": 4}, 2, X={"inter_latency": 0.25, "intra_latency": 0.125})
    tables = cases.tables(model, late, cases.costs(model, SECONDS), shape)
    assert tables.p2p(("X",), ("X",), False) == pytest.approx(0.25 + bits * 2 * 1.05 / 1e9)
    assert tables.p2p(("X",), ("X",), True) == pytest.approx(0.125 + bits * 3.5 / 8e9)


def test_the_gradients_all_reduce_uses_the_stage_own_parameters_and_links() -> None:
    h, v = 1600, 50257
    tables = gpt2_tables(Shape(1, 4, 8, 1), "paper-gpt2xl-het")
    layers = 3 * (12 * h * h + 13 * h)
    assert float(tables.all_reduce(("A10",))[5, 8]) == pytest.approx(1.5 * layers * 16 / 128e9)
    assert float(tables.all_reduce(("A100",))[5, 8]) == pytest.approx(1.5 * layers * 16 / 1840e9)
    assert float(tables.all_reduce(("A10",))[0, 1]) == pytest.approx(1.5 * h * v * 16 / 128e9)
    # Across nodes the rings of both tensor-parallel ranks share the node's link.
    across = gpt2_tables(Shape(2, 4, 4, 1), "paper-gpt2xl-het")
    assert float(across.all_reduce(("A10",))[5, 8]) == pytest.approx(1.5 * layers / 2 * 16 * 2 / 40e9)


def test_first_and_last_unit_on_one_stage_share_a_matrix() -> None:
    tables = gpt2_tables(Shape(1, 32, 1, 1))
    h, v = 1600, 50257
    assert tables.params[0, 50] == pytest.approx(h * v + 48 * (12 * h * h + 13 * h))


def test_overlap_hides_the_all_reduce_behind_the_last_backward() -> None:
    shape = Shape(1, 4, 8, 1)
    plain, hidden = gpt2_tables(shape), gpt2_tables(shape, overlap=True)
    before, after = plain.all_reduce(("A10",))[1, 7], hidden.all_reduce(("A10",))[1, 7]
    backward = float(plain.unit_times(("A10",))[1][1:7].sum())
    assert after == pytest.approx(max(before - backward, before / 6))


def test_a_step_is_the_pipeline_then_what_is_synchronised() -> None:
    model, shape = cases.model(2, 4), Shape(1, 2, 2, 1)
    cluster = cases.cluster({"X": 2}, 2)
    planner = Planner(model, cluster, cases.costs(model, SECONDS), Options())
    division = Division(("X", "X"), (("X",), ("X",)), (2, 2))
    parts = planner.simulate(planner.tables(shape), division)
    assert parts.forward == pytest.approx((0.012, 0.015))
    assert parts.backward == pytest.approx((0.024, 0.030))
    assert parts.step == pytest.approx(parts.pipeline + parts.all_reduce[0] + parts.embedding)
    assert parts.embedding == pytest.approx(64 * 1000 * 16 * 2 / 1e9)
    assert parts.all_reduce[0] == pytest.approx((64 * 1000 + 12 * 64**2 + 13 * 64) * 16 / 8e9)


def test_more_tensor_parallel_ranks_than_measured_follow_the_last_change() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")
    costs = Costs([read_costs()], model)
    two, four, eight = (costs.of(cluster.gpus[0], tp, 1) for tp in (2, 4, 8))
    assert eight.forward[1] == pytest.approx(four.forward[1] * four.forward[1] / two.forward[1])
    assert any("tp 8 was not measured" in note for note in eight.notes) and not four.notes
