"""A report in TensorBoard, read back."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from tests.export.test_recorded import converted, trace
from tests.report.made_run import write_run


@pytest.mark.slow
def test_tensorboard_gets_scalars_and_the_trace(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_run(tmp_path)
    assert (
        main(["export", str(tmp_path / "made"), "--format", "tensorboard", "-o", str(tmp_path / "logs")]) == 0
    )
    events = accumulator.EventAccumulator(str(tmp_path / "logs" / "made" / "rank0"))
    events.Reload()
    found = {
        name: [(each.step, round(each.value, 6)) for each in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert found["step/measured_ms"] == [(5, 0.16)]
    assert found["time/wait_ms"] == [(5, 0.04)]
    assert sorted(path.name for path in (tmp_path / "logs/made").glob("*.json*")) == [
        "rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz",
    ]  # fmt: skip


def plugin_profile(path: Path) -> Any:
    """What TensorBoard's trace plugin reads from a file, and the profile that it shows of it."""
    data = pytest.importorskip("torch_tb_profiler.profiler.data", reason="pip install torch-tb-profiler")
    from torch_tb_profiler.consts import WORKER_PATTERN
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    worker = WORKER_PATTERN.match(path.name).group(1)
    found = data.RunProfileData.parse(worker, None, str(path), str(path.parent))
    return found, RunGenerator(worker, None, found).generate_run_profile()


# How the plugin recognises a worker's trace (torch_tb_profiler/consts.py); the folder is the run.
WORKER = re.compile(r"(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?")


def made_traces(folder: Path, *flags: str) -> list[Path]:
    pytest.importorskip("torch.utils.tensorboard", reason="torch and tensorboard are not installed")
    assert (
        main(["export", str(folder / "made"), "--format", "tensorboard", "-o", str(folder / "logs"), *flags])
        == 0
    )
    return sorted((folder / "logs" / "made").glob("*.json.gz"))


def test_each_rank_is_a_worker_of_the_trace_plugin(tmp_path: Path) -> None:
    write_run(tmp_path)
    paths = made_traces(tmp_path)
    assert [WORKER.fullmatch(path.name).groups() for path in paths] == [("rank0", None), ("rank1", None)]
    trace = json.loads(gzip.decompress(paths[1].read_bytes()))
    assert trace["distributedInfo"] == {"rank": 1, "world_size": 2}
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    step, gemm, mm = events["ProfilerStep#5"], events["gemm"], events["aten::mm"]
    assert (step["cat"], step["ts"], step["dur"]) == ("user_annotation", 0, 160)
    assert (gemm["cat"], gemm["ts"], gemm["dur"]) == ("kernel", 30, 90)
    assert gemm["pid"] == gemm["args"]["device"]
    assert gemm["args"]["correlation"] == mm["args"]["correlation"]
    assert gemm["args"]["External id"] == mm["args"]["External id"]


def test_recorded_traces_are_taken_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard", reason="torch and tensorboard are not installed")
    name, logs = converted(tmp_path, trace()), tmp_path / "logs"
    assert main(["export", str(name), "--format", "tensorboard", "-o", str(logs)]) == 0
    recorded = gzip.decompress((logs / "run" / "rank0.pt.trace.json.gz").read_bytes())
    assert recorded == (tmp_path / "run_rank0.json").read_bytes()


def test_the_plugin_itself_shows_steps_operators_and_kernels(tmp_path: Path) -> None:
    write_run(tmp_path)
    found, profile = plugin_profile(made_traces(tmp_path)[1])
    assert found.steps_names == ["5"]
    assert {operator.name for operator in found.op_list_groupby_name} == {"aten::mm", "c10d::allreduce_"}
    assert [view.display_name for view in profile.views][-1] == "Trace"
    assert "Kernel" in [view.display_name for view in profile.views]
