"""Allocations and frees: from the profiler's events to the nodes' attributes and to peaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.inputs import find_run
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.et import memory as names
from chakra_et.et.columns import ExecutionTrace
from chakra_et.report.run import load
from chakra_et.report.timeline import curves, largest_peak, usage
from chakra_et.text import size
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, op, write_kineto
from tests.shared import shared_path

COUNTED = ("allocations", "frees", "allocated_bytes_in_node", "freed_bytes_in_node")


def memory(ts: float, size: int, after: int | None, device: int = -1, kind: int = 0, **more: Any) -> dict:
    totals = {} if after is None else {"Total Allocated": after, "Total Reserved": 1000 if kind else 0}
    args = {"Bytes": size, "Device Type": kind, "Device Id": device, "Addr": 7, **totals}
    return {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1,
            "ts": ts, "args": args | more}  # fmt: skip


STEP = [
    annotation("ProfilerStep#0", 0, 100), op("aten::empty", 10, 20), op("aten::mm", 40, 20),
    annotation("ProfilerStep#1", 100, 100), op("aten::add", 110, 20),
]  # fmt: skip


def converted(folder: Path, *events: dict, **options: Any) -> tuple[ExecutionTrace, dict[str, int]]:
    path = write_kineto(folder / "run_device.json", [*STEP, *events])
    found = convert_pair(Pair(0, None, path), PairOptions(**options))
    return found.trace, dict(found.report.findings)


def values(trace: ExecutionTrace, device: str, field: str) -> list[tuple[str, int]]:
    """(name of the node, value) of each node that has the attribute."""
    attribute = trace.attributes[names.attribute(device, field)]
    return [
        (trace.names[row], value)
        for row, value in zip(attribute.rows.tolist(), attribute.values.tolist(), strict=True)
    ]


def test_a_node_has_the_level_after_it_and_the_peak_within(tmp_path: Path) -> None:
    trace, findings = converted(
        tmp_path,
        memory(15, 400, 600, 0, 1), memory(20, 200, 800, 0, 1), memory(25, -200, 600, 0, 1),
        memory(45, 64, 64), memory(115, -400, 200, 0, 1),
    )  # fmt: skip
    gpu = {field: values(trace, "gpu0", field) for field in names.FIELDS}
    assert gpu[names.ALLOCATED] == [("aten::empty", 600), ("aten::add", 200)]
    # The level at a node's beginning counts too.
    assert gpu[names.PEAK] == [("aten::empty", 800), ("aten::add", 600)]
    assert gpu[names.RESERVED] == [("aten::empty", 1000), ("aten::add", 1000)]
    assert gpu[names.ALLOCATIONS] == [("aten::empty", 2), ("aten::add", 0)]
    assert gpu[names.FREES] == [("aten::empty", 1), ("aten::add", 1)]
    assert gpu[names.ALLOCATED_IN] == [("aten::empty", 600), ("aten::add", 0)]
    assert gpu[names.FREED_IN] == [("aten::empty", 200), ("aten::add", 400)]
    assert values(trace, "cpu", names.ALLOCATED) == [("aten::mm", 64)]
    assert names.devices(trace) == ["cpu", "gpu0"]
    assert names.attribute("cpu", names.RESERVED) not in trace.attributes
    assert findings["memory-event"] == 5


def test_python_frees_between_operators_are_kept(tmp_path: Path) -> None:
    trace, _ = converted(tmp_path, memory(15, 100, 100), memory(70, -100, 0))
    frees = names.attribute("cpu", names.FREES)
    assert trace.column(frees).sum() == 1
    assert trace.column(names.attribute("cpu", names.ALLOCATIONS)).sum() == 1


def test_one_step_has_its_own_memory_only(tmp_path: Path) -> None:
    events = memory(15, 100, 100), memory(115, 50, 150)
    trace, findings = converted(tmp_path, *events, step="1")
    assert values(trace, "cpu", names.PEAK) == [("aten::add", 150)]
    assert findings["memory-event"] == 1


def test_events_without_a_usable_field_are_left_out_and_counted(tmp_path: Path) -> None:
    trace, findings = converted(
        tmp_path, memory(15, 100, 100), memory("x", 1, 1), memory(16, [2], 3), memory(17, 10**30, 1),
        memory(18, 1, 1, 10**12, 1), {**memory(19, 1, 1), "args": {}}, memory(20, 1, None),
    )  # fmt: skip
    assert values(trace, "cpu", names.ALLOCATED) == [("aten::empty", 100)]
    assert findings["bad-memory-event"] == 6


def test_a_trace_without_memory_has_no_such_attribute(tmp_path: Path) -> None:
    trace, findings = converted(tmp_path)
    assert not [name for name in trace.attributes if names.is_memory(name)]
    assert "memory-event" not in findings


def test_a_real_run_has_the_peak_that_its_program_allocated(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from chakra_et.capture.tracer import ChakraTracer

    with ChakraTracer(tmp_path, "real", 0, 1, 1, memory=True) as tracer:
        for _ in range(2):
            large = torch.zeros(3_000_000)
            larger = large + 1
            del large
            larger.sum()
            del larger
            tracer.step()
    events = json.loads((tmp_path / "real_device.json").read_bytes())["traceEvents"]
    begin = next(event["ts"] for event in events if event["name"] == "ProfilerStep#1")
    memory_events = [event for event in events if event["name"] == "[memory]"]
    recorded = [event["args"] for event in memory_events if event["ts"] >= begin]
    run = load(find_run([str(tmp_path / "real")]))
    (found,) = usage(run)
    assert found["peak_bytes"] == max(each["Total Allocated"] for each in recorded)
    assert 24_000_000 <= found["peak_bytes"] < 24_100_000
    count = {name: int(run.traces[0].column(f"cpu_{name}").sum()) for name in COUNTED}
    assert count["allocations"] == sum(each["Bytes"] > 0 for each in recorded)
    assert count["frees"] == sum(each["Bytes"] < 0 for each in recorded)
    assert count["allocated_bytes_in_node"] == sum(each["Bytes"] for each in recorded if each["Bytes"] > 0)
    assert count["freed_bytes_in_node"] >= 24_000_000
    (curve,) = curves(run)
    assert (curve.time_ns[1:] >= curve.time_ns[:-1]).all()
    assert curve.allocated.max() == found["peak_bytes"]
    assert curve.allocated[-1] == recorded[-1]["Total Allocated"]


def test_a_real_gpu_trace_has_the_caching_allocators_peaks() -> None:
    path = shared_path("data/traces/public/pairs", "h100_bert-small-uncased.json.gz")
    run = load(find_run([str(path / "h100_bert-small-uncased.json.gz")]))
    found, names = usage(run), ("device", "peak_bytes", "reserved_bytes")
    assert [[each[name] for name in names] for each in found] == [
        ["cpu", 16, None], ["gpu 0", 101_305_344, 121_634_816],
    ]  # fmt: skip
    assert [int(run.traces[0].column(f"{name}_frees").sum()) for name in ("cpu", "gpu0")] == [9, 109]
    assert largest_peak(found)["peak_bytes"] == 101_305_344


def test_sizes_are_short() -> None:
    assert [size(each) for each in (None, 0, 999, 1000, 101_305_344, 4_490_752_000)] == [
        "-", "0 B", "999 B", "1.00 kB", "101 MB", "4.49 GB",
    ]  # fmt: skip
