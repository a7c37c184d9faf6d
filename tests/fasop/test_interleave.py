"""Interleaved plans that the search proposes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fasop.commands import evaluate
from fasop.commands import plan as plan_command
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan, read_plans
from fasop.schedule import events
from fasop.search.planner import interleaved, reschedule
from fasop.search.search import search

COSTS = [read_costs()]


def planned(cluster: str, **degrees: int) -> list[Plan]:
    model, clusters = find_model("gpt2-xl"), load_clusters(cluster)
    return search(model, clusters, COSTS, [Options()], Goal(top=4, **degrees))


def test_chunks_shorten_the_step_of_a_deep_pipeline_and_cost_memory() -> None:
    before = planned("paper-gpt2xl", tp=1, pp=8, mbs=1)
    after = reschedule(before, COSTS, interleaved)
    assert len(after) == len(before) and after[0].step_time < before[0].step_time
    assert after == sorted(after, key=lambda plan: plan.step_time)
    (same,) = (plan for plan in before if plan.shape == after[0].shape)
    assert after[0].virtual_stages > 1 and after[0].stage_memory[0] > same.stage_memory[0]
    assert not after[0].is_oom
    # The step is that of the schedule's events, and so is the price.
    assert events.step_time(events.of_plan(after[0])) == pytest.approx(after[0].step_time)
    cost = after[0].cluster.price_per_hour / 3600 * after[0].step_time
    assert after[0].price_per_step == pytest.approx(cost)
    of = {"model": "gpt2-xl", "cluster": "paper-gpt2xl", "tp": 1, "pp": 8, "mbs": 1, "top": 1}
    (best,) = plan_command.found(plan_command.Config(**of, interleave=True, iterations=1000))[0]
    assert best.virtual_stages > 1 and best.train_cost == pytest.approx(1000 * best.price_per_step)


def test_chunks_that_do_not_fit_or_can_not_run_are_not_planned() -> None:
    (plan,) = planned("paper-gpt2xl", tp=1, dp=4, pp=8, mbs=1)
    (gpu,) = plan.cluster.gpus
    tight = replace(gpu, memory_gib=max(plan.stage_memory) + 0.01)
    full = replace(plan, cluster=replace(plan.cluster, gpus=(tight,)), stage_cap=(tight.memory_gib,) * 8)
    assert reschedule([plan], COSTS, interleaved)[0].virtual_stages > 1
    assert reschedule([full], COSTS, interleaved) == [full]
    t5 = search(find_model("t5"), load_clusters("paper-t5"), COSTS, [Options()], Goal(top=1, pp=8, mbs=1))
    assert reschedule(t5, COSTS, interleaved) == t5


def test_the_command_plans_chunks_that_simulate_and_export_read(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "gpt2-xl", "--cluster", "paper-gpt2xl", "--tp", "1", "--pp", "8", "--interleave"]
    assert plan_command.main([*words, "--json", "--top", "1"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 1 and plans[0]["virtual_stages"] > 1
    with pytest.raises(SystemExit):
        plan_command.main([*words, "--objective", "cost"])
    assert "--interleave searches for the shortest step" in capsys.readouterr().err


def test_an_interleaved_plan_is_evaluated_with_its_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its chunks were left out of the activations that are in flight."""
    path = tmp_path / "plans.json"
    words = ["--model", "gpt2-xl", "--cluster", "paper-gpt2xl", "--tp", "1", "--pp", "8", "--interleave"]
    assert plan_command.main([*words, "--json", "--top", "1"]) == 0
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    (plan,) = read_plans(path)
    assert evaluate.main([str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step"] == pytest.approx(plan.step_time, rel=0.05)
    assert [stage["memory"] for stage in found["stages"]] == pytest.approx(list(plan.stage_memory))
