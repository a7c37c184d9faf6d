"""Plan, run, compare: the parts on numbers that are known, and the whole on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fasop.plans.plan import pick_plan
from megatron_lm.__main__ import main as command
from megatron_lm.results import picture, plan_run_compare
from megatron_lm.results.plan_run_compare import CompareConfig, Measured
from megatron_lm.settings.conf import read_file
from tests.megatron_lm import written_logs
from tests.megatron_lm.conftest import REPO_ROOT
from tests.megatron_lm.written_logs import write_node
from tests.report.page_data import page_data

E, T, P = 0.001, 0.004, 0.006


def measured(layers: tuple[int, ...]) -> Measured:
    """Of a machine on which a backward takes twice the forward, exactly."""
    last = len(layers) - 1
    forward = [E * (i == 0) + T * count + P * (i == last) for i, count in enumerate(layers)]
    stages = [picture.Bubble(rank, 1.0, 3 * f, 0.0) for rank, f in enumerate(forward)]
    return Measured("", 0.0, 0.0, forward, [2 * f for f in forward], 1e-4, stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_unit_costs_come_back_from_the_stages(stages: int) -> None:
    partitions = plan_run_compare.calibration_partitions(stages)
    entry = plan_run_compare.unit_costs(partitions, [measured(layers) for layers in partitions])
    np.testing.assert_allclose(entry["forward"], [E, T, T, T, T, P], rtol=1e-9)
    np.testing.assert_allclose(entry["backward"], [2 * E, 2 * T, 2 * T, 2 * T, 2 * T, 2 * P], rtol=1e-9)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a comparison whose three runs were not made, but have known times."""
    ran: list[tuple[tuple[int, ...], Mapping[str, str]]] = []

    def run(
        config: CompareConfig, layers: Sequence[int], settings: Mapping[str, str] | None = None
    ) -> Measured:
        ran.append((tuple(layers), settings or {}))
        return measured(tuple(layers))

    monkeypatch.setattr(plan_run_compare, "run", run)
    monkeypatch.setattr(
        plan_run_compare,
        "drawn",
        lambda job, plan, tables: "\n".join("|".join(row) for table in tables for row in table.rows),
    )
    assert plan_run_compare.main(["--output", str(tmp_path)]) == 0
    # E + 3T = 13 ms, T + P = 10 ms: less than 2-2 (9, 14) and 1-3 (5, 18) at their slowest.
    assert [layers for layers, _ in ran] == [(3, 1), (1, 3), (3, 1)]
    assert ran[2][1].items() >= {"PARTITION": "3-1", "MODEL": "tiny", "NPROC_PER_NODE": "2"}.items()
    assert "compare.html, costs.json, models.yaml, plan.conf, plan.json" in capsys.readouterr().out
    return tmp_path


def test_the_plan_of_known_costs_is_the_best_there_is(planned: Path) -> None:
    plan = json.loads((planned / "plan.json").read_text())["plans"][0]
    # The shortest message, as a latency.
    assert plan["p2p"] == pytest.approx([1e-4])
    events = picture.predicted_events(pick_plan(str(planned / "plan.json"), 1))
    forward = [e for e in events if e.rank == 1 and e.task == "forward"]
    assert forward[0].start == pytest.approx(E + 3 * T + 1e-4)
    ends = max(e.end for e in events if e.task == "backward")
    assert ends == pytest.approx(plan["pipeline_time"])
    row = re.search(r"forward of stage 0, ms\|([\d.]+)\|([\d.]+)\|", (planned / "compare.html").read_text())
    assert row and float(row[1]) == float(row[2]) == pytest.approx(1000 * (E + 3 * T), abs=0.01)


def test_a_difference_is_explained_by_parts_that_add_up_to_it(planned: Path) -> None:
    """Both stages take half as long again as planned, and 7 ms instead of 4 are beside the pipeline."""
    plan = pick_plan(str(planned / "plan.json"), 1)
    ours = picture.bubbles(picture.predicted_events(plan))
    stages = [
        dataclasses.replace(each, compute=1.5 * each.compute, seconds=1.5 * each.seconds) for each in ours
    ]
    result = measured((3, 1))._replace(stages=stages, iteration=1.5 * ours[0].seconds + 0.007)
    rows = plan_run_compare.explained(plan, result, 0.004).rows
    figures = {name: [float(cell) for cell in cells] for name, *cells in rows}
    longest = max(ours, key=lambda stage: stage.compute)
    assert figures["compute"][2] == pytest.approx(500 * longest.compute, abs=0.01)
    assert figures["beside the pipeline (optimizer, data, logging)"][:3] == [4.0, 7.0, 3.0]
    whole = figures.pop("step")
    assert whole[1] - whole[0] == pytest.approx(whole[2], abs=0.011) and whole[3] == 100
    sums = np.sum(list(figures.values()), axis=0)
    np.testing.assert_allclose(sums, whole, atol=2)


def test_a_plan_is_drawn_beside_its_run(planned: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MEGATRON_LOG_DIR", str(planned / "log2"))
    for rank in range(2):
        block = written_logs.timer_block(rank, written_logs.one_f_one_b(rank, 2, 16, 1.7e9))
        write_node(planned / "log2/5", f"n{rank}", out=f"NODE_RANK: {rank}\nstart\n{block}")
    out = planned / "out.html"
    assert picture.main(["5", "--plan", str(planned / "plan.json"), "--output", str(out)]) == 0
    content = page_data(out)[0]
    assert "Predicted by FASOP" in content["note"]
    assert [table["title"] for table in content["tables"]] == ["Bubbles, measured", "Bubbles, predicted"]
    assert content["timeline"]["lanes"] == [
        "measured · rank 0 (n0)", "measured · rank 1 (n1)",
        "predicted · stage 0 (CPU)", "predicted · stage 1 (CPU)",
    ]  # fmt: skip
    (planned / "plan.json").write_text("{}")
    assert command(["picture", "5", "--plan", str(planned / "plan.json"), "--output", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "plan.json" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--stages", "5"], "--stages is 5: give 2 to 4"),
        (["--global-batch", "1"], "--global-batch 1: give at least"),
        (["--iterations", "1"], "--iterations is 1: give 3 to 10,000"),
    ],
)
def test_sizes_that_cannot_be_are_refused(args: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan_run_compare.main(args)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_plan_run_and_compare_in_one_command(tiny: dict[str, str], tmp_path: Path) -> None:
    output, load = tmp_path / "compared", os.getloadavg()[0]
    done = subprocess.run(
        [REPO_ROOT / "megatron_lm/plan_run_compare.sh", "--iterations", "6", "--output", output],
        env=tiny | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    row = re.search(r"^pipeline, ms +([\d.]+) +([\d.]+) +[+-][\d.]+$", done.stdout, re.MULTILINE)
    parts = re.findall(r"^([a-z].*?)  +[\d.]+ +([-\d.]+) +[+-][\d.]+ +-?\d+$", done.stdout, re.MULTILINE)
    *of_step, (name, step) = parts
    assert name == "step" and len(of_step) == 4
    assert sum(float(each) for _, each in of_step) == pytest.approx(float(step), abs=0.03)
    assert read_file(output / "plan.conf")["MODEL"] == "tiny"
    assert json.loads((output / "costs.json").read_text())["entries"][0]["gpu"] == "CPU"
    tables = page_data(output / "compare.html")[0]["tables"]
    assert "Bubbles, predicted" in [table["title"] for table in tables]
    assert "Why the step differs" in done.stdout and (output / "compare.html").exists()
    if load > (os.cpu_count() or 1):
        pytest.skip(f"times were not compared: other programs use the processors (load {load:.0f})")
    # The schedule is known and its parts were measured here; what is left is how steady the machine is.
    assert float(row[1]) == pytest.approx(float(row[2]), rel=0.5)
