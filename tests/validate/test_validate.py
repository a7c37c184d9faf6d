"""Rules for a single .et file: a trace that breaks exactly one rule is reported under that rule alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chakra_et.et.columns import (
    Attribute,
    CollectiveType,
    ExecutionTrace,
    NodeType,
    Ragged,
    Strings,
)
from chakra_et.et.decode import decode
from chakra_et.et.encode import encode
from chakra_et.et.wire import WireError
from chakra_et.validate.check import check, check_together
from chakra_et.validate.table import RULES
from tests.convert.good_traces import (
    CPU,
    GATHER,
    GROUPS,
    KERNEL,
    LAST,
    NAMES,
    RECV,
    REDUCE,
    SEND,
    depend,
    drop,
    good,
    make,
    put,
    to_kind,
)


def no_metadata(trace: ExecutionTrace) -> None:
    trace.has_metadata, trace.metadata = False, {}


def same_id(trace: ExecutionTrace) -> None:
    depend(trace, LAST, 4)
    trace.ids[LAST] = 6
    trace.start_micros[LAST] = 5


def two_kinds(trace: ExecutionTrace) -> None:
    drop(trace, "comm_type", GATHER)
    trace.attributes["comm_type#int32"] = Attribute("int32", np.array([GATHER]), np.array([2]))


def unroot(trace: ExecutionTrace) -> None:
    depend(trace, CPU, 8)


def alone(trace: ExecutionTrace) -> None:
    trace.metadata["world_size"] = 1
    put(trace, "pg_name", GATHER, "")


def zero_of_other_kind(trace: ExecutionTrace) -> None:
    to_kind(trace, "is_cpu_op", "int32")
    trace.attributes["is_cpu_op"].values[:] = 0


def assign(name: str, row: int, value: int) -> Callable[[ExecutionTrace], None]:
    return lambda trace: getattr(trace, name).__setitem__(row, value)


SINGLE: list[tuple[str, Callable[[ExecutionTrace], object], int | None, str]] = [
    # rule, change to a valid trace, reported node, part of the message
    ("metadata-missing", no_metadata, None, "the first message is a node"),
    ("no-nodes", lambda t: t.__dict__.update(make(rank=0, world_size=2).__dict__), None, "no nodes"),
    ("duplicate-id", same_id, 6, "same id"),
    ("absent-dependency", lambda t: depend(t, LAST, 5, 99), 8, "depends on node 99"),
    ("absent-dependency", lambda t: depend(t, LAST, 2**64 - 1), 8, f"depends on node {2**64 - 1}"),
    ("absent-dependency", lambda t: depend(t, LAST, 6, 77, ctrl=True), 8, "depends on node 77"),
    ("repeated-dependency", lambda t: depend(t, LAST, 6, 5, 6), 8, "lists dependency 6"),
    ("self-dependency", lambda t: depend(t, LAST, 8), 8, "depends on itself"),
    ("self-dependency", lambda t: depend(t, LAST, 8, ctrl=True), 8, "depends on itself"),
    ("cycle", lambda t: depend(t, GATHER, 8), 4, "is on a dependency cycle of "),
    ("cycle", lambda t: depend(t, KERNEL, 1, 4, ctrl=True), 2, "cycle of 3 nodes (2 → 3 → 4 → 2)"),
    ("id-order", assign("start_micros", GATHER, 1), 4, "starts before the node of its lane "),
    ("node-type", assign("types", KERNEL, 0), 2, "has type 0"),
    ("node-type", assign("types", KERNEL, 8), 2, "has type 8"),
    ("metadata-node", assign("types", KERNEL, 1), 2, "is a METADATA node"),
    *(
        ("attribute-kind", lambda t, name=name, kind=kind: to_kind(t, name, kind), None, name)
        for name, kind in [
            ("is_cpu_op", "int64"),
            ("is_cpu_op", "int32"),
            ("comm_type", "int32"),
            ("comm_type", "uint64"),
            ("comm_size", "uint64"),
            ("comm_size", "int32"),
            ("comm_src", "int64"),
            ("comm_dst", "int64"),
            ("comm_tag", "int64"),
            ("tensor_size", "int64"),
            ("pg_name", "int64"),
        ]
    ),
    ("attribute-kind", lambda t: t.attributes.update(comm_priority=t.attributes["rf_id"]), 1, "as int64_val"),
    ("attribute-kind", lambda t: t.attributes.update(num_ops=t.attributes["comm_dst"]), 5, "as int32_val"),
    ("attribute-kind-zero", zero_of_other_kind, 1, "has is_cpu_op as int32_val"),
    ("comm-type-missing", lambda t: drop(t, "comm_type", GATHER), 4, "without comm_type"),
    ("comm-type-unknown", lambda t: put(t, "comm_type", REDUCE, 10), 3, "comm_type 10"),
    ("comm-type-unknown", lambda t: put(t, "comm_type", REDUCE, -1), 3, "comm_type -1"),
    *(
        ("comm-type-unsupported", lambda t, kind=kind: put(t, "comm_type", REDUCE, kind), 3, kind.name)
        for kind in CollectiveType
        if kind.name not in ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL")
    ),
    ("comm-size-missing", lambda t: drop(t, "comm_size", REDUCE), 3, "without comm_size"),
    ("comm-size-missing", lambda t: drop(t, "comm_size", SEND), 5, "without comm_size"),
    ("comm-size-zero", lambda t: put(t, "comm_size", REDUCE, 0), 3, "comm_size 0"),
    ("comm-size-zero", lambda t: put(t, "comm_size", RECV, -8), 6, "comm_size -8"),
    ("comm-peer-missing", lambda t: drop(t, "comm_dst", SEND), 5, "COMM_SEND without comm_dst"),
    ("comm-peer-missing", lambda t: drop(t, "comm_tag", SEND), 5, "COMM_SEND without"),
    ("comm-peer-missing", lambda t: drop(t, "comm_src", RECV), 6, "COMM_RECV without comm_src"),
    ("comm-peer-missing", lambda t: drop(t, "comm_tag", RECV), 6, "COMM_RECV without"),
    ("tensor-size-missing", lambda t: t.attributes.pop("tensor_size"), 7, "without tensor_size"),
    ("comm-on-cpu", lambda t: put(t, "is_cpu_op", REDUCE, 1), 3, "is_cpu_op=true"),
    ("pg-name-text", lambda t: put(t, "pg_name", REDUCE, "12ab"), 3, "pg_name '12ab'"),
    ("pg-name-text", lambda t: put(t, "pg_name", REDUCE, "default_pg"), 3, "pg_name 'default_pg'"),
    ("pg-name-text", lambda t: put(t, "pg_name", REDUCE, "-1"), 3, "pg_name '-1'"),
    ("pg-name-text", lambda t: put(t, "pg_name", REDUCE, "99999999999"), 3, "pg_name '99999999999'"),
    ("pg-name-zero", lambda t: put(t, "pg_name", REDUCE, "0"), 3, "simulators take for all ranks"),
    ("group-one-member", alone, 4, "all ranks of a run of one rank"),
    ("pg-name-unknown", lambda t: put(t, "pg_name", REDUCE, "7"), 3, "pg_name 7"),
    ("duration-bound", assign("duration_micros", KERNEL, 2**64 - 5), 2, "lasts -5 µs"),
    ("duration-bound", assign("duration_micros", KERNEL, 10**13), 2, "lasts 10000000000000 µs"),
    ("start-bound", assign("start_micros", LAST, 2**53 + 1), 8, "starts at 9007199254740993 µs"),
    ("start-bound", assign("start_micros", LAST, 2**64 - 1), 8, "starts at -1 µs"),
    ("no-durations", assign("duration_micros", slice(None), 0), None, "takes no time"),
    ("rank-beyond-world", lambda t: t.metadata.update(world_size=0), None, "rank 0 and world_size 0"),
]  # fmt: skip

BY_GROUPS: list[tuple[str, dict | None, int | None, str]] = [
    ("comm-groups-missing", None, None, "groups 1, 2 are used"),
    ("group-file", {**GROUPS, "0": [0, 1]}, None, "group '0'"),
    ("group-file", {**GROUPS, "3": [1, 1]}, None, "group '3'"),
    ("group-file", {**GROUPS, "3": [-1, 1]}, None, "group '3'"),
    ("group-file", {**GROUPS, "dp": [0, 1]}, None, "group 'dp'"),
    ("group-one-member", {**GROUPS, "2": [0]}, 4, "whose only member is rank 0"),
    ("rank-not-in-group", {**GROUPS, "2": [1, 2]}, 4, "which does not include rank 0"),
]


@pytest.mark.parametrize("rank", [0, 1])
def test_valid_trace_has_no_problems(rank: int) -> None:
    assert check(good(rank), GROUPS) == []


@pytest.mark.parametrize(("rule", "break_it", "node", "text"), SINGLE, ids=[case[0] for case in SINGLE])
def test_broken_rule_is_reported(
    rule: str, break_it: Callable[[ExecutionTrace], object], node: int | None, text: str, tmp_path: Path
) -> None:
    trace = good()
    break_it(trace)
    (problem,) = check(trace, GROUPS, "a.et")
    assert problem.rule == rule
    assert problem.severity == RULES[rule]
    assert text in problem.message
    assert problem.file == "a.et"
    assert node is None or problem.node == node
    assert (problem.name is None) == (problem.node is None)


@pytest.mark.parametrize(("rule", "groups", "node", "text"), BY_GROUPS, ids=[case[0] for case in BY_GROUPS])
def test_comm_group_mismatch_is_reported(rule: str, groups: dict | None, node: int | None, text: str) -> None:
    (problem,) = check(good(), groups)
    assert (problem.rule, problem.node) == (rule, node)
    assert text in problem.message


def test_a_second_kind_of_value_is_reported() -> None:
    trace = good()
    two_kinds(trace)
    assert "has comm_type as int32_val: write it as int64_val" in {p.message for p in check(trace, GROUPS)}


def test_a_file_in_which_no_node_can_run_first_has_a_cycle() -> None:
    trace = good()
    unroot(trace)
    assert {problem.rule for problem in check(trace, GROUPS)} == {"cycle"}


def test_a_self_dependency_does_not_hide_a_cycle() -> None:
    trace = good()
    depend(trace, LAST, 8)
    depend(trace, REDUCE, 4)
    assert {problem.rule for problem in check(trace, GROUPS)} == {"self-dependency", "cycle"}


def test_problem_counts_its_nodes() -> None:
    trace = good()
    trace.attributes.pop("comm_type")
    (problem,) = check(trace, GROUPS)
    assert problem.count == 2
    assert "(and 1 more)" in str(problem)


def test_unordered_ids_without_a_cycle_are_valid() -> None:
    nodes = [{"id": i, "deps": (i + 1,) if i < 3000 else (), "is_cpu_op": 1} for i in range(3001)]
    assert check(make(*nodes)) == []
    shuffled = [nodes[i] for i in np.random.default_rng(1).permutation(3001)]
    assert check(make(*shuffled)) == []


def test_ids_are_in_the_order_of_time_on_each_lane() -> None:
    """Converted gloo runs got a warning, as a thread's times without recording's cost overtook another's."""
    nodes = [{"id": at + 1, "start": start, "is_cpu_op": 1} for at, start in enumerate((0, 5, 3))]
    for lanes, found in (((0, 0, 1), []), ((0, 1, 0), []), ((0, 0, 0), ["id-order"])):
        of_lanes = [node | {"lane": lane} for node, lane in zip(nodes, lanes, strict=True)]
        assert [problem.rule for problem in check(make(*of_lanes))] == found


def test_sparse_ids_are_resolved() -> None:
    nodes = [{"id": i * 10**15, "deps": ((i - 1) * 10**15,) if i else (), "is_cpu_op": 1} for i in range(100)]
    assert check(make(*nodes)) == []
    nodes[50]["deps"] = (7,)
    (problem,) = check(make(*nodes))
    assert problem.message.startswith("depends on node 7,")


def test_random_damage_is_rejected_or_checked() -> None:
    """Random changes to the bytes of a valid file give a WireError or a list of problems, nothing else."""
    whole = b"".join(encode(good()))
    random = np.random.default_rng(7)
    outcomes = set()
    for _ in range(400):
        raw = bytearray(whole)
        for at in random.integers(0, len(raw), random.integers(1, 4)):
            raw[at] = random.integers(0, 256)
        try:
            trace = decode(bytes(raw))
        except WireError:
            outcomes.add("rejected")
            continue
        problems = check(trace, GROUPS) + check_together({0: trace, 1: good(1)}, GROUPS, NAMES)
        outcomes.add("errors" if any(problem.severity == "error" for problem in problems) else "none")
    assert outcomes == {"rejected", "errors", "none"}


def test_a_million_nodes_take_seconds() -> None:
    """The limit is far above the measured 0.5 s and far below what a non-linear check would take."""
    count = 1_000_000
    ids = np.arange(count, dtype=np.uint64)
    trace = ExecutionTrace(
        ids=ids,
        names=Strings([b"op"], np.zeros(count, np.int32)),
        types=np.full(count, NodeType.COMP, np.uint8),
        start_micros=ids,
        duration_micros=ids % np.uint64(9),
        data_deps=Ragged(np.concatenate(([0, 0], np.arange(1, count))), ids[:-1].copy()),
        ctrl_deps=Ragged(np.zeros(count + 1, np.int64), ids[:0]),
    )
    begin = time.process_time()
    assert check(trace) == []
    assert time.process_time() - begin < 5
