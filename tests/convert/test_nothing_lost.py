"""Missing or unexplained work is reported: truncated traces, steps without host operators, overhead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.errors import TraceError
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import (
    annotation,
    call,
    kernel,
    node,
    op,
    tensor,
    write_device,
    write_host,
    write_kineto,
)


def launches(count: int = 10) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for at in range(count):
        made += [op("aten::mm", 100 * at, 50, rf=at + 1), call("cudaLaunchKernel", 100 * at + 5, 5, at + 1)]
    return made


def kernels(count: int = 10) -> list[dict[str, Any]]:
    return [kernel("gemm", 100 * at + 20, 30, at + 1) for at in range(count)]


def cuda_nodes(count: int = 10) -> list[dict[str, Any]]:
    value, kind = tensor(3, 64, device="cuda:0"), "Tensor(float)"
    return [node("aten::mm", at + 1, [value, value], [kind, kind]) for at in range(count)]


def write(folder: Path, events: list[dict[str, Any]], cut: int | None = None) -> list[str]:
    host, device = write_host(folder, cuda_nodes()), write_device(folder, events)
    if cut is not None:
        text = device.read_text()
        device.write_text(text[: text.index('"cat": "kernel"', cut)])
    return ["convert", str(host), str(device), "-o", str(folder / "out")]


@pytest.mark.parametrize(
    "events, words",
    [
        (launches(), "kernel launches whose kernel is not in the device trace (10)"),
        (
            [e for e in launches() if e["cat"] == "cpu_op"],
            "has CUDA tensors, but the device trace has no GPU work",
        ),
    ],
)
def test_truncated_device_trace_is_an_error(
    events: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kineto writes device work last, and JSON that ends before it can still be valid."""
    arguments = write(tmp_path, events)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error and "--allow-truncated" in error
    assert main([*arguments, "--allow-truncated"]) == 0
    assert words.partition(" (")[0] in capsys.readouterr().err  # still a warning


def test_truncated_trace_never_has_status_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path, [*launches(), *kernels()], cut=0)
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "was cut off" in printed.err and "ok" not in printed.out.split()
    assert main([*arguments, "--allow-truncated"]) == 0
    assert "cut" in capsys.readouterr().out


def test_a_few_launches_at_the_end_of_a_recording_may_lack_their_kernels(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "one.json", [*launches(200), *kernels(198)])
    assert not convert_pair(Pair(-1, None, path)).report.warnings


def test_communication_operators_without_kernels_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*launches(), *kernels(), annotation("nccl:all_reduce", 2000, 10)]
    path = write_kineto(tmp_path / "one.json", events)
    assert main(["convert", str(path), "-o", str(tmp_path / "out")]) == 1
    assert "communication operators whose kernel is not in the device trace" in capsys.readouterr().err


def test_steps_without_host_operators_are_reported(tmp_path: Path) -> None:
    steps = [annotation(f"ProfilerStep#{n}", 300 * n, 290) for n in range(3)]
    events = [*steps, *launches(9), *kernels(9)]
    host = write_host(tmp_path, cuda_nodes(3))
    for event in events[9:]:
        if event["ts"] >= 300 and event["cat"] == "cpu_op":
            event["args"] = {}
    converted = convert_pair(Pair(-1, host, write_device(tmp_path, events)))
    assert converted.report.warnings["steps-without-host"] == 2


@pytest.mark.parametrize("side", ["host", "device"])
def test_no_operators_to_link_is_an_error(side: str, tmp_path: Path) -> None:
    host = write_host(tmp_path, [] if side == "host" else cuda_nodes())
    events = kernels() + (launches() if side == "host" else [])
    pair = Pair(-1, host, write_device(tmp_path, events))
    with pytest.raises(TraceError, match="only 0% of their operators match"):
        convert_pair(pair)
    report = convert_pair(pair, PairOptions(allow_unlinked=True)).report
    assert report.link_rate == 0


def test_unexplained_time_above_a_tenth_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two operators of 1 ms with 6 ms between them: 75% of the critical path."""
    path = write_kineto(tmp_path / "one.json", [op("aten::mm", 0, 1000), op("aten::add", 7000, 1000)])
    arguments = ["convert", str(path), "-o", str(tmp_path / "out")]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "75.0%" in printed.out
    assert "75% of the critical path is time that nothing recorded explains" in printed.err
    report = json.loads(next((tmp_path / "out").glob("*_conversion.json")).read_text())["ranks"]["0"]
    assert report["critical_path_us"]["host-overhead"] == report["unexplained_us"] == 6000
    assert sum(report["critical_path_us"].values()) == sum(report["busy_us"].values()) == 8000
