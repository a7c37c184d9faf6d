"""A set of more or fewer data-parallel ranks, from those that were captured.

A new rank is a copy of the captured one with the same tensor-parallel place and stage. Its compute times vary
by the spread that was measured between ranks with the same work, drawn with a seed; its groups, peers and
sizes are those of its place. What the files hold are times without waiting: a replay or a simulation finds
who waits for whom.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.files import scratch_folder, write_json
from chakra_et.names import RunFiles
from chakra_et.network.topology import Topology
from chakra_et.simulators.copies import (
    EVERY,
    names_in,
    peers_in,
    relabelled,
    resized,
    timed,
    transfers,
    varied,
    without_waiting,
)
from chakra_et.simulators.fit import fitted
from chakra_et.simulators.mesh import Mesh, Place, ScaledGroups, mesh_of, parse_mesh
from chakra_et.simulators.networks import read_topology
from chakra_et.simulators.remodel import Model, Remodelled, remodelled, resharded, retimed, ring_time, split
from chakra_et.simulators.replicas import shared_groups, with_reductions
from chakra_et.simulators.sets import Groups, InputSet
from chakra_et.simulators.spread import compute_micros, deviation, draw, relative_spread, step_of

MOST_RANKS = 1 << 17


@dataclass(frozen=True)
class Scaling:
    """``dp``: data-parallel ranks that are wanted, None for as many as captured. ``model``: other layers,
    batch
    or sequence. ``topology``: text, "" for the times of the capture.
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


@dataclass(frozen=True)
class Scaled:
    """What was written: ``files`` that differ, the rest being hard links to them; ``notes``, one sentence
    each."""

    run: RunFiles
    old: Mesh
    new: Mesh
    files: int
    notes: list[str]


def captured(found: InputSet) -> dict[int, ExecutionTrace]:
    """The traces of a set. Raises ``TraceError`` where ranks or the group file are missing."""
    if found.missing:
        raise TraceError(
            f"{found.name}: {len(found.missing)} of {found.world} ranks have no file, rank "
            f"{found.missing[0]} for one: convert them"
        )
    traces = {rank: et_file.read(path) for rank, path in found.files.items()}
    if not found.groups and (
        found.world > 1 or any("pg_name" in each.attributes for each in traces.values())
    ):
        raise TraceError(f"{found.name}: no comm-group file: convert the traces again")
    return traces


def find_mesh(found: InputSet, traces: Mapping[int, ExecutionTrace], text: str) -> Mesh:
    """The mesh given by ``text``, or the one that manifest, groups and messages show."""
    if text:
        return parse_mesh(text, found.world)
    entries = (found.manifest or {}).get("process_groups")
    described = {
        str(entry.get("description", "")): entry["ranks"]
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("ranks"), list)
    }
    apart: set[int] = set()
    for trace in traces.values():
        sends = trace.types == NodeType.COMM_SEND
        source, target = trace.column("comm_src", -1)[sends], trace.column("comm_dst", -1)[sends]
        known = (source >= 0) & (target >= 0)
        apart |= set(np.abs(source - target)[known].tolist())
    return mesh_of(found.groups, described, apart - {0}, found.world)


def scale(found: InputSet, traces: Mapping[int, ExecutionTrace], wanted: Scaling, run: RunFiles) -> Scaled:
    """Write the scaled set as ``run``. Raises ``TraceError``, with nothing written, where it can't be
    made."""
    old = find_mesh(found, traces, wanted.mesh)
    pp = wanted.pp or old.pp
    if pp != old.pp and (old.pp < 2 or pp % old.pp):
        raise TraceError(
            f"--pp {pp} is no multiple of the {old.pp} that was captured, or shows no messages between "
            "stages: "
            f"capture --pp 2 or more, or --pp {pp}"
        )
    tp = wanted.tp or old.tp
    if tp != old.tp and (old.tp < 2 or tp % old.tp):
        raise TraceError(
            f"--tp {tp} is no multiple of the {old.tp} that was captured, or shards can't be told from one "
            "rank "
            f"alone: capture --tp 2 or more, or --tp {tp}"
        )
    dp = wanted.dp or old.dp
    new = Mesh(tp, dp, pp)
    if new.ranks > MOST_RANKS:
        raise TraceError(f"--dp {dp} makes {new.ranks:,} ranks: give at most {MOST_RANKS // (tp * pp)}")
    if run.et_files():
        raise TraceError(
            f"{run.folder / run.name}: there are files of that name: choose another -o, or remove them"
        )
    lasting = transfers(traces, found.groups)
    notes: list[str] = [f"the captured mesh is {old} (--mesh where it is another), the new one {new}"]
    topology = read_topology(wanted.topology, new.ranks) if wanted.topology else None
    measured = fitted(traces, lasting, found.groups)
    if old.dp == 1 < dp and topology is None and measured is None:
        raise TraceError(
            f"{found.name}: has no communication between ranks from which its times could be told: give the "
            "--topology, as '4 ranks, 10 Gbit/s, 30 us'"
        )
    if topology is not None:
        notes += [f"communication lasts what the topology makes it: {topology.name}", *topology.notes]
    elif measured is not None and (new != old or wanted.model.is_other):
        only = measured.dimensions[0]
        notes.append(
            "communication of other numbers of ranks or bytes lasts what a ring does on the network that "
            "fits the "
            f"captured collectives: {only.bandwidth / 1e9:.3g} GB/s, {only.latency_ns / 1000:.3g} us per "
            "message"
        )
        notes += measured.notes
    run.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(run.folder / run.name) as scratch:
        target = RunFiles(scratch, run.name)
        plain = {rank: without_waiting(trace, lasting[rank]) for rank, trace in traces.items()}
        retime = retimed(measured, found.groups)
        made = remodelled(plain, old, wanted.model, retime, found.name)
        notes += made.notes
        mesh, own = old, found.groups
        if pp != old.pp:
            parted = split(made, own, old, pp, retime, found.name)
            made, mesh, own = parted.made, parted.mesh, parted.groups
            traces = {rank: traces[parted.captured[rank]] for rank in made.traces}
            notes += made.notes[-1:]
        if tp != old.tp:
            made = resharded(made, own, mesh, new, retime, found.name)
            notes += made.notes[-1:]
        groups = ScaledGroups(own, mesh, new)
        if old.dp == 1 < new.dp:
            made, groups = _reduced(own, made, mesh, new, notes, found.name)
        ranks = _Ranks(traces, made, mesh, groups, topology, measured, wanted)
        files = ranks.write(target)
        notes += ranks.notes()
        write_json(target.groups_file, groups.all())
        write_json(target.folder / f"{run.name}_scaled.json", _record(found, wanted, old, new, files, notes))
        for path in sorted(scratch.iterdir()):
            os.replace(path, run.folder / path.name)
    return Scaled(run, old, new, files, notes)


def _reduced(
    own: Groups, made: Remodelled, old: Mesh, new: Mesh, notes: list[str], where: str
) -> tuple[Remodelled, ScaledGroups]:
    """The ranks with the reduction of gradients that one replica does without."""
    reduced = with_reductions(made.traces, own, where)
    source = {rank: made.source[rank][rows] for rank, rows in reduced.source.items()}
    notes += reduced.notes
    several = {name for name, members in own.items() if len(members) > 1}
    apart = several - shared_groups(made.traces)
    if apart:
        notes.append(
            f"{len(apart)} of {len(several)} groups are of one replica (tensor, pipeline or expert "
            "parallel), "
            "by their descriptions; each new replica has its own"
        )
    return Remodelled(reduced.traces, source, []), ScaledGroups(reduced.groups, old, new, apart)


def _record(
    found: InputSet, wanted: Scaling, old: Mesh, new: Mesh, files: int, notes: Sequence[str]
) -> dict[str, object]:
    return {
        "scaled_from": str(found.run.folder / found.name),
        "captured": {"tp": old.tp, "dp": old.dp, "pp": old.pp},
        "mesh": {"tp": new.tp, "dp": new.dp, "pp": new.pp},
        "layers": wanted.model.layers or None,
        "batch": wanted.model.batch or None,
        "seq": wanted.model.seq or None,
        "topology": wanted.topology or None,
        "seed": wanted.seed,
        "different_files": files,
        "notes": list(notes),
    }


class _Ranks:
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
