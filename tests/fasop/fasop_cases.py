"""Small models, clusters and costs that tests build plans of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from fasop.exact.communication import Communication
from fasop.exact.passes import Passes
from fasop.exact.stage_costs import StageCosts
from fasop.exact.unit_times import Compute
from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import CostFile, Entry
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.shapes import INSIDE, Shape, blocks, boundary_kinds, stage_seats
from fasop.search.node_counts import NodeCounts
from fasop.search.partition import Assignment
from fasop.search.planner import Planner


def model(layers: int = 4, batch: int = 8, encoder: int | None = None, heads: int = 4) -> Model:
    return Model("small", 64, 32, layers, 1000, heads, batch, encoder_layers=encoder)


def gpu(name: str, **changes: object) -> Gpu:
    """A GPU type whose messages and all-reduces take about as long as a layer."""
    values = {"memory_gib": 10.0, "price_per_hour": 1.0, "inter_bandwidth": 1e9, "intra_bandwidth": 8e9}
    return Gpu(name=name, **{**values, **changes})


def cluster(nodes: dict[str, int], size: int = 2, **changes: dict[str, object]) -> Cluster:
    """``nodes`` of each type; ``changes``: settings by type."""
    gpus = tuple(gpu(name, **changes.get(name, {})) for name in nodes)
    return Cluster("small", size, gpus, tuple(nodes.values()))


def costs(of: Model, seconds: dict[str, float], uneven: bool = False) -> list[CostFile]:
    """A layer's forward ``seconds`` by GPU type; E and P take a fifth and a half of it."""
    entries = []
    for name, layer in seconds.items():
        for tp, gain in ((1, 1.0), (2, 0.6)):
            values = []
            for index, unit in enumerate(of.units):
                wave = 1 + 0.3 * (index % 3) if uneven else 1.0
                values.append(gain * layer * {"E": 0.2, "T": wave, "P": 0.5}[unit])
            entries.append(Entry(of.name, name, tp, 1, tuple(values)))
    return [CostFile(1, "made for tests", {of.name: of}, tuple(entries))]


def tables(of: Model, on: Cluster, with_costs: list[CostFile], shape: Shape, **options: object) -> StageCosts:
    how = Options(**options)
    return StageCosts(Passes(of, Compute(with_costs, of, how), Communication(on), how), shape)


def planner(of: Model, on: Cluster, with_costs: list[CostFile], **options: object) -> Planner:
    return Planner(of, on, with_costs, Options(**options))


def partitions(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut ``units`` into contiguous stages."""
    for cuts in itertools.combinations(range(1, units), stages - 1):
        yield tuple(int(size) for size in np.diff([0, *cuts, units]))


def crosses(of: Model, partition: tuple[int, ...]) -> bool:
    """Whether encoder and decoder share one of several stages."""
    border = of.encoder_layers and of.encoder_layers + 1
    return border is not None and len(partition) > 1 and border not in itertools.accumulate(partition)


def assignment(
    on: Cluster, shape: Shape, placement: tuple[str, ...], partition: tuple[int, ...]
) -> Assignment:
    return Assignment(placement, stage_seats(on, placement, shape), partition)


def searched_messages(of: StageCosts, placement: tuple[str, ...]) -> list[float]:
    """Seconds of a message over each boundary, as the search counts them."""
    seats = stage_seats(of.cluster, placement, of.shape)
    between = NodeCounts(of.cluster, blocks(of.cluster, of.shape.group)[0], of.shape.pp).between
    inside = [kind == INSIDE for kind in boundary_kinds(of.cluster, placement, of.shape)]
    return [of.p2p(seats[i], seats[i + 1], INSIDE if inside[i] else between) for i in range(of.shape.pp - 1)]


def objective(of: StageCosts, placement: tuple[str, ...], partition: tuple[int, ...]) -> float:
    """What ``partition.Search`` minimises, from its definition; inf where a stage does not fit."""
    shape = of.shape
    seats, messages = stage_seats(of.cluster, placement, shape), searched_messages(of, placement)
    around = [0.0, *messages, 0.0]
    m, begin, total, slowest = of.micro_batches, 0, 2 * sum(messages), -np.inf
    if crosses(of.model, partition):
        return float("inf")
    for i, size in enumerate(partition):
        (variant,) = of.choices(seats[i])
        forward, backward = (
            float(each[begin : begin + size].sum()) for each in of.seconds(seats[i], variant)
        )
        at = begin, begin + size
        gpus = [of.cluster.gpu(name) for name, _ in seats[i]]
        table = of.table(seats[i], 1, fit=False)
        once = float(table.reduction[at] + table.update[at])
        if of.memory(variant, min(shape.pp - i, m))[at] > min(on.memory_gib for on in gpus):
            return float("inf")
        total += forward + backward + (once if i == 0 else 0.0)
        load = (m - 1) * (forward + backward + around[i] + around[i + 1])
        slowest = max(slowest, load - min(shape.pp - 1 - i, m - 1) * forward)
        begin += size
    return total + slowest + (of.embedding_sync((seats[0], seats[-1])) if len(seats) > 1 else 0.0)


def placements(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Every order of the cluster's nodes that differs in types, for checks of small clusters."""

    def extend(prefix: tuple[str, ...], left: dict[str, int]) -> Iterator[tuple[str, ...]]:
        if not any(left.values()):
            yield prefix
        for name, count in left.items():
            if count:
                yield from extend((*prefix, name), {**left, name: count - 1})

    yield from extend((), {gpu.name: n for gpu, n in zip(cluster.gpus, cluster.nodes, strict=True)})
