"""The best placement and partition of one shape, by dynamic programming over contiguous partitions.

Minimised is a lower bound on the simulated step, which the step usually exceeds by a few percent. First a
micro-batch passes through all stages and back: ``Σ stage + 2 Σ message``. Then stage i, w forwards ahead,
still has ``(m − 1) · (stage + messages at its ends) − min(w, m − 1) · forward`` to do, and the stage with
most of it decides. The first stage's gradients and the embedding's follow. With ``paced`` each stage's own
gradients are counted, in the maximum, which is no bound but serves where another stage than the first ends
last.

For each limit on the maximum a dynamic program finds the smallest sum over all placements and partitions
that fit into memory; the limit itself is searched by halving intervals, where the smallest sum at an
interval's upper end tells when nothing in it can be better. Nothing else is left out, so the result is the
optimum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fasop.lattice import Lattice
from fasop.stage_costs import Kinds, StageCosts

INF = np.inf
SLACK = 1 + 1e-9  # sums of the same durations in another order are the same
SMALL = 200_000  # elements up to which one array operation beats a loop over the stage sizes

Key = tuple[int, float]  # a block, and the seconds of the message into its current stage


@dataclass(frozen=True)
class Division:
    """placement: GPU type of each node; kinds: of each stage; inside: of each boundary, whether it stays in
    a node; partition: units; objective, and bottleneck, the maximum in it: seconds.
    """

    placement: tuple[str, ...]
    kinds: tuple[Kinds, ...]
    inside: tuple[bool, ...]
    partition: tuple[int, ...]
    objective: float
    bottleneck: float


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
        self._allowed: dict[tuple[Kinds, int], np.ndarray] = {}
        self._loads: dict[tuple[Kinds, int], np.ndarray] = {}
        self._fitting: dict[tuple[Kinds, int], np.ndarray] = {}

    def best(self, limit: float = INF) -> Division | None:
        """The division with the smallest objective; None where none fits into memory, or none below
        ``limit``.
        """
        best = None
        for first in self._first_groups():
            best = self._best_from(first, best, limit)
        return best

    def _best_from(self, first: list[int], best: Division | None, limit: float) -> Division | None:
        bounds = self._bounds()
        floor = self._solve(INF, first)
        if floor is None:
            return best
        smallest = floor.objective - floor.bottleneck
        low = self._smallest_bound(bounds, first, int(np.searchsorted(bounds, floor.bottleneck / SLACK)))
        if smallest + bounds[low] >= limit:
            return best
        best = self._better(best, floor)
        best = self._better(best, self._solve(bounds[low], first))

        def below(division: Division) -> int:
            """The last bound that the division's own maximum exceeds: between them nothing changes."""
            return int(np.searchsorted(bounds, division.bottleneck / SLACK)) - 1

        # Intervals of bounds still to be searched, with the smallest sum that any of them allows.
        pending = [(low + 1, below(floor), smallest)]
        while pending:
            begin, end, smallest = pending.pop()
            # Bounds above this one can't be better, whatever their sum.
            end = min(end, int(np.searchsorted(bounds, best.objective - smallest)))
            if begin > end or smallest + bounds[begin] >= best.objective / SLACK:
                continue
            middle = (begin + end) // 2
            found = self._solve(bounds[middle], first)
            best = self._better(best, found)
            pending.append((middle + 1, end, smallest))
            pending.append((begin, min(middle - 1, below(found)), found.objective - found.bottleneck))
        return best

    @staticmethod
    def _better(one: Division | None, two: Division | None) -> Division | None:
        if one is None or two is None:
            return one or two
        return two if two.objective < one.objective else one

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

    def _table(self, kinds: Kinds, stage: int) -> np.ndarray:
        """Seconds [a, b] of a stage, inf where it does not fit."""
        key = (kinds, self.in_flight(stage))
        if key not in self._allowed:
            table = self.costs.compute(kinds)
            if self.fit:
                table = np.where(self.costs.memory(key[1]) <= self.costs.cap(kinds), table, INF)
            self._allowed[key] = table
        return self._allowed[key]

    def _load(self, kinds: Kinds, stage: int) -> np.ndarray:
        """A stage's part in the maximum [a, b], without its messages; inf where it can't be."""
        ahead = min(self.stages - 1 - stage, self.m - 1)
        key = (kinds, ahead)
        if key not in self._loads:
            compute = self.costs.compute(kinds)
            possible = np.isfinite(compute)
            load = (self.m - 1) * np.where(possible, compute, 0.0)
            load -= ahead * np.where(possible, self.costs.forward(kinds), 0.0)
            if self.paced:
                load += np.where(possible, self.costs.all_reduce(kinds), 0.0)
            self._loads[key] = np.where(possible, load, INF)
        return self._loads[key]

    def _fitting_load(self, kinds: Kinds, stage: int) -> np.ndarray:
        """``_load``, inf where the stage does not fit."""
        key = (kinds, self.in_flight(stage))
        if key not in self._fitting:
            fits = np.isfinite(self._table(kinds, stage))
            self._fitting[key] = np.where(fits, self._load(kinds, stage), INF)
        return self._fitting[key]

    @functools.cache  # noqa: B019 - lives as long as the search
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
        times = {0.0}
        if self.stages > 1:
            for index in range(len(self.blocks)):
                for stage in range(self.each):
                    times |= {seconds for seconds, _ in self._next((index, 0.0), stage)}
        sums = (self.m - 1) * np.array(sorted({a + b for a in times for b in times}))
        for kinds in self._all_kinds():
            rows, columns = self._distinct(kinds)
            for stage in range(max(self.stages - self.m, 0), self.stages):
                load = self._load(kinds, stage)[rows, columns]
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

    def _smallest_bound(self, bounds: np.ndarray, first: list[int], high: int) -> int:
        """Index of the smallest bound under which all units can be placed, at most ``high``.

        Whether they can needs only the largest number of units that the stages so far can hold: with
        fewer, no later stage would be worse off.
        """
        high = min(high, len(bounds) - 1)
        # Some stage has at least its share of the fastest GPUs' work, and not all of it is done ahead.
        times = [self.costs.unit_times(kinds) for kinds in self._all_kinds()]
        share = min(float((forward + backward).sum()) for forward, backward in times) / self.stages
        part = max(float((f[f + b > 0] / (f + b)[f + b > 0]).max()) for f, b in times)
        least = share * (self.m - 1 - min(self.stages - 1, self.m - 1) * part)
        low = min(int(np.searchsorted(bounds, max(least, 0.0) / SLACK)), high)
        step = 1
        while low + step < high and not self._reaches(bounds[low + step], first):
            low, step = low + step + 1, 2 * step
        high = min(low + step, high)
        while low < high:
            middle = (low + high) // 2
            if self._reaches(bounds[middle], first):
                high = middle
            else:
                low = middle + 1
        return low

    def _walk(self) -> Iterator[tuple[int, int | None, list[tuple[np.ndarray, np.ndarray]]]]:
        """(stage, block step that comes after it or None, the step's state pairs)."""
        for stage in range(self.stages - 1):
            new = (stage + 1) % self.each == 0
            step = (stage + 1) // self.each
            yield stage, (step if new else None), (self.lattice.steps[step] if new else [])

    def _reaches(self, bound: float, first: list[int]) -> bool:
        def jump(kinds: Kinds, stage: int, messages: float, states: np.ndarray) -> np.ndarray:
            fits = self._fitting_load(kinds, stage)[states] <= bound * SLACK - (self.m - 1) * messages
            return states + fits.sum(axis=1)

        reach: dict[Key, np.ndarray] = {}
        for b in first:
            states = np.full(len(self.lattice.states[1]), -1)
            states[self.lattice.steps[0][b][1]] = 0
            reach[b, 0.0] = states
        for stage, step, pairs in self._walk():
            most = self.units - (self.stages - 1 - stage)
            new: dict[Key, np.ndarray] = {}
            for key, states in reach.items():
                kinds = self.blocks[key[0]].stages[stage % self.each]
                for out, successors in self._next(key, stage):
                    got = np.minimum(jump(kinds, stage, key[1] + out, states), most)
                    # A stage that can't take one unit is a dead end.
                    got = np.where((states < 0) | (got <= states), -1, got)
                    for b in successors:
                        if step is None:
                            old = new.get((b, out))
                            new[b, out] = got if old is None else np.maximum(old, got)
                            continue
                        before, after = pairs[b]
                        if (b, out) not in new:
                            new[b, out] = np.full(len(self.lattice.states[step + 1]), -1)
                        new[b, out][after] = np.maximum(new[b, out][after], got[before])
            reach = new
        stage = self.stages - 1
        for key, states in reach.items():
            kinds = self.blocks[key[0]].stages[stage % self.each]
            if (jump(kinds, stage, key[1], states[states >= 0]) >= self.units).any():
                return True
        return False

    def _stage_sums(self, kinds: Kinds, stage: int, messages: float, bound: float) -> np.ndarray:
        """What a stage adds to the objective's sum [a, b], inf where bound or memory forbid it."""
        table = self._table(kinds, stage)
        if stage == 0 and not self.paced:
            table = table + self.costs.all_reduce(kinds)
        if bound == INF:
            return table
        load = self._fitting_load(kinds, stage)
        return np.where(load <= bound * SLACK - (self.m - 1) * messages, table, INF)

    def _solve(self, bound: float, first: list[int]) -> Division | None:
        """The smallest sum under a bound, and the division that has it."""
        start: dict[Key, np.ndarray] = {}
        for b in first:
            values = np.full((len(self.lattice.states[1]), self.units + 1), INF)
            values[self.lattice.steps[0][b][1], 0] = 0.0
            start[b, 0.0] = values
        history = [start]
        for stage, step, pairs in self._walk():
            new: dict[Key, np.ndarray] = {}
            for key, values in history[-1].items():
                kinds = self.blocks[key[0]].stages[stage % self.each]
                for out, successors in self._next(key, stage):
                    got = _min_plus(values, self._stage_sums(kinds, stage, key[1] + out, bound)) + 2 * out
                    for b in successors:
                        if step is None:
                            old = new.get((b, out))
                            new[b, out] = got if old is None else np.minimum(old, got)
                            continue
                        before, after = pairs[b]
                        if (b, out) not in new:
                            new[b, out] = np.full((len(self.lattice.states[step + 1]), self.units + 1), INF)
                        new[b, out][after] = np.minimum(new[b, out][after], got[before])
            history.append(new)
        end: tuple[float, Key] | None = None
        stage = self.stages - 1
        first_kinds = self.blocks[first[0]].stages[0]
        for key, values in history[-1].items():
            kinds = self.blocks[key[0]].stages[stage % self.each]
            sums = self._stage_sums(kinds, stage, key[1], bound)[:, self.units]
            total = float((values[0] + sums).min()) + self._embedding(first_kinds, kinds)
            if total < INF and (end is None or total < end[0]):
                end = total, key
        return self._trace(history, end, bound) if end else None

    def _trace(self, history: list[dict[Key, np.ndarray]], end: tuple[float, Key], bound: float) -> Division:
        """The division behind a sum, from the last stage back."""
        total, key = end
        state, units = 0, self.units
        ends, keys = [self.units], [key]
        kinds = self.blocks[key[0]].stages[(self.stages - 1) % self.each]
        sums = self._stage_sums(kinds, self.stages - 1, key[1], bound)
        units = int((history[-1][key][state] + sums[:, units]).argmin())
        for stage in range(self.stages - 2, -1, -1):
            ends.append(units)
            step = (stage + 1) // self.each if (stage + 1) % self.each == 0 else None
            best: tuple[float, int, Key, int] | None = None
            for before, values in history[stage].items():
                kinds = self.blocks[before[0]].stages[stage % self.each]
                for out, successors in self._next(before, stage):
                    if out != key[1] or key[0] not in successors:
                        continue
                    origin = state
                    if step is not None:
                        pairs = self.lattice.steps[step][key[0]]
                        (where,) = np.nonzero(pairs[1] == state)
                        if not where.size:
                            continue
                        origin = int(pairs[0][where[0]])
                    sums = self._stage_sums(kinds, stage, before[1] + out, bound)[:, units]
                    choice = values[origin] + sums
                    at = int(choice.argmin())
                    if choice[at] < INF and (best is None or choice[at] < best[0]):
                        best = float(choice[at]), at, before, origin
            assert best is not None
            _, units, key, state = best
            keys.append(key)
        ends.reverse()
        keys.reverse()
        partition = tuple(int(b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True))
        return self._division(keys, partition, total)

    def _division(self, keys: list[Key], partition: tuple[int, ...], total: float) -> Division:
        chosen = [self.blocks[key[0]] for key in keys[:: self.each]]
        kinds = tuple(kinds for block in chosen for kinds in block.stages)
        inside = tuple(flag for block in chosen for flag in (*block.inside, False))[: self.stages - 1]
        messages = [key[1] for key in keys] + [0.0]
        ends = np.cumsum(partition)
        bottleneck = max(
            float(self._load(kinds[i], i)[ends[i] - partition[i], ends[i]])
            + (self.m - 1) * (messages[i] + messages[i + 1])
            for i in range(self.stages)
        )
        placement = tuple(node for block in chosen for node in block.nodes)
        return Division(placement, kinds, inside, partition, total + bottleneck, bottleneck)


def _min_plus(values: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """min over a of values[:, a] + sums[a, :]."""
    if values.size * sums.shape[1] <= SMALL:
        return (values[:, :, None] + sums[None]).min(axis=1)
    result = np.full_like(values, INF)
    width = sums.shape[1]
    for size in range(1, width):
        step = np.diagonal(sums, size)
        if np.isfinite(step).any():
            np.minimum(result[:, size:], values[:, : width - size] + step, out=result[:, size:])
    return result
