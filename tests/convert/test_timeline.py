"""Lanes, nesting by time, and self time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.graph import timeline
from chakra_et.convert.graph.identify_communication import communication_rows
from chakra_et.convert.graph.timeline import Timeline
from chakra_et.traces import device as device_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL
from tests.generator import Features, generate
from tests.generator.hand_made import annotation, call, kernel, op, write_device


def build(folder: Path, *events: dict) -> tuple[DeviceTrace, Timeline]:
    device = device_trace.load(write_device(folder, list(events)))
    return device, timeline.build(device, communication_rows(device).cpu)


def pieces(device: DeviceTrace, time: Timeline, lane: int = 0) -> list[tuple[str, float, float]]:
    p = time.self_time
    return [
        (
            device.names[device.name[p.owner[at]]] if p.owner[at] >= 0 else "",
            p.start[at] / 1000,
            p.end[at] / 1000,
        )
        for at in np.flatnonzero(p.lane == lane)
    ]


def parents(device: DeviceTrace, time: Timeline) -> dict[str, str]:
    name = [device.names[code] for code in device.name]
    return {name[row]: name[at] if at >= 0 else "" for row, at in enumerate(time.parent.tolist())}


def test_self_time_before_between_and_after_children(tmp_path: Path) -> None:
    device, time = build(
        tmp_path, op("a", 0, 10), op("b", 2, 3), op("c", 6, 2), op("d", 6.5, 1), op("e", 12, 1)
    )
    assert pieces(device, time) == [
        ("a", 0, 2),
        ("b", 2, 5),
        ("a", 5, 6),
        ("c", 6, 6.5),
        ("d", 6.5, 7.5),
        ("c", 7.5, 8),
        ("a", 8, 10),
        ("", 10, 12),
        ("e", 12, 13),
    ]
    assert parents(device, time) == {"a": "", "b": "a", "c": "a", "d": "c", "e": ""}


def test_event_without_self_time_has_an_empty_segment(tmp_path: Path) -> None:
    device, time = build(tmp_path, op("a", 0, 4), op("b", 0, 4), op("c", 0, 4), op("zero", 6, 0))
    owners = [owner for owner, _, _ in pieces(device, time)]
    assert owners == ["a", "b", "c", "", "zero"]
    assert [(s, e) for _, s, e in pieces(device, time)] == [(0, 0), (0, 0), (0, 4), (4, 6), (6, 6)]


def test_event_that_ends_after_its_parent_is_clipped_and_counted(tmp_path: Path) -> None:
    device, time = build(tmp_path, op("a", 0, 5), op("b", 3, 4), op("c", 6, 2))
    assert pieces(device, time) == [("a", 0, 3), ("b", 3, 5), ("", 5, 6), ("c", 6, 8)]
    assert time.findings == {"clipped-event": 1, "clipped-ns": 2_000}


def test_each_thread_is_a_lane_main_thread_first(tmp_path: Path) -> None:
    _, time = build(
        tmp_path,
        op("w", 0, 50, tid=9),
        annotation("ProfilerStep#3", 1, 9, tid=7),
        op("a", 2, 3, tid=7),
        op("x", 3, 1, tid="text"),
    )
    assert [(lane.kind, lane.label) for lane in time.lanes] == [("cpu", "7"), ("cpu", "9"), ("cpu", "text")]
    assert time.main == 0


def test_without_steps_the_main_thread_is_the_busiest(tmp_path: Path) -> None:
    _, time = build(tmp_path, op("a", 0, 1, tid=9), op("b", 2, 30, tid=7))
    assert time.lanes[time.main].label == "7"


def test_each_stream_of_each_device_is_a_lane(tmp_path: Path) -> None:
    _, time = build(
        tmp_path, op("a", 0, 1), kernel("k", 2, 1), kernel("l", 2, 1, stream=20), kernel("m", 2, 1, device=1)
    )
    lanes = [(lane.device, lane.stream) for lane in time.lanes if lane.kind == "gpu"]
    assert lanes == [(0, 7), (0, 20), (1, 7)]


def test_work_that_overlaps_on_a_stream_gets_more_lanes(tmp_path: Path) -> None:
    device, time = build(
        tmp_path, op("a", 0, 1), kernel("k", 2, 5), kernel("l", 3, 5), kernel("m", 4, 5), kernel("n", 7, 1)
    )
    lane = {device.names[device.name[row]]: time.lanes[time.lane[row]].label for row in range(1, 5)}
    assert lane == {
        "k": "gpu 0 stream 7",
        "l": "gpu 0 stream 7 overlap 1",
        "m": "gpu 0 stream 7 overlap 2",
        "n": "gpu 0 stream 7",
    }


def test_a_trace_of_kernels_alone_has_a_lane_for_the_host(tmp_path: Path) -> None:
    _, time = build(tmp_path, kernel("k", 2, 5))
    assert [lane.kind for lane in time.lanes] == ["cpu", "gpu"] and len(time.self_time.owner) == 0


def test_steps_in_order_of_time(tmp_path: Path) -> None:
    device, _ = build(
        tmp_path,
        annotation("ProfilerStep#10", 20, 5),
        annotation("ProfilerStep#9", 1, 5),
        annotation("ProfilerStep#x", 9, 1),
    )
    assert [number for number, _ in device_trace.steps(device)] == [9, 10]


@pytest.mark.parametrize("seed", range(3))
def test_nesting_is_that_of_the_program(seed: int, tmp_path: Path) -> None:
    made = generate(Features(seed=seed, autograd_thread=True, waits=("item", "copy")))
    device, time = build(tmp_path, *made.device["traceEvents"])
    p = time.self_time
    assert (p.end >= p.start).all()
    for lane in np.unique(p.lane):
        of_lane = np.flatnonzero(p.lane == lane)
        assert (p.start[of_lane[1:]] == p.end[of_lane[:-1]]).all(), "a thread's pieces leave no gap"
    # Each event's own pieces add up to its length without its children's.
    rows = np.flatnonzero((time.lane >= 0) & (device.category < KERNEL))
    own = np.zeros(len(device), dtype=np.int64)
    np.add.at(own, p.owner[p.owner >= 0], (p.end - p.start)[p.owner >= 0])
    length = time.end - time.start
    children = np.zeros(len(device), dtype=np.int64)
    inner = rows[time.parent[rows] >= 0]
    np.add.at(children, time.parent[inner], length[inner])
    assert (own[rows] == (length - children)[rows]).all()


def test_deep_nesting_needs_no_recursion(tmp_path: Path) -> None:
    depth = 20_000
    device, time = build(tmp_path, *(op("f", n / 100, 2 * (depth - n) / 100) for n in range(depth)))
    assert (time.parent == np.arange(-1, depth - 1)).all()


def test_calls_nest_in_operators_that_start_with_them(tmp_path: Path) -> None:
    device, time = build(tmp_path, op("a", 1, 5, 3), call("cudaLaunchKernel", 1, 2, 9), op("z", 1, 5, 2))
    assert parents(device, time) == {"z": "", "a": "z", "cudaLaunchKernel": "a"}
