"""Threads that wake each other, and CPU communication with its waits. Times in µs."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.convert.graph.nodes import EdgeKind
from tests.generator.hand_made import Stages, annotation, call, node, op, tensor


def lengths(stages: Stages) -> dict[str, float]:
    """µs of all nodes by name."""
    total: dict[str, float] = {}
    for name, start, end in stages.nodes():
        total[name] = total.get(name, 0) + end - start
    return total


def backward_events(tid: int) -> list[dict]:
    """A forward operator, and its backward on thread ``tid`` while the main thread waits."""
    numbers = {"Sequence number": 5, "Fwd thread id": 0}
    return [
        annotation("ProfilerStep#1", 0, 100, 2),
        op("aten::mm", 5, 10, 3, **numbers),
        op(
            "autograd::engine::evaluate_function: MmBackward0",
            20,
            50,
            4,
            tid,
            **numbers | {"Fwd thread id": 1},
        ),
        op("optimizer", 75, 5, 6),
    ]


def test_backward_on_another_thread_is_not_counted_twice(tmp_path: Path) -> None:
    stages = Stages(tmp_path, backward_events(77))
    between = stages.edges(EdgeKind.INTER_THREAD)
    assert ("ProfilerStep#1", "autograd::engine::evaluate_function: MmBackward0") in between
    assert ("aten::mm", "autograd::engine::evaluate_function: MmBackward0") in between, "forward to backward"
    assert ("autograd::engine::evaluate_function: MmBackward0", "ProfilerStep#1") in between
    total = sum(end - start for _, start, end in stages.nodes())
    assert total == 100, "each moment is spent on one thread"
    assert stages.causes.findings == {"backward-waited": 1} and stages.replayed()


def test_a_backward_operator_follows_the_forward_operator_of_its_number(tmp_path: Path) -> None:
    """Not the collective that was called within that, whose event has no lane of its thread."""
    number = {"Sequence number": 7}
    events = [
        op("aten::mm", 0, 10, 3, **number), op("gloo:all_reduce", 20, 30, 4, tid=77, **number),
        op("aten::add", 80, 40, 5), op("MmBackward0", 100, 10, 6, tid=20, **number, **{"Fwd thread id": 1}),
    ]  # fmt: skip
    assert ("aten::mm", "MmBackward0") in Stages(tmp_path, events).edges(EdgeKind.INTER_THREAD)


def test_wait_for_backward_ends_with_a_task_of_the_main_thread(tmp_path: Path) -> None:
    task = op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 40, 10, 5)
    stages = Stages(tmp_path, [*backward_events(77), task])
    assert lengths(stages)[task["name"]] == 10, "its own work is no wait"
    assert sum(end - start for _, start, end in stages.nodes()) == 110
    assert stages.replayed()


def test_wait_for_backward_after_a_longer_task(tmp_path: Path) -> None:
    """Found by scaling: a slower backward pass would have delayed the main thread after its own task."""
    task = op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 60, 12, 5)
    stages = Stages(tmp_path, [*backward_events(77), task])
    engine = "autograd::engine::evaluate_function: MmBackward0"
    graph = stages.graph
    late = {
        graph.start[b]
        for a, b in zip(graph.source, graph.target, strict=True)
        if stages.name(a) == engine and stages.name(b) == "ProfilerStep#1"
    }
    assert 72_000 in late


def test_worker_is_woken_by_the_main_thread_without_a_wait(tmp_path: Path) -> None:
    stages = Stages(
        tmp_path, [annotation("ProfilerStep#1", 0, 50, 2), op("a", 5, 10, 3), op("load", 20, 9, 4, tid=78)]
    )
    assert stages.edges(EdgeKind.INTER_THREAD) == {("ProfilerStep#1", "load")}
    assert sum(end - start for _, start, end in stages.nodes()) == 59 and stages.replayed()


def gloo(launch: dict, begin: float, end: float, *more: dict) -> tuple[list[dict], list[dict]]:
    events = [
        annotation("ProfilerStep#1", 0, 300, 2),
        launch,
        op("gloo:all_reduce", begin, end - begin, 21, tid=90),
        *more,
    ]
    for event in events:
        event["cat"] = "user_annotation" if event["name"].startswith("gloo") else event["cat"]
    values = [tensor(3, 50)]
    nodes = [
        node("c10d::allreduce_", 20, [values, "<Object>", True, -1]),
        node("gloo:all_reduce", 21, values),
    ]
    return events, nodes


def test_collective_with_an_immediate_wait(tmp_path: Path) -> None:
    stages = Stages(tmp_path, *gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100, op("next", 110, 5, 30)))
    assert ("c10d::allreduce_", "gloo:all_reduce") in stages.edges(EdgeKind.LAUNCH)
    assert ("gloo:all_reduce", "ProfilerStep#1") in stages.edges(EdgeKind.COLLECTIVE)
    assert sum(end - start for _, start, end in stages.nodes()) == 300
    assert stages.causes.findings == {"wait-blocked": 1} and stages.replayed()


def test_collective_hidden_by_work(tmp_path: Path) -> None:
    """An asynchronous all-reduce and its wait must not be counted twice."""
    use = op("aten::div_", 200, 5, 30)
    events, nodes = gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100, op("work", 20, 150, 25), use)
    stages = Stages(tmp_path, events, [*nodes, node("aten::div_", 30, [tensor(3, 50)])])
    assert ("gloo:all_reduce", "aten::div_") in stages.edges(EdgeKind.COLLECTIVE)
    assert stages.causes.findings == {"wait-done": 1}
    assert lengths(stages)["gloo:all_reduce"] == 85 and lengths(stages)["work"] == 150 and stages.replayed()


def test_a_collective_of_tensors_on_a_gpu_lies_between_the_copies_of_its_thread(tmp_path: Path) -> None:
    """gloo copies them to the host and back: the time between was also overhead of its thread."""
    copies = call("cudaStreamSynchronize", 15, 5, 1, tid=90), op("aten::copy_", 90, 10, 31, tid=90)
    stages = Stages(
        tmp_path, *gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100, *copies, op("next", 110, 5, 30))
    )
    launch, after = stages.edges(EdgeKind.LAUNCH), stages.edges(EdgeKind.COLLECTIVE)
    assert {
        ("c10d::allreduce_", "cudaStreamSynchronize"),
        ("cudaStreamSynchronize", "gloo:all_reduce"),
    } <= launch
    assert {("gloo:all_reduce", "aten::copy_"), ("aten::copy_", "ProfilerStep#1")} <= after
    assert lengths(stages)["gloo:all_reduce"] == 70 and stages.replayed()


def test_collective_without_a_wait_is_a_note(tmp_path: Path) -> None:
    stages = Stages(tmp_path, *gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100, op("work", 20, 150, 25)))
    assert stages.causes.findings == {"wait-not-found": 1} and stages.replayed()


def test_time_in_the_backends_queue_counts_as_communication(tmp_path: Path) -> None:
    stages = Stages(tmp_path, *gloo(op("c10d::allreduce_", 10, 5, 20), 60, 100, op("next", 110, 5, 30)))
    assert ("gloo:all_reduce", 15, 100) in stages.nodes() and stages.replayed()


def test_collectives_of_one_group_share_its_lane(tmp_path: Path) -> None:
    """Two that overlap follow each other, each ending when it did."""
    events, nodes = gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100)
    events += [op("c10d::allreduce_", 20, 5, 22), op("gloo:all_reduce", 25, 100, 23, tid=91)]
    stages = Stages(tmp_path, events, [*nodes, node("c10d::allreduce_", 22), node("gloo:all_reduce", 23)])
    communication = [(start, end) for name, start, end in stages.nodes() if name == "gloo:all_reduce"]
    assert communication == [(15, 100), (100, 125)] and stages.replayed()
    assert ("gloo:all_reduce", "gloo:all_reduce") in stages.edges(EdgeKind.COLLECTIVE)


def test_overtaking_collective_gets_a_lane_of_its_own(tmp_path: Path) -> None:
    events, nodes = gloo(op("c10d::allreduce_", 10, 5, 20), 15, 100)
    events += [op("c10d::allreduce_", 20, 5, 22), op("gloo:all_reduce", 25, 30, 23, tid=91)]
    stages = Stages(tmp_path, events, [*nodes, node("c10d::allreduce_", 22), node("gloo:all_reduce", 23)])
    labels = [lane.label for lane in stages.graph.lanes if lane.kind == "communication"]
    assert labels == ["group 0", "group 0 #1"] and stages.replayed()


def test_messages_have_a_lane_for_each_direction_and_peer(tmp_path: Path) -> None:
    """isend and irecv of one batch overlap on the thread that called them."""
    events = [
        op("c10d::send", 0, 5, 5),
        annotation("gloo:send", 4, 50, 6),
        op("c10d::recv_", 8, 3, 7),
        annotation("gloo:recv", 10, 60, 8),
        op("next", 75, 5, 9),
    ]
    nodes = [
        node("c10d::send", 5, [[tensor(3, 5)], "<Object>", 1, 7]),
        node("gloo:send", 6, [tensor(3, 5)]),
        node("c10d::recv_", 7, [[tensor(4, 5)], "<Object>", 1, 8]),
        node("gloo:recv", 8, [tensor(4, 5)]),
    ]
    stages = Stages(tmp_path, events, nodes)
    assert [(item.type.name, item.peer, item.tag) for item in stages.communication.items] == [
        ("COMM_SEND", 1, 7),
        ("COMM_RECV", 1, 8),
    ]
    labels = [lane.label for lane in stages.graph.lanes if lane.kind == "communication"]
    assert labels == ["group 0 send 1", "group 0 recv 1"] and stages.replayed()


def preempted(resumed: float) -> tuple[list[dict], list[dict]]:
    """A thread waits for an all-reduce that ends at 9000 µs, but at 9100 µs in its worker's record."""
    events, nodes = gloo(
        op("c10d::allreduce_", 10, 5, 20),
        15,
        9100,
        op("copy", resumed, 20, 30),
        op("next", resumed + 40, 300, 31),
    )
    events[0]["dur"] = 10_000
    return events, nodes


def test_communication_with_a_late_end_ends_when_its_waiter_resumes(tmp_path: Path) -> None:
    """Seen on a busy machine: the wait was counted as 9 ms of work."""
    stages = Stages(tmp_path, *preempted(9000))
    assert stages.causes.findings["communication-ends-late"] == 1
    assert stages.causes.findings["wait-blocked"] == 1
    assert ("gloo:all_reduce", 15, 9000) in stages.nodes() and stages.replayed()
    assert lengths(stages)["gloo:all_reduce"] == 8985
    assert sum(end - start for name, start, end in stages.nodes() if name != "gloo:all_reduce") == 1015


def test_thread_that_resumed_long_before_did_not_wait(tmp_path: Path) -> None:
    stages = Stages(tmp_path, *preempted(8000))
    assert "communication-ends-late" not in stages.causes.findings
    assert ("gloo:all_reduce", 15, 9100) in stages.nodes() and stages.replayed()


def test_waits_whose_data_is_used_after_the_next_collective(tmp_path: Path) -> None:
    """Two all-reduces that block, then the use of both: the first one's record ended late."""
    events, nodes = preempted(9000)
    events[3:] = [op("c10d::allreduce_", 9000, 5, 30), op("gloo:all_reduce", 9102, 90, 31, tid=90)]
    events += [op("copy", 9200, 20, 32)]
    nodes += [node("c10d::allreduce_", 30, [[tensor(4, 9)], "<Object>", True, -1])]
    nodes += [node("gloo:all_reduce", 31, [tensor(4, 9)]), node("copy", 32, [tensor(3, 50)])]
    stages = Stages(tmp_path, events, nodes)
    assert stages.causes.findings["communication-ends-late"] == 1
    assert ("gloo:all_reduce", 15, 9000) in stages.nodes() and stages.replayed()


@pytest.mark.parametrize("late", (0, 500))
def test_thread_whose_core_the_worker_took_did_not_wait_for_it(late: float, tmp_path: Path) -> None:
    """Found in DDP captures on a busy machine: a gradient in the middle of a backward pass seemed to wait for
    an all-reduce, and ``--layers`` found blocks that depend on each other. ``late``: µs until the worker
    ended its record."""
    gradient = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    events, nodes = gloo(
        op("c10d::allreduce_", 10, 5, 20), 15, 20_000 + late, op(gradient, 20, 20_010, 30),
        op("c10d::allreduce_", 21_000, 5, 31), op("gloo:all_reduce", 21_010, 90, 32, tid=91),
        op("copy", 30_000, 20, 33),
    )  # fmt: skip
    events[0]["dur"] = 40_000
    nodes += [node("c10d::allreduce_", 31, [[tensor(4, 9)], "<Object>", True, -1])]
    nodes += [node("gloo:all_reduce", 32, [tensor(4, 9)]), node("copy", 33, [tensor(3, 50)])]
    stages = Stages(tmp_path, events, nodes)
    assert ("gloo:all_reduce", 15, 20_000 + late) in stages.nodes() and stages.replayed()
    assert ("gloo:all_reduce", "copy") in stages.edges(EdgeKind.COLLECTIVE)
    assert gradient not in {waiter for _, waiter in stages.edges(EdgeKind.COLLECTIVE)}
    assert lengths(stages)[gradient] == 20_010
    assert "communication-ends-late" not in stages.causes.findings


def test_collectives_of_one_group_start_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """Of gloo's two threads, the one with the later call may start and end first."""
    events, nodes = gloo(op("c10d::allreduce_", 10, 5, 20), 15, 60)
    for number, (begin, end) in enumerate([(60, 100), (35, 95)]):
        call, run = 22 + 2 * number, 23 + 2 * number
        events += [op("c10d::allreduce_", 20 + 10 * number, 5, call)]
        events += [op("gloo:all_reduce", begin, end - begin, run, tid=90 + number)]
        nodes += [node("c10d::allreduce_", call), node("gloo:all_reduce", run, [tensor(7 + number, 9)])]
    stages = Stages(tmp_path, events, nodes)
    communication = [(start, end) for name, start, end in stages.nodes() if name == "gloo:all_reduce"]
    assert [end for _, end in communication] == [60, 100, 95]
    assert communication[1][0] < communication[2][0] and stages.replayed()
