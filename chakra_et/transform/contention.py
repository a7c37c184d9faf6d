"""How much gloo's threads slow the operators that run beside its transfers on the same rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.job.operators import first_nodes
from chakra_et.simulate.breakdown import union_ns
from chakra_et.simulate.run import Run, Setting, solve
from chakra_et.transform.changes import as_run

_GLOO = "gloo:"
_SURE = 2.0
"""Standard errors from which on a slowdown counts."""
_ROUNDS = 3
"""Until what is beside a transfer hardly changes any more."""


@dataclass(frozen=True)
class Slowdown:
    """``part``: of the time in which an operator runs beside transfers, what gloo's threads take (0 to 1)."""

    part: float

    def without(self, run: Run) -> Run:
        """The run whose operators take what they take alone."""
        longer = np.rint(self.part * time_beside_transfers(run, run.measured) / 1000).astype(np.int64)
        traces = [
            replace(trace, duration_micros=trace.duration_micros - micros.astype(np.uint64))
            for trace, micros in zip(run.graph.traces, run.graph.scatter(longer), strict=True)
        ]
        return as_run(run, traces, [self.note])

    @property
    def note(self) -> str:
        return (
            f"operators beside gloo's transfers lose {self.part:.0%} of that time to its threads, as a "
            "comparison with the same operators alone shows; so they do in the new run"
        )

    def within(self, run: Run, setting: Setting) -> Setting:
        """The setting in which operators take longer beside its transfers."""
        alone = setting.own_ns
        for _ in range(_ROUNDS):
            longer = np.rint(alone + self.part * time_beside_transfers(run, setting)).astype(np.int64)
            setting = replace(setting, own_ns=longer)
        return setting


def find_slowdown(run: Run) -> Slowdown | None:
    """From operators of one name and shapes, some of which ran beside transfers and others not; None where
    the difference is within their scatter."""
    if not any(name.startswith(_GLOO) for name in run.names):
        return None
    shared, key = time_beside_transfers(run, run.measured), _alike(run)
    taken = run.graph.own_ns.astype(float)
    nodes = np.flatnonzero((key >= 0) & (taken > 0))
    near, alone = nodes[shared[nodes] > 0], nodes[shared[nodes] == 0]
    size = int(key.max(initial=-1)) + 1
    count = np.bincount(key[alone], minlength=size)
    known = near[count[key[near]] > 1]
    if not len(known):
        return None
    mean = np.bincount(key[alone], taken[alone], size) / np.maximum(count, 1)
    off = np.bincount(key[alone], (taken[alone] - mean[key[alone]]) ** 2, size) / np.maximum(count - 1, 1)
    among = np.bincount(key[known], minlength=size)
    error = float(np.sqrt((off * among * (1 + among / np.maximum(count, 1))).sum()))
    excess = float((taken[known] - mean[key[known]]).sum())
    if excess <= _SURE * error:
        return None
    return Slowdown(min(excess / float(shared[known].sum()), 1.0))


def time_beside_transfers(run: Run, setting: Setting) -> np.ndarray:
    """How long a transfer of gloo's runs on its rank beside each CPU node, ns, float64[N]."""
    graph, times = run.graph, solve(run, setting)
    start, end = times.start_ns, times.end_ns
    gloo = run.named(lambda name: name.startswith(_GLOO))
    found, nodes = np.zeros(len(graph)), np.flatnonzero(gloo & (run.operation >= 0))
    begin = np.zeros(len(run.members), np.int64)  # a transfer begins once its last member has started
    np.maximum.at(begin, run.operation[nodes], start[nodes])
    for at in np.unique(graph.trace_of[nodes]).tolist():
        own = nodes[graph.trace_of[nodes] == at]
        here = np.flatnonzero((graph.trace_of == at) & graph.is_cpu & ~gloo & (end > start))
        found[here] = union_ns(begin[run.operation[own]], end[own], start[here], end[here])
    return found


def _alike(run: Run) -> np.ndarray:
    """One number for all parts of operators with the same name, shapes and place in the operator on one rank;
    -1 where no shapes are recorded; int64[N]."""
    shapes = run.graph.gather([_shapes(trace) for trace in run.graph.traces])
    found = shapes.copy()
    for column in (run.graph.trace_of, run.name_of, run.graph.attribute("segment", 0)):
        found = np.unique(found * (int(column.max(initial=0)) + 1) + column, return_inverse=True)[1]
    return np.where(shapes >= 0, found, -1).astype(np.int64)


def _shapes(trace: ExecutionTrace) -> np.ndarray:
    """A number for the shapes of each row's operator, -1 where none are recorded; int64[N]."""
    found = np.full(len(trace), -1, np.int64)
    if trace.inputs is None:
        return found
    numbers: dict[bytes, int] = {}
    found[trace.inputs.rows] = [numbers.setdefault(text, len(numbers)) for text in trace.inputs.shapes]
    first = first_nodes(trace, trace.inputs.rows)  # the first part of an operator has its shapes
    return np.where(first >= 0, found[first], found)
