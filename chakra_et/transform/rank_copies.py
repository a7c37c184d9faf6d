"""Copies of a captured rank for other places of the mesh: groups, peers, sizes and times of their own.

Compute times of ranks with the same work differ from step to step, and a copy's are draws of measured steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import has, set_integers, set_texts, texts, with_metadata, without
from chakra_et.et.sets import RankSet
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, Place, ScaledGroups, find_mesh
from chakra_et.simulate.measured_steps import steps_of
from chakra_et.simulate.run import Run, make_run
from chakra_et.simulate.time_by_kind import KINDS, node_kinds
from chakra_et.transform.changes import with_sizes

SHARDED = (CollectiveType.ALL_GATHER, CollectiveType.GATHER)
"""Collectives whose ``comm_size`` is a rank's shard of a whole that keeps its size."""
RECORDED = ("measured_end_micros", "trace_start_ns", "clock_offset_ns", "clock_spread_ns", "rank")
EVERY = ("", "0")
"""The names of the group of all ranks, which needs no entry in the group file."""
WAITING = ("wait_micros", "transfer_micros")
_STEP = "captured_step"


def without_waiting(run: Run) -> dict[int, ExecutionTrace]:
    """The traces by rank without recorded starts and waits: communication lasts what it takes once all are
    there, the median of its members, which end together."""
    lasting = run.timing.transfer_ns.astype(np.float64)
    for nodes in run.members:
        lasting[nodes] = np.median(lasting[nodes])
    found = {}
    of_rank = run.graph.scatter(np.rint(lasting).astype(np.int64))
    for rank, trace, ns in zip(run.graph.ranks, run.graph.traces, of_rank, strict=True):
        talks = trace.types >= NodeType.COMM_SEND
        duration = np.where(talks, np.maximum(np.rint(ns / 1000), 1), trace.duration_micros)
        plain = replace(
            trace,
            start_micros=np.zeros(len(trace), dtype=np.uint64),
            duration_micros=duration.astype(np.uint64),
            attributes={name: each for name, each in trace.attributes.items() if name not in WAITING},
        )
        found[rank] = with_metadata(plain, **dict.fromkeys(RECORDED))
    return found


def with_members(
    trace: ExecutionTrace, members: Mapping[str, tuple[int, int]], retime: Retime
) -> ExecutionTrace:
    """The trace with the sizes and times of collectives whose groups have other numbers of members.

    ``members``: group → (members before, after). The shards of gathers shrink as members are added; whatever
    is reduced, scattered or exchanged keeps its whole size.
    """
    table, index = texts(trace, "pg_name")
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size", 0)
    changed = {}
    known = (trace.types == NodeType.COMM_COLL) & np.isin(kinds, list(CollectiveType))
    for row in np.flatnonzero(known).tolist():
        before, after = members[table[index[row]] if index[row] >= 0 else EVERY[0]]
        size = int(sizes[row])
        changed[row] = max(-(-size * before // after), 1) if kinds[row] in SHARDED else size
    return with_sizes(trace, changed, retime)


def relabelled(
    trace: ExecutionTrace, names: Mapping[str, str], peers: Mapping[int, int], world: int
) -> ExecutionTrace:
    """The trace with other group names and ranks: ``names`` and ``peers`` map all that occur in it."""
    table, index = texts(trace, "pg_name")
    if table:
        trace = set_texts(trace, "pg_name", [names.get(name, name) for name in table], index)
    for name in ("comm_src", "comm_dst"):
        if name in trace.attributes:
            new = np.array([peers.get(rank, rank) for rank in trace.column(name, -1).tolist()], np.int64)
            trace = set_integers(trace, name, trace.attributes[name].kind, new, has(trace, name))
    return with_metadata(trace, world_size=world)


def names_in(trace: ExecutionTrace, groups: ScaledGroups, place: Place) -> dict[str, str]:
    """Captured group → new group, of those that a rank uses, for its copy at ``place`` of the new mesh."""
    used = [name for name in texts(trace, "pg_name")[0] if name in groups.twin]
    return {name: groups.name_for(name, place) for name in used}


def peers_in(trace: ExecutionTrace, old: Mesh, new: Mesh, source: Place, place: Place) -> dict[int, int]:
    """Captured rank → new rank, of those that messages name: as many places away, for the copy at ``place``
    of the rank at ``source``."""
    named = {rank for name in ("comm_src", "comm_dst") for rank in set(trace.column(name, -1).tolist())}
    found = {}
    for rank in sorted(named):
        if 0 <= rank < old.ranks:
            peer = old.place(rank)
            data = (place.data + peer.data - source.data) % new.dp
            tensor = (place.tensor + peer.tensor - source.tensor) % new.tp
            found[rank] = new.rank(Place(tensor, data, peer.stage))
    return found


def varied(trace: ExecutionTrace, factors: np.ndarray) -> ExecutionTrace:
    """A trace ``with_steps`` whose compute times are multiplied by the factor (float64[S, K]) of their step
    and kind."""
    step = trace.column(_STEP)
    computes = (trace.types < NodeType.COMM_SEND) & (step >= 0)
    of_node = factors[np.minimum(step, len(factors) - 1), node_kinds(trace)]
    duration = trace.duration_micros.copy()
    # Rounded so that their sum stays right.
    ends = np.cumsum(duration[computes].astype(np.float64) * of_node[computes])
    duration[computes] = np.diff(np.rint(ends), prepend=0.0).astype(np.uint64)
    return replace(trace, duration_micros=duration)


def step_of(trace: ExecutionTrace) -> np.ndarray:
    """``measured_steps.Steps.step`` of each row, int64[N]."""
    step = np.empty(len(trace), np.int64)
    step[np.argsort(trace.ids, kind="stable")] = steps_of(trace).step
    return step


def with_steps(trace: ExecutionTrace, captured: ExecutionTrace) -> ExecutionTrace:
    """The trace with an attribute that says in which step of the ``captured`` rank each node was, which
    copies of nodes take along."""
    return set_integers(trace, _STEP, "int64", step_of(captured), np.ones(len(trace), bool))


def without_steps(trace: ExecutionTrace) -> ExecutionTrace:
    return without(trace, (_STEP,), np.ones(len(trace), bool))


def compute_micros(trace: ExecutionTrace) -> np.ndarray:
    """Time of all but communication by step and kind, float64[S, K]."""
    step, width = step_of(trace), len(KINDS)
    computes = (trace.types < NodeType.COMM_SEND) & (step >= 0)
    cell = (step * width + node_kinds(trace))[computes]
    micros = trace.duration_micros[computes].astype(np.float64)
    found: np.ndarray = np.bincount(cell, micros, (int(step.max(initial=0)) + 1) * width)
    return found.reshape(-1, width)


def _deviations(busy: Sequence[np.ndarray]) -> np.ndarray:
    """How ranks with the same work differ from their mean in each step, or steps from their mean where there
    is one rank, as factors, float64[R, S, K]; ``busy``: their ``compute_micros``."""
    steps = min(len(of_rank) for of_rank in busy)
    table = np.array([of_rank[:steps] for of_rank in busy])
    mean = np.broadcast_to(table.mean(axis=0 if len(busy) > 1 else 1, keepdims=True), table.shape)
    factors: np.ndarray = np.ones_like(table)
    np.divide(table, mean, out=factors, where=(mean > 0) & (table > 0))
    return factors


def relative_spread(busy: Sequence[np.ndarray]) -> float:
    """The standard deviation of all compute time of a step from rank to rank, or with one rank from step to
    step, relative to its mean; 0 with one step too."""
    factors = _deviations([of_rank.sum(axis=1, keepdims=True) for of_rank in busy])
    free = factors.size - (factors.shape[1] if len(busy) > 1 else 1)
    return float(np.sqrt(((factors - 1) ** 2).sum() / free)) if free else 0.0


def drawn_factors(
    generator: np.random.Generator, busy: Sequence[np.ndarray], own: int, spread: float | None
) -> np.ndarray:
    """Factors for the steps of a copy of rank ``own`` of ``busy``, float64[S, K].

    Each step varies as some measured step of one of the ranks did, all kinds together, so that copies of
    copies vary no more than copies; draws of few vary less than what they are drawn from, hence the power.
    With ``spread``, log-normal by so much instead.
    """
    measured = _deviations(busy)
    ranks, steps, _ = measured.shape
    if spread is None:
        drawn = measured[generator.integers(ranks, size=steps), generator.integers(steps, size=steps)]
        count = ranks if ranks > 1 else steps
        drawn = drawn ** np.sqrt(count / max(count - 1, 1))
    else:
        sigma = np.sqrt(np.log1p(spread**2))
        drawn = np.exp(generator.normal(-(sigma**2) / 2, sigma, steps))[:, None]
    return drawn / measured[own]


def filled(found: RankSet, folder: Path, mesh_text: str = "", seed: int = 0) -> tuple[RankSet, str]:
    """The set with its missing ranks written into ``folder``, and a sentence about them.

    A missing rank is a copy of the nearest rank of its stage and tensor-parallel place, with its own groups
    and peers, and with compute times that vary as measured. Raises ``TraceError`` where there is no such
    rank.
    """
    traces = {rank: et_file.read(path) for rank, path in found.files.items()}
    mesh = find_mesh(found.run.name, found.groups, traces, found.world, mesh_text)
    groups = ScaledGroups(found.groups, mesh, mesh)
    captured = without_waiting(make_run(found.run.name, list(traces.values()), list(traces), found.groups))
    generator = np.random.default_rng(seed)
    files, spreads = dict(found.files), []
    places = {rank: mesh.place(rank) for rank in range(found.world)}
    for rank in found.missing:
        place = places[rank]
        alike = [other for other in traces if places[other]._replace(data=place.data) == place]
        if not alike:
            raise TraceError(
                f"{found.run.name}: rank {rank} can't be made: no rank with tensor-parallel place "
                f"{place.tensor} and stage {place.stage} is there ({mesh}); convert one of "
                "them, use --mesh, or --trim"
            )
        source = min(alike, key=lambda other: (abs(places[other].data - place.data), other))
        busy = [compute_micros(traces[other]) for other in alike]
        spreads.append(relative_spread(busy))
        # What the rank sent to each other one isn't known.
        plain = captured[source]
        plain = without(plain, ("comm_in_split", "comm_out_split"), np.ones(len(plain), bool))
        names = names_in(traces[source], groups, place)
        peers = peers_in(traces[source], mesh, mesh, places[source], place)
        factors = drawn_factors(generator, busy, alike.index(source), None)
        copy = varied(with_steps(relabelled(plain, names, peers, mesh.ranks), traces[source]), factors)
        files[rank] = folder / f"{found.run.name}.{rank}.et"
        et_file.write(files[rank], without_steps(copy))
    step = (
        f"{found.lacks} and were made from ranks of the same stage (--fill, mesh {mesh}); their compute "
        f"times vary by {100 * max(spreads, default=0):.2f}% per step, as measured (seed {seed})"
    )
    whole = replace(found, files=dict(sorted(files.items())), groups={**found.groups, **groups.all()})
    return whole, step
