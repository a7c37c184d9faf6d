"""The best placement and partition of one shape, by dynamic programming over contiguous partitions.

Minimised is a lower bound on the simulated step, which the step usually exceeds by a few percent. First a
micro-batch passes through all stages and back: ``Σ stage + 2 Σ message``. Then stage i, w forwards ahead,
still has ``(m − 1) · (stage + messages at its ends) − min(w, m − 1) · forward`` to do, and the stage with
most of it decides. The first stage's gradients and the embedding's follow.

For each bound on the maximum a dynamic program finds the smallest sum over all placements and partitions that
fit into memory; the bound itself is searched by dividing intervals, where the smallest sum at an interval's
upper end tells when nothing in it can be better. Nothing else is left out: the result is the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fasop.inputs.clusters import Cluster
from fasop.plans.shapes import INSIDE, Block, Seats, Shape
from fasop.search.dynamic_program import INF, SLACK, DynamicProgram

DRAWS = 64  # assignments near the best
SPREAD, WIDER = 0.002, 0.03  # of the objective: noise of a random choice, and bounds above the best
TIGHTER = 4  # single bounds that are tried before intervals are divided: few shapes have any below a limit
LARGEST = 1e300  # of bounds
EVEN = 0.05  # of a mean stage: how much longer one at the bound counts there, so that even ones are drawn


@dataclass(frozen=True)
class Assignment:
    """placement: GPU type of each node; seats: of each stage; partition: units; objective: seconds."""

    placement: tuple[str, ...]
    seats: tuple[Seats, ...]
    partition: tuple[int, ...]
    objective: float = 0.0


def placed(
    cluster: Cluster, shape: Shape, chosen: Sequence[Block]
) -> tuple[tuple[str, ...], tuple[Seats, ...]]:
    """Nodes and seats of a sequence of blocks, without the nodes that no stage is on."""
    nodes = [node for block in chosen for node in block.nodes]
    missing, used = shape.pp * shape.group, 0
    while missing > 0:
        missing -= cluster.size(cluster.gpu(nodes[used]))
        used += 1
    seats = [seats for block in chosen for seats in block.stages]
    return tuple(nodes[:used]), tuple(seats[: shape.pp])


class Search(DynamicProgram):
    """The best assignment of one shape on one cluster."""

    def best(self, limit: float = INF) -> Assignment | None:
        """The assignment with the smallest objective; None where none fits into memory, or none is below
        ``limit``.
        """
        chosen = None
        for first in self._first_groups():
            limit, bound = self._lowest(first, limit)
            if bound is not None:
                chosen = bound, first
        if chosen is None:
            return None
        rows, partitions = self.draw(*chosen, 1, 0.0)
        return self._assignment(rows[0], partitions[0], limit)

    def near(self, best: Assignment) -> list[Assignment]:
        """Other assignments with sums near the smallest, drawn at random, of every group of first blocks.

        Their maximum is at most a little above that of ``best``.
        """
        spread, bound = SPREAD * best.objective, self._maximum(best) + WIDER * best.objective
        self.even = EVEN * best.objective / self.stages
        draws = [self.draw(bound, first, DRAWS, spread) for first in self._first_groups()]
        self.even = 0.0
        pairs = (zip(rows, partitions, strict=True) for rows, partitions in draws)
        return [self._assignment(*one) for one in itertools.chain(*pairs)]

    def _lowest(self, first: list[int], limit: float) -> tuple[float, float | None]:
        """The smallest sum plus bound below ``limit`` and its bound, or ``limit`` and None.

        The sum never grows with the bound: between two bounds it is at least that of the upper one.
        """
        best: tuple[float, float | None] = (limit, None)
        most, least = LARGEST, 0.0
        for _ in range(TIGHTER if limit < INF else 1):
            # With the sum under the largest bound, no bound from here on is below the limit.
            most, before = min(limit - least, LARGEST), least
            least = float(self.sums(np.array([most]), first)[0])
            if least == INF:
                return best
            if least == before:
                break  # the next would be the same
        # The program takes what is within rounding above a bound, too.
        bounds = self._bounds(float(np.nextafter(most * SLACK, INF)))
        if not len(bounds):
            return best
        # Up to the next bound the sums are the same.
        last = int(bounds.searchsorted(most * SLACK, side="right")) - 1
        if last >= 0 and least + bounds[last] < best[0]:
            best = float(least + bounds[last]), float(bounds[last])
        # Intervals (a, b) of bounds still to be searched, with the sums at both ends.
        pending = _intervals([(-1, INF), *([(last, least)] if last >= 0 else []), (len(bounds), least)])
        while pending:
            a, b, above, below = pending.pop()
            # Bounds above this one can't be better, whatever their sum.
            b = min(b, int(np.searchsorted(bounds, best[0] - below)))
            if b - a < 2 or above == below or below + bounds[a + 1] >= best[0] / SLACK:
                continue
            spread = np.linspace(a, b, self.batch + 2).astype(int)[1:-1].clip(a + 1)
            tried = np.array(sorted(set(spread.tolist())))
            sums = self.sums(bounds[tried], first)
            at = int((sums + bounds[tried]).argmin())
            if sums[at] + bounds[tried[at]] < best[0]:
                best = float(sums[at] + bounds[tried[at]]), float(bounds[tried[at]])
            ends = [(a, above), *zip(tried.tolist(), sums.tolist(), strict=True), (b, below)]
            pending += _intervals(ends)
        return best

    def _first_groups(self) -> list[list[int]]:
        """First blocks, together where the embedding's all-reduce can't tell them apart."""
        groups: dict[float, list[int]] = {}
        for index, block in enumerate(self.blocks):
            groups.setdefault(self.embedding(block.stages[0], block.stages[0]), []).append(index)
        return list(groups.values())

    def _bounds(self, limit: float) -> np.ndarray:
        """All values below ``limit`` that the maximum can have, ascending."""
        values = []
        keys = [(b, at) for b, block in enumerate(self.blocks) for at in range(len(block.stages))]
        times = {seconds for key in keys for seconds, _ in self.onward(*key) if self.stages > 1}
        # Of several stages with as many forwards ahead, one that has messages on both sides.
        ranges = [0, *range(max(self.stages - self.m, 1), self.stages)] if self.stages > 1 else [0]
        for stage in ranges:
            before = times if stage else {0.0}
            after = times if stage + 1 < self.stages else {0.0}
            sums = (self.m - 1) * np.array(sorted({a + b for a in before for b in after}))
            for seats in {seats for block in self.blocks for seats in block.stages}:
                load = self.load(seats, self.in_flight(stage))
                load = np.array(sorted(set(load[np.isfinite(load)].tolist())))  # np.unique loads numpy.ma
                here = (load[:, None] + sums[None]).ravel()
                values.append(here[here < limit])
        bounds = np.sort(np.concatenate(values))
        if len(bounds):
            # The same duration summed in another order is the same bound.
            bounds = bounds[np.append(np.diff(bounds) > 1e-11 * abs(bounds[-1]), True)]
        return bounds

    def _maximum(self, assignment: Assignment) -> float:
        between = self.counts.between
        crossed = self.costs.boundaries(assignment.placement)
        kinds = [INSIDE if kind == INSIDE else between for kind in crossed]
        pairs = zip(assignment.seats[:-1], assignment.seats[1:], kinds, strict=True)
        messages = [0.0, *(self.costs.p2p(*pair) for pair in pairs), 0.0]
        end, loads = 0, []
        for i, (seats, size) in enumerate(zip(assignment.seats, assignment.partition, strict=True)):
            end += size
            load = float(self.load(seats, self.in_flight(i))[size, end])
            loads.append(load + (self.m - 1) * (messages[i] + messages[i + 1]))
        return max(loads)

    def _assignment(self, row: np.ndarray, partition: np.ndarray, objective: float = 0.0) -> Assignment:
        chosen, stage = [], 0
        while stage < self.stages:
            chosen.append(self.blocks[row[stage]])
            stage += len(chosen[-1].stages)
        found = placed(self.costs.cluster, self.costs.shape, chosen)
        return Assignment(*found, tuple(partition.tolist()), objective)


def _intervals(ends: list[tuple[int, float]]) -> list[tuple[int, int, float, float]]:
    """Between each two ends of ascending (index, sum), those in which anything is possible.

    They are taken from the end of the list: the one with the smallest bounds comes last.
    """
    pairs = reversed(list(itertools.pairwise(ends)))
    return [(low, high, more, less) for (low, more), (high, less) in pairs if less < INF]
