"""A set of more or fewer data-parallel ranks, from those that were captured.

A new rank is a copy of the captured one with the same tensor-parallel place and stage. Its compute times vary
by the spread that was measured between ranks with the same work, drawn with a seed; its groups, peers and
sizes are those of its place. What the files hold are times without waiting: a replay or a simulation finds
who waits for whom.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.cost.network_sources import read_topology
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts, with_metadata
from chakra_et.et.record import commit
from chakra_et.files import scratch_folder, write_json
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, ScaledGroups, find_mesh
from chakra_et.job.sets import Groups, InputSet
from chakra_et.names import RunFiles, run_at
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.changes import CollectiveTimes, as_run
from chakra_et.transform.network import find_communication, samples
from chakra_et.transform.pipeline_split import split
from chakra_et.transform.rank_copies import transfers, without_waiting
from chakra_et.transform.remodel import Remodelled, remodelled, resharded
from chakra_et.transform.replicas import shared_groups, with_reductions
from chakra_et.transform.scaled_ranks import RankCopies, Scaling
from chakra_et.transform.shared_cores.contention import Slowdown, find_slowdown

MOST_RANKS = 1 << 17
MOST_SLOWED = 4_000_000
"""Nodes of all ranks up to which the slowdown beside gloo's transfers is computed."""


@dataclass(frozen=True)
class Written:
    """What was written: ``files`` that differ, the rest being hard links to them; ``notes``, one sentence
    each."""

    run: RunFiles
    old: Mesh
    new: Mesh
    files: int
    notes: list[str]


def captured(found: InputSet) -> Run:
    """A set of files as a run. Raises ``TraceError`` where the group file is missing."""
    traces = {rank: et_file.read(path) for rank, path in found.files.items()}
    if not found.groups and (
        found.world > 1 or any("pg_name" in each.attributes for each in traces.values())
    ):
        raise TraceError(f"{found.name}: no comm-group file: convert the traces again")
    return make_run(found.name, list(traces.values()), list(traces), found.groups)


def _not_from(captured: int, wanted: int, what: str) -> str:
    """Why a degree can't be made from the captured one, and what to do."""
    if captured == 1:
        return f"the captured run has 1, which doesn't show {what}: capture a run with 2 or with {wanted}"
    return f"is no multiple of the captured run's {captured}: give one, or capture a run with {wanted}"


@dataclass(frozen=True)
class Scaled:
    """A run at another size. ``ranks`` makes its traces, whose groups are ``ranks.groups`` once all are made;
    ``notes``, one sentence each."""

    old: Mesh
    new: Mesh
    ranks: RankCopies
    notes: list[str]

    def traces(self) -> list[ExecutionTrace]:
        """All ranks in order; those that don't differ are one object."""
        of_key: dict[object, ExecutionTrace] = {}
        found = []
        for _, key, trace in self.ranks:
            if trace is not None:
                of_key[key] = trace
            found.append(of_key[key])
        return found


@dataclass(frozen=True)
class ScaleRun:
    """The run at another size, as ``chakra-et scale`` writes it."""

    wanted: Scaling

    def rebuild(self, run: Run) -> Run:
        made = scaled(run, self.wanted)
        traces = [with_metadata(trace, rank=rank) for rank, trace in enumerate(made.traces())]
        return as_run(run, traces, made.notes, range(made.new.ranks), made.ranks.groups.all())


def scaled(run: Run, wanted: Scaling, manifest: Mapping[str, Any] | None = None) -> Scaled:
    """The run with other ranks, layers, batch or sequence. Raises ``TraceError`` where it can't be made.

    What communication takes is what it took once all its members were there; of other bytes or ranks, by the
    network that fits the run's own (``CollectiveTimes``), or by ``wanted.topology``.
    """
    captured = dict(zip(run.graph.ranks, run.graph.traces, strict=True))
    world = _whole_world(run)
    own = {name: list(members) for name, members in run.comm_groups.items()}
    unlisted = {name for trace in captured.values() for name in texts(trace, "pg_name")[0]} - own.keys()
    own |= {name: list(range(world)) for name in unlisted}
    old = find_mesh(run.name, own, manifest, captured, world, wanted.mesh)
    new = _new_mesh(old, wanted)
    name = run_at(run.name).name
    topology = read_topology(wanted.topology, new.ranks) if wanted.topology else None
    times = _times(run, wanted)
    if old.dp == 1 < new.dp and topology is None and times is None:
        raise TraceError(
            f"{name}: has no communication between ranks from which its times could be told: give the "
            "--topology, as '4 ranks, 10 Gbit/s, 30 us', or the --network FILE of chakra-et measure-network"
        )
    notes: list[str] = []
    if unlisted:
        notes.append(
            f"groups without a list of members are taken for all ranks: {', '.join(sorted(unlisted))}"
        )
    notes += [f"the captured mesh is {old} (--mesh where it is another), the new one {new}"]
    if topology is not None:
        notes += [f"communication lasts what the topology makes it: {topology.name}", *topology.notes]
    elif times is not None and (new != old or wanted.size.is_other):
        notes.append(
            "communication of other numbers of ranks or bytes lasts what a ring does on the network of "
            f"{times.model.describe()}"
        )
    lasting = transfers(captured, own)
    plain = {rank: without_waiting(trace, lasting[rank]) for rank, trace in captured.items()}
    retime = _retime(times, own, old.ranks)
    made = remodelled(plain, old, wanted.size, retime, name)
    notes += made.notes
    mesh = old
    if new.pp != old.pp:
        parted = split(made, own, old, new.pp, retime, name)
        made, mesh, own = parted.made, parted.mesh, parted.groups
        captured = {rank: captured[parted.captured[rank]] for rank in made.traces}
        notes += made.notes[-1:]
    if new.tp != old.tp:
        made = resharded(made, own, mesh, new, retime, name)
        notes += made.notes[-1:]
    groups = ScaledGroups(own, mesh, new)
    if old.dp == 1 < new.dp:
        made, groups = _reduced(own, made, mesh, new, notes, name, wanted.bucket_mb)
    ranks = RankCopies(captured, made, mesh, groups, topology, times, wanted)
    return Scaled(old, new, ranks, [*notes, *ranks.notes()])


def _whole_world(run: Run) -> int:
    """The number of the run's ranks. Raises ``TraceError`` where some have no file."""
    ranks = set(run.graph.ranks)
    members = {rank for group in run.comm_groups.values() for rank in group}
    world = max(ranks | members) + 1
    missing = sorted(set(range(world)) - ranks)
    if missing:
        raise TraceError(
            f"{run.name}: {len(missing)} of {world} ranks have no file, rank {missing[0]} for one: "
            "convert them"
        )
    return world


def _new_mesh(old: Mesh, wanted: Scaling) -> Mesh:
    """Raises ``TraceError`` for degrees that can't be made of the captured ones."""
    pp, tp, dp = wanted.pp or old.pp, wanted.tp or old.tp, wanted.dp or old.dp
    if pp != old.pp and (old.pp < 2 or pp % old.pp):
        raise TraceError(f"--pp {pp}: {_not_from(old.pp, pp, 'the messages between stages')}")
    if tp != old.tp and (old.tp < 2 or tp % old.tp):
        raise TraceError(f"--tp {tp}: {_not_from(old.tp, tp, 'how tensors are sharded')}")
    new = Mesh(tp, dp, pp)
    if new.ranks > MOST_RANKS:
        raise TraceError(f"--dp {dp} makes {new.ranks:,} ranks: give at most {MOST_RANKS // (tp * pp)}")
    return new


def _times(run: Run, wanted: Scaling) -> CollectiveTimes | None:
    """What collectives take, None where neither the run nor ``wanted`` tells."""
    if wanted.network is None and not any(each.ns > 0 for each in samples(find_communication(run))):
        return None
    return CollectiveTimes(run, wanted.network)


def _retime(times: CollectiveTimes | None, groups: Groups, world: int) -> Retime:
    """How long a collective of other bytes takes: as the network says, or in proportion where that isn't
    known."""

    def micros(kind: CollectiveType, before: int, after: int, group: str, taken: float) -> float:
        count = len(groups.get(group, ())) or world
        if times is None or count < 2:
            return taken * after / before
        return taken * times.change(kind, (before, count), (after, count))

    return micros


def write_scaled(found: InputSet, run: Run, wanted: Scaling, target: RunFiles) -> Written:
    """Write the scaled set. Raises ``TraceError``, with nothing written, where it can't be made."""
    if target.et_files():
        raise TraceError(
            f"{target.folder / target.name}: there are files of that name: choose another -o, or remove them"
        )
    slowdown = find_slowdown(run)
    made = scaled(slowdown.without(run) if slowdown else run, wanted, found.manifest)
    notes = [*found.notes, *made.notes]
    target.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.folder / target.name) as scratch:
        inner = RunFiles(scratch, target.name)
        ranks: Iterable[tuple[int, object, ExecutionTrace | None]] = made.ranks
        if slowdown:
            slowed, note = _slowed(run, made, slowdown)
            ranks, notes = slowed or ranks, [*notes, note]
        files: dict[object, Path] = {}
        for rank, key, trace in ranks:
            path = inner.et_file(rank)
            if trace is None:
                os.link(files[key], path)
            else:
                et_file.write(path, trace)
                files[key] = path
        write_json(inner.groups_file, made.ranks.groups.all())
        record = _record(found, wanted, made.old, made.new, len(files), notes)
        write_json(inner.folder / f"{target.name}_scaled.json", record)
        commit(scratch, target, made.new.ranks, {"scaled_from": str(found.run.folder / found.name)})
    return Written(target, made.old, made.new, len(files), notes)


def _slowed(
    run: Run, made: Scaled, slowdown: Slowdown
) -> tuple[list[tuple[int, object, ExecutionTrace | None]] | None, str]:
    """The ranks as gloo's threads slow them beside the new transfers, which ``predict`` takes into account
    too; None for more nodes than are computed together."""
    count = sum(len(made.ranks.plain[rank]) for rank in made.ranks.plain) * made.new.ranks
    if count // len(made.ranks.plain) > MOST_SLOWED:
        return None, (
            f"gloo's threads slow operators beside its transfers by {slowdown.part:.0%} in the capture: not "
            f"computed for more than {MOST_SLOWED:,} nodes, so that operators take what they take alone"
        )
    whole = as_run(run, made.traces(), [], range(made.new.ranks), made.ranks.groups.all())
    own = whole.graph.scatter(slowdown.within(whole, whole.measured).own_ns)
    found: list[tuple[int, object, ExecutionTrace | None]] = []
    for rank, trace, ns in zip(whole.graph.ranks, whole.graph.traces, own, strict=True):
        computes = trace.types < NodeType.COMM_SEND
        micros = np.where(computes, np.rint(ns / 1000), trace.duration_micros).astype(np.uint64)
        found.append((rank, rank, replace(trace, duration_micros=micros)))
    return found, (
        f"gloo's threads take {slowdown.part:.0%} of the time in which operators run beside its transfers, "
        "by the same operators alone: in the new set, too"
    )


def _reduced(
    own: Groups,
    made: Remodelled,
    old: Mesh,
    new: Mesh,
    notes: list[str],
    where: str,
    bucket_mb: float | None,
) -> tuple[Remodelled, ScaledGroups]:
    """The ranks with the reduction of gradients that one replica does without."""
    reduced = with_reductions(made.traces, own, where, bucket_mb)
    source = {rank: made.source[rank][rows] for rank, rows in reduced.source.items()}
    notes += reduced.notes
    several = {name for name, members in own.items() if len(members) > 1}
    apart = several - shared_groups(made.traces)
    if apart:
        notes.append(
            f"{len(apart)} of {len(several)} groups are of one replica (tensor, pipeline or expert "
            "parallel), by their descriptions; each new replica has its own"
        )
    return Remodelled(reduced.traces, source, []), ScaledGroups(reduced.groups, old, new, apart)


def _record(
    found: InputSet, wanted: Scaling, old: Mesh, new: Mesh, files: int, notes: Sequence[str]
) -> dict[str, object]:
    return {
        "scaled_from": str(found.run.folder / found.name),
        "captured": {"tp": old.tp, "dp": old.dp, "pp": old.pp},
        "mesh": {"tp": new.tp, "dp": new.dp, "pp": new.pp},
        "layers": wanted.size.layers or None,
        "batch": wanted.size.batch or None,
        "seq": wanted.size.seq or None,
        "topology": wanted.topology or None,
        "seed": wanted.seed,
        "different_files": files,
        "notes": list(notes),
    }
