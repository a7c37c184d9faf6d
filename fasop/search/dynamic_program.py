"""The dynamic program of one shape: the smallest sum over all placements and contiguous partitions.

Summed are stages that each fit into memory, and whose part in the maximum is within a bound (``partition``
defines sum and maximum). States are the nodes used so far (``node_counts``), the block that a stage is of and
its place in that, the message into it, and the units placed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from fasop.exact.stage_costs import StageCosts
from fasop.memo import memo
from fasop.plans.shapes import Seats
from fasop.search.node_counts import NodeCounts

INF = np.inf
SMALL = 200_000  # elements up to which one array operation beats a loop over the stage sizes
SLACK = 1 + 1e-9  # sums of the same durations in another order are the same
BATCH = 8  # bounds that are tried at once, where that is not slower

Key = tuple[int, int, float]  # a block, its current stage, and the seconds of the message into that
Before = tuple[Key, int]  # the key of a stage, and the state that it came from


class DynamicProgram:
    """One shape on one cluster: what each stage can add, and the sums over all of them."""

    def __init__(self, costs: StageCosts, counts: NodeCounts, fit: bool = True) -> None:
        """``fit`` False: as if every GPU had memory without end."""
        self.costs, self.counts, self.fit = costs, counts, fit
        self.blocks = counts.blocks
        self.stages = costs.shape.pp
        self.units = len(costs.model.units)
        # Each stage takes a unit at least: before stage i lie i units and fewer than this many more.
        self.width = max(self.units - self.stages + 1, 1)
        self.m = costs.micro_batches
        self.even = 0.0  # seconds that a stage at the bound counts as longer, its square below
        most = max(len(states) for states in counts.states)
        self.batch = max(min(BATCH, SMALL // (most * (self.units + 1) ** 2)), 1)

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations a stage keeps at once."""
        return min(self.stages - stage, self.m)

    def embedding(self, first: Seats, last: Seats) -> float:
        # A decoder's embedding may be on the last stage too: two copies are the least there can be.
        copies = len(self.costs.model.embedding_stages((1,) * self.stages))
        return self.costs.embedding_sync((first, last)) if self.stages > 1 and copies > 1 else 0.0

    @memo
    def _passes(self, seats: Seats, in_flight: int) -> tuple[np.ndarray, ...]:
        """Seconds of a stage [units, end of the last]: forward, both passes, and what counts once per step;
        and inf where there is no such stage, else 0. in_flight: 0 where memory decides only whether it fits.
        """
        table = self.costs.table(seats, in_flight, self.fit and in_flight > 0)
        passes = by_size(table.forward), by_size(table.forward + table.backward)
        never = np.where(passes[1] < INF, 0.0, INF)
        forward, both = (np.where(never, 0.0, seconds) for seconds in passes)
        return forward, both, by_size(table.reduction + table.update), never

    def _deciding(self, seats: Seats, in_flight: int) -> int:
        """``in_flight`` where memory decides how a stage works, not only whether it fits; else 0."""
        return 0 if len(self.costs.choices(seats)) == 1 else in_flight

    @memo
    def load(self, seats: Seats, in_flight: int) -> np.ndarray:
        """A stage's part in the maximum [units, end of the last], without its messages; inf where there is
        no such stage, or none that fits.
        """
        deciding = self._deciding(seats, in_flight)
        forward, both, _, never = self._passes(seats, deciding)
        load: np.ndarray = (self.m - 1) * both - (in_flight - 1) * forward + never
        if self.fit and not deciding:
            (choice,) = self.costs.choices(seats)
            load[by_size(self.costs.memory(choice, in_flight)) > self.costs.free_gib(seats)] = INF
        return load

    @memo
    def _stage(self, seats: Seats, in_flight: int, is_first: bool) -> tuple[np.ndarray, ...]:
        """Of a stage [units, end]: its part in the sum, and in the maximum, inf where it does not fit; and
        the least part in the maximum of so many units or more.
        """
        _, both, once, _ = self._passes(seats, self._deciding(seats, in_flight))
        load = self.load(seats, in_flight)
        least = np.minimum.accumulate(load.min(axis=1)[::-1])[::-1]
        return both + once if is_first else both, load, least

    @memo
    def onward(self, block: int, position: int) -> list[tuple[float, list[tuple[int, int]]]]:
        """Seconds of the message out of a stage, and what the next stage can be: blocks, and their stages."""
        of = self.blocks[block]
        seats = of.stages[position]
        if position + 1 < len(of.stages):
            after = of.stages[position + 1]
            return [(self.costs.p2p(seats, after, of.inside[position]), [(block, position + 1)])]
        by_time: dict[float, list[tuple[int, int]]] = {}
        for index, other in enumerate(self.blocks):
            seconds = self.costs.p2p(seats, other.stages[0], self.counts.between)
            by_time.setdefault(seconds, []).append((index, 0))
        return list(by_time.items())

    def _stage_sums(
        self, seats: Seats, stage: int, messages: float, bounds: np.ndarray, ends: slice | np.ndarray
    ) -> np.ndarray:
        """What a stage adds to the sum [bound, units, end], inf where bound or memory forbid it.

        As many units as any of the bounds, and the other stages, allow.
        """
        seconds, load, least = self._stage(seats, self.in_flight(stage), stage == 0)
        most = bounds * SLACK - (self.m - 1) * messages
        sizes = min(int(least.searchsorted(most[-1], side="right")), self.width + 1)
        seconds, load = seconds[: max(sizes, 1), ends], load[: max(sizes, 1), ends]
        if self.even:
            seconds = seconds + self.even * np.where(load < INF, load / most[-1], 0.0) ** 2
        return np.where(load <= most[:, None, None], seconds, INF)

    def sums(self, bounds: np.ndarray, first: list[int]) -> np.ndarray:
        """The smallest sum under each of some bounds, inf where nothing is possible."""
        *_, last = self._steps(bounds, first)
        each = [sums.min(axis=(1, 2)) for sums, _ in self._totals(last, first, bounds)]
        return functools.reduce(np.minimum, each, np.full(len(bounds), INF))

    def _totals(
        self, last: dict[Key, np.ndarray], first: list[int], bounds: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Key]]:
        """The sums [bound, state, units of the last stage] of all stages, for each key of the last one."""
        first_seats = self.blocks[first[0]].stages[0]
        stage = self.stages - 1
        for key, values in last.items():
            seats = self.blocks[key[0]].stages[key[1]]
            sums = self._stage_sums(seats, stage, key[2], bounds, slice(self.units, None))[:, :, 0]
            totals = np.full((*values.shape[:2], sums.shape[1]), INF)
            before = values[:, :, ::-1][:, :, : sums.shape[1] - 1]
            totals[:, :, 1:] = before + sums[:, None, 1:] + self.embedding(first_seats, seats)
            yield totals, key

    def _steps(self, bounds: np.ndarray, first: list[int]) -> Iterator[dict[Key, np.ndarray]]:
        """Before each stage i: the smallest sums [bound, state, units placed less i] so far."""
        states, steps = self.counts.states, self.counts.steps
        now: dict[Key, np.ndarray] = {}
        for b in first:
            if steps[0][b][0].size:
                values = np.full((len(bounds), len(states[self.counts.end(b, 0)]), self.width), INF)
                values[:, steps[0][b][1], 0] = 0.0
                now[b, 0, 0.0] = values
        yield now
        for stage in range(self.stages - 1):
            ends = slice(stage + 1, stage + 1 + self.width)
            parts: list[np.ndarray] = []
            sources: dict[Key, list[int]] = {}  # the parts that each key's sums are the least of
            for (b, position, into), values in now.items():
                seats = self.blocks[b].stages[position]
                for out, successors in self.onward(b, position):
                    sums = self._stage_sums(seats, stage, into + out, bounds, ends)
                    for after, place in successors:
                        if place or steps[stage + 1][after][0].size:
                            sources.setdefault((after, place, out), []).append(len(parts))
                    parts.append(min_plus(values, sums[:, 1:]) + 2 * out)
            least = {
                which: functools.reduce(np.minimum, (parts[part] for part in which))
                for which in {tuple(which) for which in sources.values()}
            }
            now = {}
            for key, which in sources.items():
                values = least[tuple(which)]
                if key[1] == 0:
                    before, after_it = steps[stage + 1][key[0]]
                    reached = states[self.counts.end(key[0], stage + 1)]
                    values = np.full((len(bounds), len(reached), self.width), INF)
                    values[:, after_it] = least[tuple(which)][:, before]
                now[key] = values
            yield now

    def draw(
        self, bound: float, first: list[int], count: int, spread: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Assignments under a bound, read from the last stage back: blocks and units [draw, stage].

        Each choice is that of the smallest sum, where of all draws but the first every sum counts as longer,
        by ``spread`` seconds on average. None where nothing is possible.
        """
        bounds = np.array([bound])
        history = list(self._steps(bounds, first))
        rows, partitions = np.zeros((2, count, self.stages), dtype=int)
        units = np.full(count, self.units)
        drawn = 0
        # Draws by the stage after, its key and the state before it.
        draws: dict[tuple[Key | None, int], np.ndarray] = {(None, 0): np.arange(count)}
        for stage in range(self.stages - 1, -1, -1):
            moved: dict[tuple[Key | None, int], list[np.ndarray]] = {}
            for (after, state), who in draws.items():
                options: list[tuple[Before, np.ndarray]]
                if after is None:
                    options = [
                        ((key, at), sums[:, at])
                        for sums, key in self._totals(history[-1], first, bounds)
                        for at in range(sums.shape[1])
                    ]
                else:
                    options = list(self._before(history[stage], stage, after, state, units[who], bounds))
                if not options:
                    return rows[:0], partitions[:0]
                shapes = [(len(who), s.shape[1]) for _, s in options]
                each = [np.broadcast_to(s, shape) for (_, s), shape in zip(options, shapes, strict=True)]
                sums = np.concatenate(each, axis=1)
                if spread:
                    noise = _exponential(drawn, drawn + sums.size).reshape(sums.shape)
                    sums, drawn = sums + spread * noise * (who > 0)[:, None], drawn + sums.size
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
    ) -> Iterator[tuple[Before, np.ndarray]]:
        """What a stage can be where ``after`` follows it in a state: its key, the state before, and the sums
        [draw, units of the stage] up to its end at ``units`` [draw].
        """
        for key, values in history.items():
            b, position, into = key
            seats = self.blocks[b].stages[position]
            for out, successors in self.onward(b, position):
                if out != after[2] or after[:2] not in successors:
                    continue
                origin = state
                if after[1] == 0:
                    pairs = self.counts.steps[stage + 1][after[0]]
                    (where,) = np.nonzero(pairs[1] == state)
                    if not where.size:
                        continue
                    origin = int(pairs[0][where[0]])
                sums = self._stage_sums(seats, stage, into + out, bounds, units)[0]
                begin = units[:, None] - np.arange(len(sums)) - stage
                possible = (begin >= 0) & (begin < self.width)
                placed = np.where(possible, values[0, origin][np.where(possible, begin, 0)], INF)
                yield (key, origin), placed + sums.T


def _exponential(begin: int, end: int) -> np.ndarray:
    """As if drawn from an exponential distribution of mean 1, by SplitMix64: numpy.random is slow to load."""
    mixed = np.arange(begin, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(-np.log1p(-((mixed >> np.uint64(11)) / 2.0**53)))


def by_size(table: np.ndarray) -> np.ndarray:
    """A table [a, b] as [b − a, b]: a stage's units, and where it ends; inf where it would begin before 0."""
    n = len(table)
    above = np.concatenate([np.full_like(table, INF), table])
    # One unit more is a row up, a later end a row down and a column to the right.
    row, one = above.strides
    return np.ndarray((n, n), buffer=above, offset=row * n, strides=(-row, row + one)).copy()


def min_plus(values: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """min over size of values[k, :, end − size] + sums[k, size, end], as [k, :, end]."""
    bounds, states, width = values.shape
    sizes = sums.shape[1]
    if not sizes:
        return np.full(values.shape, INF)
    if bounds * states * sizes * width <= SMALL:
        padded = np.full((bounds, states, sizes - 1 + width), INF)
        padded[:, :, sizes - 1 :] = values
        # [k, :, size, end] without a copy: one unit more is one place further to the left.
        far, near, one = padded.strides
        shape, strides = (bounds, states, sizes, width), (far, near, -one, one)
        shifted = np.ndarray(shape, buffer=padded, offset=one * (sizes - 1), strides=strides)
        return (shifted + sums[:, None]).min(axis=2)
    result: np.ndarray = values + sums[:, None, 0]
    for size in range(1, sizes):
        step = sums[:, None, size, size:]
        if np.isfinite(step).any():
            later = result[:, :, size:]
            np.minimum(later, values[:, :, : width - size] + step, out=later)
    return result
