"""Sends and receives on the GPU: a batch is one kernel without metadata, not a 1-byte all-to-all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto
from tests.simulate.replay_traces import replay_device

SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
WORLD = {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]}]}


def message(kind: str, ts: float, peer: int, elements: int = 256, tag: int = 0) -> dict[str, Any]:
    """``c10d::send`` or ``recv_`` as Kineto records it: tensors, group, peer, tag."""
    arguments = {
        "Input Dims": [[[elements]], [], [], []],
        "Input type": ["TensorList", "", "Scalar", "Scalar"],
        "Concrete Inputs": ["", "", str(peer), str(tag)],
    }
    return op(f"c10d::{kind}", ts, 8, **arguments)


def recorded(ts: float, source: int, target: int, elements: int, name: str) -> dict[str, Any]:
    group = {"Process Group Name": "0", "Group size": 4, "dtype": "Float", "Collective name": name}
    counts = {"In msg nelems": elements, "Out msg nelems": elements, "Src Rank": source, "Dst Rank": target}
    return op("record_param_comms", ts, 4, **group, **counts)


def stage(rank: int, elements: int = 256) -> list[dict[str, Any]]:
    """A ring step of four ranks: a batch of one send and one receive, coalesced to one kernel."""
    after, before = (rank + 1) % 4, (rank - 1) % 4
    return [
        message("send", 10, after, elements), recorded(12, rank, after, elements, "send"),
        message("recv_", 20, before, elements), recorded(22, before, rank, elements, "recv"),
        annotation("nccl:coalesced", 30, 20),
        call("cudaLaunchKernelExC", 35, 5, 1),
        kernel(SENDRECV, 50, 100, 1, stream=20),
        call("cudaDeviceSynchronize", 60, 95, 2),
    ]  # fmt: skip


def convert(folder: Path, events: list[dict[str, Any]], rank: int = 1, world: int = 4) -> Converted:
    header = {"distributedInfo": {"rank": rank, "world_size": world, **WORLD}}
    return convert_pair(Pair(-1, None, write_kineto(folder / "one.json", events, **header)))


def rows(converted: Converted) -> list[tuple[NodeType, int, int, int, int]]:
    trace = converted.trace
    some = np.flatnonzero(np.isin(trace.types, (NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL)))
    names = ("comm_src", "comm_dst", "comm_size", "comm_tag")
    return [(NodeType(trace.types[at]), *(int(trace.column(n, -1)[at]) for n in names)) for at in some]


def test_a_batch_is_its_send_and_its_receive(tmp_path: Path) -> None:
    converted = convert(tmp_path, stage(1))
    assert rows(converted) == [(NodeType.COMM_SEND, 1, 2, 1024, 0), (NodeType.COMM_RECV, 0, 1, 1024, 0)]
    trace = converted.trace
    messages = np.flatnonzero(np.isin(trace.types, (NodeType.COMM_SEND, NodeType.COMM_RECV)))
    names, kind = texts(trace, "kind")
    assert {names[at] for at in kind[messages].tolist()} == {"p2p"}
    # Both run while the kernel does.
    assert trace.start_micros[messages].tolist() == [40, 40]
    assert trace.duration_micros[messages].tolist() == [100, 100]
    assert not converted.report.warnings


def test_without_record_param_comms_only_the_size_is_unknown(tmp_path: Path) -> None:
    """Kineto records the shapes of a tensor list, but not its type."""
    events = [event for event in stage(1) if event["name"] != "record_param_comms"]
    events[0]["args"]["Concrete Inputs"][3] = "7"
    converted = convert(tmp_path, events)
    assert rows(converted) == [(NodeType.COMM_SEND, 1, 2, -1, 7), (NodeType.COMM_RECV, 0, 1, -1, 0)]
    assert converted.report.warnings == {"communication-size": 2}


def test_each_batch_takes_its_own_messages(tmp_path: Path) -> None:
    later = [e | {"ts": e["ts"] + 1000} for e in stage(1, elements=64)]
    for event in later:
        if "correlation" in event["args"]:
            event["args"] = event["args"] | {"correlation": event["args"]["correlation"] + 10}
    assert [row[3] for row in rows(convert(tmp_path, [*stage(1), *later]))] == [1024, 1024, 256, 256]


def test_a_single_send_is_launched_in_its_operator(tmp_path: Path) -> None:
    events = [
        message("send", 10, 2) | {"dur": 40},
        annotation("nccl:send 1->2", 15, 30), recorded(16, 1, 2, 256, "send"),
        call("cudaLaunchKernel", 20, 5, 1),
        kernel(SENDRECV, 60, 50, 1, stream=20),
    ]  # fmt: skip
    assert rows(convert(tmp_path, events)) == [(NodeType.COMM_SEND, 1, 2, 1024, 0)]


@pytest.mark.parametrize("where", ["operator around", "kernel"])
def test_an_all_to_all_stays_one(where: str, tmp_path: Path) -> None:
    """NCCL runs all-to-alls with the same kernel."""
    metadata = {"Collective name": "all_to_allv", "In msg nelems": 512, "dtype": "Float"}
    events = [
        op("c10d::alltoall_base_", 10, 40), annotation("nccl:all_to_all", 15, 30),
        call("cudaLaunchKernel", 20, 5, 1),
        kernel(SENDRECV, 60, 50, 1, stream=20, **(metadata if where == "kernel" else {})),
    ]  # fmt: skip
    if where == "operator around":
        events.insert(1, op("record_param_comms", 16, 28, **metadata))
    converted = convert(tmp_path, events)
    [row] = rows(converted)
    assert (row[0], row[3]) == (NodeType.COMM_COLL, 2048)
    at = int(np.flatnonzero(converted.trace.types == NodeType.COMM_COLL)[0])
    assert converted.trace.column("comm_type")[at] == CollectiveType.ALL_TO_ALL


def test_kind_and_size_are_unknown_without_operators(tmp_path: Path) -> None:
    events = [call("cudaLaunchKernel", 20, 5, 1), kernel(SENDRECV, 60, 50, 1, stream=20)]
    converted = convert(tmp_path, events)
    assert "comm_size" not in converted.trace.attributes and "comm_type" not in converted.trace.attributes
    assert {"communication-size", f"communication-kind:{SENDRECV}"[:79]} <= set(converted.report.warnings)


def test_four_ranks_match_on_both_sides_and_replay_together(tmp_path: Path) -> None:
    for rank in range(4):
        info = {"rank": rank, "world_size": 4, **WORLD}
        write_kineto(
            tmp_path / f"ring_rank{rank}.json", stage(rank), distributedInfo=info,
            baseTimeNanoseconds=10**18 + rank,
        )  # fmt: skip
    assert main(["convert", str(tmp_path)]) == 0
    traces = [et_file.read(tmp_path / f"ring.{rank}.et") for rank in range(4)]
    groups = json.loads((tmp_path / "ring_comm_groups.json").read_text())
    replayed = replay_device(traces, comm_groups=groups)
    for trace, end in zip(traces, replayed.end_ns, strict=True):
        assert abs(int(end.max()) / 1000 - int(trace.metadata["measured_end_micros"])) <= 1
