"""What-ifs that change which nodes a run has: each makes a new run of changed traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from chakra_et.cost.network_fit import Model, fit_model
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import lasting
from chakra_et.simulate.run import Run, Setting, make_run
from chakra_et.transform.network import find_communication, samples


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


def as_run(
    run: Run,
    traces: Sequence[ExecutionTrace],
    notes: Sequence[str],
    ranks: Sequence[int] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> Run:
    """A run of changed traces that keeps what was noted and doubted about ``run``."""
    made = make_run(
        run.name,
        traces,
        run.graph.ranks if ranks is None else ranks,
        run.comm_groups if groups is None else groups,
    )
    setting = made.measured
    for note in (*run.measured.notes, *notes):
        setting = setting.noting(note)
    known = [note for note in made.notes if note not in run.notes]
    return replace(made, measured=setting, notes=[*run.notes, *known], devices=run.devices)


def with_transfers(run: Run) -> list[ExecutionTrace]:
    """The traces of a run whose matched communication lasts as long as its transfer, without waits."""
    own = run.graph.scatter(run.measured.lasting_ns)
    matched = run.graph.scatter((run.operation >= 0).astype(np.int64))
    found = []
    for trace, lasts, is_matched in zip(run.graph.traces, own, matched, strict=True):
        rows = np.flatnonzero(is_matched)
        micros = dict(zip(rows.tolist(), (lasts[rows] / 1000).tolist(), strict=True))
        found.append(lasting(trace, micros) if micros else trace)
    return found


class CollectiveTimes:
    """How long a collective of another size or of more ranks takes in this run, µs: as long as those of its
    size took, or else what the model gives, times what the run's own collectives take of that. ``counted``:
    the nodes whose collectives count, bool[N]; None: all. ``scatter``: relative standard deviation of
    collectives of one size."""

    def __init__(self, run: Run, model: Model | None, counted: np.ndarray | None = None) -> None:
        communication = find_communication(run)
        if counted is not None:
            communication = [each for each in communication if counted[each.nodes].all()]
        found = samples(communication)
        median = {(each.kind, each.size, each.ranks): each.ns for each in found}
        ratios = [
            float(np.median(each.transfer_ns)) / median[each.kind, each.size, len(each.ranks)]
            for each in communication
            if each.kind is not None and median[each.kind, each.size, len(each.ranks)]
        ]
        self.scatter = float(np.std(ratios)) if ratios else 0.0
        self.model = model or fit_model(found, "the run")
        self.known = median
        modelled = sum(self.model.time(each.kind, each.size, each.ranks) for each in found)
        self.scale = sum(self.known.values()) / modelled if modelled else 1.0

    def micros(self, kind: CollectiveType, size: int, ranks: int) -> float:
        """µs of one collective."""
        known = self.known.get((kind, size, ranks))
        return (self.scale * self.model.time(kind, size, ranks) if known is None else known) / 1e3

    def change(self, kind: CollectiveType, before: tuple[int, int], after: tuple[int, int]) -> float:
        """How much longer a collective of ``after`` = (bytes, ranks) takes than one of ``before``."""
        return self.model.change(kind, before, after)
