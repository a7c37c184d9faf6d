"""Seconds that no placement and partition of a shape can beat, without a search.

In a step of m micro-batches each stage is busy with m passes and their messages. And (``partition`` says
why) a step takes at least what a micro-batch takes through all stages and back, and then what is left of the
stage with most left: of one that runs w forwards ahead, ``(m − 1) · (passes + messages) − w · forward``.

Work is counted in seconds on the fastest GPU of each unit. The layers are the work that can be anywhere: a
GPU type takes at least ``slow`` seconds for a second of it, and as many stages as it has GPUs for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fasop.exact.passes import Passes
from fasop.exact.stage_costs import StageCosts
from fasop.plans.shapes import BETWEEN, CROWDED, INSIDE, Shape

HALVINGS = 8  # of an interval in which a bound is searched
Type = tuple[float, int]  # seconds of some work on a GPU type, and its GPUs


class _Speeds(NamedTuple):
    """layers, others: seconds of all layers, and of the other units, on the fastest GPUs; ahead: the largest
    share of the forward in a layer's passes. Of each GPU type, seconds for a second of a layer, and of any
    unit, on the fastest type, at the unit that suits it best; seconds of its fastest layer, and of the
    embedding's forward and backward; head: seconds of its passes on the fastest.
    """

    layers: float
    others: float
    ahead: float
    slow: list[Type]
    slow_any: list[Type]
    layer: list[Type]
    first: list[tuple[float, float]]
    head: float


class Bounds:
    """Of the shapes of one model on one cluster."""

    def __init__(self, passes: Passes, tables: Callable[[Shape], StageCosts]) -> None:
        self.passes, self.tables = passes, tables
        self.model, self.options = passes.model, passes.options
        self.cluster = passes.links.cluster
        self._known_speeds: dict[tuple[int, ...], _Speeds | None] = {}

    def lower(self, shape: Shape, rough: bool = False) -> float:
        """Of a whole step; inf where the shape has no plan. 0 where a GPU type alone can't make a stage: a
        mixed one may still be faster than any other, and nothing is known. ``rough``: of computation alone,
        as if layers could be divided, which takes a fraction of the time.
        """
        speeds, pp = self._speeds(shape), shape.pp
        if speeds is None:
            return 0.0
        slow, slow_any, layers = (
            _fastest_first(types, shape) for types in (speeds.slow, speeds.slow_any, speeds.layer)
        )
        work, m = speeds.layers + speeds.others, self.model.global_batch // shape.batch
        if not math.isfinite(work) or sum(count for _, count in slow) < pp - 1e-9:
            return math.inf
        layer, number = layers[0][0], self.model.layers
        slowest = max(
            speeds.layers / sum(count / seconds for seconds, count in slow),
            work / sum(count / seconds for seconds, count in slow_any),
        )
        # Of each stage, for how many micro-batches' passes it has work left behind the first.
        weights = [m - 1 - min(pp - 1 - stage, m - 1) * speeds.ahead for stage in range(pp)]
        busiest = 0.0
        if weights[-1] > 0:
            paces = _along(slow, pp)
            busiest = speeds.layers / sum(pace / weight for pace, weight in zip(paces, weights, strict=True))
        # All stages but those with the embedding and the head alone have a layer, also on slow GPUs.
        missing, held, through = max(pp - 2.0, 0.0), 0.0, speeds.others
        for seconds, count in layers:
            some = min(count, missing)
            missing, held, through = missing - some, held + some, through + some * seconds
        through += max(number - held, 0.0) * layer
        through = max(work, through)
        if rough:
            return max(m * slowest, through + busiest)
        messages, each, embedding = self._communication(shape)
        waits = (m - 1) * each * np.array([(stage > 0) + (stage < pp - 1) for stage in range(pp)])
        closer = pp > 2  # as fewer stages are tried as fast as they are bounded
        if closer and not self.options.per_stage:
            # The first stage has the embedding too, the last one the head.
            rest = m - 1 - min(pp - 1, m - 1)
            waits[0] += min(rest * forward + (m - 1) * backward for forward, backward in speeds.first)
            waits[-1] += (m - 1) * speeds.head
        types = layers if closer else layers[:1]
        busiest = max(busiest, _whole_layers(number, types, np.maximum(weights, 0), waits))
        slowest = max(slowest, -(-number // pp) * layer)

        def pipeline(limit: float) -> float:
            """Seconds where no stage works longer than ``limit``: others do what fast GPUs can't."""
            left, total = speeds.layers, speeds.others
            for seconds, count in slow:
                done = min(left, count * limit / (m * seconds))
                left, total = left - done, total + done * seconds
            total += left * slow[-1][0]
            return float(max(m * (slowest + each), max(total, through) + 2 * messages + busiest))

        low = pipeline(1e300)
        high = pipeline(low) if closer else low
        for _ in range(HALVINGS if high > low else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if pipeline(middle) > middle else (low, middle)
        first, fullest = self._with_gradients(shape)
        return float(max(embedding + low + first, fullest))

    def _with_gradients(self, shape: Shape) -> tuple[float, float]:
        """Seconds for gradients and their update, once per step: of the first stage; and, after all its
        passes, of a stage with as many layers as some stage must have.
        """
        tables, layers = self.tables(shape), np.flatnonzero(self.passes.layers)
        most = -(-len(layers) // shape.pp)
        stages = layers[: len(layers) - most + 1], layers[most - 1 :] + 1
        found = []
        for gpu in self.cluster.gpus:
            table = tables.table(tables.pure_seats(gpu.name), 1, fit=False)
            once = table.reduction + table.update
            steps = tables.micro_batches * (table.forward + table.backward) + once
            found.append((once[0, 1:].min(), steps[stages].min()))
        first, fullest = np.min(found, axis=0)
        return first, fullest if fullest < math.inf else 0.0

    def _communication(self, shape: Shape) -> tuple[float, float, float]:
        """Seconds of one message over every boundary, of the shortest one, and of the embedding's copies."""
        tables = self.tables(shape)
        sizes = [self.cluster.size(gpu) for gpu in self.cluster.gpus]
        # A stage over parts of two nodes shares its messages among more links than one in whole nodes.
        parts = any(size % shape.group and shape.group % size for size in sizes)
        if shape.pp == 1 or parts:
            return 0.0, 0.0, 0.0
        seats = [tables.pure_seats(gpu.name) for gpu in self.cluster.gpus]
        pairs = [(one, two) for one in seats for two in seats]
        several = min(sizes) // shape.group > 1 and -(-shape.pp * shape.group // max(sizes)) > 2
        across = min(tables.p2p(*pair, CROWDED if several else BETWEEN) for pair in pairs)
        within = min(tables.p2p(one, one, INSIDE) for one in seats)
        largest = max(sizes) // shape.group
        # How many boundaries at most can lie within a node.
        inside = 0 if largest < 2 else shape.pp - 1 - (shape.pp - 1) // largest
        each = min(within, across) if inside else across
        messages = inside * within + (shape.pp - 1 - inside) * each
        copies = len(self.model.embedding_stages((1,) * shape.pp))
        embedding = min(tables.embedding_sync(pair) for pair in pairs) if copies > 1 else 0.0
        return messages, each, embedding

    def _speeds(self, shape: Shape) -> _Speeds | None:
        """None where a GPU type alone can't make a stage."""
        ranks = shape.dp if self.options.zero >= 2 or shape.ep > 1 else 1
        per_stage = self.options.per_stage
        key = (*((shape.group, shape.batch) if per_stage else (shape.tp, shape.mbs)), shape.ep, ranks)
        if key not in self._known_speeds:
            self._known_speeds[key] = self._speeds_of(StageCosts(self.passes, shape))
        return self._known_speeds[key]

    def _speeds_of(self, tables: StageCosts) -> _Speeds | None:
        names = [gpu.name for gpu in self.cluster.gpus]
        if not all(tables.choices(tables.pure_seats(name)) for name in names):
            return None
        passes = [_fastest(tables, name) for name in names]
        totals = [forward + backward for forward, backward, _ in passes]
        fastest, is_layer = np.min(totals, axis=0), self.passes.layers
        some, layers = fastest > 0, float(fastest[is_layer].sum())
        slow = [1.0] * len(totals)
        if fastest[is_layer].all():
            slow = [float((total[is_layer] / fastest[is_layer]).min()) for total in totals]
        slow_any = [float((total[some] / fastest[some]).min()) for total in totals]
        layer = [float(total[is_layer].min()) for total in totals]
        pairs = zip(self.cluster.gpus, self.cluster.nodes, strict=True)
        gpus = [self.cluster.size(gpu) * count for gpu, count in pairs]
        types = [list(zip(each, gpus, strict=True)) for each in (slow, slow_any, layer)]
        # An encoder-decoder model has no head of its own.
        head = 0.0 if is_layer[-1] else float(fastest[-1])
        first = [(float(forward[0]), float(backward[0])) for forward, backward, _ in passes]
        others, ahead = float(fastest.sum()) - layers, max(share for *_, share in passes)
        return _Speeds(layers, others, ahead, types[0], types[1], types[2], first, head)


def _fastest(tables: StageCosts, name: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Forward and backward seconds of each unit on one GPU type, whose sum no choice of a stage is below;
    and the largest share of the forward in a layer's passes.
    """
    seats, layers = tables.pure_seats(name), tables.passes.layers
    each = np.array([tables.seconds(seats, choice) for choice in tables.choices(seats)])
    totals = each.sum(axis=1)
    total = totals.min(axis=0)
    forward = np.minimum(each[:, 0].min(axis=0), total)
    shares = each[:, 0, layers] / np.maximum(totals[:, layers], 1e-30)
    return forward, total - forward, float(shares.max(initial=0.0))


def _fastest_first(types: list[Type], shape: Shape) -> list[tuple[float, float]]:
    """(seconds, stages) of the types that a shape's stages would best be on."""
    found, left = [], float(shape.pp)
    for seconds, gpus in sorted(types):
        count = min(gpus / shape.group, left)
        left -= count
        found.append((seconds, count))
    return found


def _whole_layers(
    number: int, types: list[tuple[float, float]], weights: np.ndarray, waits: np.ndarray
) -> float:
    """Seconds that are left of the busiest stage where stages hold whole layers, ``number`` in all.

    types: (seconds of a layer, stages) of each GPU type, the fastest first; all but that count as the second.
    Stages have ``weights`` times their layers' seconds left, and ``waits``.
    """
    (fast, count), (slow, _) = types[0], types[min(1, len(types) - 1)]
    # Each layer is on a stage: as many ends of some stage's k-th layer come before the last, or with it.
    ends = np.outer(np.arange(1, number + 1) * fast, weights) + waits
    low = max(waits.max(), np.partition(ends, number - 1, axis=None)[number - 1])
    if len(types) == 1 or not weights.all():
        return float(low)
    high, fastest = low * slow / fast, len(weights) - math.ceil(count)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        left = middle * (1 + 1e-9) - waits
        on_slow = left // (slow * weights)
        gains = left // (fast * weights) - on_slow
        gains.sort()
        low, high = (low, middle) if on_slow.sum() + gains[fastest:].sum() >= number else (middle, high)
    return float(low)


def _along(slow: list[tuple[float, float]], stages: int) -> list[float]:
    """How much faster than a second per second each stage is, the fastest GPUs first, where that serves best.

    slow: (seconds per second, stages, of which parts too).
    """
    paces, at = [0.0] * stages, 0.0
    for seconds, count in slow:
        end = at + count
        for stage in range(int(at), min(math.ceil(end - 1e-9), stages)):
            paces[stage] += (min(end, stage + 1) - max(at, stage)) / seconds
        at = end
    return paces
