"""The tracer never ends the training: whatever goes wrong in it is one warning, and strict=True raises it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trace_reading import load, train

from chakra_et.capture.check import inspect_pair
from chakra_et.capture.recorder import CaptureError, Recorder
from chakra_et.capture.tracer import ChakraTracer

HERE = Path(__file__).parent
OTHER_RUNNING = "another profiler is already running in this process"
OTHER_STARTED = "another profiler was started in this process and ended the recording"


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("chakra_et")]


def test_a_folder_that_is_a_file(tmp_path, caplog):
    (tmp_path / "taken").touch()
    with ChakraTracer(tmp_path / "taken", "t", 1, 1, 1) as tracer:
        train(tracer, 4)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"trace t rank 0: the trace folder {tmp_path}/taken can't be written: ")
    assert warning.endswith("; training goes on")
    tracer = ChakraTracer(tmp_path / "taken", "t", 1, 1, 1, strict=True)
    with pytest.raises(OSError, match="trace folder .*taken can't be written"):
        tracer.__enter__()


@pytest.mark.parametrize("method", ["start", "step", "stop", "export"])
def test_any_failure_of_the_recording(method, tmp_path, caplog, monkeypatch):
    """Also of a kind that nobody has thought of."""
    real = getattr(Recorder, method)

    def fail(self, *values):
        real(self, *values)
        raise AttributeError("'NoneType' object has no attribute 'save'")

    monkeypatch.setattr(Recorder, method, fail)
    with ChakraTracer(tmp_path, "t", 1, 1, 1) as tracer:
        train(tracer, 5)
    assert warnings(caplog) == ["trace t rank 0: 'NoneType' object has no attribute 'save'; training goes on"]
    manifest = load(tmp_path / "t_manifest.json")
    assert not manifest["complete"] and "no attribute 'save'" in manifest["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["t_manifest.json"]
    with pytest.raises(AttributeError), ChakraTracer(tmp_path, "t", 1, 1, 1, strict=True) as tracer:
        train(tracer, 5)
    monkeypatch.undo()
    with ChakraTracer(tmp_path, "t", 1, 1, 1) as tracer:
        train(tracer, 3)
    assert inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 1).problems == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("around", OTHER_RUNNING),
        pytest.param("around with autograd.profiler", OTHER_RUNNING, marks=pytest.mark.slow),
        pytest.param("around, wait 0", OTHER_RUNNING, marks=pytest.mark.slow),
        ("around, wait 1", OTHER_STARTED),
        pytest.param("around, wait 2", OTHER_STARTED, marks=pytest.mark.slow),
        pytest.param("within one step", OTHER_STARTED, marks=pytest.mark.slow),
        pytest.param("from an active step to beyond the last", OTHER_STARTED, marks=pytest.mark.slow),
        ("observer", "another ExecutionTraceObserver is registered in this process"),
    ],
)
def test_another_profiler_keeps_its_results(other, expected, tmp_path):
    """In a process of its own: stopping or exporting a session that another profiler has taken crashed it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "profiler_worker.py"), str(tmp_path), other],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["warnings"] == [f"trace t rank 0: {expected}; training goes on"]
    assert result["other"] > 40, "operators that the other profiler has recorded"
    assert result["strict"] == "CaptureError"
    # And the tracer works again when the other profiler is gone.
    assert inspect_pair(tmp_path / "later_host.json", tmp_path / "later_device.json", 2).problems == []
    assert "t_host.json" not in {path.name for path in tmp_path.iterdir()}


def test_capture_errors_are_no_bad_input():
    assert not issubclass(CaptureError, (OSError, ValueError))


UNENDED = """
import sys, torch
from chakra_et import ChakraTracer
tracer = ChakraTracer(sys.argv[1], "t", 1, 1, 2)
tracer.__enter__()
for _ in range(int(sys.argv[2])):
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    tracer.step()
"""


@pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_tracer_that_nobody_ended_ends_with_the_interpreter(steps: int, tmp_path: Path) -> None:
    """PyTorch crashed: it was still recording."""
    done = subprocess.run(
        [sys.executable, "-c", UNENDED, tmp_path, str(steps)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"training ended after {steps - 2} of 2 active steps" in done.stderr
    assert (tmp_path / "t_device.json").exists() == (steps == 3)
