"""Predictions by the joint replay: what bounds a rank, and how long large runs take."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings

from chakra_et.errors import TraceError
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import make_run
from chakra_et.transform.durations import Scale
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, makespan_ns, replay_device
from tests.simulate.test_replay_properties import rank_sets


@settings(max_examples=150, deadline=None)
@given(rank_sets())
def test_the_path_that_bounds_a_rank_is_whole(ranks: list[list[dict]]) -> None:
    """That the times are right is shown in tests/simulate, by a replay that is written to be read."""
    traces = [make_trace(*nodes) for nodes in ranks]
    try:
        run = make_run("random", traces, range(len(traces)))
    except TraceError:
        return
    for rank in predict(run, []).ranks:
        assert sum(rank.bound_after.values()) == pytest.approx(1) or not rank.after_ns


def big_rank(rank: int, launches: int) -> list[dict]:
    """A step of ``launches`` kernels from one thread, with an all-reduce after every hundredth."""
    nodes: list[dict] = [cpu(1, 5, name="ProfilerStep#1", start=1)]
    last = 1
    for at in range(launches):
        call = cpu(last + 1, 3, (last if at == 0 else last - 1,), name="cudaLaunchKernel")
        made = kernel(last + 2, 4 + (at * 7 + rank) % 5, (last + 1,), name=f"gemm_{at % 17}")
        last += 2
        nodes += [call, made]
        if at % 100 == 99:
            nodes.append(collective(last + 1, 20, (last,), comm_size=1 << 20))
            nodes.append(kernel(last + 2, 1, (last + 1,)))
            nodes.append(cpu(last + 3, 1, (last - 1,)))
            last += 3
    return nodes


@pytest.mark.slow
def test_eight_ranks_of_100_000_nodes_take_five_seconds() -> None:
    traces = [make_trace(*big_rank(rank, 49_300), world_size=8) for rank in range(8)]
    assert min(map(len, traces)) >= 100_000
    begin = time.process_time()
    run = make_run("big", traces, range(8))
    prediction = predict(run, [Scale("gemm_3$", 2.0)])
    first = time.process_time() - begin
    assert prediction.after_ms > prediction.before_ms
    begin = time.process_time()
    swept = [predict(run, [Scale("gemm", 0.5 + at / 10)], explain=False).after_ms for at in range(10)]
    each = (time.process_time() - begin) / 10
    assert swept == sorted(swept)
    assert first <= 5, f"{first:.2f} s for one prediction, {each:.2f} s for each of a sweep"
    assert each <= 1


def test_days_are_refused() -> None:
    run = make_run("long", [make_trace(cpu(1, 1000, name="op"))], [0])
    with pytest.raises(TraceError, match="more than can be replayed"):
        predict(run, [Scale("op", 1e13)])
    assert np.array_equal(predict(run, [Scale("op", 0.0)]).after.end_ns, [0])


def test_gloo_may_start_the_later_of_two_collectives_first() -> None:
    def rank(first: int, second: int) -> list[dict]:
        sizes = (8, 16)
        return [
            cpu(1, 10, name="ProfilerStep#1"),
            collective(2, 5, (1,), lane=first + 1, comm_sequence=first, comm_size=sizes[first]),
            collective(3, 5, (1,), lane=second + 1, comm_sequence=second, comm_size=sizes[second]),
        ]

    run = make_run("swapped", [make_trace(*rank(0, 1)), make_trace(*rank(1, 0))], [0, 1])
    assert [sorted(run.graph.row[nodes].tolist()) for nodes in run.members] == [[1, 2], [1, 2]]
    assert makespan_ns(replay_device(run.graph.traces)) == 15_000
