"""One question has one answer: the step of a run and its slow ranks are the same in every command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from tests.shared import shared_path
from tests.stragglers.gpu_job import write_job


@pytest.fixture(params=["uneven ranks", "DLRM, whose ranks start 7.5 ms apart"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "uneven ranks":
        work = np.full((4, 3), 2500.0)
        work[1] *= 1.4
        return write_job(tmp_path, work, 2 * work)
    folder = shared_path("data/traces/dlrm_8gpu", "dlrm_8gpu_rank0_device.json.gz")
    assert main(["convert", str(folder), "-o", str(tmp_path)]) == 0
    return str(tmp_path / "dlrm_8gpu")


def test_step_and_slow_ranks(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*command: str) -> dict:
        capsys.readouterr()
        assert main([*command, "--json"]) == 0
        found: dict = json.loads(capsys.readouterr().out)
        return found

    diagnosis = answer("diagnose", run)
    assert diagnosis["slow_ranks"] and diagnosis["step_ms"] > 0
    step_ns = pytest.approx(diagnosis["step_ms"] * 1e6, rel=1e-3)
    told = f"{diagnosis['step_ms']:.1f} ms per step" if diagnosis["step_ms"] >= 10 else "ms per step"
    page = str(tmp_path / "page.html")
    whole, of_skeletons = (answer("report", run, "-o", page, "--skeletons", how) for how in ("off", "on"))
    for report in (whole, of_skeletons):
        assert told in report["headline"][0]
        assert report["diagnosis"]["slow_ranks"] == diagnosis["slow_ranks"]
        assert report["diagnosis"]["step_ms"] * 1e6 == step_ns
    # Who is waited for, who comes last, and the critical path: all without the skew of the starts.
    assert int(np.sum(whole["waits"], axis=0).argmax()) == diagnosis["slow_rank"]
    assert {rank for each in whole["collectives"] for rank in each["last"]} == {str(diagnosis["slow_rank"])}
    together_ns = 1e6 * diagnosis["step_ms"] * (1 - diagnosis["skew_gain"])
    assert sum(whole["path"].values()) == pytest.approx(diagnosis["steps"] * together_ns, rel=0.01)
    for side in answer("compare", run, run)["runs"]:
        assert side["step_ns"] == step_ns
        assert side["diagnosis"]["slow_ranks"] == diagnosis["slow_ranks"]
    stragglers = answer("stragglers", run)
    assert float(np.mean([*stragglers["step_t_base"].values()])) * 1e9 == step_ns
    assert stragglers["diagnosis"]["slow_ranks"] == diagnosis["slow_ranks"]
    slowest = max(stragglers["worker_slowdown"].items(), key=lambda each: each[1])[0]
    assert int(slowest) == diagnosis["slow_rank"]
    skewless = 1 - 1 / stragglers["launch_slowdown"]
    assert skewless == pytest.approx(diagnosis["skew_gain"], abs=0.005)
    assert answer("predict", run)["step_us"]["before"] * 1e3 == step_ns
