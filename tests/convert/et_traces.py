"""Traces to write and read: random ones for hypothesis, and a large one."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from chakra_et.et import wire
from chakra_et.et.columns import Attribute, ExecutionTrace, Ragged, Strings, TensorInfo
from chakra_et.et.encode import encode

RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "sint32": (-(2**31), 2**31 - 1),
    "sfixed32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "sint64": (-(2**63), 2**63 - 1),
    "sfixed64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "fixed32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "fixed64": (0, 2**64 - 1),
    "bool": (0, 1),
}
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
uint64 = st.integers(0, 2**64 - 1) | st.integers(0, 300)


def strings(values: list[str]) -> Strings:
    table = list(dict.fromkeys(values))
    index = np.array([table.index(value) for value in values], np.int32)
    return Strings([value.encode() for value in table], index)


def ragged(lists: list[list[int]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(values) for values in lists]))).astype(np.int64)
    return Ragged(offsets, np.array([value for values in lists for value in values], np.uint64))


def attribute(kind: str, rows: list[int], values: list) -> Attribute:
    at = np.array(rows, np.int64)
    if kind == "string":
        return Attribute(kind, at, strings(values))
    if kind in ("double", "float"):
        return Attribute(kind, at, np.array(values, np.float64))
    return Attribute(kind, at, np.array(values, np.uint64 if kind in ("uint64", "fixed64") else np.int64))


@st.composite
def attributes(draw: st.DrawFn, count: int) -> dict[str, Attribute]:
    columns = {}
    for name in draw(st.lists(text, max_size=4, unique=True)):
        kind = draw(st.sampled_from([*RANGES, "string", "double", "float"]))
        rows = [row for row in range(count) if draw(st.booleans())]
        if not rows:
            continue
        if kind == "string":
            one = text
        elif kind in ("double", "float"):
            one = st.floats(width=32 if kind == "float" else 64, allow_nan=False)
        else:
            one = st.integers(*RANGES[kind])
        columns[name] = attribute(kind, rows, draw(st.lists(one, min_size=len(rows), max_size=len(rows))))
    return columns


@st.composite
def tensor_infos(draw: st.DrawFn, count: int) -> TensorInfo | None:
    rows = [row for row in range(count) if draw(st.booleans())]
    if not rows:
        return None
    columns = [[draw(text).encode() for _ in rows] for _ in range(3)]
    return TensorInfo(np.array(rows, np.int64), *columns)


@st.composite
def traces(draw: st.DrawFn, fewest: int = 0) -> ExecutionTrace:
    count = draw(st.integers(fewest, 6))
    numbers = st.lists(uint64, min_size=count, max_size=count)
    lists = st.lists(st.lists(uint64, max_size=4), min_size=count, max_size=count)
    # A type other than 0 in each node: a message of defaults alone is empty, which ends the file for some.
    return ExecutionTrace(
        ids=np.array(draw(numbers), np.uint64),
        names=strings(draw(st.lists(text, min_size=count, max_size=count))),
        types=np.array(draw(st.lists(st.integers(1, 7), min_size=count, max_size=count)), np.uint8),
        start_micros=np.array(draw(numbers), np.uint64),
        duration_micros=np.array(draw(numbers), np.uint64),
        data_deps=ragged(draw(lists)),
        ctrl_deps=ragged(draw(lists)),
        inputs=draw(tensor_infos(count)),
        outputs=draw(tensor_infos(count)),
        attributes=draw(attributes(count)),
        metadata={
            "version": draw(text),
            **draw(
                st.dictionaries(
                    text.filter(lambda name: name not in ("version", "pid", "start_ts", "finish_ts")),
                    text | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
                    max_size=4,
                )
            ),
        },
    )


def big_trace(count: int, seed: int = 0) -> ExecutionTrace:
    """Enough nodes for several chunks, with columns on some of the rows only."""
    random = np.random.default_rng(seed)
    some = np.flatnonzero(random.random(count) < 0.3)
    few = np.flatnonzero(random.random(count) < 0.001)
    every = np.arange(count)
    counts = random.integers(0, 4, count)
    sizes = random.integers(0, 400, len(some)).tolist()
    kinds = Strings([b"", b"kernel", b"operator"], random.integers(0, 3, len(some)))
    columns = {
        "rf_id": Attribute("int64", every, random.integers(-5, 2**40, count)),
        "stream": Attribute("int64", few, np.full(len(few), 7)),
        "kind": Attribute("string", some, kinds),
        "is_cpu_op": Attribute("bool", every, random.integers(0, 2, count)),
        "weight": Attribute("double", few, random.random(len(few))),
    }
    return ExecutionTrace(
        ids=np.arange(count, dtype=np.uint64) * np.uint64(3),
        names=Strings([f"op {i}".encode() * (i % 7 + 1) for i in range(90)], random.integers(0, 90, count)),
        types=random.integers(1, 8, count).astype(np.uint8),
        start_micros=(2.0 ** random.uniform(0, 63, count)).astype(np.uint64),
        duration_micros=random.integers(0, 400, count).astype(np.uint64),
        data_deps=Ragged(
            np.concatenate(([0], np.cumsum(counts))),
            random.integers(0, 2**40, counts.sum()).astype(np.uint64),
        ),
        ctrl_deps=ragged([[]] * count),
        inputs=TensorInfo(some, [b"x" * size for size in sizes], [b""] * len(some), [b"t"] * len(some)),
        attributes={name: column for name, column in columns.items() if len(column.rows)},
        metadata={"version": "1.0.0", "schema": "x"},
    )


def file_bytes(trace: ExecutionTrace) -> bytes:
    return b"".join(encode(trace))


def framed(*messages: bytes) -> bytes:
    return b"".join(wire.bytes_of_varint(len(message)) + message for message in messages)


def assert_same(left: ExecutionTrace, right: ExecutionTrace) -> None:
    count = len(left)
    assert count == len(right)
    for column in ("ids", "types", "start_micros", "duration_micros"):
        np.testing.assert_array_equal(getattr(left, column), getattr(right, column), column)
    assert [left.names[row] for row in range(count)] == [right.names[row] for row in range(count)]
    for column in ("data_deps", "ctrl_deps"):
        np.testing.assert_array_equal(getattr(left, column).offsets, getattr(right, column).offsets)
        np.testing.assert_array_equal(getattr(left, column).values, getattr(right, column).values)
    for column in ("inputs", "outputs"):
        one, other = getattr(left, column), getattr(right, column)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.rows.tolist() == other.rows.tolist()
            for text in ("values", "shapes", "types"):
                assert list(getattr(one, text)) == list(getattr(other, text))
    assert left.attributes.keys() == right.attributes.keys()
    for name, one in left.attributes.items():
        other = right.attributes[name]
        assert (one.kind, one.rows.tolist()) == (other.kind, other.rows.tolist())
        for at in range(len(one.rows)):
            assert one.values[at] == other.values[at]
    assert left.metadata == right.metadata
    assert left.has_metadata == right.has_metadata


METADATA = framed(b"\x0a\x031.0")
