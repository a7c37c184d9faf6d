"""Ranks that are missing from a set, made from those of the same stage and tensor-parallel place."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chakra_et.astra.bundle import Ranks
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.job.mesh import ScaledGroups, find_mesh
from chakra_et.job.sets import InputSet
from chakra_et.transform.rank_copies import names_in, peers_in, relabelled, transfers, varied, without_waiting
from chakra_et.transform.step_variation import compute_micros, draw, relative_spread, step_of


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
    sources = dict(found.files)
    spreads = []
    for rank in found.missing:
        place = mesh.place(rank)
        alike = [
            other
            for other in traces
            if mesh.place(other).tensor == place.tensor and mesh.place(other).stage == place.stage
        ]
        if not alike:
            raise TraceError(
                f"{found.name}: rank {rank} can't be made: no rank with tensor-parallel place {place.tensor} "
                f"and stage {place.stage} is there ({mesh}); convert one of them, use --mesh, or --trim"
            )
        source = min(alike, key=lambda other: (abs(mesh.place(other).data - place.data), other))
        busy = [compute_micros(traces[other]) for other in alike]
        spreads.append(relative_spread(busy))
        plain = without_waiting(traces[source], lasting[source])
        names = names_in(traces[source], groups, place)
        peers = peers_in(traces[source], mesh, mesh, mesh.place(source), place)
        factors = draw(generator, busy, alike.index(source), None)
        copy = varied(relabelled(plain, names, peers, mesh.ranks), step_of(traces[source]), factors)
        sources[rank] = folder / f"{found.name}.{rank}.et"
        et_file.write(sources[rank], copy)
    absent = ", ".join(map(str, found.missing[:5])) + (", …" if len(found.missing) > 5 else "")
    step = (
        f"{len(found.missing)} of {found.world} ranks have no file ({absent}) and were made from ranks of "
        f"the same stage (--fill, mesh {mesh}); their compute times vary by "
        f"{100 * max(spreads, default=0):.2f}% per step, as measured (seed {seed})"
    )
    return Ranks(found.name, dict(sorted(sources.items())), {**found.groups, **groups.all()}, (step,))
