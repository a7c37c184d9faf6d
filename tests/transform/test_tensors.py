"""Shapes of tensors for another batch, sequence or number of shards, and the places and times that follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, TensorInfo
from chakra_et.job.mesh import Mesh
from chakra_et.job.operators import GRADIENT, operators_of
from chakra_et.transform.changes import RankTraces
from chakra_et.transform.reductions import _last_in, _shared_groups
from chakra_et.transform.tensors import Sizes, find_sharding, find_sizes, resizing, with_shards
from tests.job.test_gradients import two_passes
from tests.simulate.replay_traces import collective, cpu, make_trace


def test_heads_of_a_batch_change_with_it_and_with_the_sequence() -> None:
    """As many places as a sequence has tokens are no size of a layer."""
    places = (10, 64)
    sizes = Sizes(4, 10, frozenset({(64, 64), places}), frozenset({places}), heads=2, width=32)
    resized = resizing(sizes, 8, 30, "made")
    shapes = {(8, 10, 32): (16, 30, 32), (80, 32): (480, 32), (4, 2, 10, 9): (8, 2, 30, 29)}
    assert {shape: resized(shape) for shape in shapes} == shapes
    assert resized((64, 64)) == (64, 64)


def test_more_tensor_parallel_ranks_cut_the_shards_alone() -> None:
    operator = {"kind": "operator", "lane": 0}
    trace = make_trace(
        cpu(1, 100, name="aten::addmm", **operator),
        cpu(2, 1, (1,), name=GRADIENT, **operator),
        collective(3, 9, (2,), parent=1, lane=9, is_cpu_op=0, kind="collective"),
    )
    shapes = [b"[[96],[40,64],[64,96]]", b"[[96,64]]", b"[[10,4,64]]"]
    kinds = [b'["Tensor(float)","Tensor(float)","Tensor(float)"]'] * 3
    traces = {
        rank: replace(trace, inputs=TensorInfo(np.arange(3), [b"[]"] * 3, shapes, kinds)) for rank in (0, 1)
    }
    retime = lambda *each: float(each[-1])  # noqa: E731
    ranks = RankTraces("made", Mesh(2, 1, 1), {"1": [0, 1]}, traces, {0: 0, 1: 1}, retime)
    made = with_shards(ranks, 4)
    inputs = made.traces[1].inputs
    assert inputs is not None
    assert inputs.shapes == [b"[[48],[40,64],[64,48]]", b"[[48,64]]", b"[[10,4,64]]"]
    assert "each shard of a tensor-parallel operator becomes 2: sizes 96 were recognised" in made.notes[0]


def test_an_operator_without_others_inside_ends_with_itself() -> None:
    operators = two_passes()
    cpu_rows = np.flatnonzero(operators.lane == 0)
    assert (_last_in(operators, cpu_rows, 0), _last_in(operators, cpu_rows, 2)) == (0, 8)


def test_batch_sequence_and_heads_are_told_by_look_ups_and_tensors_of_four_dimensions() -> None:
    operator = {"kind": "operator", "lane": 0}
    names = ["aten::embedding", "aten::embedding", "aten::embedding", "aten::bmm", "aten::bmm", GRADIENT]
    trace = make_trace(*(cpu(at, 1, name=name, parent=0, **operator) for at, name in enumerate(names, 1)))
    looked_up = [b"[[300,64],[4,10]]", *[b"[[50,64],[9,9]]"] * 2]  # the largest table is that of tokens
    for attention, heads in (
        ([b"[[4,2,10,32]]", b"[[4,10,10,10]]"], (2, 32)),  # batch, heads, tokens, width
        ([b"[[4,10,2,32]]", b"[[9,9,9,9]]"], (2, 32)),  # batch, tokens, heads, width
        ([b"[[10,4,2,32]]", b"[[4,7,5,8]]"], (2, 32)),  # tokens, batch, heads, width
        ([b"[[4,7,5,8]]", b"[[7,10,3,8]]"], (0, 0)),
    ):
        shapes = [*looked_up, *attention, b"[[64,64]]"]
        info = TensorInfo(np.arange(6), [b"[]"] * 6, shapes, [b'["Tensor(float)","Tensor(float)"]'] * 6)
        found = find_sizes({0: operators_of(replace(trace, inputs=info), "made")}, "made")
        assert (found.batch, found.sequence, found.heads, found.width) == (4, 10, *heads)
        assert found.tables == {(300, 64), (50, 64)} and found.parameters == {*found.tables, (64, 64)}


def test_shards_are_told_by_gradients_heads_and_gathered_tensors() -> None:
    operator = {"kind": "operator", "lane": 0}
    gathered = int(CollectiveType.ALL_GATHER)
    unnamed = collective(6, 9, parent=1, lane=9, is_cpu_op=0, kind="collective")
    del unnamed["pg_name"]
    trace = make_trace(
        cpu(1, 9, name="aten::bmm", **operator),
        cpu(2, 1, name=GRADIENT, **operator),
        collective(3, 9, (), "2", parent=1, lane=9, is_cpu_op=0, kind="collective"),
        collective(4, 9, parent=1, lane=9, is_cpu_op=0, kind="collective", comm_type=gathered),
        collective(5, 9, parent=1, lane=9, is_cpu_op=0, kind="collective"),
        unnamed,
    )
    # 4 heads of 24; another group's; a shard of 6 tokens; 10 tokens of a batch of 5 with hidden size 64; no
    # group's.
    shapes = [b"[[10,5,4,24]]", b"[[96,64]]", b"[[7,11,13]]", b"[[6,5,64]]", b"[[10,5,64]]", b"[[96,4,6]]"]
    info = TensorInfo(np.arange(6), [b"[]"] * 6, shapes, [b'["Tensor(float)"]'] * 6)
    operators = {0: operators_of(replace(trace, inputs=info), "made")}
    sizes = {6, 96, 4, 4 * 5, 4 * 5 * 10 * 10}
    assert find_sharding(operators, {"1"}, 2, 4, "made") == (sizes, 2)
    with pytest.raises(TraceError, match="a shard of 4 can't be cut into 3"):
        find_sharding(operators, {"1"}, 2, 6, "made")
    whole = replace(info, shapes=[*shapes[:3], b"[[5,10,64]]", *shapes[4:]])
    operators = {0: operators_of(replace(trace, inputs=whole), "made")}
    with pytest.raises(TraceError, match="the size 5 is that of a shard and of a whole tensor"):
        find_sharding(operators, {"1"}, 2, 4, "made")


def test_groups_of_another_axis_share_nothing_between_replicas() -> None:
    about = ("mesh_tp", "mesh_dp", "default_pg")
    nodes = [collective(at, 1, (), str(at), pg_description=text) for at, text in enumerate(about, 1)]
    assert _shared_groups({0: make_trace(*nodes)}) == {"2", "3"}
