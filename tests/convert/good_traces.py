"""A valid trace, a valid run of two ranks, and ways to break them."""

from __future__ import annotations

import numpy as np

from chakra_et.et.columns import (
    Attribute,
    ExecutionTrace,
    NodeType,
    Ragged,
    Strings,
)
from chakra_et.validate.check import Problem, check, check_together

GROUPS = {"1": [0, 1], "2": [0, 1]}
INTEGERS = {
    "is_cpu_op": "bool",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "tensor_size": "uint64",
}
CPU, KERNEL, REDUCE, GATHER, SEND, RECV, LOAD, LAST = range(8)


def make(*nodes: dict, **metadata: int | str) -> ExecutionTrace:
    """A trace of these nodes: type, deps, ctrl, start, duration, name; other keys become attributes."""
    own = {"id", "name", "type", "deps", "ctrl", "start", "duration"}
    names = [name for node in nodes for name in node if name not in own]
    return ExecutionTrace(
        ids=np.array([node["id"] for node in nodes], np.uint64),
        names=Strings([node.get("name", "op").encode() for node in nodes], np.arange(len(nodes))),
        types=np.array([node.get("type", NodeType.COMP) for node in nodes], np.uint8),
        start_micros=np.array([node.get("start", 0) for node in nodes], np.uint64),
        duration_micros=np.array([node.get("duration", 5) for node in nodes], np.uint64),
        data_deps=lists([node.get("deps", ()) for node in nodes]),
        ctrl_deps=lists([node.get("ctrl", ()) for node in nodes]),
        attributes={name: column(name, nodes) for name in dict.fromkeys(names)},
        metadata=metadata,
    )


def lists(values: list[tuple[int, ...]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in values], dtype=np.int64)))
    return Ragged(offsets, np.array([value for each in values for value in each], np.uint64))


def column(name: str, nodes: tuple[dict, ...]) -> Attribute:
    rows = np.array([row for row, node in enumerate(nodes) if name in node], np.int64)
    values = [node[name] for node in nodes if name in node]
    if isinstance(values[0], str):
        return Attribute(
            "string", rows, Strings([value.encode() for value in values], np.arange(len(values)))
        )
    return Attribute(INTEGERS.get(name, "int64"), rows, np.array(values, np.int64))


def good(rank: int = 0) -> ExecutionTrace:
    other = 1 - rank
    collective = {"type": NodeType.COMM_COLL, "is_cpu_op": 0, "comm_size": 64}
    message = {"is_cpu_op": 0, "comm_size": 8, "comm_tag": 3}
    return make(
        {
            "id": 1,
            "start": 0,
            "name": "aten::mm",
            "is_cpu_op": 1,
            "rf_id": 5,
            "op_schema": "aten::mm(Tensor)",
        },
        {"id": 2, "start": 1, "deps": (1,), "is_cpu_op": 0, "stream": 7},
        {**collective, "id": 3, "start": 2, "deps": (2,), "comm_type": 0, "pg_name": "1"},
        {**collective, "id": 4, "start": 3, "deps": (3,), "comm_type": 2, "pg_name": "2"},
        {**message, "id": 5, "start": 4, "deps": (4,), "type": NodeType.COMM_SEND, "comm_dst": other},
        {**message, "id": 6, "start": 4, "deps": (4,), "type": NodeType.COMM_RECV, "comm_src": other},
        {"id": 7, "start": 5, "ctrl": (4,), "type": NodeType.MEM_LOAD, "is_cpu_op": 0, "tensor_size": 64},
        {"id": 8, "start": 6, "deps": (5, 6), "ctrl": (7,), "is_cpu_op": 1},
        rank=rank,
        world_size=2,
    )


def put(trace: ExecutionTrace, name: str, row: int, value: int | str) -> None:
    """Set the attribute of a row that has it."""
    attribute = trace.attributes[name]
    at = int(np.flatnonzero(attribute.rows == row)[0])
    if isinstance(attribute.values, Strings):
        attribute.values.table[attribute.values.index[at]] = str(value).encode()
    else:
        attribute.values[at] = value


def drop(trace: ExecutionTrace, name: str, row: int) -> None:
    attribute = trace.attributes[name]
    keep = attribute.rows != row
    values = attribute.values
    values = Strings(values.table, values.index[keep]) if isinstance(values, Strings) else values[keep]
    trace.attributes[name] = Attribute(attribute.kind, attribute.rows[keep], values)


def depend(trace: ExecutionTrace, row: int, *ids: int, ctrl: bool = False) -> None:
    """Replace the dependencies of a row."""
    deps = trace.ctrl_deps if ctrl else trace.data_deps
    values = [tuple(deps.values[a:b].tolist()) for a, b in zip(deps.offsets, deps.offsets[1:], strict=False)]
    values[row] = ids
    setattr(trace, "ctrl_deps" if ctrl else "data_deps", lists(values))


def to_kind(trace: ExecutionTrace, name: str, kind: str) -> None:
    attribute = trace.attributes[name]
    values = attribute.values
    if kind == "string":
        values = Strings([str(value).encode() for value in values], np.arange(len(values)))
    elif isinstance(values, Strings):
        values = np.array([int(values[at]) for at in range(len(values.index))], np.int64)
    trace.attributes[name] = Attribute(kind, attribute.rows, values)


def lose_collective(trace: ExecutionTrace) -> None:
    """Turn the all-reduce into a kernel."""
    trace.types[REDUCE] = NodeType.COMP
    for name in ("comm_type", "comm_size", "pg_name"):
        drop(trace, name, REDUCE)


def run_of_two() -> dict[int, ExecutionTrace]:
    return {0: good(0), 1: good(1)}


NAMES = {0: "NAME.0.et", 1: "NAME.1.et"}


def check_run(run: dict[int, ExecutionTrace], groups: dict | None, names: dict[int, str]) -> list[Problem]:
    """What is wrong with each trace, and with all together."""
    problems = [each for rank, trace in run.items() for each in check(trace, groups, names[rank], rank)]
    return problems + check_together(run, groups, names)
