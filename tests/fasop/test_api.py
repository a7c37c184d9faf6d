"""``fasop.plan`` from Python: the command's plans, and jobs of chakra_et in and out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import chakra_et as ce
import fasop
from chakra_et.et import file as et_file
from fasop.__main__ import main
from fasop.inputs.models import find_model

ROOT = Path(__file__).resolve().parents[2]
TINY = "models: {tiny: {hidden: 64, seq: 32, layers: 2, vocab: 1000, heads: 4, global_batch: 8}}\n"


def test_the_plans_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2-xl", "--cluster", "paper-gpt2xl-het", "--top", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    plans = fasop.plan("gpt2-xl", "paper-gpt2xl-het", top=3)
    assert [plan.step_time for plan in plans] == [plan["step_time"] for plan in said["plans"]]


def test_a_plan_is_a_job_whose_step_takes_what_was_planned() -> None:
    (plan,) = fasop.plan("gpt2-xl", "paper-gpt2xl-het", top=1, tp=1, dp=2, pp=4)
    job = fasop.as_job(plan)
    assert isinstance(job, ce.Job) and job.measured.base == "planned"
    assert len(job.ranks) == 8
    last = max(job.steps["end_ns"]) - min(job.steps["start_ns"])
    assert last / 1e9 == pytest.approx(plan.step_time, rel=0.02)
    assert {"all-reduce", "send", "receive"} <= set(job.collectives["type"])


def test_the_costs_of_a_job_are_those_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = "from tests.fasop.small_captures import capture; capture('gpt2')"
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {script}"],
        cwd=tmp_path,
        check=True,
    )
    (result,) = ce.convert(tmp_path)
    (tmp_path / "models.yaml").write_text(TINY)
    job = ce.load(result.prefix)
    costs = fasop.costs(job, "tiny", "A100", mbs=2, models_file=str(tmp_path / "models.yaml"))
    busy = et_file.read(tmp_path / "gpt2.0.et").duration_micros.sum() / 1e6
    (entry,) = costs.entries
    assert 0 < sum(entry.forward) + sum(entry.backward or ()) < busy
    model = str(tmp_path / "models.yaml")
    plans = fasop.plan(
        "tiny",
        "paper-bert-het",
        [replace(costs, entries=(entry, replace(entry, gpu="A10")))],
        models_file=model,
    )
    assert plans[0].model == find_model("tiny", model) and plans[0].step_time > 0


def test_unusable_arguments_are_one_sentence() -> None:
    with pytest.raises(fasop.PlanError, match="--top is 0"):
        fasop.plan("gpt2-xl", "paper-gpt2xl-het", top=0)
    with pytest.raises(fasop.PlanError, match="topp"):
        fasop.plan("gpt2-xl", "paper-gpt2xl-het", topp=1)
