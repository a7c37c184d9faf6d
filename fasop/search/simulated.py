"""Many assignments of one shape at once, by their simulated steps: all there are, or those near the best.

What the dynamic program minimises bounds a step from below, and many assignments share that bound or nearly
do. Some of them are simulated, and the best of those improved by moving units from stage to stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fasop.exact.once_per_step import synchronized
from fasop.exact.stage_costs import StageCosts
from fasop.plans.shapes import BETWEEN, CROWDED, INSIDE, Block, Seats
from fasop.schedule import one_f_one_b
from fasop.search.arrays import distinct
from fasop.search.dynamic_program import SLACK
from fasop.search.lattice import Lattice
from fasop.search.partition import Assignment, placed

FEW = 1000  # assignments of a shape up to which all of them are simulated
TIE = 1e-6  # of a step, by which uneven stages count as longer: from equal steps the more even leads on
STARTS = 16  # assignments that are improved
AGAIN = 4  # of them, from which it goes on once more
WORK = 1_000_000  # assignments × stages × micro-batches of one round up to which there are so many


@dataclass(frozen=True)
class Simulated:
    """What an assignment takes, in seconds: per stage, per boundary and per step; ``chosen``: each stage's
    variant.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    p2p: tuple[float, ...]
    reduction: tuple[float, ...]
    update: tuple[float, ...]
    chosen: tuple[int, ...]
    embedding: float
    pipeline: float
    step: float


Placed = tuple[tuple[str, ...], tuple[Seats, ...]]  # GPU type of each node, seats of each stage


def step_times(
    tables: StageCosts,
    placements: list[Placed],
    which: np.ndarray,
    partitions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Simulated seconds per step of many assignments of one shape [assignment], inf where one does not fit
    into memory or a stage is empty; and how uneven its stages are, from 0 to 1.

    which: of each assignment its placement; partitions: units [assignment, stage].
    """
    m, pp = tables.micro_batches, tables.shape.pp
    kinds = sorted({seats for _, stages in placements for seats in stages})
    number = {seats: index for index, seats in enumerate(kinds)}
    placed = np.array([[number[seats] for seats in stages] for _, stages in placements])
    seats, upto = placed[which].T, np.cumsum(partitions, axis=1).T  # [stage, assignment]
    begins = upto - partitions.T

    # Neither a stage without units nor one that holds encoder and decoder has a finite time.
    times = np.stack(
        [tables.stacked(tuple(kinds), min(pp - i, m))[:, seats[i], begins[i], upto[i]] for i in range(pp)]
    )
    forward, backward, reduction, update = times.transpose(1, 0, 2)
    fits = np.isfinite(forward).all(axis=0)
    # What does not fit is simulated too, as if it took no time: inf − inf would be none.
    forward, backward = (np.where(fits, seconds, 0.0) for seconds in (forward, backward))

    boundaries = np.array([tables.boundaries(nodes) for nodes, _ in placements])
    message = np.array(
        [
            [[tables.p2p(left, right, kind) for right in kinds] for left in kinds]
            for kind in (BETWEEN, INSIDE, CROWDED)
        ]
    )
    p2p = [message[boundaries[which, i], seats[i], seats[i + 1]] for i in range(pp - 1)]
    line = one_f_one_b.run(list(forward), list(backward), p2p, m)
    ends = np.array(line.stage_end), np.array(line.backward_end)
    synced = synchronized(tables.options, *ends, reduction)
    step = (_with_embedding(tables, kinds, seats, upto, synced) + update).max(axis=0)
    seconds = forward + backward
    with np.errstate(invalid="ignore"):
        uneven = (seconds**2).sum(axis=0) / seconds.sum(axis=0) ** 2
    return np.where(fits, step, np.inf), np.where(fits, uneven, 0.0)


def _with_embedding(
    tables: StageCosts, kinds: list[Seats], seats: np.ndarray, ends: np.ndarray, synced: np.ndarray
) -> np.ndarray:
    """When each stage has its gradients [stage, assignment], those of the embedding's copies included."""
    model, pp = tables.model, len(seats)
    if pp == 1 or not (model.tied or model.encoder_layers is not None):
        return synced
    # The stages that hold a copy: first, last, and that of a decoder's embedding.
    holders = np.zeros((3, seats.shape[1]), dtype=int)
    holders[2] = pp - 1
    if model.encoder_layers is not None:
        holders[1] = (ends <= model.encoder_layers + 1).sum(axis=0)
    types = seats[holders.clip(max=pp - 1), np.arange(seats.shape[1])]
    # One number for each combination of stages and types.
    rows = np.concatenate([holders, types])
    sizes = [pp + 1] * len(holders) + [len(kinds)] * len(types)
    first, group = distinct(np.ravel_multi_index(tuple(rows), sizes))
    done = synced.copy()
    for index, row in enumerate(rows.T[first].tolist()):
        copies = dict(zip(row[:3], row[3:], strict=True))
        sync = tables.embedding_sync(tuple(kinds[kind] for kind in copies.values()))
        (of,) = np.nonzero(group == index)
        stages = np.array(list(copies))
        done[stages[:, None], of] = synced[stages[:, None], of].max(axis=0) + sync
    return done


def best_of_all(tables: StageCosts, lattice: Lattice) -> Assignment | None | Literal[False]:
    """The assignment with the shortest simulated step; False where they are too many to try.

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
    placements = [placed(tables.cluster, tables.shape, blocks) for blocks in sequences]
    which = np.repeat(np.arange(len(placements)), count)
    steps, _ = step_times(tables, placements, which, np.tile(partitions, (len(placements), 1)))
    at = int(steps.argmin())
    if not np.isfinite(steps[at]):
        return None
    return Assignment(*placements[at // count], tuple(partitions[at % count].tolist()), float(steps[at]))


def improve(tables: StageCosts, lattice: Lattice, assignments: list[Assignment]) -> Assignment:
    """The assignment with the shortest simulated step, of these, of those whose stages or blocks of nodes
    change places, and of all to which moving units leads from the best of them.
    """
    border = (tables.model.encoder_layers or 0) + 1
    best, step = assignments, math.inf
    while True:
        pool = _Pool(tables, [*best, *(_descending(assignment, border) for assignment in best)])
        best = pool.best()
        pool = _Pool(tables, [*best, *(o for one in best for o in _swapped(one, lattice.blocks[0]))])
        pool.descend()
        best = pool.best()[:AGAIN]
        if not pool.steps.min() < step / SLACK:
            return best[0]
        step = pool.steps.min()


class _Pool:
    """Assignments that are improved: their partitions [assignment, stage] and simulated steps."""

    def __init__(self, tables: StageCosts, assignments: list[Assignment]) -> None:
        unique = {(one.placement, one.partition): one for one in reversed(assignments)}
        self.tables = tables
        self.assignments = list(unique.values())[::-1]
        self.placements: list[Placed] = list(
            dict.fromkeys((one.placement, one.seats) for one in self.assignments)
        )
        number = {nodes: index for index, (nodes, _) in enumerate(self.placements)}
        self.which = np.array([number[one.placement] for one in self.assignments])
        self.partitions = np.array([assignment.partition for assignment in self.assignments])
        self.steps, self.seconds = self._simulate(self.which, self.partitions)

    def _simulate(self, which: np.ndarray, partitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Steps; and with what decides between equal ones."""
        steps, uneven = step_times(self.tables, self.placements, which, partitions)
        return steps, steps * (1 + TIE * uneven)

    def first(self) -> np.ndarray:
        """The best, those of each placement before others of the same."""
        order = self.seconds.argsort(kind="stable")
        first, _ = distinct(self.which[order])
        starts: np.ndarray = np.concatenate([order[np.sort(first)], np.delete(order, first)])[:STARTS]
        return starts

    def best(self) -> list[Assignment]:
        """``first`` as they are now."""
        return [
            replace(self.assignments[at], partition=tuple(self.partitions[at].tolist()))
            for at in self.first()
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
        """Move the assignments ``going`` to their best neighbours [assignment, neighbour, stage]; those
        moved.
        """
        count, each, stages = near.shape
        steps, seconds = self._simulate(self.which[going].repeat(each), near.reshape(-1, stages))
        rows, at = np.arange(count), seconds.reshape(count, each).argmin(axis=1)
        steps, seconds = steps.reshape(count, each)[rows, at], seconds.reshape(count, each)[rows, at]
        better = seconds < self.seconds[going] / SLACK
        moved: np.ndarray = going[better]
        self.partitions[moved] = near[rows, at][better]
        self.steps[moved], self.seconds[moved] = steps[better], seconds[better]
        return moved


def _descending(assignment: Assignment, border: int) -> Assignment:
    """The assignment with the larger stages first, of those of the same types and the same half: early stages
    run more forwards ahead, and so can take longer. border: unit at which the second half begins.
    """
    groups: dict[tuple[Seats, bool], list[int]] = {}
    for stage, end in enumerate(itertools.accumulate(assignment.partition)):
        groups.setdefault((assignment.seats[stage], end > border), []).append(stage)
    partition = list(assignment.partition)
    for stages in groups.values():
        sizes = sorted((assignment.partition[stage] for stage in stages), reverse=True)
        for stage, size in zip(stages, sizes, strict=True):
            partition[stage] = size
    return replace(assignment, partition=tuple(partition))


def _swapped(assignment: Assignment, block: Block) -> Iterator[Assignment]:
    """The assignment with two blocks of nodes of other types in each other's place, with their units."""
    nodes, stages = len(block.nodes), len(block.stages)
    whole = len(assignment.seats) // stages
    if -(-len(assignment.seats) // stages) * nodes < len(assignment.placement):
        return  # blocks of several sizes
    parts = [
        (
            assignment.placement[k * nodes : (k + 1) * nodes],
            assignment.seats[k * stages : (k + 1) * stages],
            assignment.partition[k * stages : (k + 1) * stages],
        )
        for k in range(-(-len(assignment.seats) // stages))
    ]
    for i, j in itertools.combinations(range(whole), 2):
        if parts[i][0] != parts[j][0]:
            order = [*parts[:i], parts[j], *parts[i + 1 : j], parts[i], *parts[j + 1 :]]
            placement, seats, partition = (
                tuple(itertools.chain(*group)) for group in zip(*order, strict=True)
            )
            yield Assignment(placement, seats, partition)
