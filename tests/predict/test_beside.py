"""Operators that gloo's threads slow: what they take alone, and beside other transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from chakra_et.et.columns import TensorInfo
from chakra_et.et.node_attributes import lasting
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.changes import as_run, with_transfers
from chakra_et.transform.contention import Slowdown, find_slowdown, time_beside_transfers
from tests.simulate.replay_traces import collective, cpu, make_trace

TAKEN = [100, 102, 98, 150, 75]
"""µs of one operator: alone three times, then beside a transfer; and of half of it, partly beside one."""


def two_ranks(taken: Sequence[int] = TAKEN, names: Sequence[str] = ("aten::mm",) * 5) -> Run:
    """Both ranks launch an all-reduce of 150 + 30 µs behind the third operator and wait for it at the end.
    The
    last operator has half the work of the others."""
    traces = []
    for _ in range(2):
        nodes = [cpu(1, 1, name="ProfilerStep#1", start=1)]
        at = 2
        for number, (micros, name) in enumerate(zip(taken, names, strict=True), 2):
            nodes.append(cpu(number, micros, (number - 1,), name=name, start=at, rf_id=number))
            at += micros
        begin = 2 + sum(taken[:3])
        reduce = {"comm_size": 10**6, "start": begin, "transfer_micros": 180, "wait_micros": 0}
        nodes.append(collective(7, 180, (4,), name="gloo:all_reduce", **reduce))
        nodes.append(cpu(8, 10, (6, 7), name="optimizer", start=max(at, begin + 180)))
        trace = make_trace(*nodes, world_size=2)
        shapes = [b"[[8,8],[8,8]]"] * 4 + [b"[[4,8],[8,8]]"]
        tensors = TensorInfo(np.arange(1, 6), [b"[]"] * 5, shapes, [b"[]"] * 5)
        traces.append(replace(trace, inputs=tensors))
    return make_run("two", traces, [0, 1])


def test_an_operator_beside_a_transfer_is_compared_with_the_same_one_alone() -> None:
    run = two_ranks()
    shared = time_beside_transfers(run, run.measured)[run.graph.trace_of == 0]
    assert (shared / 1000).tolist() == [0, 0, 0, 0, 150, 30, 0, 0]
    slowdown = find_slowdown(run)
    assert slowdown == Slowdown(1 / 3)
    # The last operator has no other of its shapes: it is slowed as the others.
    alone = slowdown.without(run)
    assert alone.graph.traces[0].duration_micros.tolist() == [1, 100, 102, 98, 100, 65, 180, 10]


def test_a_slowdown_within_the_scatter_is_none() -> None:
    assert find_slowdown(two_ranks([60, 140, 100, 150, 75])) is None
    assert find_slowdown(two_ranks([100, 102, 98, 99, 75])) is None
    # Others have nothing to be compared with.
    assert find_slowdown(two_ranks(names=["aten::mm"] * 3 + ["aten::add"] * 2)) is None


@dataclass(frozen=True)
class _Transfers:
    """All transfers take ``micros``."""

    micros: int

    def rebuild(self, run: Run) -> Run:
        return as_run(run, [lasting(trace, {6: self.micros}) for trace in with_transfers(run)], [])


def test_operators_are_slowed_beside_the_transfers_of_the_new_run() -> None:
    def after(micros: int) -> float:
        return 1000 * predict(two_ranks(), [_Transfers(micros)]).after_ms

    # 100 + 65 µs are computed alone, and a third of what passes beside the transfer is lost.
    for micros in (1, 50, 120):
        assert after(micros) == pytest.approx(1 + 300 + 100 + 65 + micros / 3 + 10, abs=0.01)
    assert after(400) == 1 + 300 + 400 + 10
    assert "lose 33% of that time" in " ".join(predict(two_ranks(), [_Transfers(1)]).notes)
