"""The zero-bubble schedule against a machine that only knows each stage's program, 1F1B, PyTorch's own order
and the published bubble; and what plans and layouts in it show.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasop.commands import evaluate, simulate
from fasop.commands import plan as plan_command
from fasop.errors import PlanError
from fasop.exact.recipes import hardware, weight_share
from fasop.inputs.models import find_model
from fasop.output import frameworks
from fasop.plans.options import Options
from fasop.plans.plan import Plan, plans_json, read_plans
from fasop.schedule import events, one_f_one_b
from megatron_lm import plan_settings

WORDS = ["--model", "gpt2-xl", "--cluster", "paper-gpt2xl", "--tp", "1", "--pp", "8"]
durations = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 1.0, 2.0]))
Action = tuple[str, int]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], list[float], int]:
    stages = draw(st.integers(1, 6))
    lists = [draw(st.lists(durations, min_size=count, max_size=count)) for count in (stages,) * 3]
    forward, inputs, weights = lists
    p2p = draw(st.lists(durations, min_size=stages - 1, max_size=stages - 1))
    backward = [one + two for one, two in zip(inputs, weights, strict=True)]
    return forward, backward, weights, p2p, draw(st.integers(1, 7))


def programs(tasks: list[one_f_one_b.Task], stages: int) -> list[list[Action]]:
    """What each stage computes, in order: F, B or W and the micro-batch."""
    found: list[list[Action]] = [[] for _ in range(stages)]
    for task in tasks:
        if not task.is_message:
            kind = "F" if task.is_forward else "W" if task.chunk < 0 else "B"
            found[task.stage].append((kind, task.micro_batch))
    return found


def played(
    order: list[list[Action]], seconds: dict[str, list[float]], p2p: list[float]
) -> dict[tuple[str, int, int], float]:
    """When each computation ends on stages that do these in order, moment by moment; each boundary carries a
    message at a time in each direction.
    """
    stages, ends = len(order), dict[tuple[str, int, int], float]()
    arrived = {("F", 0, j): 0.0 for kind, j in order[0] if kind == "F"}
    busy: dict[tuple[str, int], float] = {}
    at, clock = [0] * stages, [0.0] * stages
    while True:
        ready = []
        for stage in range(stages):
            if at[stage] < len(order[stage]):
                kind, j = order[stage][at[stage]]
                needs = arrived.get((kind, stage, j))
                if kind == "W" or kind == "B" and stage == stages - 1:
                    needs = ends[("B" if kind == "W" else "F", stage, j)]  # KeyError: wrong order
                if needs is not None:
                    ready.append((max(clock[stage], needs), stage, kind, j))
        if not ready:
            assert at == [len(each) for each in order], "no stage can go on"
            return ends
        begin, stage, kind, j = min(ready)
        clock[stage] = ends[kind, stage, j] = begin + seconds[kind][stage]
        at[stage] += 1
        peer = stage + {"F": 1, "B": -1, "W": stages}[kind]
        if 0 <= peer < stages:
            boundary = min(stage, peer)
            busy[kind, boundary] = max(clock[stage], busy.get((kind, boundary), 0.0)) + p2p[boundary]
            arrived[kind, peer, j] = busy[kind, boundary]


@settings(max_examples=40, deadline=None)
@given(pipelines())
def test_ends_are_those_of_the_programs_and_never_later_than_1f1b(
    pipeline: tuple[list[float], list[float], list[float], list[float], int],
) -> None:
    forward, backward, weights, p2p, m = pipeline
    stages = len(forward)
    tasks, ends = events.zero_bubble(forward, backward, weights, p2p, m)
    inputs = [whole - part for whole, part in zip(backward, weights, strict=True)]
    reference = played(programs(tasks, stages), {"F": forward, "B": inputs, "W": weights}, p2p)
    found = {}
    for task, end in zip(tasks, ends, strict=True):
        if not task.is_message:
            kind = "F" if task.is_forward else "W" if task.chunk < 0 else "B"
            found[kind, task.stage, task.micro_batch] = end
    assert len(found) == 3 * stages * m and found == pytest.approx(reference)
    line = one_f_one_b.run(forward, backward, p2p, m)
    assert max(ends) <= max(map(float, line.stage_end)) + 1e-9


@settings(max_examples=40, deadline=None)
@given(pipelines())
def test_no_stage_keeps_more_micro_batches_than_the_first_stage_of_1f1b(
    pipeline: tuple[list[float], list[float], list[float], list[float], int],
) -> None:
    tasks, _ = events.zero_bubble(*pipeline)
    stages, m = len(pipeline[0]), pipeline[-1]
    for program in programs(tasks, stages):
        assert sorted(j for kind, j in program if kind == "W") == list(range(m))
        kept = np.cumsum([{"F": 1, "B": 0, "W": -1}[kind] for kind, _ in program])
        assert kept.max() <= min(stages, m)


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0)])
def test_even_stages_have_the_published_bubble(stages: int, f: float, b: float, w: float) -> None:
    """(p − 1)(F + B − W) of Qi et al. 2023, table 2; 1F1B has (p − 1)(F + B + W)."""
    m = 3 * stages
    each = [f] * stages, [b + w] * stages, [w] * stages, [0.0] * (stages - 1)
    _, ends = events.zero_bubble(*each, m)
    assert max(ends) - m * (f + b + w) == pytest.approx((stages - 1) * (f + b - w))


def test_pytorch_computes_in_the_same_order() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages, m = 4, 12
    each = [1.0] * stages, [2.0] * stages, [1.0] * stages, [0.0] * (stages - 1)
    tasks, _ = events.zero_bubble(*each, m)
    ours = programs(tasks, stages)
    for rank in range(stages):
        actions = schedules._get_1f1b_rank_ops(
            *(1, stages, stages - 1 - rank, m - (stages - 1 - rank), stages - 1 - rank, rank),
            *(lambda step, at=rank: at,) * 2,
            num_1f1b_microbatches=rank,
            enable_zero_bubble=True,
        )
        names = {"F": "F", "I": "B", "W": "W"}
        theirs = [(names[one.computation_type.value], one.microbatch_index) for one in actions if one]
        assert ours[rank] == theirs


def test_the_share_of_weight_gradients_is_that_of_products() -> None:
    """The paper measured 34% to 43% of the backward passes of GPT on A100 (1.5B to 28B)."""
    model, gpu = replace(find_model("gpt2-xl"), seq=1024), hardware("A100-80GB")
    assert gpu is not None
    share = weight_share(gpu, model, 1, 6, Options(attention="flash"))
    assert share[0] == 0.0 and 0.3 < share[1] < 0.5
    longer = weight_share(gpu, replace(model, seq=8192), 1, 6, Options(attention="flash"))
    assert longer[1] < share[1]  # attention's gradients have no weights
    assert not weight_share(gpu, model, 1, 6, Options(adapters=True)).any()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plans.json"
    config = plan_command.Config(model="gpt2-xl", cluster="paper-gpt2xl", tp=1, pp=8, top=1)
    before = plan_command.found(config)[0]
    after = plan_command.found(replace(config, schedule="zero-bubble"))[0]
    assert after[0].weight_gradients and after[0].step_time < before[0].step_time
    path.write_text(plans_json([*after, *before]), encoding="utf-8")
    return path


def test_a_plan_is_shown_evaluated_simulated_and_not_exported(
    plans: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, before = read_plans(plans)
    assert "weight_gradients" not in json.loads(plans.read_text(encoding="utf-8"))["plans"][1]
    same = [size for size in before.stage_memory if before.shape == plan.shape]
    assert not same or plan.stage_memory[0] == pytest.approx(same[0]) and plan.stage_memory[-1] > same[-1]
    assert plan_command.main([*WORDS, "--schedule", "zero-bubble", "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "zero-bubble schedule." in text and "the share of weights' gradients is computed" in text
    assert evaluate.main([str(plans), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step"] == pytest.approx(plan.step_time, rel=0.01)
    assert [stage["memory"] for stage in found["stages"]] == pytest.approx(list(plan.stage_memory))
    assert simulate.main([str(plans), "--picture", str(tmp_path / "plan.html")]) == 0
    assert "pp 8" in (out := capsys.readouterr().out) and ", zero-bubble\n" in out and "(+0.00%)" in out
    drawn = simulate.picture(plan, events.of_plan(plan)).spans
    assert sum(span.kind == "wgrad" for span in drawn) == plan.pp * plan.micro_batches
    with pytest.raises(PlanError, match="zero-bubble plan can't be written"):
        simulate.main([str(plans), "--et", "--output", str(tmp_path)])
    for name in ("megatron-bridge", "torchtitan", "deepspeed"):
        refused(plan, name)
    with pytest.raises(PlanError, match="megatron_lm has no zero-bubble schedule"):
        plan_settings.settings(plan)


def refused(plan: Plan, framework: str) -> None:
    with pytest.raises(PlanError, match="zero-bubble|no model"):
        frameworks.exported(plan, framework)


LAYOUT = {
    "model": "gpt2-xl",
    "cluster": "paper-gpt2xl",
    "tp": 1,
    "dp": 8,
    "mbs": 1,
    "layers": "12-12-12-12",
}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"recompute": "full"}, "excludes recomputation full"),
        ({"virtual_stages": 2}, "one chunk per stage"),
        ({"engine": "deepspeed"}, "not DeepSpeed's"),
        ({"schedule": "dualpipe"}, "schedule"),
    ],
)
def test_layouts_that_can_not_run_so_are_refused(
    more: dict[str, object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(json.dumps({"layouts": {"one": {**LAYOUT, "schedule": "zero-bubble", **more}}}))
    assert evaluate.main([str(path)]) == 2
    assert why in capsys.readouterr().err


def test_a_layout_is_faster_with_it_and_its_last_stage_keeps_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layouts.yaml"
    path.write_text(json.dumps({"layouts": {"a": LAYOUT, "b": {**LAYOUT, "schedule": "zero-bubble"}}}))
    assert evaluate.main([str(path), "--json"]) == 0
    plain, split = json.loads(capsys.readouterr().out)
    assert split["step"] < plain["step"]
    assert split["stages"][0]["memory"] == plain["stages"][0]["memory"]
    assert split["stages"][-1]["memory"] > plain["stages"][-1]["memory"]


def test_flags_that_exclude_it(capsys: pytest.CaptureFixture[str]) -> None:
    for more, why in (
        (["--interleave"], "exclude each other"),
        (["--objective", "cost"], "--schedule searches"),
    ):
        with pytest.raises(SystemExit):
            plan_command.main([*WORDS, "--schedule", "zero-bubble", *more])
        assert why in capsys.readouterr().err
