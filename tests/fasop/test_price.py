"""$ per step: bytes that cross charged links, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasop.exact.price import price_per_step, sent_between
from fasop.inputs.clusters import Cluster, Gpu, Link
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.plan import Plan, StageChoice
from fasop.plans.shapes import Shape
from fasop.schedule.events import with_chunks
from fasop.search.planner import Planner

MODEL = Model("small", 64, 32, 8, 1000, 8, 16)
TOKEN = 32 * 64 * 2  # bytes of one sequence's output
EAST = Gpu("A100", 80, 32, 400e9, 1840e9, zone="east")
WEST = Gpu("H100", 80, 98, 400e9, 3600e9, zone="west")


def cluster(east: int = 1, west: int = 1, size: int = 4) -> Cluster:
    links = (Link(("east", "west"), 100e9, price_per_gb=0.02),)
    return Cluster("zones", size, (EAST, WEST), (east, west), links)


def plan(
    shape: Shape, on: Cluster, partition: tuple[int, ...], model: Model = MODEL, **options: object
) -> Plan:
    planner = Planner(model, on, [], Options(**options))
    nodes = [gpu.name for gpu, count in zip(on.gpus, on.nodes, strict=True) for _ in range(count)]
    return planner.estimate(shape, tuple(nodes), partition)


def crossing(made: Plan) -> float:
    return sum(size for (one, two), size in sent_between(made).items() if one != two)


def parameters(layers: int, model: Model = MODEL) -> int:
    """Of so many layers, as the planner counts them: 12h² + 13h."""
    return layers * (12 * model.hidden**2 + 13 * model.hidden)


def test_messages_and_both_copies_of_the_embedding_are_charged() -> None:
    made = plan(Shape(1, 4, 2, 1), cluster(), (5, 5))
    messages = 16 * TOKEN * 2  # each sequence, forward and back
    embedding = 4 * 2 * 64 * 1000 * 4  # a ring of two for each of 4 replicas, both ways, in fp32
    assert crossing(made) == pytest.approx(messages + embedding)
    nodes = (32 + 98) / 3600 * made.step_time
    assert made.price_per_step == pytest.approx(nodes + 0.02e-9 * (messages + embedding))
    untied = plan(Shape(1, 4, 2, 1), cluster(), (5, 5), replace(MODEL, tied=False))
    assert crossing(untied) == pytest.approx(messages)


def test_every_chunk_of_an_interleaved_plan_sends_its_messages() -> None:
    made = plan(Shape(1, 4, 2, 1), cluster(), (5, 5), replace(MODEL, tied=False))
    for chunks in (2, 4):
        # From stage 0 to 1 once per chunk, and back to stage 0 between chunks.
        crossings = 2 * chunks - 1
        assert crossing(with_chunks(made, chunks)) == pytest.approx(crossings * 16 * TOKEN * 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_zero_exchanges_is_charged(zero: int) -> None:
    made = plan(Shape(1, 8, 1, 1), cluster(), (10,), zero=zero)
    held = parameters(8) + 64 * 1000  # the tied matrix once
    m = 2  # micro-batches
    passed = {0: 2 * 4, 1: 4 + 2, 2: m * 4 + 2, 3: m * 4 + 2 * m * 2}[zero]
    assert crossing(made) == pytest.approx(2 * 7 / 8 * held * passed)


def test_each_tensor_parallel_rank_has_a_ring_of_its_own() -> None:
    made = plan(Shape(4, 2, 1, 1), cluster(), (10,))
    one = plan(Shape(1, 8, 1, 1), cluster(), (10,))
    # A quarter of the parameters in each of four rings: only (n−1)/n differs.
    assert crossing(made) == pytest.approx(crossing(one) * (1 / 2) / (7 / 8), rel=1e-3)


def test_boundaries_of_a_mixed_stage_charge_the_gpus_that_send_over_them() -> None:
    on = cluster(1, 2)
    made = plan(Shape(1, 6, 2, 1), on, (5, 5), replace(MODEL, tied=False, global_batch=12))
    # Stage 0: 4 A100 and 2 H100; stage 1: 2 H100 of the same node and 4 of the last. The first four of each
    # stage are A100 to H100.
    messages = 4 / 6 * 12 * TOKEN * 2
    ring = 2 * 2 * 5 / 6 * (parameters(4) + 64 * 1000) * 4  # stage 0's gradients, to and from the H100s
    assert crossing(made) == pytest.approx(messages + ring)


def test_tokens_that_visit_experts_in_another_zone_are_charged() -> None:
    moe = replace(MODEL, experts=8, top_k=2, tied=False)
    near = plan(Shape(1, 8, 1, 1, 4), cluster(), (10,), moe)
    far = plan(Shape(1, 8, 1, 1, 8), cluster(), (10,), moe)
    # Each of 8 GPUs sends an eighth of its tokens, twice per layer and pass, to each of 4 in the other zone.
    tokens = 8 * 4 * (2 * TOKEN * 2 / 8) * 2 * 2 * 8  # two micro-batches, top 2; 8 layers
    # Spread over one zone, each expert has a copy in the other: a ring of two for each of 4 ranks.
    copies = 4 * 2 * (2 * 8 * 2 * 64 * 256) * 4
    assert crossing(far) - tokens == pytest.approx(crossing(near) - copies)


def test_a_stage_with_its_own_degree_is_charged_for_its_own_rings() -> None:
    made = plan(Shape(1, 8, 1, 1), cluster(), (10,))
    choice = StageChoice(4, "none", (("A100", 4), ("H100", 4)))
    other = plan(Shape(4, 2, 1, 4), cluster(), (10,))
    assert crossing(replace(made, choices=(choice,))) == pytest.approx(crossing(other))


def test_links_that_cost_nothing_add_nothing() -> None:
    free = replace(cluster(), links=())
    made = plan(Shape(1, 4, 2, 1), free, (5, 5))
    assert price_per_step(made) == pytest.approx((32 + 98) / 3600 * made.step_time)
