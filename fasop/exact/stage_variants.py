"""The ways in which a stage can work on its GPUs, and the passes of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np

from fasop.exact.passes import Passes
from fasop.memo import memo
from fasop.plans.groups import Group, Part
from fasop.plans.options import Recompute
from fasop.plans.shapes import Seats, Shape, divisors, gpu_types

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Variant:
    """How one stage works on a micro-batch. shares: sequences that a replica on each GPU type takes."""

    tp: int
    recompute: Recompute
    shares: tuple[tuple[str, int], ...]


class Variants:
    """The variants of the stages of one shape: one for all, or with ``per_stage`` those of each stage.

    ``per_stage`` with a recomputation other than "none" holds for all stages.
    """

    def __init__(self, passes: Passes, shape: Shape) -> None:
        self.passes, self.shape, self.options = passes, shape, passes.options

    @memo
    def of(self, seats: Seats) -> tuple[Variant, ...]:
        """The ways in which a stage on these seats can work."""
        if not self.options.per_stage:
            shares = tuple((name, self.shape.mbs) for name in gpu_types(seats))
            return (Variant(self.shape.tp, self.options.recompute, shares),)
        # Stages choose whether to compute again, unless all of them shall.
        given = self.options.recompute
        ways = RECOMPUTE if given == "none" else (given,)
        found = []
        for tp in divisors(math.gcd(*(count for _, count in seats))):
            if tp > self.passes.max_tp or not self._is_possible(tp):
                continue
            if shares := self._even_finish(seats, tp):
                found += [Variant(tp, recompute, shares) for recompute in ways]
        return tuple(found)

    def _is_possible(self, tp: int) -> bool:
        """Whether heads can be split so, and whole groups of replicas are left for the experts."""
        model, ranks = self.passes.model, self.shape.group // tp
        return math.gcd(model.heads, model.kv_heads or model.heads) % tp == 0 and ranks % self.shape.ep == 0

    def _even_finish(self, seats: Seats, tp: int) -> tuple[tuple[str, int], ...]:
        """Sequences for a replica of each GPU type so that all finish as early as possible; () for none."""
        replicas: dict[str, int] = {}
        for name, count in seats:
            replicas[name] = replicas.get(name, 0) + count // tp
        batch, names = self.shape.batch, list(replicas)
        if len(names) != 2:
            each, rest = divmod(batch, sum(replicas.values()))
            return tuple((name, each) for name in names) if each and not rest else ()
        (one, some), (two, others) = replicas.items()
        best: float = np.inf
        chosen: tuple[tuple[str, int], ...] = ()
        for first in range(1, batch // some + 1):
            second, rest = divmod(batch - first * some, others)
            if rest or second < 1:
                continue
            slowest = max(self._layer_seconds(one, tp, first), self._layer_seconds(two, tp, second))
            if slowest < best:
                best, chosen = slowest, ((one, first), (two, second))
        return chosen

    @memo
    def _layer_seconds(self, name: str, tp: int, mbs: int) -> float:
        units = self.passes.units(name, tp, mbs, self.shape.ep)
        return float((units.forward + units.backward)[self.passes.layers].max())

    @memo
    def seconds(self, seats: Seats, variant: Variant) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each unit; all replicas wait for the slowest."""
        data = data_group(seats, variant.tp, self.shape.group // variant.tp)
        experts = data_group(seats, variant.tp, self.shape.ep) if self.passes.model.experts else ()
        each = [
            self.passes.replica(mbs, variant.recompute, tensor_group(seats, name, variant.tp), data, experts)
            for name, mbs in variant.shares
        ]
        forward: np.ndarray = np.max([one for one, _ in each], axis=0)
        backward: np.ndarray = np.max([two for _, two in each], axis=0)
        return forward, backward

    def pure_seats(self, name: str) -> Seats:
        """The seats of a stage on GPUs of one type, in as few nodes as there can be."""
        cluster = self.passes.links.cluster
        size = cluster.size(cluster.gpu(name))
        nodes, rest = divmod(self.shape.group, size)
        return ((name, rest),) * (rest > 0) + ((name, size),) * nodes

    @memo
    def fastest(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each unit on one GPU type, whose sum no variant is below."""
        seats = self.pure_seats(name)
        each = [self.seconds(seats, variant) for variant in self.of(seats)]
        if not each:
            never = np.full(len(self.passes.model.kinds), np.inf)
            return never, never
        total = np.min([forward + backward for forward, backward in each], axis=0)
        forward = np.minimum(np.min([forward for forward, _ in each], axis=0), total)
        return forward, total - forward

    def forward_share(self, name: str) -> float:
        """The largest share of the forward in a layer's passes on one GPU type."""
        seats, layers = self.pure_seats(name), self.passes.layers
        each = [self.seconds(seats, variant) for variant in self.of(seats)]
        shares = [forward / np.maximum(forward + backward, 1e-30) for forward, backward in each]
        return max((float(share[layers].max(initial=0.0)) for share in shares), default=0.0)


def tensor_group(seats: Seats, name: str, tp: int) -> Group:
    """The GPUs of a tensor-parallel group of a type, in one node where that holds so many."""
    parts, missing = [], tp
    for node, (gpu, count) in enumerate(sorted(seats, key=lambda seat: (seat[0] != name, -seat[1]))):
        taken = min(count, missing)
        if taken:
            parts.append(Part(node, gpu, taken))
        missing -= taken
    return tuple(parts)


def data_group(seats: Seats, tp: int, ranks: int) -> Group:
    """The first ``ranks`` GPUs of a data-parallel group: one of each tensor-parallel group."""
    parts, missing, offset = [], ranks, 0
    for node, (name, count) in enumerate(seats):
        here = min((offset + count - 1) // tp - (offset - 1) // tp, missing)
        if here > 0:
            parts.append(Part(node, name, here))
            missing -= here
        offset += count
    return tuple(parts)
