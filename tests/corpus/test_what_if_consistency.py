"""benchmarks/what_if_consistency.py on steps whose answers follow from how they were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.what_if_consistency import Answers, Config, answers, benchmark, disagreeing_twins
from chakra_et.convert.inputs import load_run
from chakra_et.errors import TraceError
from chakra_et.predict import command as predict_command
from chakra_et.predict.predict import predict
from chakra_et.transform.durations import GpuKernels
from tests.generator.hand_made import annotation, call, event, kernel, op, write_kineto


def _step(kernel_us: int, waits: bool = True) -> list[dict[str, object]]:
    """A host that launches three kernels in 60 µs, and waits for the device or sleeps as long."""
    events = [annotation("ProfilerStep#1", 0, 100 + 3 * kernel_us), op("aten::mm", 5, 60)]
    for at in range(3):
        events += [
            call("hipLaunchKernel", 10 + 20 * at, 5, at + 1),
            kernel("gemmKernel", 20 + kernel_us * at, kernel_us, at + 1),
        ]
    end = 20 + 3 * kernel_us
    if waits:
        events.append(call("hipDeviceSynchronize", 70, end - 70 + 5, 9))
    return [*events, op("aten::step", end + 20, 10)]


def test_a_step_that_the_device_bounds(tmp_path: Path) -> None:
    write_kineto(tmp_path / "bound.json", _step(1000))
    (found,) = answers(tmp_path).values()
    assert found.bound == "device" and found.on_device > 0.96
    assert found.saved == pytest.approx(1, abs=0.01) and found.added == pytest.approx(1, abs=0.01)
    assert found.failures() == []
    assert benchmark(Config(dirs=(str(tmp_path),))) == 0


def test_a_wait_that_is_kept_as_work_fails(tmp_path: Path) -> None:
    """The host sleeps for as long as the device works: the what-if shows what a replay can't."""
    events = _step(1000, waits=False)
    write_kineto(tmp_path / "asleep.json", [*events, event("cpu_op", "aten::sleep", 70, 2000, 1)])
    (found,) = answers(tmp_path).values()
    assert found.saved < 0.5
    assert any("half the kernels save" in each for each in found.failures())
    assert benchmark(Config(dirs=(str(tmp_path),))) == 1


def test_twins() -> None:
    def bound_by(what: str) -> Answers:
        return Answers(1, 0, 0, 1, 1, 0, what, "", {}, [])

    assert disagreeing_twins({"h100_a": bound_by("host"), "mi300_a": bound_by("host")}) == {}
    wrong = disagreeing_twins({"h100_a": bound_by("host"), "mi300_a": bound_by("device")})
    assert wrong == {"h100_a, mi300_a": "one is bound by the host, the other by the device"}


def test_gpu_kernels_hits_no_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--scale Kernel`` also hits ``hipLaunchKernel``."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import RunOptions, convert_sets
    from chakra_et.traces import sets as trace_sets

    write_kineto(tmp_path / "run.json", _step(1000))
    (traces,) = trace_sets.find(tmp_path)
    convert_sets([traces], PairOptions(), RunOptions(workers=0))
    run = load_run(str(tmp_path / "run"))
    assert "3 nodes on devices: 3.000 ms × 0.5" in predict(run, [GpuKernels(0.5)]).notes
    assert predict_command.main([str(tmp_path / "run"), "--gpu-kernels", "2"]) == 0
    assert "3 nodes on devices: 3.000 ms × 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        predict_command.main([str(tmp_path / "run"), "--gpu-kernels", "-1"])


def test_a_run_without_a_device_is_refused(tmp_path: Path) -> None:
    write_kineto(tmp_path / "cpu.json", [op("aten::mm", 5, 60)])
    with pytest.raises(TraceError, match="no traces with device work"):
        benchmark(Config(dirs=(str(tmp_path),)))
