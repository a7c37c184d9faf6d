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
from chakra_et.network.collectives import collective_time
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
from chakra_et.simulators.sets import InputSet
from chakra_et.simulators.spread import compute_micros, deviation, draw, relative_spread

MOST_RANKS = 1 << 17


@dataclass(frozen=True)
class Scaling:
    """``dp``: data-parallel ranks that are wanted. ``topology``: text, "" for the times of the capture.
    ``spread``: of compute times, None for the measured one. ``variants``: different draws per captured
    rank."""

    dp: int
    topology: str = ""
    mesh: str = ""
    seed: int = 0
    spread: float | None = None
    variants: int = 8
    tp: int | None = None
    pp: int | None = None


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
    if not found.groups:
        raise TraceError(f"{found.name}: no comm-group file: convert the traces again")
    return {rank: et_file.read(path) for rank, path in found.files.items()}


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
    for axis, count, have in (("tp", wanted.tp, old.tp), ("pp", wanted.pp, old.pp)):
        if count not in (None, have):
            raise TraceError(
                f"--{axis} {count} differs from the {have} that was captured: the work of a rank would "
                f"change in a way that the capture doesn't show, so capture --{axis} {count} and scale --dp"
            )
    if old.dp == 1 < wanted.dp:
        raise TraceError(
            f"{found.name}: was captured without data parallelism ({old}), so that it reduces no gradients: "
            "capture two replicas, and scale those"
        )
    new = Mesh(old.tp, wanted.dp, old.pp)
    if new.ranks > MOST_RANKS:
        raise TraceError(
            f"--dp {wanted.dp} makes {new.ranks:,} ranks: give at most {MOST_RANKS // (old.tp * old.pp)}"
        )
    if run.et_files():
        raise TraceError(
            f"{run.folder / run.name}: there are files of that name: choose another -o, or remove them"
        )
    groups = ScaledGroups(found.groups, old, new)
    lasting = transfers(traces, found.groups)
    notes: list[str] = [f"the captured mesh is {old} (--mesh where it is another), the new one {new}"]
    topology = read_topology(wanted.topology, new.ranks) if wanted.topology else None
    measured = fitted(traces, lasting, found.groups)
    if topology is not None:
        notes += [f"communication lasts what the topology makes it: {topology.name}", *topology.notes]
    elif measured is not None:
        only = measured.dimensions[0]
        notes.append(
            "communication of other numbers of ranks lasts what a ring does on the network that fits the "
            f"captured collectives: {only.bandwidth / 1e9:.3g} GB/s, {only.latency_ns / 1000:.3g} us per "
            "message"
        )
        notes += measured.notes
    run.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(run.folder / run.name) as scratch:
        target = RunFiles(scratch, run.name)
        ranks = _Ranks(traces, lasting, old, groups, topology, measured, wanted)
        files = ranks.write(target)
        notes += ranks.notes()
        write_json(target.groups_file, groups.all())
        write_json(target.folder / f"{run.name}_scaled.json", _record(found, wanted, old, new, files, notes))
        for path in sorted(scratch.iterdir()):
            os.replace(path, run.folder / path.name)
    return Scaled(run, old, new, files, notes)


def _record(
    found: InputSet, wanted: Scaling, old: Mesh, new: Mesh, files: int, notes: Sequence[str]
) -> dict[str, object]:
    return {
        "scaled_from": str(found.run.folder / found.name),
        "captured": {"tp": old.tp, "dp": old.dp, "pp": old.pp},
        "mesh": {"tp": new.tp, "dp": new.dp, "pp": new.pp},
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
        lasting: Mapping[int, np.ndarray],
        old: Mesh,
        groups: ScaledGroups,
        topology: Topology | None,
        measured: Topology | None,
        wanted: Scaling,
    ):
        self.traces, self.old, self.new, self.groups = traces, old, groups.new, groups
        self.topology, self.measured, self.wanted = topology, measured, wanted
        self.plain = {rank: without_waiting(trace, lasting[rank]) for rank, trace in traces.items()}
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
        if self.new.dp <= self.old.dp:
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
            source = self.old.rank(place._replace(data=place.data % self.old.dp))
            variant = -1 if place.data < self.old.dp else int(self.generator.integers(self.wanted.variants))
            trace, here = self.traces[source], self.old.place(source)
            names = names_in(trace, self.groups, here, place.data)
            peers = peers_in(trace, self.old, self.new, here, place.data)
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
        members = {name: self._members(name) for name in names}
        members |= dict.fromkeys(EVERY, (self.old.ranks, self.new.ranks))
        network = self.measured

        def lasting(kind: CollectiveType, before: int, size: int, group: str, micros: float) -> float:
            counts = members[group]
            if network is None or counts[0] == counts[1]:
                return micros
            return micros * _ring(kind, size, counts[1], network) / _ring(kind, before, counts[0], network)

        trace = resized(self.plain[source], members, lasting)
        if variant >= 0:
            place = self.old.place(source)
            own = deviation(self.busy[source], self.alike[place.tensor, place.stage])
            factors = draw(self.generator, self.spread[place.tensor, place.stage], len(own)) / own
            trace = varied(trace, self.traces[source], factors)
        return trace

    def _members(self, name: str) -> tuple[int, int]:
        shape = self.groups.shapes[name]
        assert shape is not None
        before = after = 1
        if shape.along == "all":
            before, after = self.old.dp, self.new.dp
        elif shape.along == "block":
            before = after = shape.size
        elif shape.along == "stride":
            before, after = self.old.dp // shape.size, self.new.dp // shape.size
        return before * len(shape.others), after * len(shape.others)


def _ring(kind: CollectiveType, size: int, count: int, network: Topology) -> float:
    flat = Topology.flat(count, network.dimensions[0].bandwidth, network.dimensions[0].latency_ns)
    return max(collective_time(kind, size, range(count), flat), 1e-9)
