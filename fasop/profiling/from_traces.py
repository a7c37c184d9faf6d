"""Layer costs taken from the ``.et`` files of a training run.

Compute time is that of kernels where there are any, else that of operators; communication is left out. A node
belongs to the pass that its operator ran in (``passes.py``); to the head if a shape of its operator has the
vocabulary's size, to the embedding if it is named so, else to the layers. Fused or compiled graphs hide the
operators and can't be attributed this way.
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
from fasop.profiling.passes import DEVICE, find_steps
from fasop.profiling.recorded import check
from fasop.profiling.shapes import read_shapes
from fasop.profiling.units import UnitSeconds

COMPUTE = ("operator", "runtime")

Array = NDArray[Any]


class Attributed(NamedTuple):
    """Means over all ranks: seconds per micro-batch, forward and backward of embedding, layers and head;
    micro-batches per step; and seconds per step, of what belongs to no pass (data loading, the optimizer,
    Python) and of everything. notes: what was not checked, or assumed, as sentences.
    """

    forward: UnitSeconds
    backward: UnitSeconds
    micro_batches: float
    unattributed: float
    total: float
    notes: tuple[str, ...]


def attribute(model: Model, paths: Sequence[Path], tp: int = 1, mbs: int = 1) -> Attributed:
    """Attribute the compute time of ``.et`` files to the kinds of unit.

    Raises ``PlanError``, also for a trace of another model, tensor-parallel degree or micro-batch, and for
    ranks of several runs.
    """
    if model.encoder_layers is not None:
        raise PlanError(
            f"model {model.name}: costs of an encoder-decoder can't be taken from traces, as its two "
            "halves can't be told apart: give a decoder-only or encoder-only model."
        )
    sums = np.zeros((2, 3))
    micro_batches = unattributed = total = 0.0
    ranks: dict[int, Path] = {}
    worlds: dict[int, Path] = {}
    notes: dict[str, None] = {}
    for path in paths:
        try:
            trace = et_file.read(path)
        except TraceError as error:
            raise PlanError(str(error)) from None
        _check_rank(trace, path, ranks, worlds)
        steps = find_steps(trace, path)
        own = f"{path}: taken as {model.name}"
        shapes = read_shapes(trace, steps, path, own)
        notes.update(dict.fromkeys(check(model, shapes, own, tp, mbs)))
        on_device = np.isin(steps.kinds, DEVICE)
        counts = on_device if on_device.any() else np.isin(steps.kinds, COMPUTE)
        unit = _unit(trace, steps.names, shapes.table.rows)
        seconds = trace.duration_micros.astype(np.int64) / 1e6 / len(paths)
        count = len(shapes.products)
        for phase, within in enumerate((steps.forward, steps.backward)):
            for kind in (0, 1, 2):
                sums[phase, kind] += seconds[counts & within & (unit == kind)].sum() / count
        per_step = seconds / len(steps.numbers)
        unattributed += per_step[counts & ~steps.forward & ~steps.backward].sum()
        total += per_step[counts].sum()
        micro_batches += count / len(steps.numbers) / len(paths)
    if ranks and len(paths) < (world := min(worlds)):
        notes[f"{len(paths)} of the run's {world} ranks are given, and taken for all."] = None
    forward, backward = (UnitSeconds(*row.tolist()) for row in sums)
    return Attributed(forward, backward, micro_batches, float(unattributed), float(total), tuple(notes))


def _check_rank(trace: ExecutionTrace, path: Path, ranks: dict[int, Path], worlds: dict[int, Path]) -> None:
    """Refuse ranks of several runs; ranks and worlds: the files seen so far, by rank and number of ranks."""
    rank, world = trace.metadata_int("rank"), trace.metadata_int("world_size")
    if rank is None or world is None:
        raise PlanError(f"{path}: its rank or world size is not in it: convert the traces again.")
    worlds.setdefault(world, path)
    if len(worlds) > 1:
        (one, first), (other, second) = worlds.items()
        raise PlanError(
            f"{first} is of a run of {one} ranks, {second} of one of {other}: give ranks of one run."
        )
    if rank in ranks:
        raise PlanError(f"{ranks[rank]} and {path} are both rank {rank}: give each rank of one run once.")
    ranks[rank] = path


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


def from_traces(
    model: Model, paths: list[Path], gpu_name: str, tp: int, mbs: int
) -> tuple[CostFile, tuple[str, ...]]:
    """Costs as ``attribute`` finds them, for one tensor-parallel degree and micro-batch, and its notes."""
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
    per_step = (
        f"Micro-batches per step: {found.micro_batches:g}; {found.unattributed:.6f} s of computing per step "
        "in no pass (data, clipping, the optimizer) are not in the costs."
    )
    return CostFile(FORMAT, source, {model.name: model}, (entry,)), (per_step, *found.notes)
