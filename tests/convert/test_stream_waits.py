"""Waits between streams in traces without cuda_sync records, and launches that are the bottleneck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.simulate.replays import replay_device
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto

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
        call("cudaLaunchKernel", 0, 3, 1), kernel("side", 5, 40, 1, stream=20),
        call("cudaLaunchKernel", 43, 3, 2), kernel("main", 50, 10, 2),
    ]  # fmt: skip
    assert edges(convert(tmp_path, events)) == set()
