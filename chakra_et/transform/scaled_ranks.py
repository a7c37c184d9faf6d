"""The ranks of a scaled set, written one by one: copies of captured ranks for each place of the new mesh."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_et.cost.topology import Topology
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.job.mesh import Mesh, Place, ScaledGroups
from chakra_et.names import RunFiles
from chakra_et.transform.rank_copies import EVERY, names_in, peers_in, relabelled, resized, timed, varied
from chakra_et.transform.remodel import Model, Remodelled, ring_time
from chakra_et.transform.spread import compute_micros, deviation, draw, relative_spread, step_of


@dataclass(frozen=True)
class Scaling:
    """``dp``: data-parallel ranks that are wanted, None for as many as captured. ``model``: other layers,
    batch or sequence. ``topology``: text, "" for the times of the capture.
    ``spread``: of compute times, None for the measured one. ``variants``: different draws per captured
    rank."""

    dp: int | None = None
    topology: str = ""
    mesh: str = ""
    seed: int = 0
    spread: float | None = None
    variants: int = 8
    tp: int | None = None
    pp: int | None = None
    model: Model = Model()


class Ranks:
    """Makes the new ranks one by one: each captured rank is resized once, and varied as often as there are
    draws."""

    def __init__(
        self,
        traces: Mapping[int, ExecutionTrace],
        made: Remodelled,
        old: Mesh,
        groups: ScaledGroups,
        topology: Topology | None,
        measured: Topology | None,
        wanted: Scaling,
    ):
        self.traces, self.old, self.new, self.groups = traces, old, groups.new, groups
        self.topology, self.measured, self.wanted = topology, measured, wanted
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
        low, high = min(self.spread.values()), max(self.spread.values())
        how = "measured between steps and ranks with the same work" if self.wanted.spread is None else "given"
        yield (
            f"compute times of new ranks vary from step to step by {100 * low:.2f}% to {100 * high:.2f}% "
            f"({how}; seed {self.wanted.seed}, {self.wanted.variants} draws per captured rank)"
        )

    def write(self, run: RunFiles) -> int:
        """Write all files and return how many differ."""
        made: dict[object, Path] = {}
        sized: dict[tuple[int, int], ExecutionTrace] = {}
        for rank in range(self.new.ranks):
            place = self.new.place(rank)
            source = self.old.rank(Place(place.tensor % self.old.tp, place.data % self.old.dp, place.stage))
            captured_one = place.data < self.old.dp and place.tensor < self.old.tp
            variant = -1 if captured_one else int(self.generator.integers(self.wanted.variants))
            trace, here = self.plain[source], self.old.place(source)
            names = names_in(trace, self.groups, place)
            peers = peers_in(trace, self.old, self.new, here, place)
            key = (source, variant, tuple(names.items()), tuple(peers.items()))
            path = run.et_file(rank)
            if key in made:
                os.link(made[key], path)
                continue
            if (source, variant) not in sized:
                sized[source, variant] = self._sized(source, variant, names)
            made_here = relabelled(sized[source, variant], names, peers, self.new.ranks)
            if self.topology is not None:
                made_here = timed(made_here, self.groups.all(), self.topology)
            et_file.write(path, made_here)
            made[key] = path
        return len(made)

    def _sized(self, source: int, variant: int, names: Mapping[str, str]) -> ExecutionTrace:
        members = {name: self.groups.counts(name) for name in names}
        members |= dict.fromkeys(EVERY, (self.old.ranks, self.new.ranks))
        network = self.measured

        def lasting(kind: CollectiveType, before: int, size: int, group: str, micros: float) -> float:
            counts = members[group]
            if network is None or counts[0] == counts[1]:
                return micros
            if counts[0] < 2:
                return ring_time(kind, size, counts[1], network) / 1000
            return (
                micros
                * ring_time(kind, size, counts[1], network)
                / ring_time(kind, before, counts[0], network)
            )

        trace = resized(self.plain[source], members, lasting)
        if variant >= 0:
            place = self.old.place(source)
            own = deviation(self.busy[source], self.alike[place.tensor, place.stage])
            factors = draw(self.generator, self.spread[place.tensor, place.stage], len(own)) / own
            trace = varied(trace, self.step[source], factors)
        return trace
