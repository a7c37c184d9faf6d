"""The observer's host trace in both layouts, with missing and wrong fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.errors import TraceError
from chakra_et.traces import host as host_trace
from tests.generator import Features, Layout, generate
from tests.generator.hand_made import node, tensor, write_host


def load(folder: Path, *nodes: dict) -> host_trace.HostTrace:
    return host_trace.load(write_host(folder, list(nodes)))


@pytest.mark.parametrize("host", ("1.0.1", "1.0.2", "1.0.3", "1.1.0", "1.1.1", "9.9.9"))
def test_every_layout_gives_the_same_columns(host: str, tmp_path: Path) -> None:
    features = Features(seed=6, nccl=("allreduce",), autograd_thread=True)
    expected = host_trace.load(generate(features).write(tmp_path)[0])
    found = host_trace.load(generate(features, Layout(host=host)).write(tmp_path)[0])
    for column in ("rf_id", "seq_id", "scope", "tid", "fw_tid"):
        assert (getattr(found, column) == getattr(expected, column)).all(), column
    structure = [name.replace("execution_graph", "execution_trace") for name in found.names]
    assert [structure[n] for n in found.name] == [expected.names[n] for n in expected.name]
    assert [found.schemas[n] for n in found.op_schema] == [expected.schemas[n] for n in expected.op_schema]
    for side in ("inputs", "outputs"):
        assert [*map(list, getattr(found, side))] == [*map(list, getattr(expected, side))]
    assert found.groups == expected.groups and found.groups[0]["pg_desc"] == "default_pg"
    assert set(found.header) == {"schema", "pid", "time", "start_ts", "finish_ts"}
    assert found.header["schema"].startswith(host)


def test_attributes_may_come_in_any_order_and_number(tmp_path: Path) -> None:
    nodes = [node("aten::mm", n, op_schema=f"schema {n}", seq_id=n) for n in range(1, 9)]
    nodes[2]["attrs"].reverse()
    nodes[4]["attrs"] = [{"name": "rf_id", "type": "uint64", "value": 5}]
    nodes[6]["attrs"].append({"name": "kernel_file", "type": "string", "value": "k.py"})
    nodes[7]["attrs"].append({"name": "from_2031", "type": "string", "value": "new"})
    host = load(tmp_path, *nodes)
    own = slice(1, 9)
    assert host.rf_id[own].tolist() == list(range(1, 9))
    assert host.seq_id[own].tolist() == [1, 2, 3, 4, -1, 6, 7, 8]
    expected = [f"schema {n}" if n != 5 else "" for n in range(1, 9)]
    assert [host.schemas[n] for n in host.op_schema[own]] == expected
    assert host.findings == {"unknown-attribute:from_2031": 1}


def test_missing_fields_have_defaults(tmp_path: Path) -> None:
    bare = {"id": 9, "name": "aten::mm", "ctrl_deps": None}
    host = load(tmp_path, bare)
    assert (host.rf_id[1], host.seq_id[1], host.tid[1]) == (0, -1, 0)
    assert host.inputs[0][1] == b"[]"


def test_node_with_a_field_of_the_wrong_type_is_counted(tmp_path: Path) -> None:
    host = load(
        tmp_path, node("a", 3), node("b", 4) | {"inputs": "none"}, node("c", 5) | {"id": {}}, node("d", 6)
    )
    assert [host.names[n] for n in host.name[1:-1]] == ["a", "d"]
    assert host.findings == {"bad-node": 2}


def test_inputs_stay_as_they_were_written(tmp_path: Path) -> None:
    values = [tensor(7, 12), [[tensor(8, 3, 8)]], "Infinity", 1e300, "ü", [1] * 5_000]
    host = load(tmp_path, node("aten::mm", 3, values))
    assert json.loads(host.inputs[0][1]) == json.loads(json.dumps(values))


def test_tensors_are_found_in_nested_lists() -> None:
    """The sizes of nested tensor lists: c10d::allgather_ takes a list of lists."""
    values = [[[tensor(7, 12), tensor(8, 3, 8)]], [tensor(9, 5, 2, "cuda:0")], 4, [1, 2, 3, 4, 5], "<Object>"]
    expected = [(7, 12, 4), (8, 3, 8), (9, 5, 2)]
    assert host_trace.tensors(json.dumps(values).encode()) == expected
    assert host_trace.tensors(json.dumps(values, separators=(",", ":")).encode()) == expected
    assert host_trace.tensors(b'["[1, 2, 3, 4, 5]"]') == []


def test_attributes_of_collectives_are_kept_with_their_rows(tmp_path: Path) -> None:
    communication = node(
        "record_param_comms", 4, collective_name="allreduce", pg_name="0", in_msg_nelems=0, dtype="Float"
    )
    host = load(tmp_path, node("aten::mm", 3), communication, node("aten::mm", 5))
    assert host.communication == {2: {"collective_name": "allreduce", "pg_name": "0", "dtype": "Float"}}


def test_unreadable_group_record_is_counted(tmp_path: Path) -> None:
    host = load(tmp_path, node("## process_group:init ##", 1, ["not JSON"], ["String"]))
    assert host.groups == [] and host.findings == {"bad-group-record": 1}


def test_host_trace_without_nodes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "empty_host.json"
    path.write_text('{"schema": "1.1.1-chakra.0.0.4", "nodes": []}')
    with pytest.raises(
        TraceError, match="empty_host.json: has no node; did the run reach an active profiler step"
    ):
        host_trace.load(path)


def test_device_trace_is_not_read_as_a_host_trace(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a"}]}')
    with pytest.raises(TraceError, match='has no "nodes" array'):
        host_trace.load(path)
