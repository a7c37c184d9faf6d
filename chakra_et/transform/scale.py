"""A captured run at another size: more or fewer ranks, other layers, batch or sequence.

    run = chakra_et.load("outputs/gpt2_2gpu_quick_trace").run
    print(predict(run, [Scaling(dp=64, layers="2x", spread=0.0)]).after_ms)

A new rank is a copy of the captured one with the same tensor-parallel place and stage. Its compute times vary
by the spread that was measured between ranks with the same work, drawn with a seed; its groups, peers and
sizes are those of its place. What the files hold are times without waiting: a replay or a simulation finds
who waits for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import texts, with_metadata
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, Place, ScaledGroups, find_mesh
from chakra_et.names import run_at
from chakra_et.simulate.run import Run
from chakra_et.transform import rank_copies
from chakra_et.transform.changes import CollectiveTimes, RankTraces, as_run
from chakra_et.transform.layers import with_layers
from chakra_et.transform.network import collective_samples, find_communication
from chakra_et.transform.reductions import with_reductions
from chakra_et.transform.stages import with_stages
from chakra_et.transform.tensors import with_dimensions, with_shards, with_tokens

MOST_RANKS = 1 << 17


@dataclass(frozen=True)
class Scaling:
    """The run at another size, as ``chakra-et scale`` writes it.

    ``dp``, ``tp``, ``pp``: degrees that are wanted, None for those captured. ``layers``, ``batch``, ``seq``:
    ``8`` or ``2x``, "" for what was captured. ``resize``: sizes of dimensions, old → new. ``mesh``: the
    captured one, "" for what the groups show.
    ``spread``: of compute times, None for the measured one, 0 for none. ``variants``: different draws per
    captured rank. ``network``: the one of the capture, None: fitted to it. ``bucket_mb``: DDP's bucket_cap_mb
    where reductions are put in, None for its default."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    layers: str = ""
    batch: str = ""
    seq: str = ""
    resize: Mapping[int, int] = field(default_factory=dict, hash=False)
    mesh: str = ""
    seed: int = 0
    spread: float | None = None
    variants: int = 8
    network: NetworkModel | None = None
    bucket_mb: float | None = None

    def rebuild(self, run: Run) -> Run:
        return scaled(run, self).as_run(run)


def scaled(run: Run, wanted: Scaling) -> Scaled:
    """The run with other ranks, layers, batch or sequence. Raises ``TraceError`` where it can't be made.

    What communication takes is what it took once all its members were there; of other bytes or ranks, by the
    network that fits the run's own (``CollectiveTimes``).
    """
    captured = dict(zip(run.graph.ranks, run.graph.traces, strict=True))
    name, world = run_at(run.name).name, _whole_world(run)
    own = {name: list(members) for name, members in run.comm_groups.items()}
    unlisted = {name for trace in captured.values() for name in texts(trace, "pg_name")[0]} - own.keys()
    own |= {name: list(range(world)) for name in unlisted}
    old = find_mesh(name, own, captured, world, wanted.mesh)
    new = _new_mesh(old, wanted)
    timed_ones = any(each.ns > 0 for each in collective_samples(find_communication(run)))
    times = CollectiveTimes(run, wanted.network) if wanted.network or timed_ones else None
    if old.dp == 1 < new.dp and times is None:
        raise TraceError(
            f"{name}: has no communication between ranks from which its times could be told: give the "
            "--network, as '10 Gbit/s, 30 us' or as the FILE of chakra-et measure-network"
        )
    notes: list[str] = []
    if unlisted:
        notes.append(
            f"groups without a list of members are taken for all ranks: {', '.join(sorted(unlisted))}"
        )
    notes.append(f"the captured mesh is {old} (--mesh where it is another), the new one {new}")
    if times is not None and (new != old or wanted.layers or wanted.batch or wanted.seq or wanted.resize):
        notes.append(
            "communication with other numbers of ranks or bytes takes the time of a ring on this network: "
            f"{times.model.describe()}"
        )
    plain = rank_copies.without_waiting(run)
    ranks = RankTraces(
        name,
        old,
        own,
        {rank: rank_copies.with_steps(plain[rank], trace) for rank, trace in captured.items()},
        origin={rank: rank for rank in captured},
        retime=_retime(times, lambda group: (count := len(own.get(group, ())) or world, count)),
        notes=tuple(notes),
    )
    if wanted.resize:
        ranks = with_dimensions(ranks, wanted.resize)
    if wanted.batch or wanted.seq:
        ranks = with_tokens(ranks, wanted.batch, wanted.seq)
    if wanted.layers:
        ranks = with_layers(ranks, wanted.layers)
    if new.pp != old.pp:
        ranks = with_stages(ranks, new.pp)
    if new.tp != old.tp:
        ranks = with_shards(ranks, new.tp)
    if old.dp == 1 < new.dp:
        ranks = with_reductions(ranks, wanted.bucket_mb)
    return Scaled(old, new, ranks, captured, times, wanted)


def _whole_world(run: Run) -> int:
    """The number of the run's ranks. Raises ``TraceError`` where some have no file."""
    ranks = set(run.graph.ranks)
    world = max(ranks.union(*run.comm_groups.values())) + 1
    missing = sorted(set(range(world)) - ranks)
    if missing:
        raise TraceError(
            f"{run_at(run.name).name}: {len(missing)} of {world} ranks have no file, rank {missing[0]} for "
            "one: convert them (chakra-et scale --fill makes them from ranks of the same stage)"
        )
    return world


def _new_mesh(old: Mesh, wanted: Scaling) -> Mesh:
    """Raises ``TraceError`` for degrees that can't be made of the captured ones."""
    pp, tp, dp = wanted.pp or old.pp, wanted.tp or old.tp, wanted.dp or old.dp
    for flag, have, want, what in (
        ("pp", old.pp, pp, "the messages between stages"),
        ("tp", old.tp, tp, "how tensors are sharded"),
    ):
        if want != have and have == 1:
            sizes = "2" if want == 2 else f"2 or with {want}"
            raise TraceError(
                f"--{flag} {want}: the captured run has 1, which doesn't show {what}: capture a run with "
                f"{sizes}"
            )
        if want % have:
            raise TraceError(
                f"--{flag} {want}: is no multiple of the captured run's {have}: give one, or capture a run "
                f"with {want}"
            )
    new = Mesh(tp, dp, pp)
    if new.ranks > MOST_RANKS:
        raise TraceError(f"--dp {dp} makes {new.ranks:,} ranks: give at most {MOST_RANKS // (tp * pp)}")
    return new


def _retime(times: CollectiveTimes | None, members: Callable[[str], tuple[int, int]]) -> Retime:
    """How long a collective of other bytes or members takes: as the network says, or in proportion to the
    bytes where that isn't known. ``members``: of a group, before and after."""

    def micros(kind: CollectiveType, before: int, after: int, group: str, taken: float) -> float:
        counts = members(group)
        old, new = (before, counts[0]), (after, counts[1])
        if old == new:
            return taken
        if times is None or max(old[1], new[1]) < 2:
            return taken * after / max(before, 1)
        return times.micros(kind, *new) if old[1] < 2 else taken * times.model.change(kind, old, new)

    return micros


class Copy(NamedTuple):
    """What a new rank is: the captured rank ``source`` as its draw ``variant`` varies it (-1: as it is), with
    these groups and peers (captured, new). Equal ones have equal files."""

    source: int
    variant: int
    names: tuple[tuple[str, str], ...]
    peers: tuple[tuple[int, int], ...]


class Scaled:
    """A run on mesh ``new`` in place of the captured ``old``; ``notes``, one sentence each.

    Iterating makes its ranks one by one: each captured rank is resized once, and varied as often as there are
    draws. ``groups``: those of all ranks that were made so far.
    """

    def __init__(
        self,
        old: Mesh,
        new: Mesh,
        ranks: RankTraces,
        captured: Mapping[int, ExecutionTrace],
        times: CollectiveTimes | None,
        wanted: Scaling,
    ):
        self.old, self.new, self.times, self.wanted = old, new, times, wanted
        self.mesh, self.plain = ranks.mesh, ranks.traces
        self.groups = ScaledGroups(ranks.groups, ranks.mesh, new, ranks.apart)
        self.generator = np.random.default_rng(wanted.seed)
        busy = {rank: rank_copies.compute_micros(captured[ranks.origin[rank]]) for rank in ranks.traces}
        self.alike = {
            (tensor, stage): [busy[self.mesh.rank(Place(tensor, at, stage))] for at in range(self.mesh.dp)]
            for tensor in range(self.mesh.tp)
            for stage in range(self.mesh.pp)
        }
        self.origin, self.copies = ranks.origin, list(self._copies())
        self.notes = [*ranks.notes, *self._about_spread()]

    def _about_spread(self) -> Iterator[str]:
        if self.new.dp <= self.mesh.dp and self.new.tp <= self.mesh.tp:
            return
        if self.wanted.spread == 0:
            more = self.new.ranks - self.mesh.ranks
            yield f"the {more:,} new ranks have the mean times of captured ones: no random spread is added"
            return
        how = "measured between steps and ranks with the same work"
        spread = [rank_copies.relative_spread(busy) for busy in self.alike.values()]
        if self.wanted.spread is not None:
            how, spread = "given", [self.wanted.spread]
        yield (
            f"compute times of new ranks vary per step by up to {100 * max(spread):.2f}% ({how}; seed "
            f"{self.wanted.seed}, {self.wanted.variants} draws per captured rank)"
        )

    def _copies(self) -> Iterator[Copy]:
        old, draws = self.mesh, 1 if self.wanted.spread == 0 else self.wanted.variants
        for rank in range(self.new.ranks):
            place = self.new.place(rank)
            source = old.rank(Place(place.tensor % old.tp, place.data % old.dp, place.stage))
            captured_one = place.data < old.dp and place.tensor < old.tp
            variant = -1 if captured_one else int(self.generator.integers(draws))
            names = rank_copies.names_in(self.plain[source], self.groups, place)
            peers = rank_copies.peers_in(self.plain[source], old, self.new, old.place(source), place)
            yield Copy(source, variant, tuple(names.items()), tuple(peers.items()))

    def __iter__(self) -> Iterator[tuple[int, object, ExecutionTrace | None]]:
        """(rank, key, trace) in order of ranks; None for a rank that is as the one before of the same key."""
        made: set[object] = set()
        sized: dict[tuple[int, int], ExecutionTrace] = {}
        for rank, key in enumerate(self.copies):
            if key in made:
                yield rank, key, None
                continue
            source, variant, names, peers = key
            if (source, variant) not in sized:
                sized[source, variant] = self._sized(source, variant, dict(names))
            copy = rank_copies.relabelled(sized[source, variant], dict(names), dict(peers), self.new.ranks)
            made.add(key)
            yield rank, key, copy

    def _sized(self, source: int, variant: int, names: Mapping[str, str]) -> ExecutionTrace:
        members = {name: self.groups.counts(name) for name in names}
        members |= dict.fromkeys(rank_copies.EVERY, (self.mesh.ranks, self.new.ranks))
        retime = _retime(self.times, members.__getitem__)
        trace = rank_copies.with_members(self.plain[source], members, retime)
        if variant >= 0:
            place = self.mesh.place(source)
            alike = self.alike[place.tensor, place.stage]
            factors = rank_copies.drawn_factors(self.generator, alike, place.data, self.wanted.spread)
            trace = rank_copies.varied(trace, factors)
        return rank_copies.without_steps(trace)

    def as_run(self, run: Run) -> Run:
        """All ranks in order, made of those of ``run``; those that don't differ share a trace's arrays."""
        of_key: dict[object, ExecutionTrace] = {}
        traces = []
        for rank, key, trace in self:
            if trace is not None:
                of_key[key] = trace
            traces.append(with_metadata(of_key[key], rank=rank))
        return as_run(run, traces, self.notes, range(self.new.ranks), self.groups.all())
