"""Rules across the .et files of one run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chakra_et.et.columns import (
    ExecutionTrace,
    NodeType,
)
from chakra_et.validate.table import RULES
from tests.convert.good_traces import (
    GATHER,
    GROUPS,
    NAMES,
    RECV,
    REDUCE,
    SEND,
    check_run,
    drop,
    lose_collective,
    make,
    put,
    run_of_two,
)
from tests.validate.test_validate import BY_GROUPS, SINGLE


def swap_collectives(trace: ExecutionTrace) -> None:
    for name in ("comm_type", "comm_size"):
        trace.attributes[name].values[[0, 1]] = trace.attributes[name].values[[1, 0]]


def same_group(trace: ExecutionTrace) -> None:
    trace.attributes["pg_name"].values.table[:] = [b"1", b"1"]


def send_nowhere(run: dict[int, ExecutionTrace]) -> None:
    for trace in run.values():
        put(trace, "comm_dst", SEND, 5)
        trace.types[RECV] = NodeType.COMP


RUN: list[tuple[str, Callable[[dict[int, ExecutionTrace]], object], int | None, str]] = [
    ("rank-missing", lambda run: [trace.metadata.update(world_size=3) for trace in run.values()], None,
     "1 of 3 ranks have no file, the first is rank 2"),
    ("rank-twice", lambda run: run[1].metadata.update(rank=0), 1, "holds rank 0, and so does NAME.0.et"),
    ("rank-name", lambda run: (run[0].metadata.update(rank=1), run[1].metadata.pop("rank")), 0,
     "rank 1 by its metadata"),
    ("collective-count", lambda run: lose_collective(run[1]), 1,
     "has 0 collectives of group 1, NAME.0.et has 1"),
    ("collective-type", lambda run: put(run[1], "comm_type", REDUCE, 7), 1,
     "REDUCE_SCATTER of 64 bytes (node 3 'op') here and ALL_REDUCE of 64 bytes (node 3 'op') in NAME.0.et"),
    ("collective-size", lambda run: put(run[1], "comm_size", REDUCE, 32), 1,
     "is ALL_REDUCE of 32 bytes (node 3 'op') here and ALL_REDUCE of 64 bytes (node 3 'op') in NAME.0.et"),
    ("collective-size-uneven", lambda run: put(run[1], "comm_size", GATHER, 32), 1,
     "is ALL_GATHER of 32 bytes"),
    ("p2p-rank", send_nowhere, 0, "comm_dst 5, which is not another rank"),
]  # fmt: skip


def test_valid_run_has_no_problems() -> None:
    assert check_run(run_of_two(), GROUPS, NAMES) == []


@pytest.mark.parametrize(("rule", "break_it", "rank", "text"), RUN, ids=[case[0] for case in RUN])
def test_broken_rule_across_ranks_is_reported(
    rule: str, break_it: Callable[[dict[int, ExecutionTrace]], object], rank: int | None, text: str
) -> None:
    run = run_of_two()
    break_it(run)
    problems = [problem for problem in check_run(run, GROUPS, NAMES)]
    assert {problem.rule for problem in problems} == {rule}
    assert problems[0].rank == rank
    assert text in problems[0].message


def test_missing_collective_is_reported_where_it_is_missing() -> None:
    run = run_of_two()
    for trace in run.values():
        same_group(trace)
    lose_collective(run[1])
    (problem,) = check_run(run, GROUPS, NAMES)
    assert problem.rule == "collective-count"
    assert problem.message == (
        "has 1 collectives of group 1, NAME.0.et has 2: collective 1 of group 1 is ALL_GATHER of 64 bytes "
        "(node 4 'op') here and ALL_REDUCE of 64 bytes (node 3 'op') in NAME.0.et; if a rank ended early, "
        "convert a step that all have: --step N"
    )


def test_reordered_collectives_are_reported() -> None:
    run = run_of_two()
    for trace in run.values():
        same_group(trace)
    swap_collectives(run[0])
    (problem,) = check_run(run, GROUPS, NAMES)
    assert (problem.rule, problem.file, problem.node, problem.count) == ("collective-type", "NAME.1.et", 3, 2)


def test_group_zero_missing_on_some_ranks_is_reported() -> None:
    """pg_name "" and "0" mean all ranks to ASTRA-sim, so all of them must take part."""
    run = run_of_two()
    put(run[0], "pg_name", GATHER, "")
    lose = run[1]
    lose.types[GATHER] = NodeType.COMP
    for name in ("comm_type", "comm_size", "pg_name"):
        drop(lose, name, GATHER)
    (problem,) = check_run(run, GROUPS, NAMES)
    assert problem.rule == "collective-count"
    assert problem.message.startswith("has 0 collectives of all ranks, NAME.0.et has 1")


def test_members_without_a_file_are_not_compared() -> None:
    """A group of ranks 0 and 2 with rank 0's file only: report the missing file and nothing else."""
    run = run_of_two()
    for trace in run.values():
        trace.metadata["world_size"] = 3
    lose_collective(run[1])
    problems = check_run(run, {"1": [0, 2], "2": [0, 1]}, NAMES)
    assert [problem.rule for problem in problems] == ["rank-missing"]


def test_group_with_a_rank_outside_the_run_is_reported() -> None:
    problems = check_run(run_of_two(), {**GROUPS, "3": [0, 5]}, NAMES)
    assert [problem.rule for problem in problems] == ["group-rank-absent"]


@pytest.mark.parametrize(("name", "value"), [("comm_tag", 9), ("comm_size", 16)])
def test_mismatched_send_and_receive_are_reported_on_both_sides(name: str, value: int) -> None:
    run = run_of_two()
    put(run[0], name, SEND, value)
    problems = check_run(run, GROUPS, NAMES)
    assert [(p.rule, p.file, p.node) for p in problems] == [
        ("p2p-unmatched", "NAME.0.et", 5),
        ("p2p-unmatched", "NAME.1.et", 6),
    ]
    assert "NAME.1.et has no matching receive" in problems[0].message
    assert "NAME.0.et has no matching send" in problems[1].message


def test_messages_are_matched_as_multisets() -> None:
    run = run_of_two()
    for trace in run.values():
        trace.types[RECV] = NodeType.COMP
    problems = check_run(run, GROUPS, NAMES)
    assert [(p.rule, p.node) for p in problems] == [("p2p-unmatched", 5), ("p2p-unmatched", 5)]


def test_different_world_sizes_are_reported() -> None:
    run = run_of_two()
    run[1].metadata["world_size"] = 4
    problems = check_run(run, GROUPS, NAMES)
    assert {problem.rule for problem in problems} == {"world-size", "rank-missing"}


def test_run_of_one_rank_is_a_warning() -> None:
    problems = check_run({0: make({"id": 1})}, None, NAMES)
    assert [(problem.rule, problem.severity) for problem in problems] == [("single-rank", "warning")]


def test_every_rule_has_a_test() -> None:
    tested = {case[0] for cases in (SINGLE, BY_GROUPS, RUN) for case in cases}
    elsewhere = {
        *(rule for rule in RULES if rule.startswith("astra-")),  # test_validate_astra
        "collective-splits",  # test_uneven_all_to_all
        "single-rank",
        "world-size",
        "group-rank-absent",
        "p2p-unmatched",
        "unreadable",
    }
    assert tested | elsewhere == set(RULES)


def test_absurd_world_size_costs_no_time() -> None:
    run = run_of_two()
    run[0].metadata["world_size"] = run[1].metadata["world_size"] = 2**60
    (problem,) = check_run(run, GROUPS, NAMES)
    assert problem.rule == "rank-missing"
