"""The check of a machine, rehearsed on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from chakra_et.doctor.results import BAD, CUT_OFF, GOOD, NOT_JUDGED, Results, at_most, equal, not_run

PYTHON = {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}


def test_results_are_kept_and_repeated_only_on_request(tmp_path: Path) -> None:
    first = Results(tmp_path, {"Python": "3.12"})
    lines = [equal("kernels", 3, 3), at_most("step", 0.2, 0.08), not_run("nccl", "needs a GPU")]
    assert list(first.add("capture", lines)) == lines
    again = Results(tmp_path, {"Python": "3.12"})
    assert [line.verdict for line in again.parts["capture"]] == [GOOD, BAD, "not run"] and again.bad == 1
    assert "20.00%" in first.page.read_text()
    assert not Results(tmp_path, {"Python": "3.13"}).parts  # another machine begins anew
    assert at_most("step", 0.2, 0.08, judged=False).verdict == NOT_JUDGED


def test_a_part_that_is_killed_keeps_its_lines_and_is_run_again(tmp_path: Path) -> None:
    lines = [equal("kernels", 3, 3), equal("steps", 5, 5)]
    assert next(Results(tmp_path, {}).add("capture", lines)) == lines[0]
    again = Results(tmp_path, {})
    assert again.parts["capture"][0] == lines[0] and again.bad == 1 and CUT_OFF in again.parts["capture"]
    assert "cut off" in again.page.read_text()
    assert list(again.add("capture", lines)) == Results(tmp_path, {}).parts["capture"] == lines
    assert not again.bad and "cut off" not in again.page.read_text()


def test_a_part_that_breaks_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chakra_et.doctor import command

    def broken(folder: Path, on_gpu: bool):
        raise LookupError("no such thing")
        yield

    monkeypatch.setitem(command.EXTRA, "broken", broken)
    words = ["-o", str(tmp_path), "--part", "broken", "--cpu"]
    assert command.main(words) == 1
    told = json.loads((tmp_path / "doctor.json").read_text())["parts"]["broken"]
    assert told[0]["measured"] == "LookupError: no such thing" and told[0]["verdict"] == BAD


def test_kernels_are_rehearsed(tmp_path: Path) -> None:
    from chakra_et.doctor.kernels import MOST, check

    lines = list(check(tmp_path, False))
    assert BAD not in {line.verdict for line in lines}
    judged = [line for line in lines if line.verdict == NOT_JUDGED]
    assert len(judged) == len(MOST) and all("by measure-gpu" in line.what for line in judged)
    rows = json.loads((tmp_path / "kernels.json").read_text())
    assert set(rows) == set(MOST) and all(row[-1] > 0 for kind in rows.values() for row in kind)


def test_the_model_of_a_known_gpu_tells_every_kind_of_kernel() -> None:
    from chakra_et.cost.operator_times import gpu_model
    from chakra_et.doctor.kernels import shapes, told

    model = gpu_model("H200")
    for kind, rows in shapes(50, 8192).items():
        times = told(model, kind, rows)
        assert len(times) == len(rows) and (times > 0.5).all() and (times < 1e6).all(), kind


@pytest.mark.parametrize(
    ("kind", "most"),
    [("attention", 0.09), ("normalization", 0.13), ("elementwise", 0.08), ("optimizer", 0.08)],
)
def test_what_an_h200_took_is_what_its_model_says(repo_root: Path, kind: str, most: float) -> None:
    """Layer norms and attention were modelled with these in sight, elementwise kernels weren't."""
    from chakra_et.cost.operator_times import gpu_model
    from chakra_et.doctor.kernels import told

    rows = np.array(json.loads((repo_root / "benchmarks/data/h200/kernels.json").read_text())[kind])
    shapes, times = rows[:, :-1].astype(int), rows[:, -1]
    if kind in ("elementwise", "optimizer"):  # of others, launches and loads of single elements count
        chosen = (shapes[:, 0] > 1e7) & ((shapes[:, 0] % 4 == 0) | (kind == "elementwise"))
        shapes, times = shapes[chosen], times[chosen]
    assert len(times) >= 8 and np.abs(told(gpu_model("H200"), kind, shapes) / times - 1).mean() < most


@pytest.mark.slow
def test_the_rehearsal_on_the_cpu(repo_root: Path, tmp_path: Path) -> None:
    """All parts run without a GPU, in less than three minutes on two idle cores."""
    script = repo_root / "scripts/gpu_check.sh"
    begin = time.monotonic()
    ran = subprocess.run(
        [str(script), "--cpu", "-o", str(tmp_path)], env=os.environ | PYTHON, capture_output=True, text=True
    )
    found = json.loads((tmp_path / "doctor.json").read_text())["parts"]
    bad = [line for lines in found.values() for line in lines if line["verdict"] == BAD]
    assert ran.returncode == 0 and not bad, (bad, ran.stderr)
    assert set(found) == {"capture", "what-ifs", "kernels", "verdicts", "training", "planner", "peers"}
    assert time.monotonic() - begin < 180 or os.getloadavg()[0] > 3


def test_missing_wheels_are_one_sentence(repo_root: Path, tmp_path: Path) -> None:
    """Without msgspec and without wheels the script ends with status 2 and says what to do."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    ran = subprocess.run(
        [str(repo_root / "scripts/gpu_check.sh")],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and "run scripts/gpu_wheels.sh" in ran.stderr
