"""Traces that PyTorch and training frameworks write without our tracer: their names, and conversion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.names import framework_runs, process_of
from chakra_et.traces import sets

ROOT = Path(__file__).resolve().parents[2]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def relative(runs: dict[str, list[Path]], folder: Path) -> dict[str, list[str]]:
    return {name: [path.relative_to(folder).as_posix() for path in paths] for name, paths in runs.items()}


@pytest.mark.parametrize("given", ["", "torch_profile", "chakra"])
def test_megatron_s_two_folders_are_one_run(given: str, tmp_path: Path) -> None:
    names = [f"{part}/rank-{rank}.json.gz" for part in ("torch_profile", "chakra") for rank in (0, 1)]
    touch(tmp_path, *names, "torch_profile/other.json", "chakra/rank-x.json.gz", "tensorboard/events")
    assert relative(framework_runs(tmp_path / given), tmp_path) == {"torch_profile": names}


def test_megatron_without_execution_traces(tmp_path: Path) -> None:
    touch(tmp_path, "torch_profile/rank-0.json.gz")
    assert relative(framework_runs(tmp_path), tmp_path) == {"torch_profile": ["torch_profile/rank-0.json.gz"]}


def test_torchtitan_has_a_run_per_step_and_replica(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "iteration_10/rank0_trace.json",
        "iteration_10/rank1_trace.json",
        "iteration_x/rank0_trace.json",
    )
    touch(tmp_path, "iteration_20/replica_0/rank0_trace.json", "iteration_20/replica_1/rank0_trace.json")
    touch(tmp_path, "iteration_20/rank0_memory_snapshot.pickle")
    assert relative(framework_runs(tmp_path), tmp_path) == {
        "iteration_10": ["iteration_10/rank0_trace.json", "iteration_10/rank1_trace.json"],
        "iteration_20_replica_0": ["iteration_20/replica_0/rank0_trace.json"],
        "iteration_20_replica_1": ["iteration_20/replica_1/rank0_trace.json"],
    }


def test_an_ordinary_folder_has_none(tmp_path: Path) -> None:
    touch(tmp_path, "gpt2_host.json", "gpt2_device.json", "rank0_trace.json")
    assert framework_runs(tmp_path) == framework_runs(tmp_path / "absent") == {}


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
    assert process_of(device.name) == json.loads(host.read_text())["pid"]
    assert process_of(host.name) is None
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
