"""Waits between streams in traces without cuda_sync records, and launches that are the bottleneck."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.convert.graph import stream_waits
from chakra_et.convert.graph.launches import Launches
from chakra_et.convert.graph.linked import link_rank
from chakra_et.convert.graph.nodes import Dependencies
from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.traces import device as device_trace
from chakra_et.traces.device import operators_of
from chakra_et.traces.sets import Pair
from tests.generator import Features, generate
from tests.generator.hand_made import annotation, call, kernel, op, sync, write_kineto
from tests.shared import shared_path
from tests.simulate.replay_traces import replay_device

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def convert(folder: Path, events: list[dict[str, Any]]) -> Converted:
    return convert_pair(Pair(-1, None, write_kineto(folder / "one.json", events, 0, 2)))


def edges(converted: Converted, letter: str = "Y") -> set[tuple[str, str]]:
    """(name, name) of the synchronisation edges; overhead in front of a node counts as that node."""
    trace = converted.trace
    kinds = trace.attributes["dep_kinds"]
    letters = dict(zip(kinds.rows.tolist(), range(len(kinds.rows)), strict=True))
    found = set()
    for row in range(len(trace)):
        low, high = trace.data_deps.offsets[row : row + 2]
        for at, source in enumerate(trace.data_deps.values[low:high].tolist()):
            if kinds.values[letters[row]][at] == letter:
                target = row
                while trace.names[target] == "device-overhead":
                    target = next(r for r in range(len(trace)) if target + 1 in deps(converted, r))
                found.add((trace.names[source - 1], trace.names[target]))
    return found


def deps(converted: Converted, row: int) -> list[int]:
    low, high = converted.trace.data_deps.offsets[row : row + 2]
    return converted.trace.data_deps.values[low:high].tolist()


def buckets(record: bool = True) -> list[dict[str, Any]]:
    """Gradients are reduced in two buckets on stream 20; the optimizer waits for both, oldest first.

    As DDP does it: every wait is a call whose event the trace does not name.
    """
    wait = [call("cudaStreamWaitEvent", ts, 1, 100 + ts) for ts in (28, 58, 92, 96)] if record else []
    return [
        op("aten::mm", 0, 10), call("cudaLaunchKernel", 5, 3, 1), kernel("grad1", 10, 20, 1),
        annotation("nccl:all_reduce", 25, 12), call("cudaLaunchKernel", 32, 3, 2),
        kernel(NCCL + "1", 40, 200, 2, stream=20),
        op("aten::mm", 40, 10), call("cudaLaunchKernel", 45, 3, 3), kernel("grad2", 50, 20, 3),
        annotation("nccl:all_reduce", 55, 12), call("cudaLaunchKernel", 62, 3, 4),
        kernel(NCCL + "2", 240, 300, 4, stream=20),
        op("aten::add_", 90, 12), call("cudaLaunchKernel", 98, 3, 5), kernel("step", 555, 30, 5),
        *wait,
    ]  # fmt: skip


def test_communication_waits_for_the_stream_that_feeds_it(tmp_path: Path) -> None:
    found = edges(convert(tmp_path, buckets()))
    assert ("grad1", NCCL + "1") in found and ("grad2", NCCL + "2") in found


def test_wait_is_for_earlier_launches_not_only_the_last(tmp_path: Path) -> None:
    """The optimizer's kernel starts 15 µs after the last all-reduce, without a recorded dependency."""
    converted = convert(tmp_path, buckets())
    assert (NCCL + "2", "step") in edges(converted)
    path = converted.report.critical_path_us
    assert path["device-overhead"] <= 0.05 * sum(path.values())
    assert converted.report.warnings["stream-wait-inferred"] >= 3


def test_stream_that_resumes_without_a_call_is_found_by_time(tmp_path: Path) -> None:
    """Waits from before the recording, or of a stream that the library hides."""
    assert (NCCL + "2", "step") in edges(convert(tmp_path, buckets(record=False)))


def test_a_kernel_without_a_launch_does_not_shift_the_matching(tmp_path: Path) -> None:
    stray = kernel(NCCL + "0", 2, 5, stream=20)
    assert edges(convert(tmp_path, [*buckets(), stray])) >= {
        ("grad1", NCCL + "1"), ("grad2", NCCL + "2"), (NCCL + "2", "step")
    }  # fmt: skip


def test_faster_collectives_are_predicted(tmp_path: Path) -> None:
    """With all-reduces of a tenth of the time, the step ends when the second one is done."""
    converted = convert(tmp_path, buckets())
    trace = converted.trace
    collective = np.isin(trace.types, 7)
    assert collective.sum() == 2
    trace.duration_micros = np.where(collective, trace.duration_micros // 10, trace.duration_micros)
    # 40 + 20 (first), then 75 is too early for the second: grad2 ends at 70; + 30, + 15 (lag), + 30.
    end = int(replay_device(trace).end_ns[0].max()) / 1000
    assert 130 <= end <= 150


def test_kernel_that_starts_with_its_launch_has_no_stream_wait(tmp_path: Path) -> None:
    events = [
        call("cudaLaunchKernel", 0, 3, 1), kernel(NCCL, 5, 40, 1, stream=20),
        call("cudaLaunchKernel", 43, 3, 2), kernel("main", 50, 10, 2),
    ]  # fmt: skip
    assert edges(convert(tmp_path, events)) == set()
    # Launched long before, the same kernel starts as the collective ends.
    events[2] = call("cudaLaunchKernel", 4, 3, 2)
    assert edges(convert(tmp_path, events)) == {(NCCL, "main")}


Edges = set[tuple[int, int, int, int]]


def stripped(path: Path) -> tuple[Edges, Edges]:
    """The edges between streams as (lane, time, lane, time): with cuda_sync records, and without them."""
    device = device_trace.load(path, operators=True)
    found = []
    for trace in (device, dataclasses.replace(device, waits={})):
        rank = link_rank(operators_of(trace), trace)
        launches = Launches(rank.device, rank.timeline, rank.calls)
        edges = Dependencies(rank.timeline.lanes)
        stream_waits.find(rank, launches, edges)
        found.append({tuple(row[1:].tolist()) for row in edges.edges})
    return found[0], found[1]


def not_implied(edges: Edges, by: Edges) -> int:
    """How many of ``edges`` no other edge implies: from the same stream or later, to the same or earlier."""
    return sum(
        not any(a == from_ and at <= left and b == to and enters <= into for a, left, b, enters in by)
        for from_, at, to, into in edges
    )


STRIPPED: dict[str, dict[str, Any]] = {
    "side streams": {"side_streams": True},
    "collectives": {"nccl": ("allreduce", "broadcast", "_allgather_base"), "groups": 2},
    "autograd thread": {
        "side_streams": True,
        "nccl": ("allreduce",) * 2,
        "autograd_thread": True,
        "steps": 2,
    },
    "latencies": {"side_streams": True, "nccl": ("allreduce",) * 2, "latency": 4_000, "tail": 3_000},
    "two devices": {"devices": 2, "side_streams": True, "nccl": ("allreduce",)},
}


@pytest.mark.parametrize("case", STRIPPED)
def test_stripped_of_sync_records_waits_are_found(case: str, tmp_path: Path) -> None:
    """Recall of 90% and 5% false ones at most, on programs whose waits are known."""
    true_edges = found_edges = missed = false = 0
    for seed in range(6):
        true, found = stripped(generate(Features(seed=seed, **STRIPPED[case])).write(tmp_path)[1])
        true_edges, found_edges = true_edges + len(true), found_edges + len(found)
        missed, false = missed + not_implied(true, found), false + not_implied(found, true)
    assert true_edges >= 10
    assert missed <= 0.1 * true_edges and false <= 0.05 * found_edges


def test_the_public_trace_with_sync_records_stripped_of_them() -> None:
    true, found = stripped(shared_path("data/traces/public/a100_alexnet_cuda_sync.json.gz"))
    assert len(true) == 6 and not_implied(true, found) == 0 and not_implied(found, true) == 0


def prefetched(steps: int) -> list[dict[str, Any]]:
    """Each step's input is copied on stream 20 during the step before: two ``wait_stream`` a step."""
    events: list[dict[str, Any]] = [op("aten::mm", 0, 1)]
    number = 1

    def wait(ts: float, waits: int, on: int) -> list[dict[str, Any]]:
        nonlocal number
        number += 2
        fields = {"wait_on_stream": on, "wait_on_cuda_event_record_corr_id": number - 2}
        return [
            call("cudaEventRecord", ts, 1, number - 2),
            call("cudaStreamWaitEvent", ts + 2, 1, number - 1),
            sync("Stream Wait Event", ts + 2, 1, number - 1, waits, **fields),
        ]

    for step in range(steps):
        begin = 400.0 * step + 10
        events += wait(begin, 20, 7)
        for name, stream, at, start, lasts in (
            ("Memcpy HtoD (Pinned -> Device)", 20, 10, 40, 50), ("a", 7, 20, 30, 80), ("b", 7, 30, 110, 80),
        ):  # fmt: skip
            events += [
                call("cudaLaunchKernel", begin + at, 3, number),
                kernel(name, begin + start, lasts, number, stream),
            ]
            number += 1
        events += wait(begin + 50, 7, 20)
        events += [call("cudaLaunchKernel", begin + 60, 3, number), kernel("c", begin + 200, 20, number)]
        number += 1
    return events


def test_copies_that_are_prefetched(tmp_path: Path) -> None:
    """The event is recorded on a stream other than that of the thread's last launch."""
    true, found = stripped(write_kineto(tmp_path / "one.json", prefetched(4), 0, 1))
    assert len(true) >= 7 and not_implied(true, found) == 0 and not_implied(found, true) == 0
