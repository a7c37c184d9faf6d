"""Gradients, their collectives and passes of a rank, from nodes that are written down one by one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, TensorInfo
from chakra_et.job.blocks import Blocks
from chakra_et.job.gradients import (
    Gradient,
    elements,
    launch_tree,
    limits_of,
    parameters_of,
    sweeps_of,
    whole_collectives,
)
from chakra_et.job.mesh import (
    GroupShape,
    Mesh,
    Place,
    ScaledGroups,
    described_groups,
    dp_ranks_of,
    forward_uses,
    message_distances,
    parse_mesh,
    shape_of,
    stages_of,
)
from chakra_et.job.operators import ENGINE, GRADIENT, Operators, operators_of
from chakra_et.job.operators import inside as rows_inside
from chakra_et.transform.stages import Segment, _of_embedding, one_f_one_b, segments_of
from tests.simulate.replay_traces import collective, cpu, make_trace, recv, send


def two_passes(record: int = 7) -> Operators:
    """A backward pass whose gradient is all-reduced, and one with an element of type double."""
    backward = {"kind": "operator", "phase": "backward", "lane": 0}
    trace = make_trace(
        cpu(1, 10, name="aten::mm", kind="operator", phase="forward", lane=0, seq_id=0),
        cpu(2, 5, name=f"{ENGINE}: MmBackward0", seq_id=0, **backward),
        cpu(3, 5, name=f"{ENGINE}: {GRADIENT}", **backward),
        cpu(4, 1, name=GRADIENT, parent=3, **backward),
        cpu(5, 2, name="c10d::allreduce_", parent=3, rf_id=record, **backward),
        cpu(6, 1, name="record_param_comms", parent=5, rf_id=8, **backward),
        collective(7, 20, (5,), parent=5, lane=9, is_cpu_op=0, kind="collective", comm_size=128),
        cpu(8, 1, name="c10d::allreduce_", parent=3, rf_id=record, segment=1, **backward),
        cpu(9, 1, name="aten::detach", parent=3, rf_id=record and 9, **backward),
        cpu(10, 5, name=f"{ENGINE}: MmBackward0", seq_id=4, **backward),
        cpu(11, 5, name=f"{ENGINE}: {GRADIENT}", **backward),
        cpu(12, 1, name=GRADIENT, parent=11, **backward),
        collective(13, 20, (12,), parent=12, lane=9, is_cpu_op=0, kind="collective", comm_size=130),
    )
    kinds = [b'["Tensor(float)"]', b'["Tensor(double)"]']
    tensors = TensorInfo(np.array([3, 11]), [b"[]"] * 2, [b"[[4,8]]", b"[[1]]"], kinds)
    return operators_of(replace(trace, inputs=tensors), "made")


def test_each_backward_pass_has_its_gradients_and_launches() -> None:
    operators = two_passes()
    first, second = sweeps_of(operators, None)
    assert first.gradients == [Gradient(3, (4, 8), 128, "float", -1)]
    assert second.gradients == [Gradient(11, (1,), 8, "double", -1)]
    assert (first.launches, second.launches) == ([(6, 4)], [])
    assert (first.lane, second.lane) == (0, 0)
    # With what runs in the launch and its rest after an interruption, and nothing else of its parent.
    assert launch_tree(operators, first) == [{4, 5, 6, 7}]
    without_records = two_passes(record=0)
    assert launch_tree(without_records, sweeps_of(without_records, None)[0]) == [{4, 5, 6}]
    assert (operators.item(3), operators.item(11), operators.item(0)) == (4, 8, 4)


def test_the_gradient_of_what_a_stage_received_is_none_of_a_parameter() -> None:
    """Told by its three dimensions: a parameter's two may be those of another message."""
    backward = {"kind": "operator", "phase": "backward", "lane": 0}
    trace = make_trace(
        recv(1, 5, 0, (), kind="p2p", lane=7),
        recv(2, 5, 0, (), kind="p2p", lane=7),
        cpu(3, 5, name="aten::conv1d", kind="operator", phase="forward", lane=0, seq_id=0),
        cpu(4, 5, name=f"{ENGINE}: ConvBackward0", seq_id=0, **backward),
        *(cpu(5 + at, 1, name=GRADIENT, parent=4, **backward) for at in range(3)),
    )
    shapes = [b"[[2,3,4]]", b"[[4,8]]", b"[[5,6,7]]", b"[[2,3,4]]", b"[[4,8]]", b"[[5,6,7]]"]
    rows = np.array([0, 1, 2, 4, 5, 6])
    tensors = TensorInfo(rows, [b"[]"] * 6, shapes, [b'["Tensor(float)"]'] * 6)
    (sweep,) = sweeps_of(operators_of(replace(trace, inputs=tensors), "made"), None)
    assert [each.shape for each in sweep.gradients] == [(4, 8), (5, 6, 7)]


def test_parameters_are_those_of_the_pass_with_most_gradients() -> None:
    operators = two_passes()
    assert parameters_of(sweeps_of(operators, None)) == {-1: Counter({(4, 8): 1})}
    assert elements(Counter({(4, 8): 3, (2,): 1, (): 1})) == 99
    # 130 bytes are within 2% of the 32 gradients' 128 bytes, and not of other numbers'.
    assert list(whole_collectives(operators, {6}, 32)) == [12]
    assert list(whole_collectives(operators, set(), 64)) == [6, 12]
    assert list(whole_collectives(operators, set(), 34)) == []


@pytest.mark.parametrize(
    ("stage", "order"),
    [(0, "F0 F1 F2 B0 F3 B1 B2 B3"), (1, "F0 F1 B0 F2 B1 F3 B2 B3"), (2, "F0 B0 F1 B1 F2 B2 F3 B3")],
)
def test_one_forward_one_backward(stage: int, order: str) -> None:
    passes = one_f_one_b(stage, 3, 4)
    assert " ".join(f"{'FB'[backward]}{number}" for backward, number in passes) == order


def test_a_backward_pass_begins_with_the_loss_s_outermost_operator() -> None:
    operator, lane = {"kind": "operator", "lane": 0}, {"lane": 0}
    trace = make_trace(
        cpu(1, 10, name="aten::mm", phase="forward", **operator),
        cpu(2, 10, name="aten::mse_loss", phase="forward", **operator),
        cpu(3, 1, name="between operators", kind="host-overhead", phase="backward", **lane),
        cpu(4, 10, name=f"{ENGINE}: MseLossBackward0", phase="backward", **operator),
        cpu(5, 10, name="aten::mul", parent=4, phase="backward", **operator),
        cpu(6, 10, name=f"{ENGINE}: MmBackward0", phase="backward", **operator),
    )
    outside = [-1] * 4
    blocks = Blocks(np.array([0, *outside, 1]), np.array([0, *outside, 0]), [False, True], 1, "made")
    assert segments_of(operators_of(trace, "made"), blocks, "made") == [
        Segment(0, 0, 0, 3, False, 0, 0),
        Segment(3, 5, 5, 6, True, 0, 0),
    ]


def test_groups_are_grids_of_the_mesh() -> None:
    mesh = Mesh(2, 4, 1)
    assert shape_of([0, 2, 4, 6], mesh) == GroupShape(((0, 0),), "stride", 1)
    assert shape_of([2, 3], mesh) == GroupShape(((0, 0), (1, 0)), "block", 1)
    assert shape_of([4, 6], mesh) == GroupShape(((0, 0),), "block", 2)
    assert shape_of([3, 7], mesh) == GroupShape(((1, 0),), "stride", 2)
    for none in ([], [0, 8], [-1, 0], [0, 3], [2, 4], [0, 2, 4]):
        assert shape_of(none, mesh) is None
    assert (parse_mesh("tp2,pp2", 8), parse_mesh("dp4", 4)) == (Mesh(2, 2, 2), Mesh(1, 4, 1))


def test_groups_of_a_larger_mesh_have_their_members_and_numbers() -> None:
    groups = {"1": [0, 1, 2, 3], "2": [0, 1], "3": [2, 3], "4": [0, 2], "5": [1, 3]}
    scaled = ScaledGroups(groups, Mesh(1, 4, 1), Mesh(1, 8, 1))
    names = [[scaled.name_for(group, Place(0, at, 0)) for group in ("1", "2", "4")] for at in (0, 1, 5)]
    assert names == [["1", "2", "3"], ["1", "2", "4"], ["1", "5", "4"]]
    assert scaled.all() == {
        "1": list(range(8)),
        "2": [0, 1],
        "3": [0, 2, 4, 6],
        "4": [1, 3, 5, 7],
        "5": [4, 5],
    }
    assert (scaled.counts("1"), scaled.counts("2"), scaled.counts("4")) == ((4, 8), (2, 2), (2, 4))
    same = ScaledGroups(groups, Mesh(1, 4, 1), Mesh(1, 4, 1))
    assert [same.name_for("3", Place(0, 2, 0)), same.name_for("5", Place(0, 3, 0)), same.next] == [
        "3",
        "5",
        6,
    ]
    # Four tensor-parallel places in place of two: groups along them grow, those of one place keep it.
    wider = ScaledGroups({"1": [0, 1], "2": [0, 2]}, Mesh(2, 2, 1), Mesh(4, 2, 1))
    wider.name_for("1", Place(0, 1, 0)), wider.name_for("2", Place(3, 0, 0))
    assert wider.all() == {"1": [4, 5, 6, 7], "2": [3, 7]}


def test_collectives_of_forward_passes_are_counted_unless_data_parallelism_has_them() -> None:
    within = {"phase": "forward", "comm_size": 65, "pg_description": "default_pg"}
    gather, reduce = int(CollectiveType.ALL_GATHER), int(CollectiveType.ALL_REDUCE)
    trace = make_trace(
        cpu(1, 10, name="FullyShardedDataParallel.forward"),
        cpu(2, 10, name="c10d::_allgather_base_", parent=1),
        collective(3, 5, (2,), parent=2, comm_type=gather, **within),
        collective(4, 5, (3,), comm_type=gather, **within),
        collective(5, 5, (4,), comm_type=reduce, **within),
        collective(6, 5, (5,), comm_type=reduce, **{**within, "comm_size": 64}),
        collective(7, 5, (6,), comm_type=reduce, **{**within, "phase": "backward"}),
        collective(8, 5, (7,), "2", comm_type=reduce, **{**within, "pg_description": "mesh_dp"}),
    )
    assert forward_uses([trace]) == {"1": "group 1 has 2 all-gathers inside the forward pass"}


def test_stages_are_places_in_pipeline_groups() -> None:
    groups = {
        "a": ["1", "mesh_pp", [0, 2]],
        "b": ["2", "mesh_pp", [1, 3]],
        "c": ["3", "mesh_dp", [0, 1]],
    }
    damaged = make_trace(cpu(1, 1), process_groups=json.dumps({**groups, "d": ["4", "mesh_pp"]}))
    assert described_groups(damaged) == []
    trace = make_trace(cpu(1, 1), process_groups=json.dumps(groups))
    assert described_groups(trace) == [("mesh_pp", [0, 2]), ("mesh_pp", [1, 3]), ("mesh_dp", [0, 1])]
    stages = stages_of([trace], range(5))
    assert stages == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}
    assert dp_ranks_of(stages) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 2}


def test_limits_of_buckets_are_looked_for_up_to_a_gibibyte() -> None:
    mib = 1 << 20
    for least, found in ((1024, (1024 * mib, 1024 * mib)), (1025, None)):
        sizes = [(least - 1) * mib, mib] * 2
        assert limits_of(sizes, ["float"] * 4, [least * mib] * 2) == found


def test_operators_are_inside_the_first_node_too() -> None:
    inside = {"kind": "operator", "lane": 0}
    found = operators_of(make_trace(cpu(1, 9, **inside), cpu(2, 5, parent=1, **inside)), "made")
    assert (found.parent.tolist(), found.top.tolist(), found.tops) == ([-1, 0], [0, 0], {0: [0]})
    assert rows_inside(found.trace, [1]).tolist() == [-1, 0], "the last node holds itself alone"


def test_launches_are_those_of_the_last_pass_that_began() -> None:
    nodes = []
    for begin in (1, 6):
        backward = {"kind": "operator", "phase": "backward", "lane": 0}
        nodes += [
            cpu(begin, 5, name=f"{ENGINE}: MmBackward0", seq_id=begin, **backward),
            cpu(begin + 1, 5, name=f"{ENGINE}: {GRADIENT}", **backward),
            cpu(begin + 2, 1, name=GRADIENT, parent=begin + 1, **backward),
            cpu(begin + 3, 2, name="c10d::allreduce_", parent=begin + 1, **backward),
            collective(begin + 4, 20, parent=begin + 3, lane=9, is_cpu_op=0, kind="collective"),
        ]
    passes = sweeps_of(operators_of(make_trace(*nodes), "made"), None)
    assert [each.launches for each in passes] == [[(4, 3)], [(9, 8)]]


def test_messages_and_embeddings_show_the_stages() -> None:
    sends = (send(1, 1, 5, comm_src=2), send(2, 1, 0, comm_src=3), send(3, 1, 4), send(4, 1, 4, comm_src=4))
    assert message_distances([make_trace(*sends), make_trace(cpu(1, 1))]) == {3}
    about = ("EMBEDDING_GROUP", "position_embedding", "DATA_PARALLEL_GROUP", None)
    nodes = [
        collective(at, 1, **({"pg_description": text} if text else {})) for at, text in enumerate(about, 1)
    ]
    assert _of_embedding(make_trace(*nodes)).tolist() == [True, True, False, False]


def test_groups_of_some_places_of_an_axis_that_grows_are_refused() -> None:
    pairs = {"1": [0, 1], "2": [2, 3], "3": [0, 1, 2, 3]}
    with pytest.raises(TraceError, match="group 1 has some of the 4 tensor-parallel places: --tp can't tell"):
        ScaledGroups(pairs, Mesh(4, 1, 1), Mesh(8, 1, 1))
    # More replicas ask for no more places.
    assert ScaledGroups(pairs, Mesh(4, 1, 1), Mesh(4, 2, 1)).all() == {}


def test_each_replica_has_groups_that_stay_apart_for_itself() -> None:
    scaled = ScaledGroups({"1": [0]}, Mesh(1, 2, 1), Mesh(1, 4, 1), apart=("1",))
    names = [scaled.name_for("1", Place(0, at, 0)) for at in range(4)]
    assert len(set(names)) == 4 and list(scaled.all().values()) == [[0], [1], [2], [3]]


def test_further_parts_of_the_first_operator_are_inside_it() -> None:
    trace = make_trace(cpu(1, 9, rf_id=5), cpu(2, 5, parent=1, rf_id=6), cpu(3, 9, rf_id=5, segment=1))
    assert rows_inside(trace, [0]).tolist() == [0, 0, 0]
