"""Files that are no execution traces, or incomplete ones, give one sentence or a trace, nothing else."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et import wire
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.decode import decode
from chakra_et.info.command import describe
from chakra_et.validate.check import check, check_together
from tests.convert.et_traces import (
    METADATA,
    file_bytes,
    framed,
    traces,
)


def after_metadata(*nodes: bytes) -> bytes:
    return METADATA + framed(*nodes)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "is empty"),
        (METADATA + b"\x00" + METADATA, "byte 6, node number 0: an empty message"),
        (METADATA + b"\x05\x08", "byte 6, node number 0: the message has 5 bytes, but only 1 are left"),
        (METADATA + b"\xff\xff\xff\xff\x0f\x08", "only 1 are left"),
        (METADATA + b"\xff" * 12, "not a message length"),
        (METADATA + b"\x80", "not a message length"),
        (
            after_metadata(b"\x08\x01\x18\x04", b"\x08" + b"\xff" * 10 + b"\x01"),
            "node number 1: a field does not fit",
        ),
        (after_metadata(b"\x08" + b"\xff" * 9 + b"\x02"), "node number 0: a field does not fit"),
        (
            after_metadata(b"\x08\x01\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"),
            "byte 9, node number 0: a field",
        ),
        (after_metadata(b"\x08\x01\x13\x14"), "byte 9, node number 0: a field"),
        (after_metadata(b"\x08\x01\x00\x01"), "byte 9, node number 0: a field"),
        (after_metadata(b"\x08\x01\x11\x01"), "byte 9, node number 0: a field"),
        (after_metadata(b"\x08\x01\x2a\x02\x81\x81"), "node number 0: a list of numbers is cut off"),
        (
            after_metadata(b"\x08\x01\x2a\x0b" + b"\xff" * 10 + b"\x01"),
            "node number 0: a number has more than 64",
        ),
        (after_metadata(b"\x08\x01\x52\x03\x0a\x09a"), "byte 11, node number 0: a field does not fit"),
        (after_metadata(b"\x08\x01\x42\x02\x0a\x05"), "byte 11, node number 0: a field does not fit"),
        (framed(b"\x12\x03\x0a\x09a"), "byte 3, first message: a field does not fit"),
        (b'{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "it looks like JSON"),
        (b'{\n  "traceEvents": [' + b" " * 200 + b"]}", "it looks like JSON"),
        (gzip.compress(METADATA * 50, mtime=0), "gzip file: decompress it or, if it is a trace, convert it"),
    ],
)
def test_file_that_is_no_trace_is_one_sentence(tmp_path: Path, raw: bytes, sentence: str) -> None:
    path = tmp_path / "bad.et"
    path.write_bytes(raw)
    with pytest.raises(TraceError) as caught:
        et_file.read(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_location_among_many_nodes(tmp_path: Path) -> None:
    nodes = [b"\x08\x01\x18\x04"] * 1000
    nodes[777] = b"\x08\x01\x12\x09x"
    path = tmp_path / "bad.et"
    path.write_bytes(METADATA + framed(*nodes))
    with pytest.raises(
        TraceError, match=rf"byte {6 + 777 * 5 + 1 + 2}, node number 777: a field does not fit"
    ):
        et_file.read(path)


def test_missing_file_and_folder_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        et_file.read(tmp_path / "none.et")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        et_file.read(tmp_path)


def test_too_many_attribute_names_are_rejected(tmp_path: Path) -> None:
    names = [str(i).encode() for i in range(5000)]
    attrs = [wire.tag(1, 2) + bytes([len(name)]) + name + b"\x48\x01" for name in names]
    node = b"\x08\x01" + b"".join(b"\x52" + bytes([len(attr)]) + attr for attr in attrs)
    (tmp_path / "a.et").write_bytes(METADATA + framed(node))
    with pytest.raises(TraceError, match="node number 0: more than 4096 attribute names"):
        et_file.read(tmp_path / "a.et")


@settings(max_examples=100, deadline=None)
@given(trace=traces(fewest=1), data=st.data())
def test_damaged_bytes_are_read_or_rejected(trace: ExecutionTrace, data: st.DataObject) -> None:
    raw = bytearray(file_bytes(trace))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(1, len(raw)))]
    try:
        damaged = decode(bytes(raw))
    except wire.WireError:
        return
    # Whatever can be read can be written, checked and described.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file_bytes(damaged)
        check(damaged)
        check_together({0: damaged, 1: trace}, None, {0: "a", 1: "b"})
        describe(damaged)


def test_node_with_very_many_fields_takes_linear_time(tmp_path: Path) -> None:
    deps = b"\x28\x05" * 100_000
    (tmp_path / "a.et").write_bytes(METADATA + framed(b"\x08\x01" + deps, b"\x08\x02" + deps))
    trace = et_file.read(tmp_path / "a.et")
    assert trace.data_deps.offsets.tolist() == [0, 100_000, 200_000]
