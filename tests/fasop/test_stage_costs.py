"""What a stage takes, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fasop.exact.communication import COLLECTIVE_START, HOP
from fasop.exact.estimate import estimate
from fasop.exact.memory import GIB
from fasop.exact.stage_costs import StageCosts
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model
from fasop.plans.layout import of_plan
from fasop.plans.options import Options
from fasop.plans.plan import StageChoice
from fasop.plans.shapes import BETWEEN, CROWDED, INSIDE, Part, Shape, boundary_kinds
from fasop.search.partition import Assignment
from fasop.search.planner import Planner
from tests.fasop import fasop_cases as cases

SECONDS = {"X": 0.010, "Y": 0.023}
A10, A100 = (("A10", 4),), (("A100", 4),)


def gpt2_tables(shape: Shape, cluster: str = "paper-gpt2xl", **options: object) -> StageCosts:
    model = find_model("gpt2-xl")
    return cases.tables(model, load_clusters(cluster)[0], [read_costs()], shape, **options)


def memory(tables: StageCosts, in_flight: int, begin: int, end: int) -> float:
    shape = tables.shape
    variant = StageChoice(shape.tp, tables.options.recompute, (("A10", shape.mbs),))
    return float(tables.memory(variant, in_flight)[begin, end])


def reduction(tables: StageCosts, seats: tuple, begin: int, end: int) -> float:
    return float(tables.table(seats, 1, fit=False).reduction[begin, end])


def test_memory_of_a_stage() -> None:
    s, b, h, v, a = 1024, 2, 1600, 50257, 16
    tables = gpt2_tables(Shape(2, 1, 16, b))
    layer = (12 * h * h + 13 * h) / 2
    activations = s * b * h * (10 + 24 / 2 + 5 * a * s / (h * 2))
    expected = 18 * 3 * layer + 3 * activations * 14
    assert memory(tables, 14, 5, 8) == pytest.approx(expected * 1.1 / GIB)
    first = 18 * (h * v / 2 + layer) + (s * b * h + activations) * 16
    assert memory(tables, 16, 0, 2) == pytest.approx(first * 1.1 / GIB)
    last = 18 * (h * v / 2) + (4 * s * b * h + 4 * s * b * v) / 2
    assert memory(tables, 1, 49, 50) == pytest.approx(last * 1.1 / GIB)


def test_flash_attention_keeps_no_scores_and_sequence_parallelism_splits_the_rest() -> None:
    s, b, h, a = 1024, 2, 1600, 16
    layer = 18 * (12 * h * h + 13 * h) / 2
    flash = gpt2_tables(Shape(2, 1, 16, b), attention="flash")
    kept = s * b * h * (10 + 24 / 2) + 4 * a * s * b / 2
    assert memory(flash, 14, 5, 6) == pytest.approx((layer + 14 * kept) * 1.1 / GIB)
    split = gpt2_tables(Shape(2, 1, 16, b), sequence_parallel=True)
    kept = s * b * h * (34 / 2 + 5 * a * s / (h * 2))
    assert memory(split, 14, 5, 6) == pytest.approx((layer + 14 * kept) * 1.1 / GIB)


@pytest.mark.parametrize(("zero", "per"), [(0, 18.0), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)])
def test_zero_shares_states_then_gradients_then_parameters(zero: int, per: float) -> None:
    plain, shared = (gpt2_tables(Shape(1, 4, 8, 1), zero=each) for each in (0, zero))
    layer = 12 * 1600**2 + 13 * 1600
    # With ZeRO-3 the parameters of the largest unit are whole while it runs.
    whole = 2 * 1600 * 50257 if zero == 3 else 0
    difference = memory(plain, 4, 1, 7) - memory(shared, 4, 1, 7)
    assert difference * GIB / 1.1 == pytest.approx((18 - per) * 6 * layer - whole)


def test_earlier_stages_keep_more_micro_batches() -> None:
    tables = gpt2_tables(Shape(1, 4, 8, 1))
    sizes = [memory(tables, 8 - stage, 7 + 6 * stage, 13 + 6 * stage) for stage in range(6)]
    assert sizes == sorted(sizes, reverse=True)


def test_recomputation_needs_less_memory_and_takes_another_forward() -> None:
    shape = Shape(1, 4, 8, 2)
    plain, selective, full = (
        gpt2_tables(shape, recompute=recompute) for recompute in ("none", "selective", "full")
    )
    assert memory(full, 8, 0, 7) < memory(selective, 8, 0, 7) < memory(plain, 8, 0, 7)
    forward, backward = plain.seconds(A10, plain.choices(A10)[0])
    again, longer = full.seconds(A10, full.choices(A10)[0])
    assert list(again) == list(forward)
    assert longer[3] == pytest.approx(backward[3] + forward[3]) and longer[0] == backward[0]


def test_a_stage_on_two_types_goes_at_the_slower_pace_with_the_smaller_memory() -> None:
    tables = gpt2_tables(Shape(1, 8, 4, 1), "paper-gpt2xl-het")
    mixed, slow = (("A10", 4), ("A100", 4)), (("A10", 4), ("A10", 4))
    assert tables.table(mixed, 1).forward[1, 5] == tables.table(slow, 1).forward[1, 5]
    assert tables.free_gib(mixed) == 22.20


def test_messages_share_the_node_and_have_a_latency() -> None:
    model, shape = cases.model(), Shape(1, 2, 4, 1)
    plain = cases.tables(model, cases.cluster({"X": 4}, 2), cases.costs(model, SECONDS), shape)
    bits, seats = 32 * 64 * 16, (("X", 2),)
    assert plain.p2p(seats, seats, False) == pytest.approx(bits * 2 * 1.05 / 1e9)
    assert plain.p2p(seats, seats, True) == pytest.approx(bits * 3.5 / 8e9)
    late = cases.cluster({"X": 4}, 2, X={"inter_latency": 0.25, "intra_latency": 0.125})
    tables = cases.tables(model, late, cases.costs(model, SECONDS), shape)
    assert tables.p2p(seats, seats, False) == pytest.approx(0.25 + bits * 2 * 1.05 / 1e9)
    assert tables.p2p(seats, seats, True) == pytest.approx(0.125 + bits * 3.5 / 8e9)


def test_every_tensor_parallel_rank_sends_the_whole_output_unless_it_is_split() -> None:
    shape, seats = Shape(4, 1, 8, 1), (("A10", 4),)
    whole, gathered, split = (
        gpt2_tables(shape, **{name: True}).p2p(seats, seats, False)
        for name in ("overlap", "scatter_gather", "sequence_parallel")
    )
    assert whole == pytest.approx(4 * split)
    # What went out in shares is gathered over the ring of the four ranks on one bus.
    once = COLLECTIVE_START + 3 * HOP + 0.75 * 1024 * 1600 * 16 / 128e9
    assert gathered == pytest.approx(split + once)


def test_the_gradients_all_reduce_uses_the_stage_own_parameters_and_links() -> None:
    h, v = 1600, 50257
    tables = gpt2_tables(Shape(1, 4, 8, 1), "paper-gpt2xl-het")
    layers, late = 3 * (12 * h * h + 13 * h), COLLECTIVE_START + 6 * HOP
    assert reduction(tables, A10, 5, 8) == pytest.approx(late + 1.5 * layers * 32 / 128e9)
    assert reduction(tables, A100, 5, 8) == pytest.approx(late + 1.5 * layers * 32 / 1840e9)
    assert reduction(tables, A10, 0, 1) == pytest.approx(late + 1.5 * h * v * 32 / 128e9)
    # Across nodes the rings of both tensor-parallel ranks share the node's link.
    across = gpt2_tables(Shape(2, 4, 4, 1), "paper-gpt2xl-het")
    bits = 1.5 * layers / 2 * 32 * 2
    assert reduction(across, (("A10", 4),) * 2, 5, 8) == pytest.approx(late + bits * 1.05 / 40e9)


def test_zero_1_reduces_gradients_to_shares_and_gathers_16_bit_parameters() -> None:
    plain, shared = (gpt2_tables(Shape(1, 4, 8, 1), zero=zero) for zero in (0, 1))
    layers, late = 6 * (12 * 1600**2 + 13 * 1600), COLLECTIVE_START + 3 * HOP
    assert reduction(shared, A10, 1, 7) == pytest.approx(late + 0.75 * layers * 32 / 128e9)
    gathered = shared.once(A10, 1)[1][1, 7]
    assert gathered == pytest.approx(late + 0.75 * layers * 16 / 128e9)
    assert reduction(shared, A10, 1, 7) < reduction(plain, A10, 1, 7)


def test_zero_2_and_3_communicate_with_every_micro_batch() -> None:
    shape = Shape(1, 4, 8, 1)
    plain, gradients, parameters = (gpt2_tables(shape, zero=zero) for zero in (0, 2, 3))
    times = [each.seconds(A10, each.choices(A10)[0]) for each in (plain, gradients, parameters)]
    (forward, backward), (same, longer), (gathered, longest) = times
    assert same[3] == forward[3] and gathered[3] > forward[3]
    assert longest[3] > longer[3] > backward[3]
    assert reduction(parameters, A10, 1, 7) == 0


def test_first_and_last_unit_on_one_stage_share_a_matrix() -> None:
    h, v = 1600, 50257
    seats, late = (("A10", 4),) * 8, COLLECTIVE_START + 62 * HOP
    tables = gpt2_tables(Shape(1, 32, 1, 1))
    held = h * v + 48 * (12 * h * h + 13 * h)
    assert reduction(tables, seats, 0, 50) == pytest.approx(late + 2 * 31 / 32 * held * 32 * 1.05 / 40e9)


def test_overlap_hides_the_all_reduce_behind_the_last_backward() -> None:
    shape = Shape(1, 4, 8, 1)
    plain, hidden = gpt2_tables(shape), gpt2_tables(shape, overlap=True)
    before, after = (reduction(each, A10, 1, 7) for each in (plain, hidden))
    backward = float(plain.table(A10, 1).backward[1, 7])
    # Six buckets: the last is only ready when the backward pass ends.
    assert after == pytest.approx(max(before - backward * 5 / 6, before / 6))


def test_a_step_is_the_pipeline_then_what_is_synchronised() -> None:
    model, shape = cases.model(2, 4), Shape(1, 2, 2, 1)
    planner = cases.planner(model, cases.cluster({"X": 2}, 2), cases.costs(model, SECONDS))
    assignment = Assignment(("X", "X"), ((("X", 2),), (("X", 2),)), (2, 2))
    found = planner.plan(shape, assignment)
    assert found.stage_forward == pytest.approx((0.012, 0.015))
    assert found.stage_backward == pytest.approx((0.024, 0.030))
    assert found.step_time == pytest.approx(
        found.pipeline_time + found.dp_allreduce[0] + found.embedding_allreduce
    )
    late = COLLECTIVE_START + 2 * HOP
    assert found.embedding_allreduce == pytest.approx(late + 64 * 1000 * 32 * 2 * 1.05 / 1e9)
    held = 64 * 1000 + 12 * 64**2 + 13 * 64
    assert found.dp_allreduce[0] == pytest.approx(late + held * 32 / 8e9)


def test_untied_models_have_no_embedding_to_sum() -> None:
    model = find_model("llama3-8b")
    planner = cases.planner(model, load_clusters("nodes-of-4")[0], [])
    seats = ((("A100", 4),), (("A10", 4),))
    found = planner.plan(Shape(4, 1, 2, 1), Assignment(("A100", "A10"), seats, (20, 14)), fit=False)
    assert found.embedding_allreduce == 0


def test_messages_of_other_stages_share_a_node_s_link() -> None:
    shape = Shape(1, 2, 4, 1)
    two, three = (cases.cluster({"X": nodes}, size=4) for nodes in (2, 3))
    assert boundary_kinds(two, ("X", "X"), shape) == (INSIDE, BETWEEN, INSIDE)
    wider = replace(shape, pp=6)
    assert boundary_kinds(three, ("X", "X", "X"), wider) == (INSIDE, CROWDED, INSIDE, CROWDED, INSIDE)
    # A stage per node has messages to one side at a time.
    assert boundary_kinds(three, ("X", "X", "X"), Shape(1, 4, 3, 1)) == (BETWEEN, BETWEEN)
    model = cases.model(layers=6)
    tables = cases.tables(model, three, cases.costs(model, {"X": 1.0}), wider)
    seats = (("X", 2),)
    assert tables.p2p(seats, seats, CROWDED) == pytest.approx(2 * tables.p2p(seats, seats, BETWEEN))


def test_stages_that_meet_in_a_node_reduce_over_one_link() -> None:
    model, cluster = cases.model(), cases.cluster({"X": 3}, size=4)
    tables = cases.tables(model, cluster, cases.costs(model, {"X": 1.0}), Shape(1, 6, 2, 1))
    passes, size = tables.passes, np.array(1e9)
    whole, part = (
        float(passes.over_replicas((Part(0, "X", 4), Part(1, "X", gpus)), 1, size, True)) for gpus in (4, 2)
    )
    # A ring of 8 sends 7/4 of the bytes, one of 6 sends 5/3, at half the rate.
    begin = COLLECTIVE_START + HOP
    assert (part - begin) / (whole - begin) == pytest.approx(2 * (5 / 3) / (7 / 4), rel=1e-3)


def test_a_stage_holds_a_shared_matrix_once() -> None:
    model = cases.model(layers=4, encoder=2)
    h, v = model.hidden, model.vocab
    on = cases.cluster({"X": 1}, size=2)
    held, _ = cases.tables(model, on, cases.costs(model, {"X": 1.0}), Shape(1, 1, 2, 1)).held(1)
    layers = {"T": 12 * h * h + 13 * h, "D": 16 * h * h + 13 * h}
    # Units ETT and EDD: encoder, decoder with the head; both embeddings and the head are one matrix.
    assert held[0, 3] == h * v + 2 * layers["T"]
    assert held[3, 6] == h * v + 2 * layers["D"]
    assert held[5, 6] == h * v + layers["D"]
    assert held[0, 6] == h * v + 2 * layers["T"] + 2 * layers["D"]


def test_memory_of_a_stage_counts_its_own_largest_layer() -> None:
    t5 = find_model("t5")  # its decoder layers need more than its encoder layers
    options = Options(recompute="full")
    (cluster,) = load_clusters("paper-t5")
    nodes = ("A10",) * 8
    made = Planner(t5, cluster, [], options).estimate(Shape(1, 16, 2, 4), nodes, (25, 25))
    assert estimate(of_plan(made), [], options).memory == pytest.approx(max(made.stage_memory))
    for index, stage in enumerate(estimate(of_plan(made), [], options).stages):
        assert stage.memory == pytest.approx(made.stage_memory[index])


def test_sharing_parameters_of_one_replica_costs_no_memory() -> None:
    found = [
        gpt2_tables(Shape(4, 1, 8, 1), zero=zero).memory(StageChoice(4, "none", (("A10", 1),)), 1)
        for zero in (2, 3)
    ]
    assert np.array_equal(*found)


def test_the_head_and_a_recomputed_layer_do_not_need_their_memory_at_once() -> None:
    # A last stage that recomputes all of a layer needs no more than one that recomputes its scores.
    last = {}
    for recompute in ("selective", "full"):
        tables = gpt2_tables(Shape(1, 4, 8, 4), recompute=recompute)
        last[recompute] = memory(tables, 1, 48, 50)
    assert last["full"] <= last["selective"]
