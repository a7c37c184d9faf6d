"""The rules of the two replays, each on a graph small enough to compute by hand (times in µs)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from chakra_et.errors import TraceError
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.replays import longest_path
from tests.simulate.replay_traces import (
    collective,
    cpu,
    kernel,
    make_trace,
    makespan_ns,
    recv,
    replay_astra,
    replay_device,
    send,
    times,
)

BOTH = pytest.mark.parametrize("replay", [replay_device, replay_astra])


@BOTH
def test_chain(replay):
    result = replay(make_trace(cpu(1, 5), cpu(2, 3, (1,)), kernel(3, 10, (2,)), cpu(4, 2, (3,))))
    assert times(result) == [(0, 5), (5, 8), (8, 18), (18, 20)]
    assert makespan_ns(result) == 20_000


@BOTH
def test_control_dependencies_and_repeated_dependencies(replay):
    result = replay(make_trace(cpu(1, 5), kernel(2, 4, (1, 1), ctrl=(1,))))
    assert times(result) == [(0, 5), (5, 9)]


def test_device_lanes_are_threads_and_streams():
    trace = make_trace(
        cpu(1, 10),
        cpu(2, 10, tid=2),
        cpu(3, 10),  # waits for its thread
        kernel(4, 10),
        kernel(5, 10, stream=20),
        kernel(6, 10),  # waits for its stream
    )
    assert times(replay_device(trace)) == [(0, 10), (0, 10), (10, 20), (0, 10), (0, 10), (10, 20)]


def test_device_lane_attribute_overrules_thread_and_stream():
    trace = make_trace(cpu(1, 10, tid=1, lane=0), cpu(2, 10, tid=1, lane=1), kernel(3, 10, lane=0))
    assert times(replay_device(trace)) == [(0, 10), (0, 10), (10, 20)]


def test_device_lane_keeps_id_order_even_if_a_later_node_is_ready():
    trace = make_trace(cpu(1, 50, tid=1), kernel(2, 1, (1,)), kernel(3, 1))
    assert times(replay_device(trace)) == [(0, 50), (50, 51), (51, 52)]


def test_device_collective_without_stream_has_the_lane_of_its_group():
    trace = make_trace(kernel(1, 9), collective(2, 10), collective(3, 10), collective(4, 10, group="2"))
    assert times(replay_device(trace)) == [(0, 9), (0, 10), (10, 20), (0, 10)]


@pytest.mark.parametrize("stream", [0, 7])
def test_a_collective_on_the_stream_of_a_kernel_runs_behind_it(stream):
    """Of HIP's default stream, 0, as of CUDA's."""
    trace = make_trace(kernel(1, 9, stream=stream), collective(2, 10, stream=stream))
    assert times(replay_device(trace)) == [(0, 9), (9, 19)]


def test_astra_has_one_cpu_and_one_gpu_slot():
    trace = make_trace(cpu(1, 10), cpu(2, 10, tid=2), kernel(3, 7), kernel(4, 7, stream=20))
    assert times(replay_astra(trace)) == [(0, 10), (10, 20), (0, 7), (7, 14)]


def test_astra_takes_the_lowest_ready_id_not_the_longest_waiting():
    # At 10 both 3 (freed now) and 4 (ready from the start) wait for the CPU.
    trace = make_trace(cpu(1, 10), cpu(3, 1, (1,)), cpu(4, 1))
    assert times(replay_astra(trace)) == [(0, 10), (10, 11), (11, 12)]


def test_astra_runs_a_ready_node_past_a_lower_one_that_is_not_ready():
    trace = make_trace(cpu(1, 50), kernel(2, 1, (1,)), kernel(3, 1))
    assert times(replay_astra(trace)) == [(0, 50), (50, 51), (0, 1)]


def test_astra_has_one_communication_slot_and_receives_need_none():
    trace = make_trace(collective(1, 10), send(2, 5, dst=1), recv(3, 5, src=1), recv(4, 5, src=1))
    assert times(replay_astra(trace)) == [(0, 10), (10, 15), (0, 5), (0, 5)]


def test_astra_runs_device_memory_nodes_in_the_communication_slot():
    trace = make_trace(kernel(1, 10, type=NodeType.MEM_LOAD), collective(2, 5), kernel(3, 1))
    assert times(replay_astra(trace)) == [(0, 10), (10, 15), (0, 1)]


def test_zero_duration_is_one_nanosecond_in_astra_only():
    trace = make_trace(cpu(1, 0), cpu(2, 0, (1,)), kernel(3, 0, (2,)))
    assert replay_astra(trace).end_ns[0].tolist() == [1, 2, 3]
    assert replay_device(trace).end_ns[0].tolist() == [0, 0, 0]


def test_astra_handles_simultaneous_completions_in_scheduling_order():
    # 3 and 2 both end at 10; 3 was issued first and frees 5, which takes the slot before 2 frees 4.
    trace = make_trace(
        cpu(1, 5), cpu(2, 5, (1,)), kernel(3, 10), collective(4, 1, (2,)), collective(5, 2, (3,))
    )
    assert times(replay_astra(trace))[3:] == [(12, 13), (10, 12)]


@pytest.mark.parametrize("first", [cpu, kernel])
def test_astra_issues_the_lowest_id_first_whatever_its_slot(first):
    # 1 and 2 start at 0 in this order, so 1 ends first at 10 and frees 4, which takes the slot before 3.
    second = kernel if first is cpu else cpu
    trace = make_trace(first(1, 10), second(2, 10), collective(3, 1, (2,)), collective(4, 2, (1,)))
    assert times(replay_astra(trace))[2:] == [(12, 13), (10, 12)]


@BOTH
def test_rows_need_not_be_in_id_order(replay):
    result = replay(make_trace(cpu(9, 3, (4,)), cpu(4, 5)))
    assert times(result) == [(5, 8), (0, 5)]


@BOTH
def test_ids_need_not_be_topological(replay):
    result = replay(make_trace(cpu(1, 3, (9,)), cpu(9, 5), cpu(10, 1, (1,))))
    assert times(result) == [(5, 8), (0, 5), (8, 9)]


def test_lanes_keep_id_order_where_dependencies_allow_it():
    trace = make_trace(cpu(1, 3, (9,)), cpu(9, 5), kernel(2, 10), kernel(3, 1), kernel(4, 1))
    assert times(replay_device(trace))[2:] == [(0, 10), (10, 11), (11, 12)]


def test_longest_path_has_no_lanes():
    trace = make_trace(cpu(1, 10), cpu(2, 10), cpu(3, 5, (1,)), collective(4, 4, (3,)))
    assert longest_path(trace) == 19_000


# ---- files that can't be replayed ----


@BOTH
@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "has no nodes"),
        ([cpu(1, 1), cpu(1, 1)], "two nodes with id 1"),
        ([cpu(1, 1), cpu(2, 1, (77,))], "node 2 of rank 0 depends on node 77, which is not in the file"),
        ([cpu(1, 1), cpu(2, 1, (3,)), cpu(3, 1, (2, 1))], "cycle of 2 nodes"),
        ([cpu(1, 1, (1,), name="loop")], "cycle of 1 nodes .node 1 'loop'"),
        ([cpu(1, 2**63)], "add up to more than"),
        ([cpu(1, 2**51), cpu(2, 2**51), cpu(3, 2**51)], "add up to more than"),
    ],
)
def test_unusable_graph_is_rejected(replay, nodes, message):
    with pytest.raises(TraceError, match=message):
        replay(make_trace(*nodes))


def test_largest_ids_stay_distinct():
    big = 2**64 - 1
    result = replay_device(make_trace(cpu(big - 1, 3), cpu(big, 4, (big - 1,))))
    assert times(result) == [(0, 3), (3, 7)]


# ---- size ----


def large_trace(count: int) -> ExecutionTrace:
    """CPU threads that launch kernels on streams: 2.5 dependencies per node, 0.1% collectives."""
    generator = np.random.default_rng(7)
    number = np.arange(count)
    is_cpu = number % 2 == 0
    previous = np.maximum(number - 2, 0)
    launch = np.maximum(number - 1, 0)
    far = generator.integers(0, np.maximum(number, 1))
    keep = np.stack([number >= 2, (number >= 1) & ~is_cpu, number >= 1])
    deps = np.stack([previous, launch, far])
    counts = keep.sum(axis=0)
    types = np.where((number % 1000 == 999), NodeType.COMM_COLL, NodeType.COMP).astype(np.uint8)
    rows = number.astype(np.int64)
    return ExecutionTrace(
        ids=number.astype(np.uint64),
        names=Strings([b"op"], np.zeros(count, np.int32)),
        types=types,
        start_micros=number.astype(np.uint64),
        duration_micros=generator.integers(0, 50, count).astype(np.uint64),
        data_deps=Ragged(np.r_[0, np.cumsum(counts)].astype(np.int64), deps.T[keep.T].astype(np.uint64)),
        ctrl_deps=Ragged(np.zeros(count + 1, np.int64), np.empty(0, np.uint64)),
        attributes={
            "is_cpu_op": Attribute("bool", rows, is_cpu.astype(np.int64)),
            "lane": Attribute("int64", rows, np.where(is_cpu, number // 2 % 3, 3 + number % 5)),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "seconds"), [(replay_device, 10.0), (replay_astra, 30.0)])
def test_a_million_nodes_in_seconds(replay, seconds):
    trace = large_trace(1_000_000)
    begin = time.process_time()
    result = replay(trace)
    assert time.process_time() - begin < seconds
    assert makespan_ns(result) > 0


@BOTH
def test_a_long_chain_needs_no_recursion(replay):
    count = 100_000
    trace = large_trace(count)
    trace.data_deps = Ragged(
        np.r_[0, np.arange(count)].astype(np.int64), np.arange(count - 1).astype(np.uint64)
    )
    least = 1 if replay is replay_astra else 0
    assert makespan_ns(replay(trace)) == int(
        np.maximum(trace.duration_micros.astype(np.int64) * 1000, least).sum()
    )


def test_nodes_without_a_lane_are_in_none_of_the_others():
    graph = build_graph(
        [make_trace(cpu(1, 1, tid=1), send(2, 1, 0), cpu(3, 1, tid=2), send(4, 1, 0), cpu(5, 1, tid=1))], [0]
    )
    lane = graph.in_lanes.lane.tolist()
    assert lane[0] == lane[4] and len(set(lane)) == 4
