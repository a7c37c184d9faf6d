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
def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
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
    assert found["step/lasts_ms"] == [(5, 0.16)]
    assert found["step/wait_ms"] == [(5, 0.04)]


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


def recorded_trace(folder: Path) -> Path:
    """What the plugin is given of a run, of which the device trace is there."""
    pytest.importorskip("torch.utils.tensorboard", reason="torch and tensorboard are not installed")
    name, logs = converted(folder, trace()), folder / "logs"
    assert main(["export", str(name), "--format", "tensorboard", "-o", str(logs)]) == 0
    (path,) = (logs / "run").glob("*.json.gz")
    return path


def test_recorded_traces_are_taken_as_they_are(tmp_path: Path) -> None:
    path = recorded_trace(tmp_path)
    found = WORKER.fullmatch(path.name)
    assert found is not None and found.groups() == ("rank0", None)
    assert gzip.decompress(path.read_bytes()) == (tmp_path / "run_rank0.json").read_bytes()


def test_a_trace_that_is_gone_is_made_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_trace(tmp_path).unlink()
    (tmp_path / "run_rank0.json").unlink()
    assert (
        main(["export", str(tmp_path / "run"), "--format", "tensorboard", "-o", str(tmp_path / "logs")]) == 0
    )
    assert "run_rank0.json, is gone: the nodes of the .et files are written" in capsys.readouterr().err
    (path,) = (tmp_path / "logs/run").glob("*.json.gz")
    made = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = {(event["name"], event["cat"]) for event in made if event["ph"] == "X"}
    assert {("aten::add", "operator"), ("add_kernel", "kernel"), ("late_kernel", "kernel")} <= named
    found, profile = plugin_profile(path)
    assert {operator.name for operator in found.op_list_groupby_name} == {"aten::add"}
    assert [view.display_name for view in profile.views][-1] == "Trace"


def test_the_plugin_itself_shows_operators_and_kernels(tmp_path: Path) -> None:
    found, profile = plugin_profile(recorded_trace(tmp_path))
    assert {operator.name for operator in found.op_list_groupby_name} == {"aten::add"}
    assert [view.display_name for view in profile.views][-1] == "Trace"
    assert "Kernel" in [view.display_name for view in profile.views]
