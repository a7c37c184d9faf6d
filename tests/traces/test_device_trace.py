"""Kineto's device trace, with every oddity that its writers have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chakra_et.errors import TraceError
from chakra_et.traces import device as device_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import CATEGORIES
from tests.generator.hand_made import annotation, call, event, kernel, op, sync, write_device


def load(folder: Path, *events: dict, **header) -> DeviceTrace:
    return device_trace.load(write_device(folder, list(events), **header))


def names(trace: DeviceTrace) -> list[str]:
    return [trace.names[code] for code in trace.name]


def test_events_without_work_are_counted_by_reason(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        op("aten::mm", 5, 1, 3),
        event("Trace", "PyTorch Profiler (0)", 0, 9),
        event("overhead", "x", 1, 1),
        event("python_function", "f", 1, 3),
        event("python_function", "g", 1, 2),
        event("mtia_ccp", "?", 1, 1),
        event("gpu_user_annotation", "a", 1, 1),
        event("cuda_event", "cudaEvent", 1, 1),
        {"ph": "i", "name": "Iteration Start", "ts": 1},
        {"ph": "C", "name": "memory", "ts": 1},
    )
    assert trace.events_in == 8 and names(trace) == ["aten::mm"]
    assert sorted(trace.findings.values()) == [1, 1, 1, 1, 1, 2]
    assert trace.findings["unknown-category:mtia_ccp"] == 1
    assert len(trace) + sum(trace.findings.values()) == trace.events_in


@pytest.mark.parametrize(
    ("category", "is_now"),
    [
        ("Operator", "cpu_op"),
        ("cpu_instant_event", "cpu_op"),
        ("Runtime", "cuda_runtime"),
        ("Kernel", "kernel"),
        ("hip_runtime", "cuda_runtime"),
        ("Memcpy", "gpu_memcpy"),
        ("Memset", "gpu_memset"),
    ],
)
def test_categories_of_older_and_other_writers(category: str, is_now: str, tmp_path: Path) -> None:
    trace = load(tmp_path, op("aten::mm", 1, 1), event(category, "it", 2, 1, device=0, stream=3))
    assert CATEGORIES[trace.category[1]] == is_now and not trace.findings


def test_numbers_may_be_text(tmp_path: Path) -> None:
    as_text = kernel("k", 4, 1) | {"ts": "4.25", "dur": "1.5"}
    as_text["args"] = {"device": "1", "stream": "20", "correlation": "77", "External id": "5"}
    trace = load(tmp_path, op("aten::mm", 1, 1, 2), as_text)
    assert (trace.device[1], trace.stream[1], trace.correlation[1], trace.external_id[1]) == (1, 20, 77, 5)
    assert (trace.start[1] - trace.start[0], trace.end[1] - trace.start[1]) == (3_250, 1_500)


def test_device_and_stream_from_pid_and_tid_without_args(tmp_path: Path) -> None:
    bare = kernel("k", 4, 1, stream=9, device=2)
    bare["args"] = {}
    trace = load(tmp_path, op("aten::mm", 1, 1), bare)
    assert (trace.device[1], trace.stream[1]) == (2, 9)


def test_original_stream_wins_over_the_display_lane(tmp_path: Path) -> None:
    """PyTorch 2.15 writes the display lane into ``stream``."""
    trace = load(tmp_path, op("aten::mm", 1, 1), kernel("k", 4, 1, stream=1_007, original_stream=7))
    assert trace.stream[1] == 7


def test_absurd_times_are_counted_losses(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        *(op("good", t, 1) for t in range(5)),
        op("overflow", 2.0**60, 1),
        op("for ever", 3, 1e15),
        op("nan", 2, 1) | {"ts": "NaN"},
        op("no number", 2, 1) | {"dur": "x"},
        op("past", -1e13, 1),
    )
    assert names(trace) == ["good"] * 5
    assert trace.findings == {"bad-time": 5}
    assert trace.events_in == 10


def test_negative_durations_become_0(tmp_path: Path) -> None:
    trace = load(tmp_path, op("a", 1, -3), op("b", 5, 2))
    assert (trace.end - trace.start).tolist() == [0, 2_000]
    assert trace.findings == {"negative-duration": 1}


def test_field_of_the_wrong_type_affects_only_its_event(tmp_path: Path) -> None:
    broken = op("broken", 3, 1)
    broken["args"]["External id"] = {"not": "a number"}
    trace = load(tmp_path, op("a", 1, 1), broken, op("b", 5, 2))
    assert names(trace) == ["a", "b"] and trace.findings == {"bad-field": 1}


def test_unused_fields_may_be_anything(tmp_path: Path) -> None:
    odd = op("a", 1, 1) | {"s": "g", "sf": 5, "cname": None}
    odd["args"] |= {"Input Dims": [[1, [2]], "x"], "Ev Idx": "one", "dur": 3}
    trace = load(tmp_path, odd, {"ph": "M", "name": "process_name", "args": {"name": "python"}, "ts": 0})
    assert names(trace) == ["a"]


@pytest.mark.parametrize("backwards", (False, True))
def test_events_with_equal_times_nest_by_category_and_id(backwards: bool, tmp_path: Path) -> None:
    events = [
        annotation("outermost", 1, 5, 3),
        op("outer", 1, 5, 4),
        op("inner", 1, 5, 5),
        call("cudaLaunchKernel", 1, 5, 6, **{"External id": 5}),
        call("cuLaunchKernel", 1, 5, 7, **{"External id": 5}),
    ]
    trace = load(tmp_path, *(events[::-1] if backwards else events))
    assert names(trace) == ["outermost", "outer", "inner", "cudaLaunchKernel", "cuLaunchKernel"]


def test_names_of_threads_host_and_group(tmp_path: Path) -> None:
    label = {"ph": "M", "name": "thread_name", "pid": 10, "tid": 10, "ts": 0, "args": {"name": "pt_main"}}
    trace = load(tmp_path, op("a", 1, 1), label, host_name="n1", distributedInfo={"rank": 3, "world_size": 8})
    assert trace.thread_names[(10, 10)] == "pt_main"
    assert trace.host_name == "n1" and trace.distributed["rank"] == 3


@pytest.mark.parametrize("value", (None, [], "nccl", 5))
def test_distributed_info_that_is_no_object_is_ignored(value, tmp_path: Path) -> None:
    assert load(tmp_path, op("a", 1, 1), distributedInfo=value).distributed == {}


def test_arguments_of_collectives_and_waits_stay_with_their_rows(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        sync("Stream Wait Event", 9, 1, 5, 20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=4),
        kernel(
            "ncclDevKernel_AllReduce",
            4,
            1,
            **{"Collective name": "allreduce", "In msg nelems": 5, "dtype": "Float"},
        ),
        op("a", 1, 1),
        kernel("k", 3, 1),
    )
    (row,) = trace.communication
    assert names(trace)[row].startswith("nccl") and trace.communication[row].in_elements == 5
    (row,) = trace.waits
    assert CATEGORIES[trace.category[row]] == "cuda_sync" and trace.waits[row].record_correlation == 4
    chosen = trace.select(np.array([0, 2, 3]))
    assert list(chosen.communication) == [1] and list(chosen.waits) == [2] and len(chosen) == 3


@pytest.mark.parametrize("events", ([], [event("Trace", "PyTorch Profiler (0)", 0, 9)]))
def test_trace_without_work_is_rejected(events: list[dict], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no operator, runtime call or kernel"):
        load(tmp_path, *events)


def test_trace_without_usable_times_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="with a usable time stamp"):
        load(tmp_path, op("a", 1e300, 1))


def test_times_since_1970_lose_a_quarter_of_a_microsecond_but_not_the_order_of_a_stream(
    tmp_path: Path,
) -> None:
    begin = 1_712_112_719_123_456  # of which a double holds multiples of 0.25
    ends = [begin + 2.3 * number for number in range(40)]
    work = [kernel(f"k{number}", at, 2.3, number + 1) for number, at in enumerate(ends)]
    trace = load(tmp_path, *work, kernel("other stream", begin, 90, 90, stream=8))
    of_stream = trace.stream == 7
    assert (trace.end[of_stream][:-1] <= trace.start[of_stream][1:]).all()
    assert np.abs(trace.end - trace.start - 2300)[of_stream].max() <= 250
    assert (trace.end - trace.start)[~of_stream].tolist() == [90_000]


def test_overlap_on_a_stream_stays_where_times_are_exact(tmp_path: Path) -> None:
    trace = load(tmp_path, kernel("a", 10, 5.2, 1), kernel("b", 15, 5, 2))
    assert (trace.end - trace.start).tolist() == [5200, 5000]
