"""The process group of each communication; falling back to the default group is a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.et.columns import NodeType
from chakra_et.traces.sets import Manifest, Pair
from tests.generator.hand_made import (
    annotation,
    call,
    kernel,
    node,
    op,
    tensor,
    write_device,
    write_host,
    write_kineto,
)

PAIRS = [
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
    {"pg_name": "1", "pg_desc": "undefined", "ranks": [0, 1]},
    {"pg_name": "2", "pg_desc": "undefined", "ranks": [2, 3]},
]


def groups_of(converted: Converted) -> list[str]:
    trace = converted.trace
    attribute = trace.attributes["pg_original_name"]
    return [attribute.values[at] for at in range(len(attribute.rows))]


def functional(group: str, host: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An all-reduce of a functional collective (DTensor, FSDP2), with the group as its third argument."""
    name = "_c10d_functional::all_reduce"
    arguments = {
        "Input Dims": [[64], [], []], "Input type": ["float", "", ""],
        "Concrete Inputs": ["", "sum", group],
    }  # fmt: skip
    events = [
        op(name, 10, 40, rf=5, **({} if host else arguments)),
        call("cudaLaunchKernel", 20, 5, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 60, 50, 1, stream=20),
    ]
    nodes = [node(name, 5, [tensor(1, 64), "sum", group], ["Tensor(float)", "String", "String"])]
    return events, nodes


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("group", ["0", "2"])
def test_group_of_a_functional_collective(group: str, host: bool, tmp_path: Path) -> None:
    events, nodes = functional(group, host)
    header = {"distributedInfo": {"rank": 2, "world_size": 4, "pg_config": PAIRS}}
    device = write_device(tmp_path, events, **header)
    pair = Pair(-1, write_host(tmp_path, nodes) if host else None, device)
    converted = convert_pair(pair)
    assert groups_of(converted) == [group]
    assert not any(key.startswith("group") for key in converted.report.warnings)
    # Groups that only a record knows are listed, too: PyTorch's number + 1.
    assert {number: ranks for number, (_, _, ranks) in converted.groups.items()} == {
        1: (0, 1, 2, 3), 2: (0, 1), 3: (2, 3)
    }  # fmt: skip


def test_unused_groups_in_the_manifest_are_listed(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "one.json", [op("aten::add", 1, 5)], 0, 4)
    listed = [{"name": str(at), "ranks": ranks} for at, ranks in enumerate(([0, 1, 2, 3], [0, 1], [2, 3]))]
    manifest = Manifest({"process_groups": listed})
    converted = convert_pair(Pair(-1, None, path), PairOptions(manifest=manifest))
    assert set(converted.groups) == {1, 2, 3}


def all_reduces(streams: tuple[int, ...]) -> list[dict[str, Any]]:
    """Collectives as PyTorch before 2.3 recorded them, without a group."""
    return [
        made
        for at, stream in enumerate(streams)
        for made in (
            annotation("nccl:all_reduce", 10 + 100 * at, 20),
            call("cudaLaunchKernel", 15 + 100 * at, 5, at + 1),
            kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 40 + 100 * at, 30, at + 1, stream=stream),
        )
    ]


def test_unnamed_communicators_are_separated_by_stream(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "one.json", all_reduces((20, 24, 20)), 0, 2)
    converted = convert_pair(Pair(-1, None, path))
    assert groups_of(converted) == ["communicator 0", "communicator 1", "communicator 0"]
    of_group = converted.trace.column("comm_sequence", -1)[converted.trace.types == NodeType.COMM_COLL]
    assert of_group.tolist() == [0, 0, 1]
    assert converted.report.warnings["group-by-stream"] == 3


def test_a_guessed_group_is_a_warning_with_a_count(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "one.json", all_reduces((20, 20)), 0, 2)
    converted = convert_pair(Pair(-1, None, path))
    assert groups_of(converted) == ["0", "0"]
    assert converted.report.warnings["group-default"] == 2


@pytest.mark.parametrize("ranks", [None, "[0, 1, ...", [0, -1], [0, "1"], [1, 1]])
def test_ranks_of_a_group_that_can_not_be_read_are_unknown(ranks: Any, tmp_path: Path) -> None:
    """Records that are no records of a group stand beside them."""
    config = [PAIRS[0], {"pg_name": "1", "pg_desc": "undefined", "ranks": ranks}, "damaged", {"ranks": [0]}]
    header = {"distributedInfo": {"rank": 0, "world_size": 4, "pg_config": config}}
    converted = convert_pair(Pair(-1, None, write_device(tmp_path, all_reduces((20,)), **header)))
    # One of the two, then: the default group.
    assert groups_of(converted) == ["0"] and converted.report.warnings["group-default"] == 1
    assert {number: members for number, (_, _, members) in converted.groups.items()} == {1: (0, 1, 2, 3)}


@pytest.mark.parametrize("rank, size", [(0, 4 * 64), (1, 64)])
def test_the_size_of_a_scatter_comes_from_the_other_side(rank: int, size: int, tmp_path: Path) -> None:
    """The root has an input tensor per rank; the others only have an output."""
    values = [[tensor(1, 16)], [[tensor(n + 2, 16) for n in range(4)]] if rank == 0 else [[]]]
    types = ["GenericList[Tensor(float)]", "GenericList[GenericList[Tensor(float)]]"]
    inside = [tensor(n + 2, 16) for n in range(4)] if rank == 0 else []
    events = [op("c10d::scatter_", 10, 20, rf=5), op("gloo:scatter", 15, 30, rf=6, tid=77)]
    nodes = [
        node("c10d::scatter_", 5, values, types),
        node("gloo:scatter", 6, inside, ["Tensor(float)"] * len(inside)),
    ]
    info = {"rank": rank, "world_size": 4, "pg_config": PAIRS[:1]}
    pair = Pair(-1, write_host(tmp_path, nodes), write_device(tmp_path, events, distributedInfo=info))
    trace = convert_pair(pair).trace
    assert trace.column("comm_size")[trace.types == NodeType.COMM_COLL].tolist() == [size]
