"""Many assignments of one shape at once, by their simulated steps: all there are, or those near the best.

What the dynamic program minimises bounds a step from below, and many assignments share that bound or nearly
do. Some of them are simulated, and the best of those improved by moving units from stage to stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from fasop.exact.passes import synchronized
from fasop.exact.stage_costs import StageCosts
from fasop.inputs.clusters import Cluster
from fasop.plans.shapes import BETWEEN, CROWDED, INSIDE, Seats
from fasop.schedule import one_f_one_b
from fasop.search.dynamic_program import SLACK
from fasop.search.node_counts import NodeCounts, distinct
from fasop.search.partition import Assignment, placed

FEW = 1000  # assignments of a shape up to which all of them are simulated
TIE = 1e-6  # of a step, by which uneven stages count as longer: from equal steps the more even leads on
STARTS = 16  # assignments that are improved
AGAIN = 4  # of them, from which it goes on once more
WORK = 1_000_000  # assignments × stages × micro-batches of one round up to which there are so many


Placed = tuple[tuple[str, ...], tuple[Seats, ...]]  # GPU type of each node, seats of each stage


class Steps:
    """Many assignments of one shape: seconds that each step takes at least, and what it takes, simulated."""

    def __init__(
        self, tables: StageCosts, placements: list[Placed], which: np.ndarray, partitions: np.ndarray
    ) -> None:
        """which: of each assignment its placement; partitions: units [assignment, stage].

        least: seconds [assignment], inf where one does not fit into memory or a stage is empty.
        """
        self.tables = tables
        m, pp = tables.micro_batches, tables.shape.pp
        self.kinds = sorted({seats for _, stages in placements for seats in stages})
        number = {seats: index for index, seats in enumerate(self.kinds)}
        placed = np.array([[number[seats] for seats in stages] for _, stages in placements])
        self.seats, self.upto = placed[which].T, np.cumsum(partitions, axis=1).T  # [stage, assignment]
        begins, kinds = self.upto - partitions.T, tuple(self.kinds)

        # Neither a stage without units nor one that holds encoder and decoder has a finite time.
        of_stages = [
            tables.stacked(kinds, min(pp - i, m))[:, self.seats[i], begins[i], self.upto[i]]
            for i in range(pp)
        ]
        # Forward, backward, reduction and update [stage, assignment].
        self.times = np.stack(of_stages, axis=1)
        boundaries = np.array([tables.boundaries(nodes) for nodes, _ in placements], dtype=int)
        each = itertools.product((BETWEEN, INSIDE, CROWDED), kinds, kinds)
        message = np.array([tables.p2p(left, right, kind) for kind, left, right in each])
        message = message.reshape(3, len(kinds), len(kinds))
        self.p2p = message[boundaries[which].T, self.seats[:-1], self.seats[1:]]  # [boundary, assignment]
        self.least = self._least(m, pp)

    def _least(self, m: int, pp: int) -> np.ndarray:
        """Without the embedding's copies; ``partition`` says why it takes that."""
        forward, backward, reduction, update = self.times
        ahead = np.array([min(pp - 1 - i, m - 1) for i in range(pp)])[:, None]
        fits = np.isfinite(forward).all(axis=0)
        forward, backward = (np.where(fits, seconds, 0.0) for seconds in (forward, backward))
        load = (m - 1) * (forward + backward) - ahead * forward
        load[1:] += (m - 1) * self.p2p
        load[:-1] += (m - 1) * self.p2p
        total = (forward + backward).sum(axis=0) + 2 * self.p2p.sum(axis=0) + reduction[0] + update[0]
        return np.where(fits, total + load.max(axis=0), np.inf)

    def simulate(self, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Simulated seconds of some assignments that fit; and how uneven their stages are, from 0 to 1."""
        forward, backward, reduction, update = self.times[:, :, of]
        rows = list(forward), list(backward), list(self.p2p[:, of])
        line = one_f_one_b.run(*rows, self.tables.micro_batches)
        ends = np.array(line.stage_end), np.array(line.backward_end)
        synced = synchronized(self.tables.options, *ends, reduction)
        synced = _with_embedding(self.tables, self.kinds, self.seats[:, of], self.upto[:, of], synced)
        seconds = forward + backward
        return (synced + update).max(axis=0), (seconds**2).sum(axis=0) / seconds.sum(axis=0) ** 2

    def all(self, limit: float | np.ndarray = np.inf) -> tuple[np.ndarray, np.ndarray]:
        """``simulate`` of all, with inf where one does not fit or can't take less than ``limit`` seconds."""
        (tried,) = np.nonzero(self.least < limit)
        steps, uneven = np.full(len(self.least), np.inf), np.zeros(len(self.least))
        if tried.size:
            steps[tried], uneven[tried] = self.simulate(tried)
        return steps, uneven


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


def best_of_all(tables: StageCosts, counts: NodeCounts) -> Assignment | None | Literal[False]:
    """The assignment with the shortest simulated step; False where they are too many to try.

    None where none fits into memory.
    """
    units, pp = len(tables.model.units), tables.shape.pp
    count = math.comb(units - 1, pp - 1)
    if count > FEW:
        return False
    sequences = list(itertools.islice(counts.sequences(), FEW // count + 1))
    if count * len(sequences) > FEW:
        return False
    cuts = np.array(list(itertools.combinations(range(1, units), pp - 1)), dtype=int)
    partitions = np.diff(cuts.reshape(count, pp - 1), axis=1, prepend=0, append=units)
    placements = [placed(tables.cluster, tables.shape, blocks) for blocks in sequences]
    which = np.repeat(np.arange(len(placements)), count)
    steps, _ = Steps(tables, placements, which, np.tile(partitions, (len(placements), 1))).all()
    at = int(steps.argmin())
    if not np.isfinite(steps[at]):
        return None
    return Assignment(*placements[at // count], tuple(partitions[at % count].tolist()), float(steps[at]))


def improve(tables: StageCosts, assignments: list[Assignment]) -> Assignment:
    """The assignment with the shortest simulated step, of these, of those whose stages or blocks of nodes
    change places, and of all to which moving units leads from the best of them.
    """
    border = (tables.model.encoder_layers or 0) + 1
    best, step = assignments, math.inf
    while True:
        pool = _Pool(tables, [*best, *(_descending(assignment, border) for assignment in best)])
        best = pool.best()
        pool = _Pool(tables, [*best, *(other for one in best for other in _swapped(one, tables.cluster))])
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
        number: dict[Placed, int] = {}
        which = [number.setdefault((one.placement, one.seats), len(number)) for one in self.assignments]
        self.which, self.placements = np.array(which), list(number)
        self.partitions = np.array([assignment.partition for assignment in self.assignments])
        steps = Steps(self.tables, self.placements, self.which, self.partitions)
        self.steps, uneven = steps.all()
        self.seconds = self.steps * (1 + TIE * uneven)

    def first(self) -> np.ndarray:
        """The best, those of each placement before others of the same."""
        order = self.seconds.argsort(kind="stable")
        first, _ = distinct(self.which[order])
        return np.concatenate([order[np.sort(first)], np.delete(order, first)])[:STARTS]

    def best(self) -> list[Assignment]:
        """``first`` as they are now."""
        pairs = ((self.assignments[at], self.partitions[at].tolist()) for at in self.first())
        return [replace(one, partition=tuple(partition)) for one, partition in pairs]

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
            going = self.move(going, near)
            # Half of them each time: the best seldom comes from the worst.
            going = going[self.seconds[going].argsort(kind="stable")][: (len(going) + 1) // 2]

    def move(self, going: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Move the assignments ``going`` to their best neighbours, where these are faster; the ones moved.

        ``near``: the neighbours of each, layers per stage [assignment, neighbour, stage].
        """
        count, each, stages = near.shape
        which = self.which[going].repeat(each)
        candidates = Steps(self.tables, self.placements, which, near.reshape(-1, stages))
        steps, uneven = candidates.all(self.seconds[going].repeat(each))
        seconds = (steps * (1 + TIE * uneven)).reshape(count, each)
        rows, at = np.arange(count), seconds.argmin(axis=1)
        steps, seconds = steps.reshape(count, each)[rows, at], seconds[rows, at]
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


def _swapped(assignment: Assignment, cluster: Cluster) -> Iterator[Assignment]:
    """The assignment with two blocks of nodes of other types in each other's place, with their units.

    A block is the fewest nodes that hold whole stages: those of another size may take more of them.
    """
    per_stage = sum(count for _, count in assignment.seats[0])
    sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    parts: list[tuple[tuple[str, ...], tuple[Seats, ...], tuple[int, ...]]] = []
    node, stage, gpus = 0, 0, 0
    for at, name in enumerate(assignment.placement, 1):
        gpus += sizes[name]
        if gpus % per_stage == 0 and (end := gpus // per_stage) <= len(assignment.seats):
            own = assignment.seats[stage:end], assignment.partition[stage:end]
            parts.append((assignment.placement[node:at], *own))
            node, stage = at, end
    # Stages of a block that is not used up stay the last.
    rest = [(assignment.placement[node:], assignment.seats[stage:], assignment.partition[stage:])]
    for i, j in itertools.combinations(range(len(parts)), 2):
        if parts[i][0] != parts[j][0]:
            order = [*parts[:i], parts[j], *parts[i + 1 : j], parts[i], *parts[j + 1 :], *rest]
            placement, seats, partition = (tuple(itertools.chain(*of)) for of in zip(*order, strict=True))
            yield Assignment(placement, seats, partition)
