"""The cost model hpdc24 against the published tool's rows, and its rules one by one."""

from __future__ import annotations

import ast
import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from fasop.errors import PlanError
from fasop.hpdc24 import search as hpdc24
from fasop.hpdc24.rules import even_split, minmax, simulate
from fasop.hpdc24.search import published_costs
from fasop.inputs.clusters import load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model

FIXTURES = Path(__file__).with_name("fixtures")
NAMES = {"p4d.24xlarge": "A100", "g5.24xlarge": "A10"}
# Model, cluster, rows that the published tool has, and of how many of them one was kept.
RUNS = [
    ("bert-large", "paper-bert", "rows_bert", 89, 1),
    ("bert-large", "paper-bert-het", "rows_bert_heterogeneous", 356, 1),
    ("gpt2-xl", "paper-gpt2xl", "rows_gpt2", 74, 1),
    ("gpt2-xl", "paper-gpt2xl-het", "rows_gpt2_heterogeneous", 592, 1),
    ("t5", "paper-t5", "rows_T5", 89, 1),
    ("t5", "paper-t5-het", "rows_T5_heterogeneous", 712, 1),
    ("gpt2-xl", "paper-pareto", "rows_pareto", 31_362, 16),
]


def rows_of(model_name: str, cluster: str) -> list[hpdc24.Row]:
    model = find_model(model_name)
    return hpdc24.search(model, load_clusters(cluster), published_costs([read_costs()], model))


def number(text: str) -> float:
    return float(text.removeprefix("tensor([").removesuffix("])"))


@pytest.mark.parametrize(("model", "cluster", "file", "count", "one_in"), RUNS)
def test_every_row_of_the_published_tool_in_its_order(
    model: str, cluster: str, file: str, count: int, one_in: int
) -> None:
    with gzip.open(FIXTURES / f"{file}.csv.gz", "rt", encoding="utf-8") as handle:
        expected = list(csv.DictReader(handle))
    rows = rows_of(model, cluster)
    assert len(rows) == count
    assert len(rows := rows[::one_in]) == len(expected)
    text = io.StringIO()
    csv.writer(text).writerows(hpdc24.csv_row(row, 12_500_000) for row in rows)
    found = list(csv.reader(io.StringIO(text.getvalue())))
    for row, mine, theirs in zip(rows, found, expected, strict=True):
        degrees = (row.mbs, row.tp, row.dp, row.pp)
        assert degrees == tuple(int(float(theirs[key])) for key in ("mbs", "tp", "dp", "pp"))
        assert row.placement == tuple(NAMES[n] for n in ast.literal_eval(theirs["node placement"]))
        assert mine[4] == theirs["node placement"] and mine[7] == theirs["partition"]
        assert mine[13] == theirs["is_oom"] and mine[15] == theirs["is_fsdp_oom"]
        # Printed to four decimals; a half may be rounded either way.
        assert float(mine[14]) == pytest.approx(number(theirs["oom_gpumem"]), abs=1.01e-4)
        assert float(mine[16]) == pytest.approx(number(theirs["fsdpoom_gpumem"]), abs=1.01e-4)
        # 1e-4 is what is promised; as the tool's float32 steps are followed, all but the last digits agree.
        for column in (5, 6, 8, 9, 10, 11, 12, 17):
            assert float(mine[column]) == pytest.approx(float(list(theirs.values())[column]), rel=1e-7)


def test_t5_is_split_so_that_both_halves_have_whole_stages() -> None:
    for row in rows_of("t5", "paper-t5"):
        if row.pp > 1:
            assert 25 in np.cumsum(row.partition)


def test_placements_rotate_to_the_left() -> None:
    (cluster,) = load_clusters("paper-bert-het")
    letters = ["".join("A" if node == "A100" else "B" for node in p) for p in hpdc24.placements(cluster)]
    assert letters == ["ABBB", "BBBA", "BBAB", "BABB"]


def test_other_gpu_types_are_refused(tmp_path: Path) -> None:
    from tests.fasop.fasop_cases import cluster

    with pytest.raises(PlanError, match="knows only A100 and A10, not L4.*--cost-model exact"):
        hpdc24.placements(cluster({"A100": 1, "L4": 1}))


@pytest.mark.parametrize(
    ("units", "stages", "expected"),
    [(26, 4, [7, 6, 6, 7]), (50, 4, [13, 12, 12, 13]), (8, 4, [2, 2, 2, 2]), (9, 4, [2, 2, 2, 3])],
)
def test_the_split_to_begin_with(units: int, stages: int, expected: list[int]) -> None:
    assert even_split(units, stages).tolist() == expected


def one_minmax(costs: list[list[float]], types: list[int], incoming: list[float]) -> tuple[list, list]:
    """One row; ``costs`` of each unit by GPU type."""
    units = len(costs[0])
    sums = np.zeros((1, len(costs), units + 1, units + 1))
    for g, values in enumerate(costs):
        for a in range(units):
            sums[0, g, a, a + 1 :] = np.cumsum(values[a:])
    partition, compute = minmax(sums, np.zeros(1, dtype=int), np.array([types]), np.array([incoming]))
    return partition[0].tolist(), compute[0].tolist()


def test_minmax_moves_units_until_the_slowest_stage_would_grow() -> None:
    partition, compute = one_minmax([[1.0] * 12, [2.0] * 12], [0, 1, 1], [0.0] * 3)
    assert partition == [6, 3, 3]
    assert compute == [6.0, 6.0, 6.0]


def test_minmax_leaves_times_stale_where_the_first_stage_has_two_units() -> None:
    # The first stage is slowest with its last two units: the move that led there is taken back, but the
    # stage times stay those of the partition that it led to.
    partition, compute = one_minmax([[1.0] * 8, [10.0] * 8], [1, 0], [0.0, 0.0])
    assert partition == [3, 5]
    assert compute == [20.0, 6.0]


def test_minmax_stops_at_a_single_unit_without_undoing() -> None:
    partition, compute = one_minmax([[1.0] * 6, [50.0] * 6], [0, 1, 0], [0.0] * 3)
    assert partition == [3, 1, 2]
    assert compute == [3.0, 50.0, 2.0]


def test_minmax_counts_messages_into_inner_stages_only_when_it_compares() -> None:
    partition, compute = one_minmax([[1.0] * 9], [0, 0, 0], [0.0, 5.0, 0.0])
    assert partition[1] < 3
    assert sum(compute) == 9.0


def test_messages_take_time_at_the_two_ends_only() -> None:
    compute = np.array([[3.0, 3.0, 3.0]])
    zero, some = np.zeros(1), np.full(1, 0.5)
    free = simulate(compute, zero, zero, 4)[0, 0]
    assert free == pytest.approx((4 + 3 - 1) * 3)
    assert simulate(compute, some, some, 4)[0, 0] > free
