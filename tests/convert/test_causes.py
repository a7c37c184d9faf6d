"""Launches, waits between streams and waits for the device, case by case. Times in µs."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.convert.graph.nodes import EdgeKind
from tests.generator.hand_made import Stages, annotation, call, kernel, op, sync


def lengths(stages: Stages) -> dict[str, float]:
    """µs of all nodes by name."""
    total: dict[str, float] = {}
    for name, start, end in stages.nodes():
        total[name] = total.get(name, 0) + end - start
    return total


def test_launch_by_correlation_id(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path,
        [
            op("aten::mm", 0, 10, 3),
            call("cudaLaunchKernel", 1, 3, 50),
            call("cuLaunchKernel", 6, 2, 51),
            kernel("k", 5, 4, 50),
            kernel("l", 9, 1, 51),
        ],
    )
    assert stages.edges(EdgeKind.LAUNCH) == {("cudaLaunchKernel", "overhead"), ("cuLaunchKernel", "l")}
    assert ("overhead", "k") in stages.edges() and ("k", "l") in stages.edges(EdgeKind.STREAM_ORDER)
    assert stages.replayed()


def test_driver_call_within_a_runtime_call_launches(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path,
        [
            op("aten::mm", 0, 9, 3),
            call("cudaLaunchKernel", 1, 5, 50),
            call("cuLaunchKernel", 2, 3, 50),
            kernel("k", 6, 4, 50),
        ],
    )
    assert stages.edges(EdgeKind.LAUNCH) == {("cudaLaunchKernel", "k")} and stages.replayed()


def test_graph_launch_starts_many_kernels(tmp_path: Path) -> None:
    kernels = [kernel(f"k{n}", 5 + n, 1, 50, stream=7 + n % 2) for n in range(6)]
    stages = Stages(tmp_path, [op("aten::mm", 0, 5, 3), call("cudaGraphLaunch", 1, 3, 50), *kernels])
    assert stages.edges(EdgeKind.LAUNCH) == {("cudaGraphLaunch", "overhead")}
    assert (stages.graph.edge_kind == EdgeKind.LAUNCH).sum() == 6 and stages.replayed()


def test_work_without_a_runtime_call_depends_on_its_operator(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path,
        [
            op("a", 0, 2, 3),
            annotation("long", 3, 60, 4),
            call("cudaLaunchKernel", 4, 1, 9),
            kernel("k", 5, 3, 9),
            kernel("unseen", 20, 5, 77, **{"External id": 4}),
        ],
    )
    (source,) = {a for a, b in stages.edges(EdgeKind.LAUNCH) if a != "cudaLaunchKernel"}
    assert source == "long", "as soon as what the stream was given before it"
    assert stages.replayed()


def test_work_without_a_launch_is_ordered_by_stream_and_counted(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path, [op("a", 0, 2, 3), kernel("o1", 5, 1, 70), kernel("o2", 7, 1), kernel("m", 8, 1, stream=9)]
    )
    assert stages.causes.findings["no-launch"] == 3
    assert ("o1", "overhead") in stages.edges(EdgeKind.STREAM_ORDER)
    assert stages.edges(EdgeKind.INTER_THREAD) == {("a", "overhead")}
    assert stages.replayed()


def copy_of(start: float, end: float, *more: dict) -> list[dict]:
    return [
        op("aten::copy_", 0, 30, 3),
        call("cudaMemcpyAsync", 5, 20, 50),
        kernel("Memcpy DtoH (Device -> Pageable)", start, end - start, 50),
        *more,
    ]


def test_blocking_copy_is_a_wait(tmp_path: Path) -> None:
    stages = Stages(tmp_path, copy_of(8, 24))
    assert lengths(stages)["cudaMemcpyAsync"] == 3 + 1, "until the copy began, and after it"
    assert ("Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync") in stages.edges(EdgeKind.SYNCHRONISATION)
    assert stages.causes.findings["blocking-copy"] == 1 and stages.replayed()


def test_blocking_copy_behind_a_kernel_waits_for_both(tmp_path: Path) -> None:
    before = [call("cudaLaunchKernel", 1, 1, 49), kernel("k", 3, 17, 49)]
    stages = Stages(tmp_path, copy_of(20, 24, *before))
    assert lengths(stages)["cudaMemcpyAsync"] == 1
    assert stages.replayed()


@pytest.mark.parametrize("busy", [True, False])
def test_a_memset_that_lasts_until_the_stream_is_free_waits(busy: bool, tmp_path: Path) -> None:
    before = [call("cudaLaunchKernel", 1, 1, 49), kernel("k", 3, 17 if busy else 1, 49)]
    memset = [call("cudaMemset", 5, 20, 50), kernel("Memset (Device)", 20, 3, 50)]
    stages = Stages(tmp_path, [op("aten::zero_", 0, 30, 3), *before, *memset])
    assert lengths(stages)["cudaMemset"] == (2 if busy else 20)
    assert stages.replayed()


def test_asynchronous_copy_is_no_wait(tmp_path: Path) -> None:
    stages = Stages(tmp_path, copy_of(8, 40))
    assert lengths(stages)["cudaMemcpyAsync"] == 20 and "blocking-copy" not in stages.causes.findings


LAUNCHES = [
    op("aten::mm", 0, 5, 3),
    call("cudaLaunchKernel", 1, 1, 50),
    call("cudaLaunchKernel", 3, 1, 51),
    kernel("k", 2, 50, 50),
    kernel("side", 4, 20, 51, stream=20),
]
WAITS = {
    "cudaDeviceSynchronize": (sync("Context Sync", 10, 45, 60, -1), {"k", "side"}, 52),
    "cudaStreamSynchronize": (sync("Stream Sync", 10, 45, 60, 20), {"side"}, 24),
    "cudaEventSynchronize": (
        sync("Event Sync", 10, 45, 60, -1, wait_on_stream=7, wait_on_cuda_event_record_corr_id=52),
        {"k"},
        52,
    ),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("dialect", ("cuda", "hip"))
def test_synchronising_call_waits_and_keeps_its_self_time(name: str, dialect: str, tmp_path: Path) -> None:
    record, sources, done = WAITS[name]
    name = name.replace("cuda", dialect)
    waiting = [call("cudaEventRecord", 6, 1, 52), call(name, 10, done - 8, 60), op("after", 70, 1, 4)]
    stages = Stages(tmp_path, [*LAUNCHES, *waiting, record])
    assert {a for a, b in stages.edges(EdgeKind.SYNCHRONISATION) if b == name} == sources
    assert lengths(stages)[name] == 2 and stages.replayed()


@pytest.mark.parametrize("name", WAITS)
def test_synchronisation_without_sync_records_is_matched_by_time(name: str, tmp_path: Path) -> None:
    _, sources, done = WAITS[name]
    stages = Stages(tmp_path, [*LAUNCHES, call(name, 10, done - 8, 60), op("after", 70, 1, 4)])
    found = {a for a, b in stages.edges(EdgeKind.SYNCHRONISATION) if b == name}
    assert found <= sources and len(found) >= 1
    assert lengths(stages)[name] == 2 and stages.replayed()


def test_call_that_returns_immediately_is_no_wait(tmp_path: Path) -> None:
    events = [*LAUNCHES, call("cudaStreamSynchronize", 60, 4, 60), sync("Stream Sync", 60, 4, 60, 7)]
    stages = Stages(tmp_path, events)
    assert lengths(stages)["cudaStreamSynchronize"] == 4
    # It would have waited, had the kernel been slower.
    assert ("k", "overhead") in stages.edges() or ("k", "cudaStreamSynchronize") in stages.edges()


def test_work_that_ends_after_the_wait_is_not_its_source(tmp_path: Path) -> None:
    """A synchronisation with a stream that is not in the trace, or with another context."""
    stages = Stages(tmp_path, [*LAUNCHES, call("cudaDeviceSynchronize", 10, 4, 60)])
    assert stages.edges(EdgeKind.SYNCHRONISATION) == set() and lengths(stages)["cudaDeviceSynchronize"] == 4


def test_devices_are_synchronised_separately(tmp_path: Path) -> None:
    """Found on a process with two GPUs: cudaDeviceSynchronize waited for the other one too."""
    events = [
        op("aten::mm", 0, 5, 3),
        call("cudaLaunchKernel", 1, 1, 50),
        call("cudaLaunchKernel", 3, 1, 51),
        kernel("k0", 2, 50, 50),
        kernel("k1", 4, 20, 51, device=1),
        call("cudaDeviceSynchronize", 10, 15, 60),
        sync("Context Sync", 10, 15, 60, -1, device=1),
    ]
    stages = Stages(tmp_path, events)
    assert stages.edges(EdgeKind.SYNCHRONISATION) == {("k1", "cudaDeviceSynchronize")}


FENCE = [
    op("aten::mm", 0, 20, 3),
    call("cudaLaunchKernel", 1, 1, 50),
    call("cudaEventRecord", 3, 1, 51),
    call("cudaStreamWaitEvent", 5, 1, 52),
    call("cudaLaunchKernel", 7, 1, 53),
    call("cudaLaunchKernel", 9, 1, 54),
    kernel("first", 2, 50, 50),
    kernel("waits", 52, 5, 53, stream=20),
    kernel("next", 57, 5, 54, stream=20),
]


@pytest.mark.parametrize("stream", (7, "7"))
def test_stream_waits_for_an_event_on_another_stream(stream, tmp_path: Path) -> None:
    record = sync(
        "Stream Wait Event", 5, 1, 52, 20, wait_on_stream=stream, wait_on_cuda_event_record_corr_id=51
    )
    stages = Stages(tmp_path, [*FENCE, record])
    assert stages.edges(EdgeKind.SYNCHRONISATION) == {("first", "waits")} and stages.replayed()


def test_the_default_stream_is_waited_for(tmp_path: Path) -> None:
    events = [
        event | {"args": event["args"] | {"stream": 0}} if event["args"].get("stream") == 7 else event
        for event in FENCE
    ]
    record = sync("Stream Wait Event", 5, 1, 52, 20, wait_on_stream=0, wait_on_cuda_event_record_corr_id=51)
    stages = Stages(tmp_path, [*events, record])
    assert stages.edges(EdgeKind.SYNCHRONISATION) == {("first", "waits")}
    assert "stream-wait-no-record" not in stages.causes.findings


@pytest.mark.parametrize("record", ([], [sync("Stream Wait Event", 5, 1, 52, 20, wait_on_stream=-1)]))
def test_stream_wait_without_a_usable_record_is_found_by_time(record: list[dict], tmp_path: Path) -> None:
    stages = Stages(tmp_path, [*FENCE, *record])
    assert stages.edges(EdgeKind.SYNCHRONISATION) == {("first", "waits")}
    assert stages.causes.findings["stream-wait-inferred"] == 1
    assert stages.causes.findings.get("stream-wait-no-record", 0) == len(record)


def test_stream_wait_that_contradicts_the_times_is_a_note(tmp_path: Path) -> None:
    events = [event if event["name"] != "waits" else kernel("waits", 20, 5, 53, stream=20) for event in FENCE]
    record = sync("Stream Wait Event", 5, 1, 52, 20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=51)
    stages = Stages(tmp_path, [*events, record])
    assert stages.edges(EdgeKind.SYNCHRONISATION) == set()
    assert stages.causes.findings["stream-wait-contradicted"] == 1


def test_overlapping_work_is_ordered_with_the_rest_of_its_stream(tmp_path: Path) -> None:
    kernels = [
        kernel("before", 5, 2, 50),
        kernel("a", 7, 9, 50),
        kernel("b", 7, 5, 50),
        kernel("after", 16, 2, 50),
    ]
    stages = Stages(tmp_path, [op("m", 0, 5, 3), call("cudaGraphLaunch", 1, 3, 50), *kernels])
    order = stages.edges(EdgeKind.STREAM_ORDER)
    assert {("before", "a"), ("before", "b"), ("a", "after"), ("b", "after")} <= order and (
        "a",
        "b",
    ) not in order
    assert stages.replayed()
