"""Many divisions of one shape at once, by their simulated steps: all there are, or those near the best.

What the dynamic program minimises bounds a step from below, and many divisions share that bound or nearly
do. Some of them are simulated, and the best of those improved by moving units from stage to stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from fasop.exact.stage_costs import Kinds, StageCosts
from fasop.plans.shapes import Block, inside_node
from fasop.schedule import one_f_one_b as schedule
from fasop.search.dynamic_program import SLACK
from fasop.search.lattice import Lattice
from fasop.search.partition import Division

FEW = 1000  # divisions of a shape up to which all of them are simulated
TIE = 1e-6  # of a step, by which uneven stages count as longer: from equal steps the more even leads on
STARTS = 16  # divisions that are improved
AGAIN = 4  # of them, from which it goes on once more
WORK = 1_000_000  # divisions × stages × micro-batches of one round up to which there are so many


def step_times(
    tables: StageCosts,
    placements: list[tuple[Kinds, ...]],
    which: np.ndarray,
    partitions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Simulated seconds a step of many divisions of one shape [division], inf where one does not fit into
    memory or a stage is empty; and how uneven its stages are, from 0 to 1.

    placements: the types of each stage; which: of each division its placement; partitions: units
    [division, stage].
    """
    m, pp, model = tables.micro_batches, tables.shape.pp, tables.model
    names = sorted({kinds for placed in placements for kinds in placed})
    number = {kinds: index for index, kinds in enumerate(names)}
    placed = np.array([[number[kinds] for kinds in kinds_] for kinds_ in placements])
    kinds, ends = placed[which].T, np.cumsum(partitions, axis=1).T  # [stage, division]
    begins = ends - partitions.T

    times = np.array([tables.unit_times(name) for name in names])  # [types, forward or backward, unit]
    sums = np.concatenate([np.zeros((*times.shape[:2], 1)), times.cumsum(axis=2)], axis=2)
    forward, backward = (sums[kinds, way, ends] - sums[kinds, way, begins] for way in (0, 1))
    all_reduce = np.array([tables.all_reduce(name) for name in names])[kinds, begins, ends]
    # Neither a stage without units nor one that holds encoder and decoder has a finite time.
    fits = np.isfinite(np.array([tables.compute(name) for name in names])[kinds, begins, ends]).all(axis=0)
    caps = np.array([tables.cap(name) for name in names])
    for i in range(pp):
        fits &= tables.memory(min(pp - i, m))[begins[i], ends[i]] <= caps[kinds[i]]

    inside = inside_node(tables.cluster, tables.shape.tp * tables.shape.dp)
    message = {
        within: np.array([[tables.p2p(left, right, within) for right in names] for left in names])
        for within in set(inside)
    }
    p2p = [message[inside[i]][kinds[i], kinds[i + 1]] for i in range(pp - 1)]
    line = schedule.run(list(forward), list(backward), p2p, m)
    synced = np.array(line.stage_end) + all_reduce

    # The stages that hold a copy of the embedding: first, last, and that of a decoder's embedding.
    holders = np.zeros((3, len(partitions)), dtype=int)
    holders[2] = pp - 1
    if model.encoder_layers is not None:
        holders[1] = (ends <= model.encoder_layers + 1).sum(axis=0)
    columns = np.arange(len(partitions))
    types = kinds[holders.clip(max=pp - 1), columns]
    step = synced.max(axis=0)
    distinct, group = np.unique(np.concatenate([holders, types]).T, axis=0, return_inverse=True)
    group = group.ravel()
    for index, row in enumerate(distinct):
        copies = dict(zip(row[:3].tolist(), row[3:].tolist(), strict=True))
        sync = tables.embedding_sync([names[kind] for kind in copies.values()])
        of = group == index
        step[of] = np.maximum(step[of], synced[list(copies)][:, of].max(axis=0) + sync)
    seconds = forward + backward
    uneven = (seconds**2).sum(axis=0) / seconds.sum(axis=0) ** 2
    return np.where(fits, step, np.inf), uneven


def best_of_all(tables: StageCosts, lattice: Lattice) -> Division | None | Literal[False]:
    """The division with the shortest simulated step; False where they are too many to try.

    None where none fits into memory.
    """
    units, pp = len(tables.model.units), tables.shape.pp
    count = math.comb(units - 1, pp - 1)
    if count > FEW:
        return False
    sequences = list(itertools.islice(lattice.sequences(), FEW // count + 1))
    if count * len(sequences) > FEW:
        return False
    cuts = np.array(list(itertools.combinations(range(1, units), pp - 1)), dtype=int)
    partitions = np.diff(cuts.reshape(count, pp - 1), axis=1, prepend=0, append=units)
    placements = [tuple(kinds for block in blocks for kinds in block.stages) for blocks in sequences]
    which = np.repeat(np.arange(len(placements)), count)
    steps, _ = step_times(tables, placements, which, np.tile(partitions, (len(placements), 1)))
    at = int(steps.argmin())
    if not np.isfinite(steps[at]):
        return None
    nodes = tuple(node for block in sequences[at // count] for node in block.nodes)
    return Division(nodes, placements[at // count], tuple(partitions[at % count].tolist()), float(steps[at]))


def improve(tables: StageCosts, lattice: Lattice, divisions: list[Division]) -> Division:
    """The division with the shortest simulated step, of these, of those whose stages or blocks of nodes
    change places, and of all to which moving units leads from the best of them.
    """
    border = (tables.model.encoder_layers or 0) + 1
    best, step = divisions, math.inf
    while True:
        pool = _Pool(tables, [*best, *(_descending(division, border) for division in best)])
        best = pool.best()
        pool = _Pool(tables, [*best, *(o for one in best for o in _swapped(one, lattice.blocks[0]))])
        pool.descend()
        best = pool.best()[:AGAIN]
        if not pool.steps.min() < step / SLACK:
            return best[0]
        step = pool.steps.min()


class _Pool:
    """Divisions that are improved: their partitions [division, stage] and simulated steps."""

    def __init__(self, tables: StageCosts, divisions: list[Division]) -> None:
        unique = {(one.kinds, one.partition): one for one in reversed(divisions)}
        self.tables = tables
        self.divisions = list(unique.values())[::-1]
        self.placements = list(dict.fromkeys(division.kinds for division in self.divisions))
        number = {kinds: index for index, kinds in enumerate(self.placements)}
        self.which = np.array([number[division.kinds] for division in self.divisions])
        self.partitions = np.array([division.partition for division in self.divisions])
        self.steps, self.seconds = self._simulate(self.which, self.partitions)

    def _simulate(self, which: np.ndarray, partitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Steps; and with what decides between equal ones."""
        steps, uneven = step_times(self.tables, self.placements, which, partitions)
        return steps, steps * (1 + TIE * uneven)

    def first(self) -> np.ndarray:
        """The best, those of each placement before others of the same."""
        order = self.seconds.argsort(kind="stable")
        _, first = np.unique(self.which[order], return_index=True)
        starts: np.ndarray = np.concatenate([order[np.sort(first)], np.delete(order, first)])[:STARTS]
        return starts

    def best(self) -> list[Division]:
        """``first`` as they are now."""
        return [
            replace(self.divisions[at], partition=tuple(self.partitions[at].tolist())) for at in self.first()
        ]

    def descend(self) -> None:
        """Move units from stage to stage as long as that makes one of the first shorter."""
        stages = self.tables.shape.pp
        unit = np.eye(stages, dtype=int)
        moves = (unit[:, None] - unit[None]).reshape(-1, stages)
        moves = moves[moves.any(axis=1)]
        work = max(len(moves), 1) * stages * self.tables.micro_batches
        going = self.first()[: max(WORK // work, 1)]
        while going.size and len(moves):
            near = self.partitions[going][:, None] + moves[None]
            # No stage may be empty: such a move is none.
            near = np.where((near > 0).all(axis=2)[..., None], near, self.partitions[going][:, None])
            going = self.move(going, near)
            # Half of them each time: the best seldom comes from the worst.
            going = going[self.seconds[going].argsort(kind="stable")][: (len(going) + 1) // 2]

    def move(self, going: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Move the divisions ``going`` to their best neighbours [division, neighbour, stage]; those moved."""
        count, each, stages = near.shape
        steps, seconds = self._simulate(self.which[going].repeat(each), near.reshape(-1, stages))
        rows, at = np.arange(count), seconds.reshape(count, each).argmin(axis=1)
        steps, seconds = steps.reshape(count, each)[rows, at], seconds.reshape(count, each)[rows, at]
        better = seconds < self.seconds[going] / SLACK
        moved: np.ndarray = going[better]
        self.partitions[moved] = near[rows, at][better]
        self.steps[moved], self.seconds[moved] = steps[better], seconds[better]
        return moved


def _descending(division: Division, border: int) -> Division:
    """The division with the larger stages first, of those of the same types and the same half: early stages
    run more forwards ahead, and so can take longer. border: unit at which the second half begins.
    """
    groups: dict[tuple[Kinds, bool], list[int]] = {}
    for stage, end in enumerate(itertools.accumulate(division.partition)):
        groups.setdefault((division.kinds[stage], end > border), []).append(stage)
    partition = list(division.partition)
    for stages in groups.values():
        sizes = sorted((division.partition[stage] for stage in stages), reverse=True)
        for stage, size in zip(stages, sizes, strict=True):
            partition[stage] = size
    return replace(division, partition=tuple(partition))


def _swapped(division: Division, block: Block) -> Iterator[Division]:
    """The division with two blocks of nodes of other types in each other's place, with their units."""
    nodes, stages = len(block.nodes), len(block.stages)
    parts = [
        (
            division.placement[k * nodes : (k + 1) * nodes],
            division.kinds[k * stages : (k + 1) * stages],
            division.partition[k * stages : (k + 1) * stages],
        )
        for k in range(len(division.placement) // nodes)
    ]
    for i, j in itertools.combinations(range(len(parts)), 2):
        if parts[i][0] != parts[j][0]:
            order = [*parts[:i], parts[j], *parts[i + 1 : j], parts[i], *parts[j + 1 :]]
            placement, kinds, partition = (
                tuple(itertools.chain(*group)) for group in zip(*order, strict=True)
            )
            yield Division(placement, kinds, partition)
