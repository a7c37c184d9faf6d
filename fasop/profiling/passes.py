"""The forward and backward passes of a recorded training step: which of its nodes belong to which."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chakra_et.et.columns import ExecutionTrace, Strings
from fasop.errors import PlanError

DEVICE = ("kernel", "memcpy", "memset")
NO_PASS = -1

Array = NDArray[Any]


class Steps(NamedTuple):
    """The steps of a trace, with one entry per node.

    kinds, names: of each node. began: µs when its operator began on the host, also for kernels, which may run
    much later. step: -1 before the first. forward, backward: whether it is of such a pass; what a step
    does after its last backward pass (clipping, the optimizer) is of none. numbers: of the steps.
    """

    kinds: Array
    names: Array
    began: Array
    step: Array
    forward: NDArray[np.bool_]
    backward: NDArray[np.bool_]
    numbers: list[str]


def find_steps(trace: ExecutionTrace, path: Path) -> Steps:
    """Raises ``PlanError`` for a trace without steps or times, or of another converter."""
    if "kind" not in trace.attributes or trace.inputs is None:
        raise PlanError(f"{path}: not written by this project's converter: convert the traces again.")
    kinds = _texts(trace, "kind")
    names = np.array([trace.names[row] for row in range(len(trace))])
    start = trace.start_micros.astype(np.int64)
    marks = np.flatnonzero((kinds == "annotation") & np.char.startswith(names, "ProfilerStep#"))
    if not len(marks) or not start.any():
        raise PlanError(f"{path}: no ProfilerStep or no start times in it: convert without --no-timestamps.")
    marks = marks[np.argsort(start[marks], kind="stable")]
    began = _began(trace, kinds, start)
    step = np.searchsorted(start[marks], began, side="right") - 1
    # The converter gives kernels the phase of the operator that launched them, and operators that run within
    # autograd (recomputed activations) that of the backward pass.
    phase = _texts(trace, "phase") if "phase" in trace.attributes else np.full(len(trace), "")
    backward = (phase == "backward") & (step >= 0)
    if not backward.any():
        raise PlanError(f"{path}: no backward pass found in it: is it a training step's trace?")
    last = np.full(len(marks), -1)
    np.maximum.at(last, step[backward], began[backward])
    forward = (phase == "forward") & (step >= 0) & (began < last[step])
    numbers = [name.removeprefix("ProfilerStep#") for name in names[marks]]
    return Steps(kinds, names, began, step, forward, backward, numbers)


def forward_passes(steps: Steps, lookups: Array, path: Path) -> Array:
    """The number of the forward pass that each node of one belongs to, counted over all steps, else -1.

    lookups: nodes that look up a micro-batch's tokens, one per forward pass. Raises ``PlanError`` where a
    forward pass isn't followed by its own backward pass.
    """
    for at, name in enumerate(steps.numbers):
        begins = np.sort(steps.began[lookups[steps.step[lookups] == at]])
        own = np.sort(steps.began[steps.backward & (steps.step == at)])
        before = np.searchsorted(own, begins)
        followed = int((np.diff(np.append(before, len(own))) > 0).sum())
        if followed != len(begins) or (len(own) and (not len(begins) or before[0] > 0)):
            raise PlanError(
                f"{path}: step {name} looks tokens up {len(begins)} times, of which {followed} are followed "
                "by a backward pass: give steps in which each forward pass has its backward pass before the "
                "next (encoder-decoders and several pipeline stages can't be told apart)."
            )
    number = np.searchsorted(np.sort(steps.began[lookups]), steps.began, side="right") - 1
    return np.where(steps.forward, number, NO_PASS)


def _began(trace: ExecutionTrace, kinds: Array, start: Array) -> Array:
    operator = trace.column("rf_id")
    of_host = (operator > 0) & ~np.isin(kinds, DEVICE)
    ids, place = np.unique(operator, return_inverse=True)
    first = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(first, place[of_host], start[of_host])
    known = first[place] < np.iinfo(np.int64).max
    return np.where(known, first[place], start)


def _texts(trace: ExecutionTrace, name: str) -> Array:
    attribute = trace.attributes[name]
    values = np.full(len(trace), "", dtype=object)
    if isinstance(attribute.values, Strings):
        values[attribute.rows] = [attribute.values[at] for at in range(len(attribute.rows))]
    return values.astype(str)
