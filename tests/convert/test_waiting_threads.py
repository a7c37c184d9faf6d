"""Threads that only wait do no work, however late they resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import (
    annotation,
    call,
    event,
    kernel,
    node,
    op,
    tensor,
    write_device,
    write_host,
    write_kineto,
)


def watchdog(name: str = "", count: int = 20) -> list[dict[str, Any]]:
    """NCCL's watchdog polls every 50 µs whether a kernel is done."""
    polls = [call("cudaEventQuery", 10 + 50 * at, 45, 1000 + at, tid=99) for at in range(count)]
    if name:
        polls.append(call("cudaEventDestroy", 10 + 50 * count, 5, 3000, tid=99))
        polls.append({"ph": "M", "name": "thread_name", "pid": 10, "tid": 99, "args": {"name": name}})
    return polls


def work() -> list[dict[str, Any]]:
    return [
        op("aten::mm", 0, 1000), call("cudaLaunchKernel", 10, 5, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 30, 900, 1, stream=20),
    ]  # fmt: skip


def lanes(converted: Converted) -> list[str]:
    lanes = json.loads(converted.trace.metadata["lanes"])
    return [lane["label"] for lane in lanes if lane["kind"] == "cpu"]


@pytest.mark.parametrize("name", ["", "pt_nccl_watchdg"])
def test_a_thread_that_only_polls_has_no_lane(name: str, tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "one.json", [*work(), *watchdog(name)])
    converted = convert_pair(Pair(-1, None, path))
    assert lanes(converted) == ["10"]
    assert converted.report.losses["polling-call"] == len([e for e in watchdog(name) if e["ph"] == "X"])
    assert converted.report.conserved()


def test_a_thread_that_also_works_keeps_its_lane(tmp_path: Path) -> None:
    events = [*work(), *watchdog(), op("aten::add", 2000, 5, tid=99)]
    converted = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", events)))
    assert lanes(converted) == ["10", "99"] and "polling-call" not in converted.report.losses


def gloo(wait: str, wakes: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An all-reduce of 1 ms on gloo's thread; the main thread works for 100 µs and then waits for it."""
    reduced = tensor(7, 64)
    events = [
        op("_c10d_functional::all_reduce", 0, 20, rf=1),
        event("cpu_op", "gloo:all_reduce", 30, 1000, 77, **{"Record function id": 2, "External id": 2}),
        op("aten::mul", 50, 100, rf=3),
        op("aten::relu", 160, 30, rf=4),
        op(wait, 200, wakes - 200, rf=5),
        op("aten::add", wakes + 10, 20, rf=6),
    ]
    nodes = [
        node("_c10d_functional::all_reduce", 1, [reduced, "sum", "0"], ["Tensor(float)", "String", "String"]),
        node("gloo:all_reduce", 2, [reduced], ["Tensor(float)"]),
        node(wait, 5, [tensor(8, 64)], ["Tensor(float)"]),
    ]
    return events, nodes


@pytest.mark.parametrize("wakes", [1031, 1900])
@pytest.mark.parametrize("wait", ["_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"])
def test_wait_tensor_is_a_wait_however_late_it_resumes(wait: str, wakes: float, tmp_path: Path) -> None:
    """It returns another tensor, so only its name identifies it as a wait."""
    events, nodes = gloo(wait, wakes)
    nodes += [
        node(e["name"], e["args"]["Record function id"]) for e in events if e["name"].startswith("aten")
    ]
    pair = Pair(-1, write_host(tmp_path, nodes), write_device(tmp_path, events))
    converted = convert_pair(pair)
    trace = converted.trace
    rows = [row for row in range(len(trace)) if trace.names[row] == wait]
    spent = sum(int(trace.duration_micros[row]) for row in rows)
    assert spent <= 1  # a mark, and the µs to wake up
    assert converted.report.notes["wait-blocked"] == 1
    # What the scheduler took to wake the thread is overhead, and named so.
    late = sum(
        int(trace.duration_micros[row])
        for row in range(len(trace))
        if trace.names[row] == "host-overhead" and 1025 <= trace.start_micros[row] <= 1035
    )
    assert abs(late - (wakes - 1030)) <= 1 or wakes == 1031


def test_another_operator_that_runs_on_after_the_end_is_work(tmp_path: Path) -> None:
    events, nodes = gloo("aten::sort", 1900)
    nodes += [node(e["name"], e["args"]["Record function id"]) for e in events if e["name"].startswith("aten")
              and e["name"] != "aten::sort"]  # fmt: skip
    pair = Pair(-1, write_host(tmp_path, nodes), write_device(tmp_path, events))
    trace = convert_pair(pair).trace
    spent = sum(int(trace.duration_micros[r]) for r in range(len(trace)) if trace.names[r] == "aten::sort")
    assert spent == 1700


def joined(late: float, count: int = 4) -> list[dict[str, Any]]:
    """The main thread hands work to another one and sleeps until that is done, ``late`` µs after it."""
    return [annotation("ProfilerStep#1", 0, 10_000 * count)] + [
        each
        for at in range(count)
        for each in (
            op("aten::to", 10_000 * at, 100), op("collate", 10_000 * at + 150, 6000 + 500 * at, tid=20),
            op("aten::mm", 10_000 * at + 6150 + 500 * at + late, 100),
        )
    ]  # fmt: skip


def test_a_gap_that_ends_when_another_thread_is_done_waits_for_it(tmp_path: Path) -> None:
    """As ``thread.join()`` or a queue in Python, which records nothing."""
    converted = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", joined(8))))
    assert converted.report.notes["thread-waited"] == 4
    path = converted.report.critical_path_us
    assert (path["operator"], path["host-overhead"]) == (27_800, 12_200)


@pytest.mark.parametrize(("late", "count"), [(400, 4), (8, 1)], ids=["late", "perhaps by chance"])
def test_another_thread_that_was_done_before_is_no_cause(late: float, count: int, tmp_path: Path) -> None:
    converted = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", joined(late, count))))
    assert "thread-waited" not in converted.report.notes
