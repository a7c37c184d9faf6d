"""More and fewer blocks of a rank that is written down node by node, and the buckets of their gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType, TensorInfo
from chakra_et.et.edges import edges_of
from chakra_et.et.node_attributes import parents, texts, with_integers, with_texts
from chakra_et.job.mesh import Mesh
from chakra_et.job.operators import ENGINE, GRADIENT
from chakra_et.simulate.run import make_run
from chakra_et.transform.changes import RankTraces
from chakra_et.transform.layers import with_layers
from chakra_et.transform.scale import Scaling
from tests.simulate.replay_traces import collective, cpu, make_trace

BLOCKS, MIB = 3, 1 << 20


def rank(sizes: tuple[int, ...], gap: bool = False, scalars: int = 0) -> ExecutionTrace:
    """Three blocks of four operators and two gradients of 1 MiB; behind the last of each of ``sizes`` bytes,
    its all-reduce is launched, for 11, 12, … µs. The thread waits for all of them at the end.
    ``gap``: it rests in each block's forward pass. ``scalars``: the optimizer counts the steps of as many
    parameters, all in a scalar each."""
    nodes, gradients, calls = [], [], []
    ends = np.cumsum(sizes).tolist()

    def add(name: str, phase: str, lane: int, micros: int = 5, **more: Any) -> int:
        number = len(nodes) + 1
        before = next((node["id"] for node in reversed(nodes) if node.get("lane") == lane), 0)
        deps = (before,) if before else ()
        kind = {"kind": "operator", "phase": phase, "lane": lane}
        nodes.append(cpu(number, micros, deps, name=name, start=10 * number, **kind | more))
        return number

    add("aten::embedding", "forward", 0, seq_id=0)
    for block in range(BLOCKS):
        for at, name in enumerate(("aten::norm", "aten::mm", "aten::gelu", "aten::add")):
            add(name, "forward", 0, seq_id=4 * block + at + 1)
            if gap and at == 1:
                add("rest", "forward", 0, kind="host-overhead")
    behind = add("aten::loss", "forward", 0)
    loss = add(f"{ENGINE}: Loss", "backward", 1, seq_id=4 * BLOCKS + 1)
    nodes[loss - 1]["deps"] = (behind,)
    for block in reversed(range(BLOCKS)):
        for at in reversed(range(4)):
            add(f"{ENGINE}: B{at}", "backward", 1, seq_id=4 * block + at + 1)
        for _ in range(2):
            around = add(f"{ENGINE}: {GRADIENT}", "backward", 1)
            gradients.append(add(GRADIENT, "backward", 1, parent=around))
            if len(calls) < len(ends) and len(gradients) * MIB >= ends[len(calls)]:
                launch = add("c10d::allreduce_", "backward", 1, 11 + len(calls), parent=around)
                number, of = len(nodes) + 1, sizes[len(calls)]
                more = {"lane": 9, "is_cpu_op": 0, "kind": "collective", "start": 10 * number}
                nodes.append(collective(number, 20, (launch,), parent=launch, comm_size=of, **more))
                calls.append(number)
    last = add("aten::wait", "optimizer", 1)
    nodes[last - 1]["deps"] = (last - 1, *calls)
    shapes = [b"[[512,512]]"] * len(gradients)
    kinds = [b'["Tensor(float)"]'] * len(gradients)
    if scalars:
        gradients.append(add("aten::_foreach_add_", "optimizer", 1, 100))
        shapes.append(b"[[%s],[]]" % b",".join([b"[]"] * scalars))
        kinds.append(b'["GenericList[Tensor(float)]","Scalar"]')
    rows = np.array(gradients) - 1
    return replace(make_trace(*nodes), inputs=TensorInfo(rows, [b"[]"] * len(rows), shapes, kinds))


def layered(trace: ExecutionTrace, layers: str) -> tuple[ExecutionTrace, tuple[str, ...]]:
    ranks = RankTraces(
        "made",
        Mesh(1, 1, 1),
        {},
        {0: with_integers(trace, "of_row", {row: row for row in range(len(trace))})},
        {0: 0},
        lambda kind, before, after, group, micros: micros * after / before,
    )
    made = with_layers(ranks, layers)
    (found,) = made.traces.values()
    rows = found.column("of_row").tolist()  # copies of nodes keep other attributes
    assert [trace.names[row] for row in rows] == [found.names[i] for i in range(len(found))]
    return found, made.notes


def reductions(trace: ExecutionTrace) -> list[tuple[int, int, int]]:
    """Of each all-reduce the MiB, its own µs, and those of its launch, in the order of launches."""
    rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    launch = parents(trace)[rows]
    columns = (
        trace.column("comm_size")[rows] // MIB,
        trace.duration_micros[rows],
        trace.duration_micros[launch],
    )
    order = np.argsort(launch)
    return [tuple(int(column[at]) for column in columns) for at in order]


def waited_for(trace: ExecutionTrace) -> int:
    """How many all-reduces the last node waits for."""
    edges = edges_of(trace)
    last = next(row for row in range(len(trace)) if trace.names[row] == "aten::wait")
    return int((trace.types[edges.parent[edges.child == last]] == NodeType.COMM_COLL).sum())


@pytest.mark.parametrize(("layers", "count"), [("2x", 12), ("4", 8), ("2", 4), ("1", 2)])
def test_buckets_of_ddp_are_filled_anew_by_its_rule(layers: str, count: int) -> None:
    trace, notes = layered(rank((MIB,) * 6), layers)
    # The last bucket is like the last one, and all others like those in their places.
    launches = [11 + min(at, 5) for at in range(count - 1)] + [16]
    assert reductions(trace) == [(1, 20, each) for each in launches]
    assert waited_for(trace) == count
    # Forward passes run the copies of a block in order, backward passes the last first.
    number, lane = trace.column("seq_id", -1), trace.column("lane")
    forward, backward = (number[(lane == each) & (number >= 0)].tolist() for each in (0, 1))
    assert forward == sorted(set(forward)) and len(forward) == 2 * count + 1
    assert backward[0] > forward[-1] and backward[1:] == forward[:0:-1]
    assert "the buckets of 1 backward passes were refilled by DDP's rule" in notes
    around = [trace.names[row] for row in parents(trace)[trace.column("comm_type", -1) == 0].tolist()]
    assert around == ["c10d::allreduce_"] * count
    launch = np.array(
        [name == "c10d::allreduce_" for name in (trace.names[row] for row in range(len(trace)))]
    )
    assert {trace.names[row] for row in parents(trace)[launch].tolist()} == {f"{ENGINE}: {GRADIENT}"}
    # Each comes behind the gradient that fills its bucket, and ahead of the next.
    thread = [trace.names[row] for row in np.flatnonzero(lane == 1).tolist()]
    behind = [thread[at - 1] for at, name in enumerate(thread) if name == "c10d::allreduce_"]
    assert behind == [GRADIENT] * count
    # The backward pass waits for the forward pass, on another thread.
    edges, loss = edges_of(trace), int(np.flatnonzero(lane == 1)[0])
    assert [trace.names[row] for row in edges.parent[edges.child == loss].tolist()] == ["aten::loss"]


def test_buckets_by_no_rule_keep_their_number() -> None:
    # Each had 3 of 6 gradients, and has 6 of 12.
    trace, notes = layered(rank((3 * MIB - 600, 3 * MIB)), "2x")
    sizes = trace.column("comm_size")[trace.types == NodeType.COMM_COLL]
    assert sizes.tolist() == [6 * MIB - 1200, 6 * MIB]
    assert any("keep their number, and grew with their gradients" in note for note in notes)


def test_collectives_of_one_process_take_time_by_their_bytes() -> None:
    run = make_run("made", [rank((3 * MIB - 600, 3 * MIB))], [0], {"1": [0]})
    network = NetworkModel(0.0, 1e3, 1e9, math.inf, 0.0, 0, "a test")
    for given in (None, network):
        made = Scaling(layers="2x", spread=0.0, network=given).rebuild(run)
        (trace,) = made.graph.traces
        micros = trace.duration_micros[trace.types == NodeType.COMM_COLL]
        assert micros.tolist() == [40, 40]


def test_collectives_of_one_block_stay_with_it() -> None:
    trace, notes = layered(rank((2 * MIB,) * 3), "2x")
    assert [each[0] for each in reductions(trace)] == [2] * 6
    assert "no collective of gradients was recognised: communication outside of blocks stays" in notes


def test_a_block_with_other_parameters_is_named() -> None:
    trace = rank((MIB,) * 6)
    assert trace.inputs is not None
    shapes = [b"[[512,256]]"] * 2 + trace.inputs.shapes[2:]  # the backward pass begins with the last block
    with pytest.raises(
        TraceError, match="blocks 0 and 2 repeat their operators, and have gradients of other"
    ):
        layered(replace(trace, inputs=replace(trace.inputs, shapes=shapes)), "2x")


def test_a_rest_between_operators_of_a_block_stays_there_in_each_copy() -> None:
    made, _ = layered(rank((MIB,) * 6, gap=True), "2x")
    forward = [made.names[row] for row in np.flatnonzero(made.column("lane") == 0).tolist()]
    whole = ["aten::norm", "aten::mm", "rest", "aten::gelu", "aten::add"]
    assert forward == ["aten::embedding", *whole * 6, "aten::loss"]


@pytest.mark.parametrize(("scalars", "micros"), [(3, 100), (4, 200), (6, 200)])
def test_a_list_of_as_many_scalars_as_half_of_the_parameters_follows_their_number(
    scalars: int, micros: int
) -> None:
    """One of four was counted as three. Six parameters become twelve."""
    made, _ = layered(rank((MIB,) * 6, scalars=scalars), "2x")
    (row,) = (row for row in range(len(made)) if made.names[row] == "aten::_foreach_add_")
    assert made.duration_micros[row] == micros


@pytest.mark.parametrize("numbered", [False, True])
def test_copies_keep_what_is_around_all_blocks_and_number_their_modules(numbered: bool) -> None:
    trace = rank((MIB,) * 6)
    products = [row for row in range(len(trace)) if trace.names[row] == "aten::mm"]
    trace = with_texts(trace, "kind", {0: "annotation"})
    trace = with_integers(trace, "parent", dict.fromkeys(products, 1), "int64")
    modules = {row: f"Model_0/Block_{at}" if numbered else "Model_0" for at, row in enumerate(products)}
    made, _ = layered(with_texts(trace, "module", modules), "2x")
    rows = [row for row in range(len(made)) if made.names[row] == "aten::mm"]
    assert len(rows) == 2 * BLOCKS and parents(made)[rows].tolist() == [0] * len(rows)
    table, index = texts(made, "module")
    of_copies = [f"Model_0/Block_{at}" for at in range(len(rows))] if numbered else ["Model_0"] * len(rows)
    assert [table[at] for at in index[rows].tolist()] == of_copies
