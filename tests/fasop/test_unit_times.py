"""Seconds of units: measured, scaled or computed; and the collectives that come with tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fasop.errors import PlanError
from fasop.exact import recipes
from fasop.exact.communication import COLLECTIVE_START, HOP, INTER_LOSS, Communication
from fasop.exact.estimate import estimate
from fasop.exact.kernels import Matmul, Moved, unit_work
from fasop.exact.memory import MEMORY_MARGIN, parameters, stage_gib
from fasop.exact.passes import Passes
from fasop.exact.recipes import hardware, unit_parts
from fasop.exact.unit_times import Compute
from fasop.hpdc24.search import published_costs
from fasop.inputs.clusters import Cluster, Gpu, load_clusters
from fasop.inputs.costs import CostFile, Entry, MeasuredOn, read_costs
from fasop.inputs.models import Model, find_model
from fasop.plans.layout import Layout, LayoutStage, Replica, of_plan, uniform
from fasop.plans.options import CudaGraphs, Options
from fasop.plans.shapes import Part, Shape
from fasop.search.planner import Planner
from tests.fasop import fasop_cases as cases

A100 = Gpu("A100-80GB", 80, 0, 1600e9, 1840e9)


def small(**changes: object) -> CostFile:
    entry = Entry("small", "X", 1, 2, (1.0,) * 6, (3.0,) * 6)
    values = {"format": 1, "source": "made", "models": {"small": cases.model()}, "entries": (entry,)}
    return CostFile(**{**values, **changes})


def compute(files: list[CostFile], model: Model, **options: object) -> Compute:
    return Compute(files, model, Options(**options))


def test_measured_backwards_and_micro_batches_are_used() -> None:
    costs = compute([small()], cases.model())
    at_two, at_four = (costs.of(cases.gpu("X"), 1, mbs) for mbs in (2, 4))
    assert list(at_two.forward) == [1.0] * 6 and list(at_two.backward) == [3.0] * 6
    assert list(at_four.forward) == [2.0] * 6 and list(at_four.backward) == [6.0] * 6


def test_between_measured_micro_batches_costs_are_interpolated() -> None:
    entries = tuple(Entry("small", "X", 1, mbs, (float(mbs + 1),) * 6) for mbs in (2, 8))
    costs = compute([small(entries=entries)], cases.model())
    times = [float(costs.of(cases.gpu("X"), 1, mbs).forward[1]) for mbs in (1, 2, 4, 8, 16)]
    # Below the smallest launches dominate; above the largest time grows with the tokens.
    assert times == [3.0, 3.0, 5.0, 9.0, 18.0]


def test_a_host_that_set_the_pace_does_not_with_cuda_graphs() -> None:
    """On a host of 2026 the layers of GPT-2 XL took 1.15 ms of it, and 0.2 ms of an H200."""
    entry = Entry("small", "X", 1, 2, (2.0,) * 6, (4.0,) * 6, kernels=((1.0,) * 6, (3.0,) * 6))
    ways: tuple[CudaGraphs, ...] = ("none", "layer", "full")
    found = [compute([small(entries=(entry,))], cases.model(), cuda_graphs=way) for way in ways]
    each = [costs.of(cases.gpu("X"), 1, 2) for costs in found]
    assert [(costs.forward[1], costs.backward[1]) for costs in each] == [(2, 4), (1, 3), (1, 3)]
    plain = compute([small()], cases.model(), cuda_graphs="full").of(cases.gpu("X"), 1, 2)
    assert plain.forward[1] == 1 and plain.backward[1] == 3, "what isn't known stays as measured"


def test_a_faster_gpu_like_another() -> None:
    costs = compute([small()], cases.model())
    found = costs.of(cases.gpu("New", like="X", speed=2.0), 1, 2)
    assert list(found.forward) == [0.5] * 6 and found.notes == ("New: costs of X divided by 2",)
    with pytest.raises(PlanError, match="no costs of small on GPU 'New'.*give New 'like'.*and 'speed'"):
        costs.of(cases.gpu("New"), 1, 2)


def test_gpt2_345m_takes_its_costs_from_bert_whose_layers_have_its_widths() -> None:
    model, bert = find_model("gpt2-345m"), find_model("bert-large")
    (cluster,) = load_clusters("paper-bert")
    mine, theirs = (compute([read_costs()], m).of(cluster.gpus[0], 1, b) for m, b in ((model, 4), (bert, 8)))
    work = (24 * 1024 + 4 * 1024) / (24 * 1024 + 4 * 512)
    assert mine.forward[1] == pytest.approx(theirs.forward[1] * work)
    assert mine.forward[25] == pytest.approx(theirs.forward[25] * 50257 / 30522)
    assert any("by ratio of work" in note for note in mine.notes)
    assert [note.split(" is ")[1] for note in theirs.notes] == ["2 times the largest measured one"]


def test_costs_are_not_carried_over_to_layers_of_other_widths() -> None:
    # Those of gpt2-xl by ratio of work made a 22B model take 28.7 s, where 1.42 s was published.
    model = replace(find_model("gpt-22b"), costs="gpt2-xl")
    found = compute([read_costs()], model).of(A100, 8, 4)
    assert any("other widths" in note for note in found.notes)
    assert any("computed by the model of the GPU" in note for note in found.notes)
    assert found.forward[1] < 0.02


def test_exact_grows_first_and_last_unit_with_the_micro_batch_where_hpdc24_does_not() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl-het")
    a100, files = cluster.gpus[0], [read_costs()]
    exact, tool = compute(files, model), published_costs(files, model)
    assert exact.of(a100, 1, 4).forward[0] == pytest.approx(4 * exact.of(a100, 1, 1).forward[0])
    assert tool.of(a100, 1, 4).forward[0] == tool.of(a100, 1, 1).forward[0]
    assert tool.of(a100, 1, 4).forward[1] == pytest.approx(3 * exact.of(a100, 1, 4).forward[1])


def test_published_costs_hold_the_collectives_of_their_own_node_only() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")
    published = compute([read_costs()], model)
    gpu, one = cluster.gpus[0], published.of(cluster.gpus[0], 1, 1)
    here = published.of(gpu, 2, 1, node=4)
    assert here.has_collectives and not here.notes
    twice = replace(gpu, name="Faster", like="A10", speed=2.0)
    for kind, node in (
        (replace(gpu, intra_bandwidth=1840e9), 4),
        (gpu, 8),  # more groups on the bus
        (gpu, 0),  # a group over several nodes
        (twice, 4),  # faster kernels, the same bus
    ):
        elsewhere = published.of(kind, 2, 1, node=node)
        assert not elsewhere.has_collectives
        assert any("measured in another kind of node" in note for note in elsewhere.notes)
        # What is left is the one-GPU cost at the computed ratio, not the figure with a PCIe node's
        # collectives.
        assert one.forward[1] / 2 < elsewhere.forward[1] * kind.speed < one.forward[1]


def test_costs_without_a_gpu_alone_are_not_carried_over_to_another_node() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")
    published = read_costs()
    files = [replace(published, entries=tuple(e for e in published.entries if e.tp > 1))]
    found = compute(files, model).of(cluster.gpus[0], 2, 1)
    assert found.forward[1] == compute([], model).of(cluster.gpus[0], 2, 1).forward[1]
    assert any("measured in another kind of node" in note for note in found.notes)


def test_a_tensor_parallel_group_over_several_nodes_waits_for_their_network() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")

    def step(bandwidth: float) -> float:
        gpus = (replace(cluster.gpus[0], inter_bandwidth=bandwidth),)
        slower = replace(cluster, gpus=gpus)
        parts = tuple(Part(node, "A10", 4) for node in range(4))
        stage = LayoutStage(len(model.kinds), (Replica(parts, 1),))
        return estimate(Layout(model, slower, (stage,), model.global_batch), [read_costs()], Options()).step

    assert step(40e6) > 100 * step(40e9)


def test_published_growth_does_not_hide_how_far_a_micro_batch_is_from_what_was_measured() -> None:
    (cluster,) = load_clusters("paper-gpt2xl-het")
    found = {}
    for name, mbs in (("gpt2-xl", 1), ("gpt2-xl", 32), ("bert-large", 4), ("bert-large", 64)):
        found[name, mbs] = compute([read_costs()], find_model(name)).of(cluster.gpus[1], 1, mbs).notes
    assert cluster.gpus[1].name == "A10" and found["gpt2-xl", 1] == found["bert-large", 4] == ()
    assert "32 sequences is 32 times the largest" in found["gpt2-xl", 32][0]
    assert "64 sequences is 16 times the largest" in found["bert-large", 64][0]


def test_how_costs_were_measured_is_compared_with_how_the_model_runs() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")
    for options, said in (
        ({}, []),
        ({"precision": "fp32"}, ["in mixed precision, not in fp32 precision"]),
        ({"attention": "flash"}, ["with unfused attention, not with flash attention"]),
    ):
        notes = compute([read_costs()], model, **options).of(cluster.gpus[0], 1, 1).notes
        assert [note.split("measured ")[1] for note in notes] == said


def test_more_tensor_parallel_ranks_than_measured_follow_the_computed_ratio() -> None:
    model = find_model("gpt2-xl")
    (cluster,) = load_clusters("paper-gpt2xl")
    published = read_costs()
    nodes = {"A10": replace(published.nodes["A10"], gpus=0)}  # of any size
    costs = compute([replace(published, nodes=nodes)], model)
    four, eight = (costs.of(cluster.gpus[0], tp, 1, node=8) for tp in (4, 8))
    a10 = hardware("A10")
    assert a10 is not None
    ratios = [recipes.kernel_seconds(a10, model, tp, 1, Options())[0, 1] for tp in (4, 8)]
    assert eight.forward[1] == pytest.approx(four.forward[1] * ratios[1] / ratios[0])
    assert any("tp 8 was not measured" in note for note in eight.notes) and not four.notes


def test_a_launch_bound_unit_does_not_wait_for_its_last_collective() -> None:
    # Timed alone, a unit ends with its collective; in a run the next unit's launches go on beside it.
    for alone, hidden in ((0.8e-3, True), (1.5e-3, False)):
        kernels = (alone,) * 6, (2 * alone,) * 6
        entries = (Entry("small", "X", 2, 1, (1.5e-3,) * 6, kernels=kernels),)
        gpu = cases.gpu("X", gpus_per_node=2)
        nodes = {"X": MeasuredOn(gpu.intra_bandwidth, gpu.shared_bus)}
        model, cluster = cases.model(), Cluster("one", 2, (gpu,), (1,))
        costs = compute([small(entries=entries, collectives="included", nodes=nodes)], model)
        passes = Passes(model, costs, Communication(cluster), Options())
        tensor = (Part(0, "X", 2),)
        forward, _ = passes.replica(1, "none", tensor, (Part(0, "X", 1),), ())
        once = passes.sum_seconds(tensor, 1)
        assert 0 < once < 0.5e-3
        assert forward[1] == pytest.approx(1.5e-3 - once * hidden)


def test_a_large_product_reaches_the_published_rate() -> None:
    gpu = hardware("A100-80GB")
    assert gpu is not None and hardware("no such GPU") is None
    times = [
        recipes._parts([Matmul(6912, 16384, 2048)], gpu, "T", Options(precision=precision))["products"]
        for precision in ("mixed", "fp32")
    ]
    # The public table of A100 has 243.5 TFLOP/s with 4,096 rows and 242.0 with 8,192 (another source 267.9).
    assert 2 * 6912 * 16384 * 2048 / times[0] == pytest.approx(242e12, rel=0.05)
    assert times[1] > 1.5 * times[0]


def test_a_small_layer_takes_what_its_host_needs_to_start_it() -> None:
    small, wide = Model("m", 256, 128, 2, 1000, 4, 8), Model("m", 8192, 2048, 2, 1000, 64, 8)
    # Six products, softmax, two dropouts, two normalizations, activation and transposition; backward two
    # products for each.
    forward, backward = (count * recipes.constant("host") for count in (14, 20))
    for model, least in ((small, True), (wide, False)):
        on = Cluster("one", 1, (A100,), (1,))
        layout = uniform(model, on, (A100.name,), Shape(1, 1, 1, 1), (4,))
        hosts, graphs = (estimate(layout, [], Options(cuda_graphs=each)).stages[0] for each in (False, True))
        own = compute([], model).of(A100, 1, 1)
        assert graphs.forward == pytest.approx(own.forward.sum()) and own.hosts[1][1] == backward
        # Two layers, nine kernels of the embedding and eleven of the head with its loss.
        assert (hosts.forward == pytest.approx((2 + 20 / 14) * forward, rel=0.01)) == least
        assert (own.forward[1] < forward) == least


def test_collectives_within_a_node_hide_behind_the_launches_of_a_small_layer() -> None:
    on = Cluster("one", 8, (A100,), (1,))
    found = []
    for hidden in (256, 16384):
        model = Model("m", hidden, 1024, 8, 1000, 8, 8)
        layout = uniform(model, on, (A100.name,), Shape(8, 1, 1, 1), (10,))
        hosts, graphs = (
            estimate(layout, [], Options(cuda_graphs=each, engine="deepspeed")).step for each in (False, True)
        )
        found.append(hosts / graphs)
    assert found[0] > 2 and found[1] < 1.1


def test_a_head_of_an_odd_vocabulary_is_slow_where_nobody_pads_it() -> None:
    model = Model("m", 2048, 1024, 2, 50257, 16, 8)
    for engine, tp, is_slow in (("eager", 1, True), ("eager", 2, False), ("megatron", 1, False)):
        odd, even = (
            compute([], each, engine=engine).of(A100, tp, 8).forward[-1]
            for each in (model, replace(model, vocab=50304))
        )
        assert (odd > 1.5 * even) == is_slow and odd > 0.99 * even


def test_softmax_has_more_kernels_where_heads_of_a_micro_batch_are_no_multiple_of_4() -> None:
    model = Model("m", 1024, 1024, 8, 1000, 16, 16)
    fused, stepwise = (compute([], model).of(A100, 8, mbs) for mbs in (2, 1))
    assert stepwise.hosts[0][1] / fused.hosts[0][1] == pytest.approx(20 / 16)  # with two sums
    assert compute([], model, precision="fp32").of(A100, 8, 1).hosts[0][1] == fused.hosts[0][1]


def test_the_gradient_of_scores_that_opt_clamps_has_kernels_of_its_own() -> None:
    model, options = Model("opt", 2048, 2048, 24, 50272, 32, 1), Options(precision="fp32", engine="eager")
    plain, clamped = (
        [
            sum(kernel.numbers for kernel in kernels if isinstance(kernel, Moved))
            for kernels in unit_work(replace(model, clamped=each), "T", 1, 1, options)[:2]
        ]
        for each in (False, True)
    )
    scores, dropout = 32 * 2048**2, 2.25
    assert clamped[0] - plain[0] == -dropout * scores
    assert clamped[1] - plain[1] == (10 - dropout - 2 - 2) * scores  # of scale and mask, too


def test_pytorch_adds_gradients_to_those_of_the_step_before() -> None:
    model, gpu = Model("m", 1024, 512, 24, 30522, 16, 2), hardware("A100-80GB")
    assert gpu
    for kind, weights in (("T", 12 * 1024**2 + 13 * 1024), ("E", 30522 * 1024), ("P", 30522 * 1024)):
        own, added = (
            unit_parts(gpu, model, kind, 1, 2, Options(precision="fp32", attention="flash", engine=engine))
            for engine in ("mpt", "eager")
        )
        more = added["memory"] - own["memory"]
        assert more[:2] == pytest.approx([0, 3 * weights * 4 / gpu.memory])


def test_tensor_parallel_sums_take_the_links_that_the_group_uses() -> None:
    links = Communication(Cluster("two", 8, (A100,), (2,)))
    size = 2 * 4 * 2048 * 6144
    inside = links.collective((Part(0, A100.name, 8),), size)
    assert inside == pytest.approx(COLLECTIVE_START + 14 * HOP + 2 * 7 / 8 * size * 8 / 1840e9)
    across = links.collective((Part(0, A100.name, 8), Part(1, A100.name, 8)), size)
    assert across == pytest.approx(COLLECTIVE_START + 30 * HOP + 2 * 15 / 16 * size * 8 * 1.05 / 1600e9)


def test_a_layer_holds_two_sums_per_pass_and_recomputation_two_more() -> None:
    model, on = find_model("gpt-22b"), Cluster("one", 8, (A100,), (1,))
    free = Cluster("free", 8, (replace(A100, intra_bandwidth=1e14),), (1,))
    layout = [uniform(model, each, (A100.name,), Shape(8, 1, 1, 4), (50,), "full") for each in (on, free)]
    options = Options(recompute="full", cuda_graphs=True)
    slow, fast = (estimate(each, [], options).stages[0] for each in layout)
    size = 2 * 4 * 2048 * 6144
    once = 2 * 7 / 8 * size * 8 * (1 / 1840e9 - 1 / 1e14)
    # The embedding's output, and the gradient of the head's input.
    assert slow.forward - fast.forward == pytest.approx(once * (2 * 48 + 1), rel=1e-6)
    assert slow.backward - fast.backward == pytest.approx(once * (4 * 48 + 1), rel=1e-6)


@pytest.mark.parametrize(
    ("recompute", "sequence", "published"), [("full", False, 1.42), ("selective", True, 1.10)]
)
def test_the_published_time_of_a_22b_model(recompute: str, sequence: bool, published: float) -> None:
    # Korthikanti et al. 2022, table 5: 8 A100, tp 8, batch 4. Nothing was fitted to it.
    model, on = find_model("gpt-22b"), Cluster("one", 8, (A100,), (1,))
    layout = uniform(model, on, (A100.name,), Shape(8, 1, 1, 4), (50,), recompute)
    found = estimate(layout, [], Options(recompute=recompute, sequence_parallel=sequence))
    assert found.step == pytest.approx(published, rel=0.1)


def test_grouped_queries_and_gates_change_the_work_as_they_change_the_weights() -> None:
    plain = Model("m", 1024, 1024, 2, 1000, 16, 8)
    grouped, gated = replace(plain, kv_heads=4), replace(plain, gated=True, ffn=4096)
    gpu = hardware("A100")
    assert gpu is not None
    times = [
        recipes.kernel_seconds(gpu, model, 1, 8, Options(attention="flash"))[0, 1]
        for model in (grouped, plain, gated)
    ]
    assert times == sorted(times) and times[0] < times[2]


def test_experts_that_are_spread_exchange_their_tokens() -> None:
    model = Model("moe", 1024, 1024, 2, 1000, 16, 16, gated=True, ffn=2048, experts=8, tied=False)
    on = Cluster("one", 8, (A100,), (1,))
    options = Options(zero=1)
    alone = estimate(uniform(model, on, (A100.name,), Shape(1, 8, 1, 2), (4,)), [], options)
    layout = uniform(model, on, (A100.name,), Shape(1, 8, 1, 2), (4,))
    spread = replace(
        layout,
        stages=tuple(
            replace(stage, replicas=tuple(replace(replica, ep=8) for replica in stage.replicas))
            for stage in layout.stages
        ),
    )
    shared = estimate(spread, [], options)
    assert shared.memory < alone.memory
    assert shared.stages[0].reduction < alone.stages[0].reduction
    assert np.isfinite(shared.step)


def test_gradients_of_experts_share_a_nodes_links_with_those_of_the_others() -> None:
    model = Model("moe", 1024, 1024, 2, 1000, 16, 16, gated=True, ffn=2048, experts=8, tied=False)
    two = Cluster("two", 8, (A100,), (2,))
    passes = Passes(model, Compute([], model, Options()), Communication(two), Options())
    data = (Part(0, A100.name, 8), Part(1, A100.name, 8))
    experts, others = np.array(1e9), np.array(2e9)
    found = passes.once(data, 1, experts + others, experts, 8)[0]
    # Each of a node's 8 GPUs has other experts than its neighbours, and sums them with one GPU of the other
    # node: 8 rings of 2 over a node's link, after one ring of all 16.
    link = 1600e9 / INTER_LOSS / 8
    expected = 2 * 15 / 16 * 4 * 2e9 / link + 8 * 2 * 1 / 2 * 4 * 1e9 / link
    assert found == pytest.approx(expected, rel=1e-3)


def test_experts_share_their_optimizer_among_their_copies_alone() -> None:
    model = Model("moe", 1024, 1024, 2, 1000, 16, 16, gated=True, ffn=2048, experts=8, tied=False)
    sizes = []
    for ep in (1, 8):
        held, of_experts = (np.array(each.sum()) for each in parameters(model, 1, ep))
        nothing = np.array(0.0)
        made = stage_gib(model, Options(zero=1), (1, ep, 8), (held, of_experts), nothing, (nothing, nothing))
        sizes.append(float(made) * 2**30 / MEMORY_MARGIN)
    held, of_experts = (float(each.sum()) for each in parameters(model, 1, 8))
    assert sizes[1] == pytest.approx((held - of_experts) * (6 + 12 / 8) + of_experts * (6 + 12))
    # Weights and gradients are spread, the states were shared already.
    assert sizes[0] - sizes[1] == pytest.approx(7 * of_experts * 6)


def test_a_plan_with_experts_on_several_ranks_is_evaluated_as_it_was_planned() -> None:
    model = Model("moe", 1024, 1024, 4, 1000, 16, 16, gated=True, ffn=2048, experts=8, tied=False)
    on = Cluster("two", 4, (A100,), (4,))
    for zero in (0, 1):
        planner = Planner(model, on, [], Options(zero=zero))
        shape = Shape(2, 4, 2, 1, 4)
        plan = planner.best(shape)
        found = estimate(of_plan(plan), [], plan.options)
        assert found.step == pytest.approx(plan.step_time, rel=1e-9)
        assert found.memory == pytest.approx(max(plan.stage_memory), rel=1e-9)


def test_a_token_goes_once_to_each_rank_that_has_some_of_its_experts() -> None:
    model = replace(Model("moe", 1024, 1024, 2, 1000, 16, 16, experts=8), top_k=2)
    pairs = [(one, two) for one in range(4) for two in range(4)]  # ranks of a token's two experts
    assert model.receivers(4) == pytest.approx(sum(len({*pair}) for pair in pairs) / len(pairs))
    assert model.receivers(1) == 1
    cluster = Cluster("one", 4, (A100,), (1,))
    times = []
    for fast in (False, True):
        options = Options(fast_dispatch=fast)
        passes = Passes(model, Compute([], model, options), Communication(cluster), options)
        times.append(passes.exchange_seconds((Part(0, A100.name, 4),), 1, 64))
    assert times[1] / times[0] == pytest.approx(model.receivers(4) / 2, rel=0.02)


def test_graphs_of_layers_leave_a_launch_for_each_pass_and_collective() -> None:
    model = Model("m", 256, 128, 2, 1000, 8, 8)
    ways: list[CudaGraphs | bool] = ["none", "layer", "full", True]
    none, layer, full, same = (
        recipes.host_seconds(model, 2, 1, Options(cuda_graphs=way)) / recipes.constant("host") for way in ways
    )
    # 14 and 20 kernels with two sums each; embedding and head aren't captured.
    assert none[:, 1] == pytest.approx([16, 22]) and layer[:, 1] == pytest.approx([3, 3])
    assert layer[:, [0, -1]] == pytest.approx(none[:, [0, -1]]) and not full.any() and not same.any()
    experts, options = replace(model, experts=8), Options(cuda_graphs="layer")
    launches = len(unit_work(experts, "T", 1, 1, options, 2).forward) + 2  # with two exchanges
    whole = recipes.constant("host") * launches + recipes.constant("expert host") * 4 / 3  # of 4 experts
    assert recipes.host_seconds(experts, 1, 1, Options(), 2)[0, 1] == pytest.approx(whole)
    sent = recipes.host_seconds(experts, 1, 1, options, 2)[0, 1]
    assert sent == pytest.approx(3 * recipes.constant("host"))
