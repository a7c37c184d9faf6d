"""Layer costs taken from the ``.et`` files of a training run.

Compute time is that of kernels where there are any, else that of operators; communication is left out. A node
belongs to the backward pass if it begins between autograd's first node of the step and the optimizer; to the
head if a shape of its operator has the vocabulary's size, to the embedding if it is named so, else to the
layers. Fused or compiled graphs hide the operators and can't be attributed this way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from fasop.errors import PlanError
from fasop.inputs.costs import FORMAT, CostFile, Entry
from fasop.inputs.models import Model
from fasop.profiling.recorded import vocabulary_rows
from fasop.profiling.units import UnitSeconds

COMPUTE = ("operator", "runtime")
DEVICE = ("kernel", "memcpy", "memset")
BACKWARD_FUNCTION = 1  # RecordScope of autograd's nodes

Array = NDArray[Any]


class Attributed(NamedTuple):
    """Seconds per step, the mean over all ranks: forward and backward of embedding, layers and head; and what
    belongs to none of them (data loading, the optimizer, Python). ``total`` is the sum of all.
    """

    forward: UnitSeconds
    backward: UnitSeconds
    unattributed: float
    total: float


def attribute(model: Model, paths: Sequence[Path], tp: int = 1, mbs: int = 1) -> Attributed:
    """Attribute the compute time of ``.et`` files to the kinds of unit.

    Raises ``PlanError``, also for a trace of another model, tensor-parallel degree or micro-batch.
    """
    sums = np.zeros((2, 3))
    unattributed = total = 0.0
    for path in paths:
        try:
            trace = et_file.read(path)
        except TraceError as error:
            raise PlanError(str(error)) from None
        if "kind" not in trace.attributes or trace.inputs is None:
            raise PlanError(f"{path}: not written by this project's converter: convert the traces again.")
        kinds = _texts(trace, "kind")
        names = np.array([trace.names[row] for row in range(len(trace))])
        start, length = trace.start_micros.astype(np.int64), trace.duration_micros.astype(np.int64)
        begins = np.sort(start[(kinds == "annotation") & np.char.startswith(names, "ProfilerStep#")])
        if not len(begins) or not start.any():
            raise PlanError(
                f"{path}: no ProfilerStep or no start times in it: convert without --no-timestamps."
            )
        on_device = np.isin(kinds, DEVICE)
        counts = on_device if on_device.any() else np.isin(kinds, COMPUTE)
        backward, other = _phases(trace, names, start, begins)
        unit = _unit(trace, names, vocabulary_rows(model, trace, path, tp, mbs, backward | other))
        seconds = length / 1e6 / len(begins) / len(paths)
        for phase in (0, 1):
            for kind in (0, 1, 2):
                chosen = counts & ~other & (backward == bool(phase)) & (unit == kind)
                sums[phase, kind] += seconds[chosen].sum()
        unattributed += seconds[counts & other].sum()
        total += seconds[counts].sum()
    forward_seconds, backward_seconds = (UnitSeconds(*row.tolist()) for row in sums)
    return Attributed(forward_seconds, backward_seconds, float(unattributed), float(total))


def _phases(trace: ExecutionTrace, names: Array, start: Array, begins: Array) -> tuple[Array, Array]:
    """Whether each node belongs to the backward pass, and whether to neither pass."""
    step = np.searchsorted(begins, start, side="right") - 1
    backward = np.zeros(len(trace), dtype=bool)
    other = step < 0
    autograd = trace.column("scope") == BACKWARD_FUNCTION
    optimizer = np.char.startswith(names, "Optimizer.step")
    never = np.iinfo(np.int64).max
    for number, begin in enumerate(begins):
        within = step == number
        first = start[within & autograd].min(initial=never)
        last = start[within & optimizer].min(initial=never)
        backward |= within & (start >= first) & (start < last)
        other |= within & ((start >= last) | (start < begin))
    return backward, other


def _texts(trace: ExecutionTrace, name: str) -> Array:
    attribute = trace.attributes[name]
    values = np.full(len(trace), "", dtype=object)
    values[attribute.rows] = [attribute.values[at] for at in range(len(attribute.rows))]
    return values.astype(str)


def _unit(trace: ExecutionTrace, names: Array, rows: int) -> Array:
    """0 embedding, 1 layer, 2 head for each node; all nodes of one operator are alike.

    rows: words of the vocabulary on this rank.
    """
    vocabulary = re.compile(rb"(?<!\d)%d(?!\d)" % rows)
    unit = np.ones(len(trace), dtype=np.int64)
    named = np.char.find(np.char.lower(names), "embedding") >= 0
    wide = np.zeros(len(trace), dtype=bool)
    assert trace.inputs is not None
    wide[trace.inputs.rows] = [bool(vocabulary.search(shapes)) for shapes in trace.inputs.shapes]
    operator = trace.column("rf_id")
    unit[np.isin(operator, operator[wide & (operator > 0)]) | wide] = 2
    unit[named] = 0
    return unit


def from_traces(model: Model, paths: list[Path], gpu_name: str, tp: int, mbs: int) -> CostFile:
    """Costs as ``attribute`` finds them, for one tensor-parallel degree and micro-batch."""
    found = attribute(model, paths, tp, mbs)
    if not found.forward.layer or not found.backward.layer:
        raise PlanError(
            f"{paths[0]}: no forward and backward pass found in it: is it a training step's trace?"
        )
    forward, backward = (
        units._replace(layer=units.layer / model.layers).of_model(model)
        for units in (found.forward, found.backward)
    )
    source = (
        f"From {', '.join(path.name for path in paths)}, operators attributed to embedding, layers and head."
    )
    entry = Entry(model.name, gpu_name or "traced", tp, mbs, forward, backward)
    return CostFile(FORMAT, source, {model.name: model}, (entry,))
