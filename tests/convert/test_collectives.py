"""Communication: type, bytes of this rank, group, peer, tag, sequence, asynchronous or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.convert.graph.communication import Communication, Group, group_number, operation_named
from chakra_et.convert.graph.groups import declared_groups
from chakra_et.convert.graph.identify_communication import communication_rows
from chakra_et.convert.pair import convert_pair
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.traces.sets import Pair
from chakra_et.validate import check as validate
from tests.generator import Features, Layout, generate
from tests.generator.device_layouts import comm_bytes
from tests.generator.hand_made import Stages, annotation, call, kernel, node, op, tensor
from tests.generator.truth import Converted, convert

TYPES = {
    "allreduce": CollectiveType.ALL_REDUCE,
    "allreduce_coalesced": CollectiveType.ALL_REDUCE,
    "_allgather_base": CollectiveType.ALL_GATHER,
    "all_gather": CollectiveType.ALL_GATHER,
    "_reduce_scatter_base": CollectiveType.REDUCE_SCATTER,
    "reduce_scatter": CollectiveType.REDUCE_SCATTER,
    "broadcast": CollectiveType.BROADCAST,
    "reduce": CollectiveType.REDUCE,
    "all_to_all": CollectiveType.ALL_TO_ALL,
    "all_to_allv": CollectiveType.ALL_TO_ALL,
    "gather": CollectiveType.GATHER,
    "scatter": CollectiveType.SCATTER,
    "barrier": CollectiveType.BARRIER,
}
ALL = (*TYPES, "send", "recv")
SOURCES = {
    "arguments of the kernel": Layout(),
    "arguments of record_param_comms": Layout(comm_args=False),
    "tensors of the operators": Layout(comm_args=False, comm_attrs=False),
}


def described(c: Converted) -> list[tuple[Communication, object]]:
    """(converter's result, true value) of each communication."""
    by_row = {row: number for number, row in c.row.items()}
    events = {event.number: event for event in c.generated.run.events}
    assert len(c.communication.items) == sum(
        e.comm is not None and e.lane[0] != "cpu" for e in events.values()
    )
    return [(item, events[by_row[item.event]].comm) for item in c.communication.items]


@pytest.mark.parametrize("kernels", ("old", "dev", "rccl"))
@pytest.mark.parametrize("source", SOURCES)
def test_nccl_metadata_in_every_place(source: str, kernels: str, tmp_path: Path) -> None:
    layout = SOURCES[source]
    # Without any argument only the default group is known.
    groups = 1 if source == "tensors of the operators" else 3
    made = generate(
        Features(seed=3, nccl=ALL, nccl_kernels=kernels, groups=groups, rank=1, world_size=4), layout
    )
    for item, true in described(convert(made, tmp_path)):
        assert item.on_gpu and item.launch >= 0
        assert item.size == comm_bytes(true), true
        assert item.group.name == true.group and item.group.ranks == (0, 1, 2, 3)
        if true.kind in TYPES:
            assert item.type is NodeType.COMM_COLL and item.collective is TYPES[true.kind]
            assert item.asynchronous is False
        else:
            assert item.type is (NodeType.COMM_SEND if true.kind == "send" else NodeType.COMM_RECV)
            assert item.peer == (true.target if true.kind == "send" else true.source)
            assert item.tag == true.tag


@pytest.mark.parametrize("late", (False, True))
def test_gloo(late: bool, tmp_path: Path) -> None:
    kinds = tuple(kind for kind in ALL if kind != "allreduce_coalesced")
    made = generate(Features(seed=5, devices=0, gloo=kinds, late=late, rank=1, world_size=4))
    for item, true in described(convert(made, tmp_path)):
        assert not item.on_gpu
        assert item.size == (1 if true.kind == "barrier" else comm_bytes(true)), true
        assert item.group.name == "0" and item.group.ranks == (0, 1, 2, 3)
        if true.kind in TYPES:
            assert item.collective is TYPES[true.kind] and item.asynchronous is late
        else:
            assert item.type is (NodeType.COMM_SEND if true.kind == "send" else NodeType.COMM_RECV)
            assert item.peer == (true.target if true.kind == "send" else true.source)


def test_gloo_operator_that_had_not_ended_when_the_recording_stopped(tmp_path: Path) -> None:
    """Found in DDP captures on a busy machine: the observer never wrote it, so its bytes were lost."""
    kinds = tuple(kind for kind in ALL if kind != "allreduce_coalesced")
    made = generate(Features(seed=5, devices=0, gloo=kinds, rank=1, world_size=4))
    made.host["nodes"] = [each for each in made.host["nodes"] if not each["name"].startswith("gloo:")]
    converted = convert(made, tmp_path)
    items = described(converted)
    assert len(items) == len(kinds)
    for item, true in items:
        assert item.size == (1 if true.kind == "barrier" else comm_bytes(true)), true
    assert "communication-size" not in converted.communication.findings


def test_gloo_groups_that_nothing_records_are_a_warning(tmp_path: Path) -> None:
    features = Features(devices=0, gloo=("allreduce",) * 9, groups=3)
    found = convert(generate(features), tmp_path).communication
    assert {item.group.name for item in found.items} == {"0"}
    assert found.findings == {"group-default": 9}


def test_sequence_numbers_count_per_group(tmp_path: Path) -> None:
    c = convert(generate(Features(seed=2, nccl=("allreduce", "broadcast", "send") * 3, groups=2)), tmp_path)
    counts: dict[str, int] = {}
    order = sorted(described(c), key=lambda pair: pair[0].event)
    for item, true in order:
        if true.kind == "send":
            assert item.sequence == -1
            continue
        assert item.sequence == counts.get(true.group, 0)
        counts[true.group] = item.sequence + 1
    assert len(counts) == 2


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", CollectiveType.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(…)", CollectiveType.REDUCE_SCATTER),
        ("ncclDevKernel_AllGather_RING_LL(…)", CollectiveType.ALL_GATHER),
        ("ncclDevKernel_Reduce_Sum_f32_TREE_LL(…)", CollectiveType.REDUCE),
        ("ncclDevKernel_Broadcast_RING_LL(…)", CollectiveType.BROADCAST),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(…)", None),
        ("nccl:_all_gather_base", CollectiveType.ALL_GATHER),
        ("nccl:all_reduce_barrier", CollectiveType.BARRIER),
        ("nccl:all_to_all", CollectiveType.ALL_TO_ALL),
        ("c10d::alltoall_base_", CollectiveType.ALL_TO_ALL),
        ("_c10d_functional::all_gather_into_tensor", CollectiveType.ALL_GATHER),
        ("_c10d_functional::reduce_scatter_tensor", CollectiveType.REDUCE_SCATTER),
        ("all_gather_into_tensor_coalesced", CollectiveType.ALL_GATHER),
        ("c10d::scatter_", CollectiveType.SCATTER),
        ("c10d::gather_", CollectiveType.GATHER),
        ("c10d::recv_any_source_", NodeType.COMM_RECV),
        ("gloo:send", NodeType.COMM_SEND),
        ("aten::mm", None),
    ],
)
def test_names_of_operations(name: str, what: CollectiveType | NodeType | None) -> None:
    assert operation_named(name) is what


def test_wait_record_is_no_collective(tmp_path: Path) -> None:
    """DLRM's traces have record_param_comms nodes named "wait", which start nothing."""
    stages = Stages(
        tmp_path,
        [
            op("record_param_comms", 0, 2, 5),
            op("c10d::allreduce_", 3, 5, 6),
            op("record_param_comms", 4, 3, 7),
            call("cudaLaunchKernel", 5, 1, 9),
            kernel("ncclKernel_AllReduce_RING_LL_Sum_float()", 6, 9, 9),
        ],
        [
            node("record_param_comms", 5, [141, 0, 0, "wait", [], []]),
            node("record_param_comms", 7, [[tensor(3, 50)]]),
        ],
    )
    (item,) = stages.communication.items
    assert item.collective is CollectiveType.ALL_REDUCE and item.size == 200


def test_sizes_of_nested_tensor_lists(tmp_path: Path) -> None:
    """All-to-all with a list, coalesced all-reduce: the bytes of all input tensors."""
    values = [[tensor(3, 50), tensor(4, 25, 8)], "<Object>"]
    stages = Stages(
        tmp_path,
        [
            op("c10d::alltoall_", 3, 5, 6),
            op("record_param_comms", 4, 3, 7),
            call("cudaLaunchKernel", 5, 1, 9),
            kernel("ncclDevKernel_SendRecv()", 6, 9, 9),
        ],
        [
            node("c10d::alltoall_", 6, values),
            node("record_param_comms", 7, values, ["GenericList[Tensor(c10::Half)]"]),
        ],
    )
    (item,) = stages.communication.items
    assert item.collective is CollectiveType.ALL_TO_ALL
    assert (item.size, item.dtype, item.storages) == (400, "c10::Half", {3, 4})


def test_coalesced_launch_without_arguments_uses_the_kernels_metadata(tmp_path: Path) -> None:
    """Under a coalescing manager, the kernel is launched outside all c10d operators."""
    stages = Stages(
        tmp_path,
        [
            op("c10d::allreduce_", 0, 1, 4),
            op("c10d::allreduce_", 2, 1, 5),
            annotation("nccl:coalesced", 4, 3, 6),
            call("cudaLaunchKernelExC", 5, 1, 9),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 6, 9, 9),
        ],
        [node("nccl:coalesced", 6, [[tensor(3, 50), tensor(4, 50)]])],
    )
    (item,) = stages.communication.items
    assert item.collective is CollectiveType.ALL_REDUCE and item.size == 400


def test_communication_kernel_of_unknown_kind_is_a_warning(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [op("aten::mm", 0, 1, 4), kernel("ncclDevKernel_Generic_4()", 6, 9)])
    (item,) = stages.communication.items
    assert (item.type, item.collective, item.size) == (NodeType.COMM_COLL, None, 0)
    assert stages.communication.findings == {
        "communication-kind:ncclDevKernel_Generic_4()": 1, "communication-size": 1, "group-default": 1
    }  # fmt: skip


def test_the_rows_of_an_uneven_all_to_all_on_a_gpu(tmp_path: Path) -> None:
    """On the kernel, and as the operator's arguments, the output first; other collectives have none."""
    splits = {"In split size": "[3, 1]", "Out split size": "[2, 4]"}
    for name, fields, values in (
        ("alltoallv", splits, []), ("", {}, [tensor(1, 6), tensor(2, 4), [2, 4], [3, 1]]),
        ("allreduce", splits, []),
    ):  # fmt: skip
        events = [
            op("c10d::alltoall_base_", 0, 9, 4), call("cudaLaunchKernel", 1, 1, 8),
            kernel("ncclDevKernel_SendRecv()", 20, 9, 8, **{"Collective name": name} | fields),
        ]  # fmt: skip
        types = ["Tensor(float)", "Tensor(float)", "GenericList[Int,Int]", "GenericList[Int,Int]"]
        stages = Stages(tmp_path, events, [node("c10d::alltoall_base_", 4, values, types[: len(values)])])
        (item,) = stages.communication.items
        known = ("[3,1]", "[2,4]") if name != "allreduce" else ("", "")
        assert (item.in_split, item.out_split) == known


def test_peers_of_nccl_from_the_annotation(tmp_path: Path) -> None:
    """ProcessGroupNCCL writes ``nccl:send 1->3`` and ``nccl:recv 1<-2``: itself first, ranks in the group."""
    groups = {"rank": 5, "world_size": 8, "pg_config": [{"pg_name": "0", "ranks": [4, 5, 6, 7]}]}
    stages = Stages(
        tmp_path,
        [
            annotation("nccl:send 1->3", 0, 3, 4),
            call("cudaLaunchKernel", 1, 1, 8),
            annotation("nccl:recv 1<-2", 5, 3, 5),
            call("cudaLaunchKernel", 6, 1, 9),
            kernel("ncclDevKernel_SendRecv()", 3, 1, 8),
            kernel("ncclDevKernel_SendRecv()", 9, 1, 9),
        ],
        distributedInfo=groups,
    )
    assert [(item.type.name, item.peer) for item in stages.communication.items] == [
        ("COMM_SEND", 7),
        ("COMM_RECV", 6),
    ]


@pytest.mark.parametrize(
    ("device", "manifest", "host", "ranks"),
    [
        ([0, 1], [], None, (0, 1)),
        (None, [{"pg_name": "0", "ranks": [0, 1, 2]}], None, (0, 1, 2)),
        (None, [], [], (0, 1)),
        (None, [], [1, 0], (1, 0)),
        ([], [], [], (0, 1)),
    ],
)
def test_the_ranks_of_the_default_group(
    device, manifest, host, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """From the manifest, Kineto's distributedInfo or the host trace's record."""
    info = {"pg_config": [{"pg_name": "0", "ranks": device}]} if device is not None else {}
    record = f'[{{"pg_name": "0", "pg_desc": "default_pg", "ranks": {host}, "group_size": 2}}]'
    nodes = [node("## process_group:init ##", 1, [record], ["String"])] if host is not None else []
    stages = Stages(tmp_path, [op("a", 0, 1, 4)], nodes, distributedInfo=info)
    assert declared_groups(stages.host, stages.device, manifest)["0"].ranks == ranks


def test_group_ids_are_integers_from_1_and_equal_on_all_ranks() -> None:
    assert [group_number(Group(str(n))) for n in range(3)] == [1, 2, 3]
    named = Group("mesh_dp", "", (0, 2))
    assert 2**20 < group_number(named) == group_number(Group("mesh_dp", "other words", (0, 2))) < 2**31
    assert group_number(named) != group_number(Group("mesh_dp", "", (1, 3)))
    assert group_number(Group("9" * 40)) < 2**31


@pytest.mark.parametrize(
    "kinds", [{"nccl": ALL}, {"gloo": ("allreduce", "_allgather_base", "send"), "devices": 0}]
)
def test_file_has_the_attributes_of_both_feeders(kinds: dict, tmp_path: Path) -> None:
    made = generate(Features(seed=1, **kinds))
    converted = convert_pair(Pair(-1, *made.write(tmp_path)))
    et_file.write(tmp_path / "x.0.et", converted.trace)
    trace = et_file.read(tmp_path / "x.0.et")
    assert [p for p in validate.check(trace, {"1": [0, 1]}) if p.severity == "error"] == []
    communication = [e.comm for e in made.run.events if e.comm is not None and e.lane[0] != "cpu"]
    sizes = sorted(
        1 if c.kind == "barrier" and not kinds.get("nccl") else comm_bytes(c) for c in communication
    )
    assert sorted(trace.attributes["comm_size"].values.tolist()) == sizes
    assert trace.attributes["comm_size"].kind == "int64"
    assert {trace.attributes["pg_name"].values[row] for row in range(len(communication))} == {"1"}
    types = [NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL]
    counted = [int((trace.types == kind).sum()) for kind in types]
    assert counted == [
        sum(c.kind == "send" for c in communication),
        sum(c.kind == "recv" for c in communication),
        sum(c.kind in TYPES for c in communication),
    ]


def test_communication_is_found_on_both_kinds_of_thread(tmp_path: Path) -> None:
    events = [
        op("gloo:all_reduce", 0, 1, 4, tid=99),
        op("glooming", 0, 1, 5),
        kernel("ncclKernel_x", 0, 1),
        kernel("void my_ncclKernel()", 2, 1),
        kernel("ncclDevKernel_y", 4, 1),
    ]
    device = Stages(tmp_path, events).device
    rows = communication_rows(device)
    found = [[device.names[device.name[row]] for row in mask.nonzero()[0]] for mask in (rows.cpu, rows.gpu)]
    assert found == [["gloo:all_reduce"], ["ncclKernel_x", "ncclDevKernel_y"]]
