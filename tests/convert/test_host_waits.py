"""The clocks of host and device, and what hosts wait for. Times in µs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.convert.graph.launches import Scope, _last, scope_of, waits_for_copy
from chakra_et.convert.graph.nodes import EdgeKind
from tests.convert.test_causes import lengths
from tests.generator.hand_made import Stages, annotation, call, event, kernel, op, sync

Events = list[dict[str, Any]]


def stream_of(count: int, lasting: float, first: float = 20, every: float = 5, late: float = 0) -> Events:
    """``count`` launches, one every few µs, and their kernels back to back; ``late``: the device's clock."""
    return [
        each
        for at in range(count)
        for each in (
            call("hipLaunchKernel", 1 + every * at, 2, at + 1),
            kernel(f"k{at}", first + lasting * at + late, lasting, at + 1),
        )
    ]


def pending_device(late: float) -> Events:
    """The last of four kernels ends 98 µs after the recording began, and the host waits until 100."""
    return [
        op("aten::mm", 0, 21, 3),
        *stream_of(4, 20, 18, late=late),
        call("hipDeviceSynchronize", 30, 70, 60),
        op("after", 110, 10, 4),
    ]


def test_work_that_ends_8_us_after_the_wait_for_it(tmp_path: Path) -> None:
    """Found on an MI300X: 17 ms of hipDeviceSynchronize were kept as work, beyond a tolerance of 5 µs."""
    stages = Stages(tmp_path, pending_device(10))
    (clock,) = stages.rank.clocks
    assert clock.most_ns == -8_000 and clock.least_ns == -27_000 and clock.offset_ns == -17_500
    assert stages.rank.findings["clock-offset:0"] == 17_500 and clock.contradicting == 0
    assert ("k3", "hipDeviceSynchronize") in stages.edges(EdgeKind.SYNCHRONISATION)
    assert lengths(stages)["hipDeviceSynchronize"] == 100 - (98 - 7.5) and stages.replayed()


def test_clocks_that_the_bounds_allow_stay(tmp_path: Path) -> None:
    stages = Stages(tmp_path, pending_device(0))
    (clock,) = stages.rank.clocks
    assert clock.offset_ns == 0 and clock.most_ns == 2_000 and clock.pairs == 5
    assert "clock-offset:0" not in stages.rank.findings
    assert lengths(stages)["hipDeviceSynchronize"] == 2 and stages.replayed()


def test_kernels_that_start_before_their_launch(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [op("a", 0, 9, 3), call("cudaLaunchKernel", 5, 3, 50), kernel("k", 3, 4, 50)])
    assert stages.rank.clocks[0].offset_ns == 2_000
    assert ("k", 5, 9) in stages.nodes() and stages.replayed()


def test_a_wait_for_other_work_is_no_bound(tmp_path: Path) -> None:
    """A synchronisation of another context returns long before this one's work ends: no clock's fault."""
    events = [*pending_device(0), call("hipDeviceSynchronize", 24, 2, 61)]
    (clock,) = Stages(tmp_path, events).rank.clocks
    assert clock.offset_ns == 0 and clock.contradicting == 1


def test_one_early_return_of_a_busy_device_is_no_bound(tmp_path: Path) -> None:
    """The device lags by milliseconds, so launches bound nothing, and the wait was for another context."""
    events = [
        op("aten::mm", 0, 50, 3), *stream_of(4, 2000, 5000), call("hipDeviceSynchronize", 60, 12_400, 60),
        op("after", 13_100, 10, 4),
    ]  # fmt: skip
    (clock,) = Stages(tmp_path, events).rank.clocks
    assert clock.offset_ns == 0 and clock.contradicting == 1


def test_a_clock_that_drifts(tmp_path: Path) -> None:
    """100 µs per second: no constant offset fits the first and the last waits."""
    events: Events = [op("aten::mm", 0, 5, 3)]
    for at in range(40):
        begin = 50_000.0 * at
        off = 1e-4 * begin
        events += [
            call("cudaLaunchKernel", begin + 10, 4, 2 * at + 1),
            kernel("k", begin + 16 + off, 200, 2 * at + 1),
            call("cudaStreamSynchronize", begin + 20, 200, 2 * at + 2),
        ]
    stages = Stages(tmp_path, events)
    (clock,) = stages.rank.clocks
    assert clock.drift == pytest.approx(-1e-4, rel=0.05) and clock.contradicting == 0
    assert lengths(stages)["cudaStreamSynchronize"] < 40 * 8 and stages.replayed()


@pytest.mark.parametrize(
    ("call_name", "copy", "waits"),
    (
        ("hipMemcpyWithStream", "Memcpy HtoD (Host -> Device)", True),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", True),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", False),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", False),
        ("cudaMemcpy", "Memcpy HtoD (Pageable -> Device)", False),
        ("cuMemcpyDtoH_v2", "Memcpy DtoH (Device -> Pinned)", True),
    ),
)
def test_calls_that_wait_for_their_copy(call_name: str, copy: str, waits: bool) -> None:
    assert waits_for_copy(call_name, copy) == waits


@pytest.mark.parametrize(
    ("name", "scope"),
    (
        ("cudaDeviceSynchronize", Scope.DEVICE), ("cuCtxSynchronize", Scope.DEVICE),
        ("hipFree", Scope.DEVICE),
        ("cuStreamSynchronize_ptsz", Scope.STREAM), ("hipStreamSynchronize", Scope.STREAM),
        ("zeCommandQueueSynchronize", Scope.STREAM), ("zeEventHostSynchronize", Scope.EVENT),
        ("hipEventSynchronize", Scope.EVENT), ("mtiaDeviceSynchronize", Scope.DEVICE),
        ("cudaLaunchKernel", None), ("cudaFreeHost", None),
    ),
)  # fmt: skip
def test_calls_of_every_api(name: str, scope: Scope | None) -> None:
    assert scope_of(name) is scope


def test_copies_that_end_just_after_their_call(tmp_path: Path) -> None:
    """Found in an MI300X trace: copies that end 1.85 µs after the blocking call counted as 173 ms of work."""
    events = [
        op("aten::mm", 0, 10, 3),
        *stream_of(2, 500, 30),
        call("hipMemcpyWithStream", 15, 1033, 60),
        kernel("Memcpy HtoD (Host -> Device)", 1035, 14.85, 60),
        op("after", 1060, 10, 4),
    ]
    stages = Stages(tmp_path, events)
    assert stages.rank.clocks[0].most_ns == -1_850
    assert lengths(stages)["hipMemcpyWithStream"] < 20 and stages.replayed()


def test_item_without_runtime_calls(tmp_path: Path) -> None:
    """Some traces hold operators and kernels only: the copy of .item() has the operator as its launch."""
    events = [
        op("aten::mm", 0, 5, 3),
        kernel("k", 10, 500, **{"External id": 3}),
        op("aten::item", 20, 500, 4),
        op("aten::_local_scalar_dense", 21, 498, 5),
        kernel("Memcpy DtoH (Device -> Pageable)", 510, 2, **{"External id": 5}),
        op("after", 540, 10, 6),
    ]
    stages = Stages(tmp_path, events)
    assert lengths(stages)["aten::_local_scalar_dense"] < 20 and stages.replayed()


@pytest.mark.parametrize(("depth", "count"), [(1020, 1215), (200, 278), (200, 1000)])
def test_launches_into_a_full_queue_wait(depth: int, count: int, tmp_path: Path) -> None:
    """Found on a V100: 1,067 launches block with about 1,020 kernels pending, for 238 ms. In a step that the
    device bounds, most of all launches may."""
    lasting, begin, events = 40.0, 20.0, [op("aten::mm", 0, 1, 3)]
    ready = 2.0
    for at in range(count):
        freed = begin + lasting * (at - depth + 1)
        ends = max(ready + 4, freed + 2)  # once the kernel ``depth`` places before it is done
        events += [
            call("cudaLaunchKernel", ready, ends - ready, at + 1),
            kernel("k", begin + lasting * at, 40, at + 1),
        ]
        ready = ends + 1
    stages = Stages(tmp_path, events)
    (key,) = (each for each in stages.causes.findings if each.startswith("queue-full"))
    assert abs(int(key.partition(":")[2]) - depth) <= 1 and stages.causes.findings[key] >= 40
    assert lengths(stages)["cudaLaunchKernel"] < 5 * count and stages.replayed()


def test_a_launch_that_loads_its_module_is_work(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 1, 3), *stream_of(100, 6), call("cudaLaunchKernel", 900, 5000, 900)]
    stages = Stages(tmp_path, [*events, kernel("new", 5910, 10, 900)])
    assert lengths(stages)["cudaLaunchKernel"] == 5000


def test_a_loop_of_queries_waits_for_the_device(tmp_path: Path) -> None:
    """A host that asks cudaEventQuery in a loop of Python: the calls and what is between them is waiting."""
    queries = [call("cudaEventQuery", 30 + 10 * at, 2, 100 + at) for at in range(50)]
    events = [op("aten::mm", 0, 5, 3), *stream_of(2, 250, 18), *queries, op("after", 545, 5, 4)]
    stages = Stages(tmp_path, events)
    assert stages.causes.findings["host-spun"] == 1
    assert ("k1", "overhead") in stages.edges(EdgeKind.SYNCHRONISATION)
    assert lengths(stages)["cudaEventQuery"] <= 4 and stages.replayed()


def spinning(layers: int, off: float) -> Events:
    """Each layer's host goes on ``off`` µs after its kernel has ended, with nothing recorded in between."""
    events: Events = [annotation("ProfilerStep#1", 0, 2000.0 * layers + 50, 1)]
    for at in range(layers):
        begin = 2000.0 * at + 5
        events += [
            op("dispatch", begin, 20, 10 + at),
            call("cudaLaunchKernel", begin + 5, 5, at + 1),
            kernel("notify_dispatch", begin + 30, 1900, at + 1),
            op("next", begin + 1930 + off, 10, 100 + at),
        ]
    return events


def test_a_host_that_spins_until_a_kernel_has_ended(tmp_path: Path) -> None:
    """Found on an H800: DeepEP's host waits in C++ for the counts that a kernel writes, and a step whose GPU
    is busy for 99.6% seemed to be 61% host overhead."""
    stages = Stages(tmp_path, spinning(4, 2))
    assert stages.causes.findings["host-spun"] == 4 and stages.replayed()
    assert lengths(stages)["ProfilerStep#1"] < 4 * 150


def test_gaps_between_operators_do_not_hide_those_that_wait(tmp_path: Path) -> None:
    """Two gaps of 10 µs after each launch, before the long one: none of them needs a cause."""
    between = [op("prepare", 2000.0 * at + begin, 5, 200 + at) for at in range(4) for begin in (35, 50)]
    stages = Stages(tmp_path, [*spinning(4, 2), *between])
    assert stages.causes.findings["host-spun"] == 4 and lengths(stages)["ProfilerStep#1"] < 4 * 150


def test_a_thread_whose_own_work_has_ended_does_not_wait_for_anothers(tmp_path: Path) -> None:
    """The thread's only kernel starts with its call, so that it is the first event of all."""
    events = [call("cudaLaunchKernel", 0, 3, 100), kernel("first", 0, 20, 100)]
    for at in range(4):
        end = 2000.0 * at + 1935
        events += [
            call("cudaLaunchKernel", 5 + 10 * at, 5, at + 1, tid=20),
            kernel("of the other thread", end - 1900, 1900, at + 1, stream=20 + at),
            op("next", end + 2, 10, 100 + at),
        ]
    assert "host-spun" not in Stages(tmp_path, events).causes.findings


def test_a_host_that_is_told_before_the_kernel_ends(tmp_path: Path) -> None:
    """The kernel writes what the host polls, and ends 3 µs later: what ran before it is waited for."""
    events = spinning(4, -1903)
    queued = [
        each
        for at in range(4)
        for each in (
            call("cudaLaunchKernel", 2000.0 * at + 6, 2, 50 + at),
            kernel("before", 2000.0 * at + 20, 1800, 50 + at),
        )
    ]
    events = [each | {"ts": each["ts"] + 1900} if each["name"] == "next" else each for each in events]
    events = [
        each | {"ts": each["ts"] + 1790, "dur": 110} if each["name"] == "notify_dispatch" else each
        for each in events
    ]
    stages = Stages(tmp_path, [*events, *queued])
    assert stages.causes.findings["host-spun"] == 4 and stages.replayed()
    assert lengths(stages)["ProfilerStep#1"] < 4 * 300


def test_queries_inside_an_operator(tmp_path: Path) -> None:
    queries = [call("cudaEventQuery", 40 + 10 * at, 2, 100 + at) for at in range(49)]
    stages = Stages(
        tmp_path, [op("aten::mm", 0, 5, 3), *stream_of(2, 250, 18), op("wait", 30, 520, 4), *queries]
    )
    assert stages.causes.findings["host-spun"] == 1 and stages.replayed()
    assert lengths(stages)["wait"] <= 40


def test_gaps_that_end_long_after_the_device_are_work(tmp_path: Path) -> None:
    stages = Stages(tmp_path, spinning(4, 50))
    assert "host-spun" not in stages.causes.findings and lengths(stages)["ProfilerStep#1"] > 4 * 1900


def test_one_gap_that_ends_with_the_device_may_be_chance(tmp_path: Path) -> None:
    events = [*spinning(4, 50), op("one", 8100, 5, 200), call("cudaLaunchKernel", 8101, 2, 90)]
    events += [kernel("k", 8110, 100, 90), op("two", 8211, 5, 201)]
    assert "host-spun" not in Stages(tmp_path, events).causes.findings


def test_a_stream_of_several_is_known_by_its_launch(tmp_path: Path) -> None:
    """Without cuda_sync records: what the thread launched last before, not what ended nearest."""
    events = [
        op("aten::mm", 0, 105, 3),
        call("cudaLaunchKernel", 1, 2, 50),
        kernel("side", 20, 78, 50, stream=20),
        call("cudaMemcpyAsync", 6, 2, 51),
        kernel("Memcpy DtoH (Device -> Pinned)", 60, 30, 51),
        call("cudaStreamSynchronize", 10, 90, 60),
        op("after", 110, 1, 4),
    ]
    stages = Stages(tmp_path, events)
    waited = {a for a, b in stages.edges(EdgeKind.SYNCHRONISATION) if b == "cudaStreamSynchronize"}
    assert waited == {"Memcpy DtoH (Device -> Pinned)"}
    assert stages.causes.findings["sync-by-time"] == 1
    known = Stages(tmp_path, [*events, sync("Stream Sync", 10, 90, 60, 7)])
    assert "sync-by-time" not in known.causes.findings


def test_a_recorded_gap_needs_no_device(tmp_path: Path) -> None:
    assert Stages(tmp_path, [op("a", 0, 5, 3), event("cpu_op", "b", 500, 5)]).causes.findings == {}


def test_bounds_of_a_clock_leave_one_outlier_in_a_hundred_out() -> None:
    shuffled = np.random.default_rng(0).permutation
    assert [_last(shuffled(count)) for count in (1, 99, 100, 1000)] == [0, 98, 98, 989]
