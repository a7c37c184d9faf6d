"""Ranks that a capture lacks, made from those of the same stage that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.node_attributes import without
from chakra_et.job.mesh import ScaledGroups, find_mesh
from chakra_et.job.sets import InputSet
from chakra_et.transform.rank_copies import (
    compute_micros,
    drawn_factors,
    names_in,
    peers_in,
    relabelled,
    relative_spread,
    step_of,
    transfers,
    varied,
    without_waiting,
)


def filled(found: InputSet, folder: Path, mesh_text: str = "", seed: int = 0) -> tuple[InputSet, str]:
    """The set with its missing ranks written into ``folder``, and a sentence about them.

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
        # What the rank sent to each other one isn't known.
        plain = without(plain, ("comm_in_split", "comm_out_split"), np.ones(len(plain), bool))
        names = names_in(traces[source], groups, place)
        peers = peers_in(traces[source], mesh, mesh, places[source], place)
        factors = drawn_factors(generator, busy, alike.index(source), None)
        copy = varied(relabelled(plain, names, peers, mesh.ranks), step_of(traces[source]), factors)
        files[rank] = folder / f"{found.name}.{rank}.et"
        et_file.write(files[rank], copy)
    step = (
        f"{found.lacks} and were made from ranks of the same stage (--fill, mesh {mesh}); their compute "
        f"times vary by {100 * max(spreads, default=0):.2f}% per step, as measured (seed {seed})"
    )
    whole = replace(found, files=dict(sorted(files.items())), groups={**found.groups, **groups.all()})
    return whole, step
