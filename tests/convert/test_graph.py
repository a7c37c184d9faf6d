"""Nodes and edges as rows: split, numbered by time, acyclic, with every start accounted for."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.emit import whole_micros
from chakra_et.convert.graph.build import Rows, _connect, build
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind, NodeKind
from tests.generator import Features, Program, generate, run
from tests.generator.hand_made import Stages, annotation, call, kernel, op
from tests.generator.parts import Parts
from tests.generator.program import Busy, Launch, Op
from tests.generator.truth import convert, replay


def test_operator_is_one_node_per_segment_of_self_time(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [op("a", 0, 10, 3), op("b", 2, 3, 4), op("c", 6, 2, 5)])
    assert stages.nodes() == [("a", 0, 2), ("b", 2, 5), ("a", 5, 6), ("c", 6, 8), ("a", 8, 10)]
    assert stages.graph.segment.tolist() == [0, 0, 1, 0, 2]
    assert (stages.graph.kind == NodeKind.OPERATOR).all()


def test_annotation_has_duration_0_and_its_self_time_is_overhead(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [annotation("step", 0, 10, 2), op("a", 3, 2, 3)])
    assert stages.nodes() == [("step", 0, 0), ("step", 0, 3), ("a", 3, 5), ("step", 5, 10)]
    overhead = NodeKind.HOST_OVERHEAD
    assert stages.graph.kind.tolist() == [NodeKind.ANNOTATION, overhead, NodeKind.OPERATOR, overhead]


def test_what_the_first_node_launches_depends_on_it(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [call("cudaLaunchKernel", 0, 5, 9), kernel("k", 8, 30, 9)])
    graph = stages.graph
    assert (0, EdgeKind.LAUNCH) in zip(graph.source.tolist(), graph.edge_kind.tolist(), strict=True)


def test_points_with_no_node_on_their_side_make_no_edge() -> None:
    lane, none = np.array([0, 1]), np.array([-1, -1])
    rows = Rows(lane, np.array([5, 5]), np.array([9, 9]), none, none, none)
    # Kind; lane and time that it leaves; those that it enters: nothing ends by 3 or begins from 7 on.
    points = [
        [1, 0, 9, 1, 5],
        [2, 0, 3, 1, 5],
        [3, 0, 9, 1, 7],
        [4, 1, 3, 0, 5],
        [5, 1, 9, 0, 5],
        [6, 0, 9, 0, 5],
    ]
    edges = _connect(rows, np.array(points), 2)
    assert [each.tolist() for each in edges] == [[0, 1], [1, 0], [1, 5]]


def test_operator_is_split_where_it_launches(tmp_path: Path) -> None:
    """Work that starts during a call must not wait for its end."""
    stages = Stages(tmp_path, [op("a", 0, 20, 3), call("cudaLaunchKernel", 2, 10, 9), kernel("k", 5, 30, 9)])
    assert ("cudaLaunchKernel", 2, 5) in stages.nodes() and ("cudaLaunchKernel", 5, 12) in stages.nodes()
    assert stages.replayed()


def test_ids_follow_start_times_and_edges_point_forward(tmp_path: Path) -> None:
    c = convert(
        generate(Features(seed=1, devices=2, autograd_thread=True, nccl=("allreduce",), steps=3)), tmp_path
    )
    graph = c.graph
    assert (np.diff(graph.start) >= 0).all()
    assert (graph.source < graph.target).all()
    assert (graph.end[graph.source] <= graph.start[graph.target]).all()
    pairs = graph.source * len(graph) + graph.target
    assert len(np.unique(pairs)) == len(pairs), "no edge twice"
    for lane in np.unique(graph.lane):
        of_lane = np.flatnonzero(graph.lane == lane)
        assert (graph.start[of_lane[1:]] >= graph.end[of_lane[:-1]]).all(), "a lane does one thing at a time"


def test_every_event_is_one_node_and_its_further_segments(tmp_path: Path) -> None:
    c = convert(generate(Features(seed=3, waits=("item", "copy"), graphs=True)), tmp_path)
    stands = c.graph.event[(c.graph.event >= 0) & (c.graph.segment == 0)]
    assert sorted(stands.tolist()) == sorted(c.row.values())


def test_unexplained_start_gets_overhead(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path,
        [op("a", 0, 5, 3), op("b", 8, 2, 4), call("cudaLaunchKernel", 1, 1, 9), kernel("k", 6, 1, 9)],
    )
    kinds = {
        (name, NodeKind(kind).name, start)
        for (name, start, _), kind in zip(stages.nodes(), stages.graph.kind.tolist(), strict=True)
        if name == "overhead"
    }
    assert kinds == {("overhead", "HOST_OVERHEAD", 5), ("overhead", "DEVICE_OVERHEAD", 2)}


def test_backward_edge_is_left_out_and_counted(tmp_path: Path) -> None:
    events = [annotation("ProfilerStep#1", 0, 15, 2), op("b", 10, 5, 4), op("x", 0, 20, 5, tid=11)]
    stages = Stages(tmp_path, events)
    causes = Dependencies(stages.time.lanes)
    causes.edge(EdgeKind.INTER_THREAD, (1, 20_000), (0, 10_000))
    graph = build(stages.rank, causes)
    assert graph.findings == {"backward-edge": 1}


def test_waits_become_nodes_of_duration_0(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [op("a", 0, 5, 3), op("c10d::wait", 5, 20, 4), op("b", 25, 5, 5)])
    causes = Dependencies(stages.time.lanes)
    causes.wait(0, 5_000, 25_000)
    causes.wait(0, 7_000, 7_000)
    graph = build(stages.rank, causes)
    assert [(int(a), int(b)) for a, b in zip(graph.start, graph.end, strict=True)][:2] == [
        (0, 5_000),
        (5_000, 5_000),
    ]


def test_durations_in_micros_lose_less_than_one_per_lane(tmp_path: Path) -> None:
    """Thousands of sub-microsecond operators: the remainder is carried over, not lost."""
    events = [op("a", n * 0.3, 0.3, n + 3) for n in range(5_000)]
    stages = Stages(tmp_path, events)
    micros = whole_micros(stages.graph.lane, stages.graph.end - stages.graph.start)
    assert micros.sum() == 1_500 and set(micros.tolist()) == {0, 1}


def _short_kernels(latency: int) -> Program:
    """A thread that launches 3 µs kernels every 6 µs and is the bottleneck."""
    body: list = []
    parts = Parts(random.Random(1))
    for number in range(100):
        work = Launch(f"void k{number}()", 3_000, (0, 7), key=f"kernel {number}")
        body += [Op("cudaLaunchKernel", [Busy(5_000), work], "cuda_runtime"), Busy(1_000)]
    body.append(parts.synchronise("device", (0, -1)))
    return Program({"main": [Op("aten::mm", body)]}, latency=latency)


@pytest.mark.parametrize("latency", [0, 4_000])
def test_slower_kernels_are_predicted_if_the_cpu_was_the_bottleneck(latency: int, tmp_path: Path) -> None:
    """Kernels of 10 µs instead of 3 make the device the bottleneck: 100 of them take 1 ms."""
    c = convert(generate(_short_kernels(latency)), tmp_path)
    changes = {f"kernel {number}": 7_000 for number in range(100)}
    true = run(c.generated.program, changes).end
    by_key = c.generated.run.by_key()
    nodes = {c.nodes[by_key[key].number][0]: change for key, change in changes.items()}
    start = replay(c, nodes)
    length = c.graph.end - c.graph.start
    predicted = max(int(start[n] + length[n]) + nodes.get(n, 0) for n in range(len(c.graph))) - c.offset
    assert abs(predicted / true - 1) < 0.02
