"""The .et writer and reader, compared with the protobuf library where that is installed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings

from chakra_et.et import file as et_file
from chakra_et.et import wire
from chakra_et.et.columns import Attribute, ExecutionTrace, Strings, TensorInfo
from chakra_et.et.decode import decode
from chakra_et.et.encode import encode
from chakra_et.et.schema import MEMBERS
from tests.convert.et_traces import (
    METADATA,
    assert_same,
    big_trace,
    file_bytes,
    framed,
    traces,
)


@pytest.fixture(scope="module")
def pb2() -> ModuleType:
    return pytest.importorskip(
        "chakra.schema.protobuf.et_def_pb2", reason="mlc-chakra is not installed: ./run_tests.sh installs it"
    )


# ---- the same content through the protobuf library ----


def pb2_messages(pb2: ModuleType, trace: ExecutionTrace) -> list:
    metadata = dict(trace.metadata)
    messages = [pb2.GlobalMetadata(version=metadata.pop("version", "1.0.0"))]
    members = {bool: "bool_val", int: "int64_val", str: "string_val", float: "double_val"}
    for name, value in metadata.items():
        messages[0].attr.add(name=name, **{members[type(value)]: value})
    if not messages[0].ByteSize():
        messages[0].version = "1.0.0"
    for row in range(len(trace)):
        node = pb2.Node(
            id=int(trace.ids[row]),
            name=trace.names[row],
            type=int(trace.types[row]),
            start_time_micros=int(trace.start_micros[row]),
            duration_micros=int(trace.duration_micros[row]),
        )
        for deps, target in ((trace.ctrl_deps, node.ctrl_deps), (trace.data_deps, node.data_deps)):
            target.extend(deps.values[deps.offsets[row] : deps.offsets[row + 1]].tolist())
        for tensors, target in ((trace.inputs, node.inputs), (trace.outputs, node.outputs)):
            for at in np.flatnonzero(tensors.rows == row) if tensors else ():
                target.SetInParent()
                target.values, target.shapes, target.types = (
                    column[at].decode() for column in (tensors.values, tensors.shapes, tensors.types)
                )
        for name, column in trace.attributes.items():
            for at in np.flatnonzero(column.rows == row):
                value = column.values[at]
                value = value if isinstance(value, str) else value.item()
                node.attr.add(
                    name=name, **{f"{column.kind}_val": bool(value) if column.kind == "bool" else value}
                )
        messages.append(node)
    return messages


def file_of(messages: list) -> bytes:
    from chakra.src.third_party.utils.protolib import encodeMessage

    out = io.BytesIO()
    for message in messages:
        encodeMessage(out, message)
    return out.getvalue()


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_bytes_are_those_of_the_protobuf_library(pb2: ModuleType, trace: ExecutionTrace) -> None:
    assert file_bytes(trace) == file_of(pb2_messages(pb2, trace))


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_what_is_written_is_read_back(trace: ExecutionTrace) -> None:
    raw = file_bytes(trace)
    back = decode(raw)
    if not trace.metadata["version"] and len(trace.metadata) == 1:
        trace.metadata["version"] = "1.0.0"
    assert_same(trace, back)
    assert file_bytes(back) == raw


def test_many_chunks_are_written_as_the_protobuf_library_does(pb2: ModuleType) -> None:
    trace = big_trace(20_000)
    assert file_bytes(trace) == file_of(pb2_messages(pb2, trace))


def test_many_chunks_are_read_back(tmp_path: Path) -> None:
    trace = big_trace(40_000)
    et_file.write(tmp_path / "big.et", trace)
    assert_same(trace, et_file.read(tmp_path / "big.et"))


def test_metadata_kinds_of_the_mlcommons_converter(pb2: ModuleType, tmp_path: Path) -> None:
    trace = big_trace(1)
    trace.metadata = {
        "schema": "1.1.1",
        "pid": 7,
        "time": "now",
        "start_ts": 1,
        "finish_ts": 2**40,
        "rank": 3,
    }
    et_file.write(tmp_path / "a.et", trace)
    raw = (tmp_path / "a.et").read_bytes()
    message = pb2.GlobalMetadata.FromString(raw[1 : 1 + raw[0]])
    kinds = {attr.name: attr.WhichOneof("value") for attr in message.attr}
    assert kinds == {
        "schema": "string_val",
        "pid": "uint64_val",
        "time": "string_val",
        "start_ts": "uint64_val",
        "finish_ts": "uint64_val",
        "rank": "int64_val",
    }
    assert et_file.read(tmp_path / "a.et").metadata == {**trace.metadata, "version": "1.0.0"}


def test_invalid_utf8_is_replaced(pb2: ModuleType, tmp_path: Path) -> None:
    trace = big_trace(2)
    trace.names = Strings([b"ok", b"\xff\xfe"], np.array([0, 1]))
    trace.inputs = TensorInfo(np.array([1]), [b"\xe2\x82"], [b"\xac"], [b""])
    trace.attributes = {"kind": Attribute("string", np.array([0]), Strings([b"\xc3"], np.array([0])))}
    trace.metadata["time"] = "\udcff"
    et_file.write(tmp_path / "a.et", trace)
    back = et_file.read(tmp_path / "a.et")
    assert file_bytes(back) == file_of(pb2_messages(pb2, back))
    assert back.names[1] == "\N{REPLACEMENT CHARACTER}" * 2


# ---- files of other writers ----


def test_files_of_the_reference_generator(pb2: ModuleType, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "chakra.src.generator.generator", "--num_npus", "1"], cwd=tmp_path, check=True
    )
    files = sorted(tmp_path.glob("*.et"))
    assert len(files) >= 14
    for path in files:
        trace = et_file.read(path)
        copy = tmp_path / "copy"
        et_file.write(copy, trace)
        expected = messages_without(path, "doc_string", pb2)
        assert copy.read_bytes() == file_of(expected), path.name


def messages_without(path: Path, left_out: str, pb2: ModuleType) -> list:
    from chakra.src.third_party.utils.protolib import decodeMessage

    messages = []
    with open(path, "rb") as file:
        message = pb2.GlobalMetadata()
        while decodeMessage(file, message):
            for attr in message.attr:
                attr.ClearField(left_out)
            messages.append(message)
            message = pb2.Node()
    return messages


def test_every_kind_of_value_in_the_schema_is_known(pb2: ModuleType) -> None:
    fields = pb2.AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields
    ours = {
        (f"{kind}_val" if "list" not in kind else kind): member.number for kind, member in MEMBERS.items()
    }
    assert ours == {field.name: field.number for field in fields}


@pytest.mark.parametrize("copies", [1, 300], ids=["few", "many"])
def test_any_order_unpacked_lists_and_unknown_fields(tmp_path: Path, copies: int) -> None:
    node = (
        b"\x28\x05"  # data_deps 5, not packed
        b"\x52\x05\x48\x09\x0a\x01a"  # attr {int64_val: 9, name: "a"}: the value first
        b"\x2a\x02\x06\x07"  # data_deps [6, 7], packed
        b"\x99\x06\x01\x02\x03\x04\x05\x06\x07\x08"  # field 99, fixed64
        b"\x52\x07\x0a\x01a\x48\x01\x48\x02"  # attr a again, and with two values: the last one counts
        b"\x5d\x01\x02\x03\x04"  # field 11, fixed32
        b"\x62\x03abc"  # field 12, bytes
        b"\x18\x04\x12\x02op\x08\x01\x08\x2a"  # type, name, id twice
    )
    path = tmp_path / "odd.et"
    path.write_bytes(METADATA + framed(*[node] * copies))
    trace = et_file.read(path)
    assert len(trace) == copies
    for row in (0, copies - 1):
        assert (trace.ids[row], trace.names[row], trace.types[row]) == (42, "op", 4)
        assert trace.data_deps.values[3 * row : 3 * row + 3].tolist() == [5, 6, 7]
        assert trace.attributes["a"].values[row] == 2
    assert trace.metadata == {"version": "1.0"}


def test_one_name_with_two_kinds_keeps_both(tmp_path: Path, pb2: ModuleType) -> None:
    nodes = [pb2.Node(id=1, type=4), pb2.Node(id=2, type=4)]
    nodes[0].attr.add(name="a", int64_val=1)
    nodes[1].attr.add(name="a", int32_val=2)
    raw = file_of([pb2.GlobalMetadata(version="x"), *nodes])
    (tmp_path / "a.et").write_bytes(raw)
    trace = et_file.read(tmp_path / "a.et")
    assert {name: column.kind for name, column in trace.attributes.items()} == {
        "a": "int64",
        "a#int32": "int32",
    }
    assert file_bytes(trace) == raw


def test_attribute_order_of_the_file_is_kept(tmp_path: Path) -> None:
    trace = big_trace(2)
    trace.attributes = {
        name: Attribute("int64", np.array(rows), np.zeros(len(rows), np.int64))
        for name, rows in (("a", [1]), ("b", [0, 1]), ("c", [1]), ("d", [0, 1]))
    }
    et_file.write(tmp_path / "a.et", trace)
    assert list(et_file.read(tmp_path / "a.et").attributes) == ["a", "b", "c", "d"]


def test_a_file_without_metadata_keeps_its_first_node(tmp_path: Path) -> None:
    trace = big_trace(3)
    trace.has_metadata, trace.metadata = False, {}
    et_file.write(tmp_path / "a.et", trace)
    back = et_file.read(tmp_path / "a.et")
    assert_same(trace, back)
    assert back.ids[0] == 0, "a first node with id 0 has no id field"


# ---- whole files or nothing ----


def test_the_same_columns_give_the_same_bytes() -> None:
    assert file_bytes(big_trace(9000)) == file_bytes(big_trace(9000))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    et_file.write(path, big_trace(3))
    before = path.read_bytes()
    broken = big_trace(20_000)
    broken.names.index[15_000] = 10_000  # Fails in the second chunk.
    with pytest.raises(IndexError):
        et_file.write(path, broken)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.et"]


def test_a_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    et_file.write(tmp_path / "a.et", big_trace(3))
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a.et").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_empty_metadata_is_never_an_empty_message() -> None:
    trace = big_trace(1)
    trace.metadata = {"version": ""}
    assert file_bytes(trace).startswith(framed(b"\x0a\x051.0.0"))


@pytest.mark.parametrize("has_metadata", [True, False])
def test_blocks_in_turns_are_the_file(has_metadata: bool) -> None:
    trace = replace(big_trace(20_000), has_metadata=has_metadata)
    turns = zip_longest(encode(trace, 0, 2), encode(trace, 1, 2), fillvalue=b"")
    assert b"".join(block for blocks in turns for block in blocks) == file_bytes(trace)


def test_numpy_numbers_in_the_metadata_are_numbers() -> None:
    given = {"cost": np.float64(1.5), "count": np.int64(-3), "pid": 7, "most": 2**63, "whole": True}
    metadata = decode(file_bytes(replace(big_trace(1), metadata=given))).metadata
    assert metadata == {**given, "version": "1.0.0"} and metadata["whole"] is True


def test_numbers_alone_are_written_as_in_columns() -> None:
    values = [0, 1, 127, 128, 300, 2**32, 2**63, 2**64 - 1]
    assert [wire.bytes_of_varint(value) for value in values] == list(
        wire.varints(np.array(values, np.uint64))
    )
