"""A set of more or fewer data-parallel ranks, from those that were captured.

A new rank is a copy of the captured one with the same tensor-parallel place and stage. Its compute times vary
by the spread that was measured between ranks with the same work, drawn with a seed; its groups, peers and
sizes are those of its place. What the files hold are times without waiting: a replay or a simulation finds
who waits for whom.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chakra_et.astra.network_sources import read_topology
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.files import scratch_folder, write_json
from chakra_et.job.mesh import Mesh, ScaledGroups, find_mesh
from chakra_et.job.sets import Groups, InputSet
from chakra_et.names import RunFiles
from chakra_et.transform.network_fit import fitted
from chakra_et.transform.pipeline_split import split
from chakra_et.transform.rank_copies import (
    transfers,
    without_waiting,
)
from chakra_et.transform.remodel import Remodelled, remodelled, resharded, retimed
from chakra_et.transform.replicas import shared_groups, with_reductions
from chakra_et.transform.scaled_ranks import Ranks, Scaling

MOST_RANKS = 1 << 17


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


def _not_from(captured: int, wanted: int, what: str) -> str:
    """Why a degree can't be made from the captured one, and what to do."""
    if captured == 1:
        return f"the captured run has 1, which doesn't show {what}: capture a run with 2 or with {wanted}"
    return f"is no multiple of the captured run's {captured}: give one, or capture a run with {wanted}"


def scale(found: InputSet, traces: Mapping[int, ExecutionTrace], wanted: Scaling, run: RunFiles) -> Scaled:
    """Write the scaled set as ``run``. Raises ``TraceError``, with nothing written, where it can't be
    made."""
    old = find_mesh(found.name, found.groups, found.manifest, traces, found.world, wanted.mesh)
    pp = wanted.pp or old.pp
    if pp != old.pp and (old.pp < 2 or pp % old.pp):
        raise TraceError(f"--pp {pp}: {_not_from(old.pp, pp, 'the messages between stages')}")
    tp = wanted.tp or old.tp
    if tp != old.tp and (old.tp < 2 or tp % old.tp):
        raise TraceError(f"--tp {tp}: {_not_from(old.tp, tp, 'how tensors are sharded')}")
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
        ranks = Ranks(traces, made, mesh, groups, topology, measured, wanted)
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
        "layers": wanted.model.layers or None,
        "batch": wanted.model.batch or None,
        "seq": wanted.model.seq or None,
        "topology": wanted.topology or None,
        "seed": wanted.seed,
        "different_files": files,
        "notes": list(notes),
    }
