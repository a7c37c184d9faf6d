"""The ranks of a scaled run, one by one: copies of captured ranks for each place of the new mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from chakra_et.cost.network_fit import Model
from chakra_et.cost.topology import Topology
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.job.mesh import Mesh, Place, ScaledGroups
from chakra_et.transform.changes import CollectiveTimes
from chakra_et.transform.rank_copies import EVERY, names_in, peers_in, relabelled, resized, timed, varied
from chakra_et.transform.remodel import ModelSize, Remodelled
from chakra_et.transform.step_variation import compute_micros, draw, relative_spread, step_of


@dataclass(frozen=True)
class Scaling:
    """``dp``, ``tp``, ``pp``: degrees that are wanted, None for those captured. ``size``: other layers, batch
    or sequence. ``topology``: text, "" for the times of the capture. ``mesh``: the captured one, "" for what
    the groups show. ``spread``: of compute times, None for the measured one, 0 for none.
    ``variants``: different draws per captured rank. ``network``: the one of the capture, None: fitted to it.
    ``bucket_mb``: DDP's bucket_cap_mb where reductions are put in, None for its default."""

    dp: int | None = None
    topology: str = ""
    mesh: str = ""
    seed: int = 0
    spread: float | None = None
    variants: int = 8
    tp: int | None = None
    pp: int | None = None
    size: ModelSize = ModelSize()
    network: Model | None = None
    bucket_mb: float | None = None


class RankCopies:
    """Makes the new ranks one by one: each captured rank is resized once, and varied as often as there are
    draws. ``groups``: those of all ranks that were made so far."""

    def __init__(
        self,
        traces: Mapping[int, ExecutionTrace],
        made: Remodelled,
        old: Mesh,
        groups: ScaledGroups,
        topology: Topology | None,
        times: CollectiveTimes | None,
        wanted: Scaling,
    ):
        self.old, self.new, self.groups = old, groups.new, groups
        self.topology, self.times, self.wanted = topology, times, wanted
        self.plain = made.traces
        self.step = {rank: step_of(trace)[made.source[rank]] for rank, trace in traces.items()}
        self.generator = np.random.default_rng(wanted.seed)
        self.busy = {rank: compute_micros(trace) for rank, trace in traces.items()}
        self.alike = {
            (tensor, stage): [self.busy[old.rank(Place(tensor, data, stage))] for data in range(old.dp)]
            for tensor in range(old.tp)
            for stage in range(old.pp)
        }
        self.spread = {
            place: relative_spread(busy) if wanted.spread is None else wanted.spread
            for place, busy in self.alike.items()
        }

    def notes(self) -> Iterator[str]:
        if self.new.dp <= self.old.dp and self.new.tp <= self.old.tp:
            return
        if self.wanted.spread == 0:
            more = self.new.ranks - self.old.ranks
            yield f"{more:,} more ranks have the mean times of captured ones, so that steps don't vary more"
            return
        low, high = min(self.spread.values()), max(self.spread.values())
        how = "measured between steps and ranks with the same work" if self.wanted.spread is None else "given"
        yield (
            f"compute times of new ranks vary from step to step by {100 * low:.2f}% to {100 * high:.2f}% "
            f"({how}; seed {self.wanted.seed}, {self.wanted.variants} draws per captured rank)"
        )

    def __iter__(self) -> Iterator[tuple[int, object, ExecutionTrace | None]]:
        """(rank, key, trace) in order of ranks; None for a rank that is as the one before of the same key."""
        made: set[object] = set()
        sized: dict[tuple[int, int], ExecutionTrace] = {}
        for rank in range(self.new.ranks):
            place = self.new.place(rank)
            source = self.old.rank(Place(place.tensor % self.old.tp, place.data % self.old.dp, place.stage))
            captured_one = place.data < self.old.dp and place.tensor < self.old.tp
            draws = 1 if self.wanted.spread == 0 else self.wanted.variants
            variant = -1 if captured_one else int(self.generator.integers(draws))
            trace, here = self.plain[source], self.old.place(source)
            names = names_in(trace, self.groups, place)
            peers = peers_in(trace, self.old, self.new, here, place)
            key = (source, variant, tuple(names.items()), tuple(peers.items()))
            if key in made:
                yield rank, key, None
                continue
            if (source, variant) not in sized:
                sized[source, variant] = self._sized(source, variant, names)
            copy = relabelled(sized[source, variant], names, peers, self.new.ranks)
            if self.topology is not None:
                copy = timed(copy, self.groups.all(), self.topology)
            made.add(key)
            yield rank, key, copy

    def _sized(self, source: int, variant: int, names: Mapping[str, str]) -> ExecutionTrace:
        members = {name: self.groups.counts(name) for name in names}
        members |= dict.fromkeys(EVERY, (self.old.ranks, self.new.ranks))

        def lasting(kind: CollectiveType, before: int, size: int, group: str, micros: float) -> float:
            old, new = members[group]
            if self.times is None or old == new:
                return micros
            if old < 2:
                return self.times.micros(kind, size, new)
            return micros * self.times.change(kind, (before, old), (size, new))

        trace = resized(self.plain[source], members, lasting)
        if variant >= 0:
            place = self.old.place(source)
            alike = self.alike[place.tensor, place.stage]
            factors = draw(self.generator, alike, place.data, self.wanted.spread)
            trace = varied(trace, self.step[source], factors)
        return trace
