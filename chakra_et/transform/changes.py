"""What-ifs: each changes how long nodes run (``Change``), or which nodes a run has (``Rebuild``).

    job = chakra_et.load("outputs/gpt2_2gpu_quick_trace").what_if(gpu_kernels=None, bandwidth="1Gbit/s")
    print(job.changes, job.prediction.after_ms)

A job applies its changes in their order when a result is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from chakra_et.cost.network_fit import NetworkModel, fit_model
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import lasting, texts, with_integers
from chakra_et.simulate.run import Run, Setting, make_run
from chakra_et.transform.network import collective_samples, find_communication

if TYPE_CHECKING:
    from chakra_et.et.sets import Groups
    from chakra_et.job.gradients import Retime
    from chakra_et.job.mesh import Mesh
    from chakra_et.job.operators import Operators


@runtime_checkable
class Change(Protocol):
    """One what-if."""

    def apply(self, run: Run, setting: Setting) -> Setting:
        """The changed setting. Raises ``TraceError`` where the change doesn't fit the run."""
        ...


@runtime_checkable
class Rebuild(Protocol):
    """One what-if that changes the nodes."""

    def rebuild(self, run: Run) -> Run:
        """The changed run. Raises ``TraceError`` where the change doesn't fit the run."""
        ...


@dataclass(frozen=True)
class RankTraces:
    """The ranks of a run on their way to another size: each transform takes them and returns others.

    ``where`` names the run in messages. By rank: its ``traces``, and the captured rank that it was made of
    (``origin``). ``groups`` on ``mesh``; of those, each replica has the ones ``apart`` for itself.
    ``retime``: what collectives of other bytes take. ``notes``: what was assumed, one sentence each.
    """

    where: str
    mesh: Mesh
    groups: Groups
    traces: dict[int, ExecutionTrace]
    origin: dict[int, int]
    retime: Retime
    apart: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def operators(self) -> dict[int, Operators]:
        """The operators of each rank. Raises ``TraceError`` for files that don't tell them."""
        from chakra_et.job.operators import operators_of

        return {rank: operators_of(trace, f"{self.where}.{rank}") for rank, trace in self.traces.items()}

    def with_traces(self, traces: dict[int, ExecutionTrace], *notes: str, **others: Any) -> RankTraces:
        """The same ranks with other traces and further notes."""
        return replace(self, traces=traces, notes=(*self.notes, *notes), **others)


def as_run(
    run: Run,
    traces: Sequence[ExecutionTrace],
    notes: Sequence[str],
    ranks: Sequence[int] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> Run:
    """A run of changed traces that keeps what was noted and doubted about ``run``."""
    ranks = run.graph.ranks if ranks is None else ranks
    made = make_run(run.name, traces, ranks, run.comm_groups if groups is None else groups)
    setting = replace(made.measured, notes=(*made.measured.notes, *run.measured.notes, *notes))
    # What the clocks of files tell was noted of the run.
    unmatched = [note for note in made.matching.notes if note not in run.notes]
    return replace(made, measured=setting, notes=[*run.notes, *unmatched], devices=run.devices)


def with_transfers(run: Run) -> list[ExecutionTrace]:
    """The traces of a run whose matched communication lasts as long as its transfer, without waits."""
    own = run.graph.scatter(run.measured.lasting_ns)
    matched = map(np.flatnonzero, run.graph.scatter(run.operation >= 0))
    return [
        lasting(trace, {row: lasts[row] / 1000 for row in rows.tolist()})
        for trace, lasts, rows in zip(run.graph.traces, own, matched, strict=True)
    ]


def with_sizes(trace: ExecutionTrace, sizes: Mapping[int, int], retime: Retime) -> ExecutionTrace:
    """The trace whose communication (by row) has other ``sizes``, and takes the time of these by ``retime``;
    messages take theirs in proportion to the bytes."""
    table, group = texts(trace, "pg_name")
    before, kinds = trace.column("comm_size"), trace.column("comm_type", -1)
    duration = trace.duration_micros.copy()
    for row, size in sizes.items():
        micros, kind = float(duration[row]), int(kinds[row])
        if kind in set(CollectiveType):
            name = table[group[row]] if group[row] >= 0 else ""
            micros = retime(CollectiveType(kind), int(before[row]), size, name, micros)
        else:
            micros *= size / int(before[row])
        duration[row] = max(round(micros), 1)
    trace = with_integers(trace, "comm_size", sizes) if sizes else trace
    return replace(trace, duration_micros=duration)


class CollectiveTimes:
    """How long a collective of another size or of more ranks takes in this run, µs: as long as those of its
    size took, or else what the model gives, times what the run's own collectives take of that. ``counted``:
    the nodes whose collectives count, bool[N]; None: all. ``scatter``: relative standard deviation of
    collectives of one size."""

    def __init__(self, run: Run, model: NetworkModel | None, counted: np.ndarray | None = None) -> None:
        communication = find_communication(run)
        if counted is not None:
            communication = [each for each in communication if counted[each.nodes].all()]
        found = collective_samples(communication)
        self.known = {(each.kind, each.size, each.ranks): each.ns for each in found}
        ratios = [
            each.median_ns / median
            for each in communication
            if each.kind is not None and (median := self.known[each.kind, each.size, len(each.ranks)])
        ]
        self.scatter = float(np.std(ratios)) if ratios else 0.0
        self.model = model or fit_model(found, "the run")
        modelled = sum(self.model.time(each.kind, each.size, each.ranks) for each in found)
        self.scale = sum(self.known.values()) / modelled if modelled else 1.0

    def micros(self, kind: CollectiveType, size: int, ranks: int) -> float:
        """µs of one collective."""
        known = self.known.get((kind, size, ranks))
        return (self.scale * self.model.time(kind, size, ranks) if known is None else known) / 1e3
