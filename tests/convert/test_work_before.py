"""Device work that began before the recording, and what waits for it. Times in µs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.graph.linked import WORK_BEFORE
from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto

LAUNCH = [op("aten::mm", 5100, 50), call("cudaLaunchKernel", 5110, 5, 9), kernel("gemm", 5120, 100, 9)]
CALLS: dict[str, list[dict[str, Any]]] = {
    "a kernel launched at once": [
        op("aten::mm", 0, 50), call("cudaLaunchKernel", 5, 5, 1), kernel("gemm", 5010, 30, 1),
    ],
    "a device synchronization": [op("a", 0, 3), call("cudaDeviceSynchronize", 10, 5000, 1), *LAUNCH],
    "an event": [op("a", 0, 3), call("hipEventSynchronize", 10, 5000, 1), *LAUNCH],
    "a blocking copy": [
        op("aten::item", 0, 5100), call("hipMemcpyWithStream", 10, 5010, 1),
        kernel("Memcpy DtoH (Device -> Host)", 5012, 3, 1),
    ],
    "queries of a spinning host": [
        op("a", 0, 3), *(call("cudaEventQuery", 10 * n, 1, 1000 + n) for n in range(1, 501)), *LAUNCH,
    ],
    "a kernel launched before, too": [
        op("a", 0, 3), call("cudaStreamSynchronize", 10, 5025, 1), kernel("early", 5000, 30, 77), *LAUNCH,
    ],
}  # fmt: skip


def converted(tmp_path: Path, events: list[dict[str, Any]], **options: Any) -> Converted:
    path = write_kineto(tmp_path / "a_rank0.json", events, 0)
    return convert_pair(Pair(0, None, path), PairOptions(**options))


def times(found: Converted) -> dict[str, int]:
    """µs of each name along the critical path's kinds, and of the work before."""
    names = found.trace.names
    lasts = found.trace.duration_micros.tolist()
    return {"before": sum(t for name, t in zip(names, lasts, strict=True) if name == WORK_BEFORE)}


@pytest.mark.parametrize("what", CALLS)
def test_a_wait_for_work_from_before_the_recording_is_work_of_the_device(what: str, tmp_path: Path) -> None:
    """The wait of the first kernel was half of a real trace's critical path, and overhead."""
    found = converted(tmp_path, CALLS[what])
    report = found.report
    assert report.warnings["work-before-recording"] == 1 and "work-unexplained-wait" not in report.warnings
    assert times(found)["before"] == pytest.approx(5000, rel=0.01)
    path = report.critical_path_us
    assert path["kernel"] >= 5000 and sum(path.values()) - path["kernel"] < 260
    assert report.conserved() and report.nodes_by_kind["kernel"] == 1 + sum(
        event["cat"] == "kernel" for event in CALLS[what]
    )


@pytest.mark.parametrize(
    "events",
    [
        [op("aten::mm", 0, 50), call("cudaLaunchKernel", 5, 5, 1), kernel("gemm", 30, 30, 1)],
        [op("a", 0, 3), call("cudaDeviceSynchronize", 10, 8, 1), *LAUNCH],
        [op("a", 0, 6000), kernel("unknown", 5000, 30, 77), kernel("unknown", 5100, 30, 78)],
        [op("a", 0, 3), call("cudaMalloc", 10, 5000, 1), *LAUNCH],
    ],
    ids=["idle device", "short wait", "no launches recorded", "no call that waits"],
)
def test_an_idle_device_had_no_work_before(events: list[dict[str, Any]], tmp_path: Path) -> None:
    assert "work-before-recording" not in converted(tmp_path, events).report.findings


def test_a_wait_in_the_middle_is_not_for_work_from_before(tmp_path: Path) -> None:
    events = [
        *CALLS["a kernel launched at once"],
        call("cudaLaunchKernel", 6000, 5, 2), kernel("late", 9000, 30, 2),
    ]  # fmt: skip
    warnings = converted(tmp_path, events).report.warnings
    assert (warnings["work-before-recording"], warnings["work-unexplained-wait"]) == (1, 1)


def test_one_step_begins_with_what_the_step_before_left_on_the_device(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#1", 0, 100), op("aten::mm", 10, 50),
        call("cudaLaunchKernel", 15, 5, 1), kernel("gemm", 30, 5000, 1),
        annotation("ProfilerStep#2", 200, 5200), op("aten::add", 210, 50),
        call("cudaLaunchKernel", 215, 5, 2), kernel("add", 5030, 30, 2),
        call("cudaDeviceSynchronize", 300, 4770, 3),
    ]  # fmt: skip
    alone, whole = converted(tmp_path, events, step="2"), converted(tmp_path, events)
    for found in (alone, whole):
        assert "gemm" in [found.trace.names[row] for row in range(len(found.trace))]
        assert times(found)["before"] == 0 and "work-unexplained-wait" not in found.report.warnings
        assert found.report.steps_us["2"] == 5400 - 5030
