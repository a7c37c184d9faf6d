"""Traces that PyTorch and training frameworks write without our tracer: their names, and conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from chakra_et.traces import sets

ROOT = Path(__file__).resolve().parents[2]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


PROGRAM = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
model = torch.nn.Linear(8, 8)
plan = schedule(wait=1, warmup=1, active=1, repeat=1)
ready = tensorboard_trace_handler("log")
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready) as profiler:
    for _ in range(4):
        model(torch.ones(4, 8)).sum().backward()
        profiler.step()
"""


def test_pytorch_s_own_execution_trace_converts_with_its_device_trace(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "ENABLE_PYTORCH_EXECUTION_TRACE": "1", "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, check=True)
    (host,), (device,) = (tmp_path / "tmp").glob("*.et.json"), (tmp_path / "log").iterdir()
    command = [sys.executable, "-m", "chakra_et", "convert", host, device, "--output", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "out").glob("*.0.et"))) == 1
    assert "100.0%" in done.stdout, "linked by the record-function ids"


def test_older_names_of_device_traces_are_known(tmp_path: Path) -> None:
    """The first version of this project wrote NAME_kineto.json beside NAME_host.json."""
    touch(tmp_path, "run_host.json", "run_kineto.json", "run_rank1_host.json", "run_rank1_kineto.json.gz")
    [found] = sets.find(tmp_path)
    assert found.name == "run" and not found.incomplete
    assert {rank: pair.device.name for rank, pair in found.pairs.items()} == {
        0: "run_kineto.json",
        1: "run_rank1_kineto.json.gz",
    }
