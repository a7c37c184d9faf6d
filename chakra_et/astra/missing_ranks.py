"""The ranks of a bundle: those of a set, without its missing ranks or with copies in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et.astra.prepare import as_compute
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import has, set_integers, with_metadata
from chakra_et.job.mesh import ScaledGroups, find_mesh
from chakra_et.job.sets import InputSet
from chakra_et.transform.rank_copies import (
    compute_micros,
    draw,
    names_in,
    peers_in,
    relabelled,
    relative_spread,
    step_of,
    transfers,
    varied,
    without_waiting,
)


@dataclass(frozen=True)
class Ranks:
    """What goes into a bundle: a set that lacks no rank. ``steps``: what was done about those that it lacked;
    ``captured``: the captured numbers of the ranks, in order, where others were left out."""

    set: InputSet
    steps: Sequence[str] = ()
    captured: Sequence[int] | None = None


def ranks_of(found: InputSet, trim: bool = False) -> Ranks:
    """The ranks of a set. Raises ``TraceError`` where some are missing and ``trim`` is False."""
    if not found.missing:
        return Ranks(found)
    if not trim:
        raise TraceError(
            f"{found.name}: {_missing(found)}: convert them, or use --trim to leave them out or --fill to "
            "make them from their like"
        )
    place = {rank: at for at, rank in enumerate(found.files)}
    step = (
        f"{_missing(found)} and were left out (--trim): the others are ranks 0 to {len(place) - 1}, groups "
        "are cut to them, sizes are as recorded"
    )
    groups = {
        name: [place[rank] for rank in members if rank in place] for name, members in found.groups.items()
    }
    files = dict(enumerate(found.files.values()))
    used = {name: members for name, members in groups.items() if members}
    return Ranks(replace(found, files=files, groups=used), (step,), list(place))


def trimmed(trace: ExecutionTrace, ranks: Sequence[int]) -> tuple[ExecutionTrace, int]:
    """The trace with peers renumbered to their place in ``ranks``, and how many messages to and from absent
    ranks became compute. Collectives keep their sizes."""
    place = np.full(max(ranks) + 2, -1, dtype=np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    lost = np.zeros(len(trace), dtype=bool)
    for name, kind in (("comm_src", NodeType.COMM_RECV), ("comm_dst", NodeType.COMM_SEND)):
        if name in trace.attributes:
            new = place[np.clip(trace.column(name, -1), -1, len(place) - 1)]
            lost |= (trace.types == kind) & (new < 0)
            present = has(trace, name) & (new >= 0)
            trace = set_integers(trace, name, trace.attributes[name].kind, new, present)
    return with_metadata(as_compute(trace, lost), world_size=len(ranks), rank=None), int(lost.sum())


def filled(found: InputSet, folder: Path, mesh_text: str = "", seed: int = 0) -> Ranks:
    """The set with its missing ranks written into ``folder``.

    A missing rank is a copy of the nearest rank of its stage and tensor-parallel place, with its own groups
    and peers, and with compute times that vary as measured. Raises ``TraceError`` where there is no such
    rank.
    """
    traces = {rank: et_file.read(path) for rank, path in found.files.items()}
    mesh = find_mesh(found.name, found.groups, found.manifest, traces, found.world, mesh_text)
    groups = ScaledGroups(found.groups, mesh, mesh)
    lasting = transfers(traces, found.groups)
    generator = np.random.default_rng(seed)
    files, spreads = dict(found.files), []
    places = {rank: mesh.place(rank) for rank in range(found.world)}
    for rank in found.missing:
        place = places[rank]
        alike = [
            other
            for other in traces
            if (places[other].tensor, places[other].stage) == (place.tensor, place.stage)
        ]
        if not alike:
            raise TraceError(
                f"{found.name}: rank {rank} can't be made: no rank with tensor-parallel place {place.tensor} "
                f"and stage {place.stage} is there ({mesh}); convert one of them, use --mesh, or --trim"
            )
        source = min(alike, key=lambda other: (abs(places[other].data - place.data), other))
        busy = [compute_micros(traces[other]) for other in alike]
        spreads.append(relative_spread(busy))
        plain = without_waiting(traces[source], lasting[source])
        names = names_in(traces[source], groups, place)
        peers = peers_in(traces[source], mesh, mesh, places[source], place)
        factors = draw(generator, busy, alike.index(source), None)
        copy = varied(relabelled(plain, names, peers, mesh.ranks), step_of(traces[source]), factors)
        files[rank] = folder / f"{found.name}.{rank}.et"
        et_file.write(files[rank], copy)
    step = (
        f"{_missing(found)} and were made from ranks of the same stage (--fill, mesh {mesh}); their compute "
        f"times vary by {100 * max(spreads, default=0):.2f}% per step, as measured (seed {seed})"
    )
    whole = replace(found, files=dict(sorted(files.items())), groups={**found.groups, **groups.all()})
    return Ranks(whole, (step,))


def _missing(found: InputSet) -> str:
    first = ", ".join(map(str, found.missing[:5])) + (", …" if len(found.missing) > 5 else "")
    return f"{len(found.missing)} of {found.world} ranks have no file ({first})"
