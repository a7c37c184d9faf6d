"""The .et files of a plan: they replay to the planned step, also on other links and with other durations."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main as chakra_et
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.sets import read_comm_groups
from fasop.errors import PlanError
from fasop.exact.passes import Passes
from fasop.inputs.models import Model
from fasop.output import traces
from fasop.plans.plan import Plan
from fasop.plans.shapes import Shape
from fasop.schedule import events
from tests.fasop import fasop_cases as cases
from tests.simulate.replay_traces import makespan_ns, replay_astra, replay_device

MICRO = 1e-6


def planned(tp: int, dp: int, pp: int, model: Model | None = None, size: int = 4, **options: object) -> Plan:
    """The best plan of a shape, with layers of 100 ms on links that make messages of a tenth of that."""
    model = model or cases.model(layers=8, batch=8 * dp)
    links = {"X": {"inter_bandwidth": 2e7, "intra_bandwidth": 4e7}}
    nodes = tp * dp * pp // size or 1
    planner = cases.planner(
        model, cases.cluster({"X": nodes}, size, **links), cases.costs(model, {"X": 0.1}), **options
    )
    shape = Shape(tp, dp, pp, 1)
    found = planner.best(shape)
    assert found is not None
    return found


def written(plan: Plan, folder: Path) -> list[ExecutionTrace]:
    return [et_file.read(path) for path in traces.write(plan, events.of_plan(plan), folder, "planned")]


def groups(folder: Path) -> dict[str, list[int]]:
    return {
        name: list(ranks)
        for name, ranks in json.loads((folder / "planned_comm_groups.json").read_text()).items()
    }


def replayed(found: list[ExecutionTrace], folder: Path) -> tuple[float, float]:
    """Seconds of one step, as devices do it and as ASTRA-sim does."""
    read = read_comm_groups(folder / "planned_comm_groups.json")
    return tuple(makespan_ns(replay(found, None, read)) / 1e9 for replay in (replay_device, replay_astra))


CASES = {
    "pipeline": ((1, 1, 4), {}),
    "data": ((1, 4, 2), {}),
    "tensor": ((2, 2, 2), {}),
    "sequence": ((4, 1, 2), {"sequence_parallel": True}),
    "overlap": ((2, 2, 2), {"overlap": True}),
    "zero": ((1, 4, 2), {"zero": 1}),
    "zero with overlap": ((2, 2, 2), {"zero": 1, "overlap": True, "sequence_parallel": True}),
    "recompute": ((2, 1, 4), {"recompute": "full"}),
    "one stage": ((2, 4, 1), {"overlap": True}),
    "per stage": ((2, 2, 2), {"per_stage": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_set_is_valid_and_replays_to_the_planned_step(case: str, tmp_path: Path) -> None:
    degrees, options = CASES[case]
    plan = planned(*degrees, **options)
    found = written(plan, tmp_path)
    assert len(found) == plan.tp * plan.dp * plan.pp
    assert chakra_et(["validate", str(tmp_path / "planned")]) == 0
    device, astra = replayed(found, tmp_path)
    assert device == pytest.approx(plan.step_time, rel=1e-4)
    # ASTRA-sim issues one communication at a time, so that buckets get in the way of tensor-parallel sums.
    assert astra == pytest.approx(plan.step_time, rel=0.05 if plan.options.overlap else 1e-3)


def test_two_plans_are_compared_by_their_planned_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages end at different times: the mean of their own times was given as the step, a fifth too short."""
    plans = planned(1, 1, 4), planned(2, 1, 2)
    for number, plan in enumerate(plans):
        written(plan, tmp_path / str(number))
    capsys.readouterr()
    sets = [str(tmp_path / str(number) / "planned") for number in range(2)]
    assert chakra_et(["compare", *sets, "--json"]) == 0
    sides = json.loads(capsys.readouterr().out)["runs"]
    for side, plan in zip(sides, plans, strict=True):
        assert side["step_ns"] / 1e9 == pytest.approx(plan.step_time, rel=1e-4)
        assert side["parts_ns"]


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interleaved_set_replays_to_the_simulated_step(chunks: int, overlap: bool, tmp_path: Path) -> None:
    plan = events.rescheduled(planned(1, 2, 2, overlap=overlap), chunks)
    found = written(plan, tmp_path)
    assert chakra_et(["validate", str(tmp_path / "planned")]) == 0
    assert replayed(found, tmp_path)[0] == pytest.approx(plan.step_time, rel=1e-4)
    chunk = found[0].column("chunk", -2)
    assert set(chunk[found[0].types == NodeType.COMP]) >= set(range(chunks))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("factor", [0.1, 10])
def test_a_set_replays_other_links_as_the_schedule_would(chunks: int, factor: float, tmp_path: Path) -> None:
    # Edges taken from times that coincided made an interleaved step 26 % longer at a tenth of the bandwidth.
    plan = planned(1, 2, 4)
    plan = events.rescheduled(plan, chunks) if chunks > 1 else plan
    slower = dataclasses.replace(plan, p2p=tuple(factor * p2p for p2p in plan.p2p), wrap=factor * plan.wrap)
    expected = events.step_time(events.of_plan(slower))
    found = written(plan, tmp_path)
    scaled = [_scaled(trace, (NodeType.COMM_SEND, NodeType.COMM_RECV), factor) for trace in found]
    assert replayed(scaled, tmp_path)[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_set_replays_slower_gpus_as_the_schedule_would(chunks: int, tmp_path: Path) -> None:
    plan = planned(1, 1, 4)
    plan = events.rescheduled(plan, chunks) if chunks > 1 else plan
    first = plan.tp * plan.dp  # ranks of the first stage, which becomes three times as slow
    parts = [
        dataclasses.replace(
            part, layer_forward=by * part.layer_forward, layer_backward=by * part.layer_backward
        )
        for part, by in zip(plan.parts, (3, 1, 1, 1), strict=True)
    ]
    slower = dataclasses.replace(
        plan,
        parts=tuple(parts),
        stage_forward=(3 * plan.stage_forward[0], *plan.stage_forward[1:]),
        stage_backward=(3 * plan.stage_backward[0], *plan.stage_backward[1:]),
    )
    expected = events.step_time(events.of_plan(slower))
    found = written(plan, tmp_path)
    scaled = [
        _scaled(trace, (NodeType.COMP,), 3) if rank < first else trace for rank, trace in enumerate(found)
    ]
    # The optimizer, a computation as well, is not a part of the passes.
    assert replayed(scaled, tmp_path)[0] == pytest.approx(expected, rel=2e-3)


def _scaled(trace: ExecutionTrace, types: tuple[NodeType, ...], factor: float) -> ExecutionTrace:
    """The trace without recorded times, with other durations of some nodes."""
    lasting = np.where(np.isin(trace.types, types), trace.duration_micros * factor, trace.duration_micros)
    nowhere = np.zeros_like(trace.start_micros)
    return dataclasses.replace(trace, start_micros=nowhere, duration_micros=lasting.astype(np.uint64))


def collectives(trace: ExecutionTrace) -> Counter[tuple[str, int, str]]:
    """How often each collective occurs: (type, bytes, group)."""
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size")
    names = trace.attributes["pg_name"]
    of = dict(zip(names.rows.tolist(), (names.values[at] for at in range(len(names.rows))), strict=True))
    rows = np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist()
    return Counter((CollectiveType(kinds[row]).name, int(sizes[row]), of[row]) for row in rows)


def test_tensor_parallel_sums_have_their_groups_and_sizes(tmp_path: Path) -> None:
    # Shoeybi et al. 2019: two all-reduces per layer in the forward pass and two in the backward pass.
    plan = planned(2, 2, 2)
    found = written(plan, tmp_path)
    activations = plan.mbs * plan.model.seq * plan.model.hidden * 2
    for rank, trace in enumerate(found):
        stage = rank // 4
        (name,) = {of for kind, size, of in collectives(trace) if size == activations}
        assert groups(tmp_path)[name] == [rank // 2 * 2, rank // 2 * 2 + 1]
        # The first stage sums the embedding's output too, the last the gradient of the head's input.
        count = plan.micro_batches * (4 * plan.layers[stage] + 1)
        assert collectives(trace)["ALL_REDUCE", activations, name] == count


def computed(
    tp: int, dp: int, partition: tuple[int, ...], model: Model, chunks: int = 1, **options: object
) -> tuple[Plan, Plan]:
    """A plan with computed costs, and what it would take if tensor-parallel collectives took no time."""
    shape = Shape(tp, dp, len(partition), 1)
    nodes = dp * len(partition)
    on = cases.cluster({"A100": nodes}, tp)

    def estimated() -> Plan:
        return cases.planner(model, on, [], **options).estimate(shape, ("A100",) * nodes, partition)

    plan = estimated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "sum_seconds", lambda *_: 0.0)
        without = estimated()
    return events.rescheduled(plan, chunks) if chunks > 1 else plan, without


T5 = cases.model(layers=8, batch=8, encoder=4)
GPT = replace(cases.model(layers=8, batch=8), vocab=50_257)  # a head that takes longer than a sum
TENSOR = {
    "GPT": ((2, 1, (5, 5)), GPT, {}),
    "GPT, one stage": ((2, 1, (10,)), GPT, {}),
    "GPT, sequence parallel, recomputed": (
        (4, 1, (4, 6)),
        GPT,
        {"sequence_parallel": True, "recompute": "full"},
    ),
    "GPT, interleaved": ((2, 1, (5, 5)), GPT, {"chunks": 2}),
    "GPT, interleaved and recomputed": ((2, 2, (3, 2, 2, 3)), GPT, {"chunks": 2, "recompute": "full"}),
    "T5": ((2, 1, (5, 5)), T5, {}),
    "T5, one stage": ((2, 1, (10,)), T5, {}),
    "T5, four stages, recomputed": ((2, 2, (3, 2, 2, 3)), T5, {"recompute": "full"}),
}


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_parallel_collectives_take_what_the_cost_model_counts(case: str, tmp_path: Path) -> None:
    # T5's second stage had none for the decoder's embedding, and one for a head that it hasn't got.
    degrees, model, options = TENSOR[case]
    plan, free = computed(*degrees, model, cuda_graphs=True, **options)  # no host hides them
    found = written(plan, tmp_path)
    activations = plan.mbs * model.seq * model.hidden * 2
    begin = 0
    for stage, size in enumerate(plan.partition):
        kinds = model.kinds[begin : begin + size]
        begin += size
        rank = stage * plan.tp * plan.dp
        trace, of = found[rank], groups(tmp_path)
        names = trace.attributes["pg_name"]
        tensor = [
            row
            for at, row in enumerate(names.rows.tolist())
            if trace.types[row] == NodeType.COMM_COLL
            and of[names.values[at]] == list(range(rank, rank + plan.tp))
        ]
        seconds = float(trace.duration_micros[tensor].sum()) * MICRO
        counted = [
            plan.micro_batches * (one[stage] - other[stage])
            for one, other in (
                (plan.stage_forward, free.stage_forward),
                (plan.stage_backward, free.stage_backward),
            )
        ]
        # Each is rounded to a microsecond.
        assert seconds == pytest.approx(sum(counted), abs=0.6 * MICRO * len(tensor)), stage
        layers = 2 * (3 if plan.options.recompute == "full" else 2) * kinds.count("T")
        layers += 3 * (3 if plan.options.recompute == "full" else 2) * kinds.count("D")
        sums = plan.micro_batches * (layers + kinds.count("E") + kinds.count("P"))
        each = activations * (1 + 1 / plan.tp if plan.options.sequence_parallel else 1)
        assert int(trace.column("comm_size")[tensor].sum()) == sums * each, stage
    assert replayed(found, tmp_path)[0] == pytest.approx(plan.step_time, rel=2e-2)


@pytest.mark.parametrize(("model", "stages"), [(GPT, 1), (GPT, 2), (T5, 1), (T5, 2)])
def test_a_pass_goes_through_its_units_in_order(model: Model, stages: int, tmp_path: Path) -> None:
    # The embedding's backward came before the layers', and its all-reduce after them.
    plan, _ = computed(2, 1, (10 // stages,) * stages, model)
    begin = 0
    for stage, size in enumerate(plan.partition):
        kinds = model.kinds[begin : begin + size]
        begin += size
        trace = written(plan, tmp_path)[stage * 2]
        order = np.argsort(trace.ids)
        for kind in ("forward", "backward"):
            names = [trace.names[row] for row in order.tolist()]
            parts = [name.split()[2] for name in names if name.startswith(f"{kind} 0 ")]
            units = [part for part, before in zip(parts, ["", *parts], strict=False) if part != before]
            expected = [{"E": "embedding", "P": "head"}.get(unit, "layer") for unit in kinds]
            expected = expected if kind == "forward" else expected[::-1]
            merged = [part for part, before in zip(expected, ["", *expected], strict=False) if part != before]
            if stages == 1 and model is GPT and kind == "backward":
                merged.remove("embedding")  # of no time of its own beside the head
            assert units == merged, (stage, kind)


def test_sequence_parallelism_scatters_and_gathers(tmp_path: Path) -> None:
    plan = planned(4, 1, 2, sequence_parallel=True)
    counts = collectives(written(plan, tmp_path)[0])
    activations = plan.mbs * plan.model.seq * plan.model.hidden * 2
    kinds = {(kind, size): count for (kind, size, _), count in counts.items()}
    each = plan.micro_batches * (4 * plan.layers[0] + 1)
    assert kinds["REDUCE_SCATTER", activations] == each and kinds["ALL_GATHER", activations // 4] == each


def test_recomputation_repeats_the_sums_of_the_forward_pass(tmp_path: Path) -> None:
    plan, again = planned(2, 1, 4), planned(2, 1, 4, recompute="full")
    once, twice = (
        sum(collectives(written(each, tmp_path / name)[2]).values())
        for each, name in ((plan, "a"), (again, "b"))
    )
    assert (once, twice) == (4 * plan.layers[1] * 8, 6 * again.layers[1] * 8)


def test_gradients_have_the_size_of_the_parameters_in_fp32(tmp_path: Path) -> None:
    # They were counted as two bytes each, and those of T5 as up to 3.3 × too few.
    for encoder in (None, 4):
        model = cases.model(layers=8, batch=32, encoder=encoder)
        plan = planned(1, 4, 4, model)
        found = written(plan, tmp_path / str(encoder))
        h, v = model.hidden, model.vocab
        layer = {"T": 12 * h * h + 13 * h, "D": 16 * h * h + 13 * h, "E": h * v, "P": h * v}
        begin = 0
        for stage, units in enumerate(plan.partition):
            parameters = sum(layer[kind] for kind in model.kinds[begin : begin + units])
            if encoder and stage == 3:
                parameters += h * v  # the head, which is a part of the last layer
            begin += units
            sizes = {
                size for kind, size, _ in collectives(found[4 * stage]) if size != 4 * h * v or units == 1
            }
            assert 4 * parameters in sizes, (encoder, stage)


def test_overlapped_buckets_run_beside_the_last_backward(tmp_path: Path) -> None:
    # They were one all-reduce after it: ASTRA-sim took a third longer than planned.
    plan = planned(1, 4, 2, overlap=True)
    trace = written(plan, tmp_path)[0]
    names = [trace.names[row] for row in range(len(trace))]
    buckets = [row for row, name in enumerate(names) if name.startswith("gradient")]
    assert len(buckets) == plan.layers[0]
    last = max(
        int(trace.start_micros[row] + trace.duration_micros[row])
        for row, name in enumerate(names)
        if name.startswith("backward")
    )
    beside = [row for row in buckets if trace.start_micros[row] < last]
    assert len(beside) == plan.layers[0] - 1
    whole = sum(size * count for (_, size, _), count in collectives(trace).items())
    h = plan.model.hidden
    parameters = plan.layers[0] * (12 * h * h + 13 * h) + h * plan.model.vocab
    assert whole == pytest.approx(4 * (parameters + h * plan.model.vocab), rel=1e-3), (
        "with the embedding's sum"
    )


def test_a_sharded_optimizer_scatters_gradients_and_gathers_parameters(tmp_path: Path) -> None:
    plan = planned(1, 4, 2, zero=1)
    trace = written(plan, tmp_path)[0]
    h = plan.model.hidden
    parameters = plan.layers[0] * (12 * h * h + 13 * h) + h * plan.model.vocab
    kinds = {kind: size for kind, size, _ in collectives(trace) if kind != "ALL_REDUCE"}
    assert kinds == {"REDUCE_SCATTER": 4 * parameters, "ALL_GATHER": 2 * parameters // 4}


def spread_experts(tp: int, dp: int, pp: int, ep: int, dense: int = 0, **options: object) -> Plan:
    """A plan of a small mixture of 8 experts on nodes of 4 A100."""
    model = Model("moe", 256, 64, 4, 1000, 4, 16, gated=True, ffn=512, experts=8, tied=False)
    model = dataclasses.replace(model, dense=dense, dense_ffn=1024 * (dense > 0))
    cluster = cases.cluster({"A100": tp * dp * pp // 4}, 4)
    planner = cases.planner(model, cluster, [], **options)
    shape = Shape(tp, dp, pp, 1, ep)
    found = planner.best(shape)
    assert found is not None
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"recompute": "full"}, {"overlap": True}])
def test_experts_exchange_tokens_and_reduce_among_their_copies(
    tp: int, options: dict[str, object], tmp_path: Path
) -> None:
    plan = spread_experts(tp, 8, 2, 4, **options)
    found = written(plan, tmp_path)
    assert chakra_et(["validate", str(tmp_path / "planned")]) == 0
    assert replayed(found, tmp_path)[0] == pytest.approx(plan.step_time, rel=1e-2)
    model, h = plan.model, plan.model.hidden
    # Each token goes to 2 experts and comes back, in both passes; with recomputation twice in the backward.
    tokens = plan.mbs * model.seq * model.top_k * h * 2 // tp
    times = 6 if plan.options.recompute == "full" else 4
    experts = plan.layers[0] * 8 // 4 * 3 * h * model.ffn_width // tp
    each = plan.layers[0] if plan.options.overlap else 1
    kind = "REDUCE_SCATTER" if plan.options.zero else "ALL_REDUCE"
    for place in range(8 * tp):
        counts, of = collectives(found[place]), groups(tmp_path)
        tensor, replica = place % tp, place // tp
        (exchange,) = {name for kind, _, name in counts if kind == "ALL_TO_ALL"}
        assert of[exchange] == [tensor + tp * (replica // 4 * 4 + one) for one in range(4)]
        assert counts["ALL_TO_ALL", tokens, exchange] == times * plan.layers[0] * plan.micro_batches
        (copies,) = {
            name for name, ranks in of.items() if ranks == [tensor + tp * (replica % 4 + k) for k in (0, 4)]
        }
        assert counts[kind, 4 * experts // each, copies] == each


def test_experts_with_one_copy_reduce_nothing_and_layers_without_exchange_nothing(tmp_path: Path) -> None:
    """A group with one member made such sets invalid."""
    plan = spread_experts(1, 4, 2, 4, dense=1)
    found = written(plan, tmp_path)
    assert chakra_et(["validate", str(tmp_path / "planned")]) == 0
    assert replayed(found, tmp_path)[0] == pytest.approx(plan.step_time, rel=2e-2)
    for rank, layers in ((0, plan.layers[0] - 1), (4, plan.layers[1])):
        counts = collectives(found[rank])
        exchanges = sum(count for (kind, *_), count in counts.items() if kind == "ALL_TO_ALL")
        assert exchanges == 4 * layers * plan.micro_batches
        assert not any(len(of) < 2 for of in groups(tmp_path).values())


def test_what_the_traces_can_not_hold_is_refused(tmp_path: Path) -> None:
    plan = planned(1, 4, 2)
    other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, zero=2))
    with pytest.raises(PlanError, match="--zero 2 can't be written"):
        traces.write(other, events.of_plan(plan), tmp_path / "no", "x")
    assert not (tmp_path / "no").exists()
