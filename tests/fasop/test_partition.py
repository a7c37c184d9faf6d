"""The dynamic program against brute force over all placements and partitions, and against HiGHS."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fasop.plans.shapes import Shape, blocks, stage_seats
from fasop.search.node_counts import NodeCounts
from fasop.search.partition import Search
from tests.fasop import fasop_cases as cases

TYPES = {
    "X": {},
    "Y": {"inter_bandwidth": 3e8, "intra_bandwidth": 2e9, "shared_bus": True, "inter_latency": 1e-3},
    "Z": {"inter_bandwidth": 5e9, "memory_gib": 5.0},
}
SECONDS = {"X": 0.010, "Y": 0.023, "Z": 0.016}
CASES = [
    # nodes by type, GPUs a node, layers, (tp, dp, pp, mbs), encoder layers
    ({"X": 1, "Y": 3}, 2, 5, (1, 2, 4, 1), None),
    ({"X": 1, "Y": 1}, 4, 6, (1, 2, 4, 2), None),
    ({"X": 2, "Y": 2}, 2, 4, (2, 2, 2, 1), None),
    ({"X": 3, "Y": 3}, 2, 5, (1, 4, 3, 2), None),
    ({"X": 2, "Y": 1, "Z": 1}, 1, 5, (1, 1, 4, 1), None),
    ({"X": 1, "Y": 2}, 2, 4, (1, 3, 2, 1), None),
    ({"X": 1, "Y": 2}, 4, 5, (2, 3, 2, 1), None),
    ({"X": 1, "Y": 2}, 2, 6, (1, 2, 3, 1), 3),
    ({"X": 1}, 1, 4, (1, 1, 1, 1), None),
]
LARGE = [
    ({"X": 3, "Y": 2, "Z": 3}, 1, 4, (1, 2, 4, 1), None),
    ({"X": 3, "Y": 3, "Z": 3}, 1, 3, (1, 3, 3, 1), None),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)],
    ids=lambda case: "-".join(map(str, case[3])) + str(case[0]),
)
def test_the_optimum_of_all_placements_and_partitions(case: tuple) -> None:
    nodes, size, layers, degrees, encoder = case
    shape = Shape(*degrees)
    model = cases.model(layers, 12 * shape.dp // np.gcd(12, shape.dp), encoder)
    cluster = cases.cluster(nodes, size, **TYPES)
    for uneven in (False, True):
        tables = cases.tables(model, cluster, cases.costs(model, SECONDS, uneven), shape)
        brute = min(
            cases.objective(tables, placement, partition)
            for placement in cases.placements(cluster)
            for partition in cases.partitions(len(model.units), shape.pp)
        )
        counts = NodeCounts(cluster, blocks(cluster, shape.group)[0], shape.pp)
        found = Search(tables, counts).best()
        assert found is not None
        assert found.objective == pytest.approx(brute, rel=1e-9)
        again = cases.objective(tables, found.placement, found.partition)
        assert again == pytest.approx(found.objective, rel=1e-9)
        counts = tuple(found.placement.count(gpu.name) for gpu in cluster.gpus)
        assert counts == cluster.nodes


def test_memory_forbids_what_would_be_faster() -> None:
    model, shape = cases.model(6, 8), Shape(1, 1, 4, 1)
    cluster = cases.cluster({"X": 2}, 2)
    tables = cases.tables(model, cluster, cases.costs(model, SECONDS), shape)
    counts = NodeCounts(cluster, blocks(cluster, 1)[0], 4)
    free = Search(tables, counts).best()
    (variant,) = tables.choices((("X", 1),))
    spans = enumerate(_spans(free.partition))
    need = max(float(tables.memory(variant, 4 - i)[a, b]) for i, (a, b) in spans)
    small = cases.cluster({"X": 2}, 2, X={"memory_gib": need * 0.999})
    tight = cases.tables(model, small, cases.costs(model, SECONDS), shape)
    found = Search(tight, counts).best()
    brute = min(
        cases.objective(tight, ("X", "X"), partition) for partition in cases.partitions(len(model.units), 4)
    )
    if brute == float("inf"):
        assert found is None
    else:
        assert found.objective == pytest.approx(brute, rel=1e-9)
        assert found.partition != free.partition
    none = cases.tables(
        model, cases.cluster({"X": 2}, 2, X={"memory_gib": 1e-9}), cases.costs(model, SECONDS), shape
    )
    assert Search(none, counts).best() is None
    assert Search(none, counts, fit=False).best().partition == free.partition


def _spans(partition: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = np.cumsum(partition).tolist()
    return [(end - size, end) for size, end in zip(partition, ends, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_highs_finds_the_same_optimum(seed: int) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="scipy, whose HiGHS is the other solver")
    dice = random.Random(seed)
    nodes = {"X": dice.randint(1, 2), "Y": dice.randint(1, 2)}
    cluster = cases.cluster(nodes, 2, **TYPES)
    shape = Shape(1, 1, 2 * sum(nodes.values()), 1)
    model = cases.model(dice.randint(shape.pp, 10), 8)
    tables = cases.tables(model, cluster, cases.costs(model, SECONDS, uneven=True), shape)
    found = Search(tables, NodeCounts(cluster, blocks(cluster, 1)[0], shape.pp)).best()
    best = min(_milp(optimize, tables, placement) for placement in cases.placements(cluster))
    assert found.objective == pytest.approx(best, rel=1e-6)


def _milp(optimize, tables, placement: tuple[str, ...]) -> float:
    """The objective's optimum for one placement: x[i, a, b] says that stage i holds the units a … b−1."""
    seats = stage_seats(tables.cluster, placement, tables.shape)
    pp, n, m = len(seats), len(tables.model.units), tables.micro_batches
    messages = cases.searched_messages(tables, placement)
    around = [0.0, *messages, 0.0]
    columns, cost, load = [], [], []
    for i in range(pp):
        table = tables.table(seats[i], min(pp - i, m))
        times, once = table.forward + table.backward, table.reduction + table.update
        for a in range(n):
            for b in range(a + 1, n + 1):
                if np.isfinite(times[a, b]) and (i > 0 or a == 0) and (i < pp - 1 or b == n):
                    columns.append((i, a, b))
                    cost.append(times[a, b] + (once[a, b] if i == 0 else 0.0))
                    ahead = min(pp - 1 - i, m - 1) * table.forward[a, b]
                    load.append((m - 1) * (times[a, b] + around[i] + around[i + 1]) - ahead)
    width = len(columns) + 1  # the last column is the slowest stage
    rows, low, high = [], [], []
    for i in range(pp):
        one, slow = np.zeros(width), np.zeros(width)
        for k, (stage, _, _) in enumerate(columns):
            if stage == i:
                one[k], slow[k] = 1.0, load[k]
        slow[-1] = -1.0
        rows += [one, slow]
        low += [1.0, -np.inf]
        high += [1.0, 0.0]
    for i in range(pp - 1):
        for cut in range(1, n):
            flow = np.zeros(width)
            for k, (stage, a, b) in enumerate(columns):
                flow[k] = (stage == i and b == cut) - float(stage == i + 1 and a == cut)
            rows.append(flow)
            low.append(0.0)
            high.append(0.0)
    result = optimize.milp(
        np.array([*cost, 1.0]),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
        integrality=np.array([1] * len(columns) + [0]),
        bounds=optimize.Bounds(0, np.array([1.0] * len(columns) + [np.inf])),
    )
    assert result.success, result.message
    return result.fun + 2 * sum(messages) + tables.embedding_sync((seats[0], seats[-1]))
