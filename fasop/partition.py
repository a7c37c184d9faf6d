"""The best placement and partition of one shape, by dynamic programming over contiguous partitions.

Minimised is a lower bound on the simulated step, which the step usually exceeds by a few percent. First a
micro-batch passes through all stages and back: ``Σ stage + 2 Σ message``. Then stage i, w forwards ahead,
still has ``(m − 1) · (stage + messages at its ends) − min(w, m − 1) · forward`` to do, and the stage with
most of it decides. The first stage's gradients and the embedding's follow. With ``paced`` each stage's own
gradients are counted, in the maximum, which is no bound but serves where another stage than the first ends
last.

For each bound on the maximum a dynamic program finds the smallest sum over all placements and partitions
that fit into memory; the bound itself is searched by dividing intervals, where the smallest sum at an
interval's upper end tells when nothing in it can be better. Nothing else is left out, so the result is the
optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fasop.lattice import Lattice
from fasop.memo import memo
from fasop.shapes import inside_node
from fasop.stage_costs import Kinds, StageCosts

INF = np.inf
SLACK = 1 + 1e-9  # sums of the same durations in another order are the same
BATCH = 8  # bounds that are tried at once, where that is not slower
DRAWS = 64  # divisions near the best
EVEN = (
    0.05  # of the mean stage, by which one at the bound counts as longer there, so that even ones are drawn
)
SPREAD, WIDER = 0.002, 0.03  # of the objective: noise of a random choice, and bounds above the best
SMALL = 200_000  # elements up to which one array operation beats a loop over the stage sizes

Key = tuple[int, float]  # a block, and the seconds of the message into its current stage


@dataclass(frozen=True)
class Division:
    """placement: GPU type of each node; kinds: of each stage; partition: units; objective: seconds."""

    placement: tuple[str, ...]
    kinds: tuple[Kinds, ...]
    partition: tuple[int, ...]
    objective: float = 0.0


class Search:
    """One shape on one cluster: the tables of its dynamic program."""

    def __init__(self, costs: StageCosts, lattice: Lattice, fit: bool = True, paced: bool = False) -> None:
        """``fit`` False: as if every GPU had memory without end."""
        self.costs, self.lattice, self.fit, self.paced = costs, lattice, fit, paced
        self.blocks = lattice.blocks
        self.stages = costs.shape.pp
        self.each = len(self.blocks[0].stages)  # stages of a block
        self.units = len(costs.model.units)
        self.m = costs.micro_batches
        self._even = 0.0
        most = max(len(states) for states in lattice.states)
        self.batch = max(min(BATCH, SMALL // (most * (self.units + 1) ** 2)), 1)

    def best(self, limit: float = INF) -> Division | None:
        """The division with the smallest objective; None where none fits into memory, or none is below
        ``limit``.
        """
        bounds = self._bounds()
        chosen = None
        for first in self._first_groups():
            limit, bound = self._lowest(bounds, first, limit)
            if bound is not None:
                chosen = bound, first
        if chosen is None:
            return None
        rows, partitions = self._draw(*chosen, 1, 0.0)
        return self._division(rows[0], partitions[0], limit)

    def near(self, best: Division) -> list[Division]:
        """Other divisions whose sums are near the smallest, drawn at random, of every group of first blocks.

        Their maximum is at most a little above that of ``best``.
        """
        spread, bound = SPREAD * best.objective, self._maximum(best) + WIDER * best.objective
        self._even = EVEN * best.objective / self.stages
        found = []
        for first in self._first_groups():
            for row, partition in zip(*self._draw(bound, first, DRAWS, spread), strict=True):
                found.append(self._division(row, partition))
        self._even = 0.0
        return found

    def _lowest(self, bounds: np.ndarray, first: list[int], limit: float) -> tuple[float, float | None]:
        """The smallest sum plus bound below ``limit`` and its bound, or ``limit`` and None.

        The sum never grows with the bound: between two bounds it is at least that of the upper one.
        """
        top = len(bounds) - 1
        (least,) = self._sums(bounds[top:], first)
        best: tuple[float, float | None] = (limit, None)
        if least == INF:
            return best
        if least + bounds[top] < limit:
            best = float(least + bounds[top]), float(bounds[top])
        # Intervals (a, b) of bounds still to be searched, with the sums at both ends.
        pending = [(-1, top, INF, float(least))]
        while pending:
            a, b, above, below = pending.pop()
            # Bounds above this one can't be better, whatever their sum.
            b = min(b, int(np.searchsorted(bounds, best[0] - below)))
            if b - a < 2 or above == below or below + bounds[a + 1] >= best[0] / SLACK:
                continue
            tried = np.unique(np.linspace(a, b, self.batch + 2).astype(int)[1:-1].clip(a + 1))
            sums = self._sums(bounds[tried], first)
            at = int((sums + bounds[tried]).argmin())
            if sums[at] + bounds[tried[at]] < best[0]:
                best = float(sums[at] + bounds[tried[at]]), float(bounds[tried[at]])
            ends = [(a, above), *zip(tried.tolist(), sums.tolist(), strict=True), (b, below)]
            # Taken from the end: the interval with the smallest bounds last.
            pending += [
                (low, high, more, less)
                for (low, more), (high, less) in reversed(list(itertools.pairwise(ends)))
                if less < INF
            ]
        return best

    def _first_groups(self) -> list[list[int]]:
        """First blocks, together where the embedding's all-reduce can't tell them apart."""
        groups: dict[float, list[int]] = {}
        for index, block in enumerate(self.blocks):
            groups.setdefault(self._embedding(block.stages[0], block.stages[0]), []).append(index)
        return list(groups.values())

    def _embedding(self, first: Kinds, last: Kinds) -> float:
        # A decoder's embedding may be on the last stage too: two copies are the least there can be.
        return self.costs.embedding_sync([first, last]) if self.stages > 1 else 0.0

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at once."""
        return min(self.stages - stage, self.m)

    @memo
    def _load(self, kinds: Kinds, in_flight: int) -> np.ndarray:
        """A stage's part in the maximum [units, end of the last], without its messages; inf where there is
        no such stage.
        """
        compute = self.costs.compute(kinds)
        possible = np.isfinite(compute)
        load = (self.m - 1) * np.where(possible, compute, 0.0)
        load -= (in_flight - 1) * np.where(possible, self.costs.forward(kinds), 0.0)
        if self.paced:
            load += np.where(possible, self.costs.all_reduce(kinds), 0.0)
        return _by_size(np.where(possible, load, INF))

    @memo
    def _stage(self, kinds: Kinds, in_flight: int, is_first: bool) -> tuple[np.ndarray, ...]:
        """Of a stage [units, end]: its part in the sum, and in the maximum, inf where it does not fit; and
        the least part in the maximum of so many units or more.
        """
        seconds = self.costs.compute(kinds)
        if is_first and not self.paced:
            seconds = seconds + self.costs.all_reduce(kinds)
        if self.fit:
            seconds = np.where(self.costs.memory(in_flight) <= self.costs.cap(kinds), seconds, INF)
        seconds = _by_size(seconds)
        load = np.where(np.isfinite(seconds), self._load(kinds, in_flight), INF)
        return seconds, load, np.minimum.accumulate(load.min(axis=1)[::-1])[::-1]

    @memo
    def _next(self, key: Key, stage: int) -> list[tuple[float, list[int]]]:
        """Seconds of the message out of a stage, and the blocks that the next stage can be of."""
        block, position = self.blocks[key[0]], stage % self.each
        kinds = block.stages[position]
        if position + 1 < self.each:
            return [(self.costs.p2p(kinds, block.stages[position + 1], block.inside[position]), [key[0]])]
        by_time: dict[float, list[int]] = {}
        for index, after in enumerate(self.blocks):
            by_time.setdefault(self.costs.p2p(kinds, after.stages[0], False), []).append(index)
        return list(by_time.items())

    def _bounds(self) -> np.ndarray:
        """All values that the maximum can have, ascending."""
        values = []
        keys = itertools.product(range(len(self.blocks)), range(self.each if self.stages > 1 else 0))
        times = {seconds for block, stage in keys for seconds, _ in self._next((block, 0.0), stage)}
        # Of several stages with as many forwards ahead, one that has messages on both sides.
        ranges = [0, *range(max(self.stages - self.m, 1), self.stages)] if self.stages > 1 else [0]
        distinct = {kinds: self._distinct(kinds) for kinds in self._all_kinds()}
        for stage in ranges:
            before = times if stage else {0.0}
            after = times if stage + 1 < self.stages else {0.0}
            sums = (self.m - 1) * np.array(sorted({a + b for a in before for b in after}))
            for kinds, (rows, columns) in distinct.items():
                load = self._load(kinds, self.in_flight(stage))[columns - rows, columns]
                values.append((load[:, None] + sums[None]).ravel())
        bounds = np.unique(np.concatenate(values))
        # The same duration summed in another order is the same bound.
        keep = np.append(np.diff(bounds) > 1e-11 * abs(bounds[-1]), True)
        return bounds[keep]

    def _all_kinds(self) -> set[Kinds]:
        return {kinds for block in self.blocks for kinds in block.stages}

    def _distinct(self, kinds: Kinds) -> tuple[np.ndarray, np.ndarray]:
        """[a, b] of all stages but for those that equal another one in every time."""
        rows, columns = np.nonzero(np.isfinite(self.costs.compute(kinds)))
        tables = [self.costs.compute(kinds), self.costs.forward(kinds)]
        if self.paced:
            tables.append(self.costs.all_reduce(kinds))
        # One number that only equal stages share, but for accidents below what rounding does.
        mixed = sum(
            table[rows, columns] * weight for table, weight in zip(tables, (1.0, 0.618, 0.414), strict=False)
        )
        _, first = np.unique(np.round(mixed / mixed.max(), 11), return_index=True)
        return rows[first], columns[first]

    def _walk(self) -> Iterator[tuple[int, int | None, list[tuple[np.ndarray, np.ndarray]]]]:
        """(stage, block step that comes after it or None, the step's state pairs)."""
        for stage in range(self.stages - 1):
            new = (stage + 1) % self.each == 0
            step = (stage + 1) // self.each
            yield stage, (step if new else None), (self.lattice.steps[step] if new else [])

    def _stage_sums(
        self, kinds: Kinds, stage: int, messages: float, bounds: np.ndarray, ends: slice | np.ndarray
    ) -> np.ndarray:
        """What a stage adds to the objective's sum [bound, units, end], inf where bound or memory forbid it.

        As many units as any of the bounds, and the other stages, allow.
        """
        seconds, load, least = self._stage(kinds, self.in_flight(stage), stage == 0)
        most = bounds * SLACK - (self.m - 1) * messages
        sizes = min(int(least.searchsorted(most[-1], side="right")), self.units - self.stages + 2)
        seconds, load = seconds[: max(sizes, 1), ends], load[: max(sizes, 1), ends]
        if self._even:
            seconds = seconds + self._even * np.where(load < INF, load / most[-1], 0.0) ** 2
        return np.where(load <= most[:, None, None], seconds, INF)

    def _sums(self, bounds: np.ndarray, first: list[int]) -> np.ndarray:
        """The smallest sum under each of some bounds, inf where nothing is possible."""
        *_, last = self._steps(bounds, first)
        return np.min([sums.min(axis=1) for sums, _ in self._totals(last, first, bounds)], axis=0)

    def _totals(
        self, last: dict[Key, np.ndarray], first: list[int], bounds: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Key]]:
        """The sums [bound, units of the last stage] of all stages, for each key of the last one."""
        first_kinds = self.blocks[first[0]].stages[0]
        stage = self.stages - 1
        for key, values in last.items():
            kinds = self.blocks[key[0]].stages[stage % self.each]
            sums = self._stage_sums(kinds, stage, key[1], bounds, slice(self.units, None))[:, :, 0]
            before = values[:, 0, ::-1][:, : sums.shape[1]]
            yield before + sums + self._embedding(first_kinds, kinds), key

    def _steps(self, bounds: np.ndarray, first: list[int]) -> Iterator[dict[Key, np.ndarray]]:
        """Before each stage: the smallest sums [bound, state, units placed] so far."""
        now: dict[Key, np.ndarray] = {}
        for b in first:
            values = np.full((len(bounds), len(self.lattice.states[1]), self.units + 1), INF)
            values[:, self.lattice.steps[0][b][1], 0] = 0.0
            now[b, 0.0] = values
        yield now
        for stage, step, pairs in self._walk():
            new: dict[Key, np.ndarray] = {}
            # Each stage before and after takes a unit at least.
            ends = slice(stage + 1, self.units - self.stages + stage + 2)
            for key, values in now.items():
                kinds = self.blocks[key[0]].stages[stage % self.each]
                for out, successors in self._next(key, stage):
                    sums = self._stage_sums(kinds, stage, key[1] + out, bounds, ends)
                    got = np.full_like(values, INF)
                    got[:, :, ends] = _min_plus(values, sums, ends) + 2 * out
                    for b in successors:
                        if step is None:
                            old = new.get((b, out))
                            new[b, out] = got if old is None else np.minimum(old, got)
                            continue
                        before, after = pairs[b]
                        if (b, out) not in new:
                            states = len(self.lattice.states[step + 1])
                            new[b, out] = np.full((len(bounds), states, self.units + 1), INF)
                        new[b, out][:, after] = np.minimum(new[b, out][:, after], got[:, before])
            now = new
            yield now

    def _draw(
        self, bound: float, first: list[int], count: int, spread: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divisions under a bound, read from the last stage back: blocks and units [draw, stage].

        Each choice is that of the smallest sum, where of all draws but the first every sum is as if it
        were longer, by ``spread`` seconds on average. None where nothing is possible.
        """
        bounds = np.array([bound])
        history = list(self._steps(bounds, first))
        rows, partitions = np.zeros((2, count, self.stages), dtype=int)
        units = np.full(count, self.units)
        dice = np.random.default_rng(0)
        # Draws by the stage after, its key and the state before it.
        draws: dict[tuple[Key | None, int], np.ndarray] = {(None, 0): np.arange(count)}
        for stage in range(self.stages - 1, -1, -1):
            moved: dict[tuple[Key | None, int], list[np.ndarray]] = {}
            for (after, state), who in draws.items():
                if after is None:
                    options = [((key, 0), sums) for sums, key in self._totals(history[-1], first, bounds)]
                else:
                    options = list(self._before(history[stage], stage, after, state, units[who], bounds))
                shapes = [(len(who), s.shape[1]) for _, s in options]
                sums = [np.broadcast_to(s, shape) for (_, s), shape in zip(options, shapes, strict=True)]
                sums = np.concatenate(sums, axis=1)
                if spread:
                    sums = sums + spread * dice.exponential(size=sums.shape) * (who > 0)[:, None]
                best = sums.argmin(axis=1)
                if not np.isfinite(sums[np.arange(len(who)), best]).all():
                    return rows[:0], partitions[:0]
                starts = np.cumsum([0, *(width for _, width in shapes)])
                chosen = np.searchsorted(starts, best, side="right") - 1
                partitions[who, stage] = best - starts[chosen]
                for index in sorted(set(chosen.tolist())):
                    (key, origin), _ = options[index]
                    rows[who[chosen == index], stage] = key[0]
                    moved.setdefault((key, origin), []).append(who[chosen == index])
            units -= partitions[:, stage]
            draws = {key: np.concatenate(parts) for key, parts in moved.items()}
        return rows, partitions

    def _before(
        self,
        history: dict[Key, np.ndarray],
        stage: int,
        after: Key,
        state: int,
        units: np.ndarray,
        bounds: np.ndarray,
    ) -> Iterator[tuple[tuple[Key, int], np.ndarray]]:
        """What a stage can be where ``after`` follows it in a state: its key, the state before, and the sums
        [draw, units of the stage] up to its end at ``units`` [draw].
        """
        step = (stage + 1) // self.each if (stage + 1) % self.each == 0 else None
        for key, values in history.items():
            kinds = self.blocks[key[0]].stages[stage % self.each]
            for out, successors in self._next(key, stage):
                if out != after[1] or after[0] not in successors:
                    continue
                origin = state
                if step is not None:
                    pairs = self.lattice.steps[step][after[0]]
                    (where,) = np.nonzero(pairs[1] == state)
                    if not where.size:
                        continue
                    origin = int(pairs[0][where[0]])
                sums = self._stage_sums(kinds, stage, key[1] + out, bounds, units)[0]
                begin = units[:, None] - np.arange(len(sums))
                placed = np.where(begin < 0, INF, values[0, origin][begin])
                yield (key, origin), placed + sums.T

    def _maximum(self, division: Division) -> float:
        """The maximum in a division's objective."""
        inside = inside_node(self.costs.cluster, self.costs.shape.tp * self.costs.shape.dp)
        pairs = zip(division.kinds[:-1], division.kinds[1:], inside, strict=True)
        messages = [0.0, *(self.costs.p2p(*pair) for pair in pairs), 0.0]
        ends = itertools.accumulate(division.partition)
        return max(
            float(self._load(kinds, self.in_flight(i))[size, end])
            + (self.m - 1) * (messages[i] + messages[i + 1])
            for i, (kinds, size, end) in enumerate(zip(division.kinds, division.partition, ends, strict=True))
        )

    def _division(self, row: np.ndarray, partition: np.ndarray, objective: float = 0.0) -> Division:
        chosen = [self.blocks[b] for b in row[:: self.each]]
        kinds = tuple(kinds for block in chosen for kinds in block.stages)
        placement = tuple(node for block in chosen for node in block.nodes)
        return Division(placement, kinds, tuple(partition.tolist()), objective)


def _by_size(table: np.ndarray) -> np.ndarray:
    """A table [a, b] as [b − a, b]: a stage's units, and where it ends; inf where it would begin before 0."""
    n = len(table)
    above = np.concatenate([np.full_like(table, INF), table])
    # One unit more is a row up, a later end a row down and a column to the right.
    row, one = above.strides
    return np.ndarray((n, n), buffer=above, offset=row * n, strides=(-row, row + one)).copy()


def _min_plus(values: np.ndarray, sums: np.ndarray, ends: slice) -> np.ndarray:
    """min over size of values[k, :, end − size] + sums[k, size, end], as [k, :, end]."""
    bounds, states, width = values.shape
    sizes, count = sums.shape[1:]
    padded = np.full((bounds, states, sizes - 1 + width), INF)
    padded[:, :, sizes - 1 :] = values
    begin = sizes - 1 + ends.start
    if bounds * states * sizes * count <= SMALL:
        # [k, :, size, end] without a copy: one unit more is one place further to the left.
        far, near, one = padded.strides
        shape, strides = (bounds, states, sizes, count), (far, near, -one, one)
        shifted = np.ndarray(shape, buffer=padded, offset=one * begin, strides=strides)
        return (shifted + sums[:, None]).min(axis=2)
    result = np.full((bounds, states, count), INF)
    for size in range(1, sizes):
        step = sums[:, None, size]
        if np.isfinite(step).any():
            before = padded[:, :, begin - size : begin - size + count]
            np.minimum(result, before + step, out=result)
    return result
