"""Operators of timing steps get the tensors of the same operators in the structure step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from chakra_et.convert.graph.communication_arguments import marks, started_by
from chakra_et.convert.graph.link import aligned
from chakra_et.convert.graph.linked import _matched

CALL, REDUCE, GATHER = "c10d::allreduce_", "gloo:all_reduce", "gloo:all_gather"


def device(*events: tuple[str, int, int, int]) -> Any:
    """Events (name, thread, start, record-function id) as the columns of a device trace."""
    names, thread, start, rf_id = zip(*events, strict=True)
    table = list(dict.fromkeys(names))
    return SimpleNamespace(
        names=table,
        name=np.array([table.index(name) for name in names]),
        thread=np.array(thread),
        start=np.array(start),
        end=np.array(start) + 5,
        rf_id=np.array(rf_id),
        category=np.zeros(len(names), np.int8),
        threads=[(0, number) for number in range(20)],
    )


def pairs(trace: Any, structure: int, groups: dict[int, str] | None = None) -> dict[int, int]:
    """Row of the structure step, which has the first ``structure`` rows → row of the next step."""
    rows = np.arange(len(trace.name))
    pooled = np.array([row for row in rows if trace.names[trace.name[row]].startswith("gloo:")])
    started = started_by(trace, pooled, groups or {}, marks(trace))
    return dict(_matched(trace, rows[:structure], rows[structure:], started, marks(trace)).tolist())


def test_operations_of_gloo_are_matched_by_calls_and_not_by_the_threads_that_took_them() -> None:
    """A bucket of 6 MB got the 32 bytes of the next all-reduce, which another gloo thread began first."""
    trace = device(
        (CALL, 1, 0, 1), (REDUCE, 7, 10, 2), (CALL, 1, 20, 3), (REDUCE, 8, 30, 4),
        # In the next step the first call goes to the other thread, and begins after the second one.
        (CALL, 1, 100, 11), (CALL, 1, 120, 13), (REDUCE, 7, 125, 14), (REDUCE, 8, 130, 12),
    )  # fmt: skip
    assert pairs(trace, 4) == {0: 4, 1: 7, 2: 5, 3: 6}


def test_operations_of_gloo_are_matched_within_their_group() -> None:
    """Two threads with a group each call in another order in each step: sizes went to the other group."""
    first, second = "process_group:1", "process_group:2"
    trace = device(
        (first, 1, 0, 1), (CALL, 1, 1, 2), (REDUCE, 7, 2, 3), (second, 2, 10, 4), (CALL, 2, 11, 5),
        (REDUCE, 8, 12, 6),
        (second, 2, 100, 0), (CALL, 2, 101, 0), (first, 1, 102, 0), (CALL, 1, 103, 0), (REDUCE, 8, 104, 0),
        (REDUCE, 7, 105, 0),
    )  # fmt: skip
    found = pairs(trace, 6, {7: "1", 8: "2"})
    assert (found[2], found[5]) == (11, 10)


def test_a_send_that_waits_for_its_tensor_first_is_of_the_group_that_it_names() -> None:
    """With tensor parallelism in a pipeline, c10d::send waits for the layer's all-reduce and calls itself:
    the inner call, which gloo serves, was of the default group, and its peer another rank."""
    trace = device(
        ("process_group:4 (1024 bytes)", 1, 0, 1), ("c10d::send", 1, 1, 2),
        ("_c10d_functional::wait_tensor", 1, 2, 3), ("c10d::send", 1, 4, 4), ("gloo:send", 1, 5, 5),
        (CALL, 1, 9, 6),
    )  # fmt: skip
    assert marks(trace) == {1: ("4", 1024), 3: ("4", 1024)}
    assert started_by(trace, np.array([4]), {}, marks(trace))[4] == 3


def test_a_step_with_one_collective_less_keeps_the_bytes_of_the_others() -> None:
    """With weights that are averaged before every second step, buckets got the bytes of the weights."""
    trace = device(
        ("aten::cat", 1, 0, 1), (CALL, 1, 1, 2), (REDUCE, 7, 2, 3), ("aten::copy_", 1, 3, 4),
        ("aten::mm", 1, 4, 5), (CALL, 1, 5, 6), (REDUCE, 8, 6, 7),
        ("aten::mm", 1, 100, 0), (CALL, 1, 101, 0), (REDUCE, 7, 102, 0),
    )  # fmt: skip
    assert pairs(trace, 7) == {4: 7, 5: 8, 6: 9}


def test_a_call_of_another_thread_starts_no_operation_of_another_kind() -> None:
    """A checkpoint's all-gather on its own group became the all-reduce that DDP called meanwhile."""
    trace = device(
        ("process_group:1", 2, 0, 0), ("c10d::allgather_", 2, 1, 0), (CALL, 1, 2, 0), (GATHER, 7, 3, 0),
        (REDUCE, 8, 4, 0),
    )  # fmt: skip
    started = started_by(trace, np.array([3, 4]), {7: "1", 8: "0"}, marks(trace))
    assert started.tolist() == [-1, -1, -1, 1, 2]


def test_sequences_are_aligned_from_both_ends() -> None:
    step = [f"op{number}" for number in range(100)]
    more = [step[0], *(["aten::copy_"] * 200), *step[1:]]
    assert aligned(step, more) == [(0, 0), *((at, at + 200) for at in range(1, 100))]
    assert aligned(list("axbyc"), list("abqc")) == [(0, 0), (2, 1), (4, 3)]


def test_a_call_that_starts_two_operations_has_both() -> None:
    """gloo may run a reduce-scatter as two all-reduces: the second one was left without its bytes."""
    scatter = "c10d::reduce_scatter_"
    trace = device(
        (CALL, 1, 0, 1), (REDUCE, 7, 1, 2), (scatter, 1, 2, 3), (REDUCE, 7, 3, 4), (REDUCE, 8, 4, 5),
        (CALL, 1, 100, 0), (REDUCE, 7, 101, 0), (scatter, 1, 102, 0), (REDUCE, 7, 103, 0),
        (REDUCE, 8, 104, 0),
    )  # fmt: skip
    assert pairs(trace, 5) == {0: 5, 1: 6, 2: 7, 3: 8, 4: 9}


def test_a_collective_whose_bytes_vary_keeps_those_of_its_own_step() -> None:
    """An all-to-all of each step had the bytes of the step whose tensors are recorded."""
    trace = device(
        ("process_group:0 (8 bytes)", 1, 0, 1), (CALL, 1, 1, 2), (REDUCE, 7, 2, 3),
        ("process_group:0 (12 bytes)", 1, 100, 0), (CALL, 1, 101, 0), (REDUCE, 7, 102, 0),
    )  # fmt: skip
    assert marks(trace) == {1: ("0", 8), 4: ("0", 12)}
    assert pairs(trace, 3) == {0: 3, 1: 4}


def test_calls_that_wait_for_a_thread_of_gloo_are_served_in_their_order() -> None:
    """Three buckets were called before gloo began the first: the first had the bytes of the last."""
    trace = device(
        (CALL, 1, 0, 0), (CALL, 1, 1, 0), (CALL, 1, 2, 0), (REDUCE, 7, 3, 0), (REDUCE, 8, 4, 0),
        (REDUCE, 7, 5, 0),
    )  # fmt: skip
    assert started_by(trace, np.arange(3, 6), {}, {}).tolist() == [-1, -1, -1, 0, 1, 2]


def test_a_reduce_scatter_that_gloo_runs_as_an_all_reduce_has_its_own_call() -> None:
    """Both calls waited for a thread of gloo: the all-reduce took the later one, of an all-to-all."""
    trace = device(
        ("c10d::_reduce_scatter_base_", 1, 0, 0), ("c10d::alltoall_base_", 1, 1, 0), (REDUCE, 7, 2, 0),
        ("gloo:all_to_all", 8, 3, 0),
    )  # fmt: skip
    assert started_by(trace, np.arange(2, 4), {}, {}).tolist() == [-1, -1, 0, 1]
