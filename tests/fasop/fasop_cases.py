"""Small models, clusters and costs that tests build plans of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from fasop.exact.stage_costs import Options, StageCosts
from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import CostFile, Costs, Entry
from fasop.inputs.models import Model
from fasop.plans.shapes import Shape, inside_node, kinds_of


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


def costs(of: Model, seconds: dict[str, float], uneven: bool = False) -> Costs:
    """A layer's forward ``seconds`` by GPU type; E and P take a fifth and a half of it."""
    entries = []
    for name, layer in seconds.items():
        for tp, gain in ((1, 1.0), (2, 0.6)):
            values = []
            for index, unit in enumerate(of.units):
                wave = 1 + 0.3 * (index % 3) if uneven else 1.0
                values.append(gain * layer * {"E": 0.2, "T": wave, "P": 0.5}[unit])
            entries.append(Entry(of.name, name, tp, 1, tuple(values)))
    return Costs([CostFile(1, "made for tests", {of.name: of}, tuple(entries))], of)


def tables(of: Model, on: Cluster, with_costs: Costs, shape: Shape, **options: object) -> StageCosts:
    return StageCosts(of, on, with_costs, shape, Options(**options))


def partitions(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut ``units`` into contiguous stages."""
    for cuts in itertools.combinations(range(1, units), stages - 1):
        yield tuple(int(size) for size in np.diff([0, *cuts, units]))


def crosses(of: Model, partition: tuple[int, ...]) -> bool:
    """Whether encoder and decoder share one of several stages."""
    border = of.encoder_layers and of.encoder_layers + 1
    return border is not None and len(partition) > 1 and border not in itertools.accumulate(partition)


def objective(of: StageCosts, placement: tuple[str, ...], partition: tuple[int, ...], paced: bool) -> float:
    """What ``partition.Search`` minimises, from its definition; inf where a stage does not fit."""
    group = of.shape.tp * of.shape.dp
    kinds, inside = kinds_of(of.cluster, placement, group), inside_node(of.cluster, group)
    messages = [of.p2p(kinds[i], kinds[i + 1], inside[i]) for i in range(len(kinds) - 1)]
    around = [0.0, *messages, 0.0]
    m, begin, total, slowest = of.micro_batches, 0, 2 * sum(messages), -np.inf
    if crosses(of.model, partition):
        return float("inf")
    for i, size in enumerate(partition):
        forward, backward = of.unit_times(kinds[i])
        seconds = float((forward + backward)[begin : begin + size].sum())
        sync = float(of.all_reduce(kinds[i])[begin, begin + size])
        if of.memory(min(len(partition) - i, m))[begin, begin + size] > of.cap(kinds[i]):
            return float("inf")
        total += seconds + (sync if i == 0 and not paced else 0.0)
        load = (m - 1) * (seconds + around[i] + around[i + 1]) + (sync if paced else 0.0)
        load -= min(len(partition) - 1 - i, m - 1) * float(forward[begin : begin + size].sum())
        slowest = max(slowest, load)
        begin += size
    return total + slowest + (of.embedding_sync([kinds[0], kinds[-1]]) if len(kinds) > 1 else 0.0)
