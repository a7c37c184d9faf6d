"""Layer costs taken from the ``.et`` files of a training run.

Compute time is that of kernels where there are any, else that of operators; communication is left out. A node
belongs to the pass that its operator ran in; to the head if a shape of its operator has the vocabulary's
size, to the embedding if it is named so, else to the layers. Fused or compiled graphs hide the operators and
can't be attributed this way.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chakra_et.et import file as et_file
from chakra_et.et.node_attributes import texts
from chakra_et.et.sets import find_rank_sets
from chakra_et.job.operators import Operators, Shape, operators_of
from chakra_et.simulate.measured_steps import step_rows
from fasop.errors import PlanError
from fasop.inputs.costs import FORMAT, CostFile, Entry
from fasop.inputs.models import Model
from fasop.profiling.measure import KindSeconds

COMPUTE, DEVICE = ("operator", "runtime"), ("kernel", "memcpy", "memset")
# Products, and where the factor that holds the weights is among their tensors.
PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::_addmm_activation": 2}
PADDED = 128  # Megatron pads a vocabulary to a multiple of 128 × tp rows; others pad less

Array = NDArray[Any]


class Attributed(NamedTuple):
    """Means over all ranks: seconds per micro-batch, forward and backward of embedding, layers and head;
    micro-batches per step; and seconds per step, of what belongs to no pass (data loading, the optimizer,
    Python) and of everything. notes: what was not checked, or assumed, as sentences.
    """

    forward: KindSeconds
    backward: KindSeconds
    micro_batches: float
    unattributed: float
    total: float
    notes: tuple[str, ...]


class _Steps:
    """The steps of a trace, with one entry per node.

    began: µs when its operator began on the host, also for kernels, which may run much later. step: -1 before
    the first. forward, backward: whether it is of such a pass; what a step does after its last backward pass
    (clipping, the optimizer) is of none. names: of the steps.
    """

    def __init__(self, operators: Operators, path: Path) -> None:
        """Raises ``PlanError`` for a trace without steps or times."""
        trace = operators.trace
        table, index = texts(trace, "kind")
        self.kinds = np.array([*table, ""])[index]
        start = trace.start_micros.astype(np.int64)
        self.names, marks = step_rows(trace)
        if not len(marks) or not start.any():
            raise PlanError(f"{path}: has no ProfilerStep or no times: convert without --no-timestamps.")
        operator = trace.column("rf_id")
        of_host = (operator > 0) & ~np.isin(self.kinds, DEVICE)
        ids, place = np.unique(operator, return_inverse=True)
        never = np.iinfo(np.int64).max
        first = np.full(len(ids), never)
        np.minimum.at(first, place[of_host], start[of_host])
        self.began = np.where(first[place] < never, first[place], start)
        self.step = np.searchsorted(start[marks], self.began, side="right") - 1
        # The converter gives kernels the phase of the operator that launched them, and operators that run
        # within autograd (recomputed activations) that of the backward pass.
        phase = np.array(operators.phase)
        self.backward = (phase == "backward") & (self.step >= 0)
        if not self.backward.any():
            raise PlanError(f"{path}: no backward pass found in it: is it a training step's trace?")
        last = np.full(len(marks), -1)
        np.maximum.at(last, self.step[self.backward], self.began[self.backward])
        self.forward = (phase == "forward") & (self.step >= 0) & (self.began < last[self.step])

    def passes(self, lookups: Array, path: Path) -> Array:
        """The number of the forward pass that each node of one belongs to, counted over all steps, else -1.

        lookups: nodes that look up a micro-batch's tokens, one per forward pass. Raises ``PlanError`` where a
        forward pass isn't followed by its own backward pass.
        """
        for at, name in enumerate(self.names):
            begins = np.sort(self.began[lookups[self.step[lookups] == at]])
            own = np.sort(self.began[self.backward & (self.step == at)])
            before = np.searchsorted(own, begins)
            followed = int((np.diff(np.append(before, len(own))) > 0).sum())
            if followed != len(begins) or (len(own) and (not len(begins) or before[0] > 0)):
                counts = f"{len(begins)} times, of which {followed} are followed by a backward pass"
                how = "give steps in which each forward pass has its own before the next."
                raise PlanError(f"{path}: {name} looks tokens up {counts}: {how}")
        number = np.searchsorted(np.sort(self.began[lookups]), self.began, side="right") - 1
        return np.where(self.forward, number, -1)


def attribute(model: Model, paths: Sequence[Path], tp: int = 1, mbs: int = 1) -> Attributed:
    """Attribute the compute time of ``.et`` files to the kinds of unit.

    Raises ``PlanError``, also for a trace of another model, tp or micro-batch, and for ranks of several runs.
    """
    if model.encoder_layers is not None or model.experts:
        what = "costs of an encoder-decoder, or of layers with experts, can't be taken from traces"
        raise PlanError(f"model {model.name}: {what}.")
    sums = np.zeros((2, 3))
    micro_batches = unattributed = total = 0.0
    ranks, worlds = set[int](), set[int]()
    notes: dict[str, None] = {}
    find_rank_sets(map(str, paths))  # refuses files that aren't those of one finished conversion
    for path in paths:
        trace = et_file.read(path)
        operators = operators_of(trace, str(path))
        rank, world = trace.metadata_int("rank"), trace.metadata_int("world_size")
        if rank is None or world is None:
            raise PlanError(f"{path}: its rank or world size is not in it: convert the traces again.")
        worlds.add(world)
        if rank in ranks or len(worlds) > 1:
            raise PlanError(f"{path}: rank {rank} of {world}: give each rank of one run once.")
        ranks.add(rank)
        steps = _Steps(operators, path)
        rows, count, own_notes = _checked(model, operators, steps, path, tp, mbs)
        notes.update(dict.fromkeys(own_notes))
        on_device = np.isin(steps.kinds, DEVICE)
        counts = on_device if on_device.any() else np.isin(steps.kinds, COMPUTE)
        unit = _unit(operators, rows)
        seconds = trace.duration_micros.astype(np.int64) / 1e6 / len(paths)
        for phase, within in enumerate((steps.forward, steps.backward)):
            weights = seconds * (counts & within)
            sums[phase] += np.bincount(unit, weights, minlength=3) / count
        per_step = seconds / len(steps.names)
        unattributed += per_step[counts & ~steps.forward & ~steps.backward].sum()
        total += per_step[counts].sum()
        micro_batches += count / len(steps.names) / len(paths)
    if len(paths) < (world := min(worlds)):
        notes[f"{len(paths)} of the run's {world} ranks are given, and taken for all."] = None
    forward, backward = (KindSeconds(*row.tolist()) for row in sums)
    return Attributed(forward, backward, micro_batches, float(unattributed), float(total), tuple(notes))


def _checked(
    model: Model, operators: Operators, steps: _Steps, path: Path, tp: int, mbs: int
) -> tuple[int, int, list[str]]:
    """The words of the vocabulary on this rank, the number of forward passes, and what was assumed.

    Raises ``PlanError`` where shapes of the operators show that the trace is of another model.
    """
    own = f"{path}: taken as {model.name}"
    part = "this rank holds a part of a pipeline; give traces of a run with one pipeline stage."
    shapes = {row: operators.shapes(row) for row in np.flatnonzero(steps.forward).tolist()}
    tables = {
        row: (*found[0], *found[1])
        for row, found in shapes.items()
        if operators.name[row] == "aten::embedding" and [len(shape) for shape in found[:2]] == [2, 2]
    }
    if not tables:
        raise PlanError(f"{own}: no embedding in it: {part}")
    rows, hidden, batch, seq = table = max(tables.values())
    for what, in_it, expected in (("hidden", hidden, model.hidden), ("seq", seq, model.seq)):
        if in_it != expected:
            raise PlanError(f"{own}: its {what} is {in_it}, the model's {expected}: give the model it is of.")
    padding = rows * tp - model.vocab
    if not 0 <= padding < PADDED * tp:
        raise PlanError(
            f"{own}: its embedding has {rows} rows on each of {tp} tensor-parallel ranks, the model's "
            f"vocabulary {model.vocab}: give the model it is of, and its --tp."
        )
    if batch != mbs:
        raise PlanError(f"{own}: its micro-batches have {batch} sequences: give --mbs {batch}.")
    number = steps.passes(np.array([row for row, found in tables.items() if found[:2] == table[:2]]), path)
    count = int(number.max()) + 1
    products: Counter[Shape] = Counter()
    for row, found in shapes.items():
        at = PRODUCTS.get(operators.name[row], len(found))
        # Of attention's products neither side is as wide as the model.
        if number[row] >= 0 and at < len(found) and len(found[at]) == 2 and hidden in found[at]:
            products[found[at]] += 1
    notes = [f"{padding} rows of its embedding are taken as padding of the vocabulary."] if padding else []
    if not products[hidden, rows]:
        raise PlanError(f"{own}: no head in it (no product with its {rows} words): {part}")
    # Fewer heads of keys than ranks: each rank has one.
    kv = max((model.kv_heads or model.heads) // tp, 1) * model.head_width
    feed = model.ffn_width // tp * (3 if model.gated else 2)
    expected = model.layers * hidden * (2 * (model.width // tp + kv) + feed)
    weights = sum(math.prod(size) * times for size, times in products.items() if size != (hidden, rows))
    # A pooler, and the transform before a BERT's head, are hidden × hidden.
    extra, rest = divmod(weights - count * expected, count * hidden**2)
    if rest or extra not in ((0,) if model.causal else (0, 1, 2)):
        raise PlanError(
            f"{own}: its layers multiply by {weights // count} weights, those of the model by {expected} on "
            f"each of {tp} tensor-parallel ranks: give the model it is of, and its --tp (nothing compiled)."
        )
    if extra:
        notes.append(f"{extra} products of {hidden}x{hidden} that are of no layer count to the layers.")
    unseen = "Not checked, as shapes of weights don't show them: tied, causal, heads and kv_heads."
    return rows, count, [*notes, unseen]


def _unit(operators: Operators, rows: int) -> Array:
    """0 embedding, 1 layer, 2 head for each node; all nodes of one operator are alike.

    rows: words of the vocabulary on this rank.
    """
    trace = operators.trace
    vocabulary = re.compile(rb"(?<!\d)%d(?!\d)" % rows)
    unit = np.ones(len(trace), dtype=np.int64)
    wide = np.zeros(len(trace), dtype=bool)
    if trace.inputs is not None:
        wide[trace.inputs.rows] = [bool(vocabulary.search(shapes)) for shapes in trace.inputs.shapes]
    operator = trace.column("rf_id")
    unit[np.isin(operator, operator[wide & (operator > 0)]) | wide] = 2
    unit[["embedding" in name.lower() for name in operators.name]] = 0
    return unit


def from_traces(
    model: Model, paths: list[Path], gpu_name: str, tp: int, mbs: int
) -> tuple[CostFile, tuple[str, ...]]:
    """Costs as ``attribute`` finds them, for one tensor-parallel degree and micro-batch, and its notes."""
    found = attribute(model, paths, tp, mbs)
    if not found.forward.layer or not found.backward.layer:
        raise PlanError(f"{paths[0]}: no forward and backward pass in it: is it a training step's trace?")
    both = (units._replace(layer=units.layer / model.layers) for units in (found.forward, found.backward))
    forward, backward = (units.of_model(model) for units in both)
    names = ", ".join(path.name for path in paths)
    source = f"From {names}, operators attributed to embedding, layers and head."
    entry = Entry(model.name, gpu_name or "traced", tp, mbs, forward, backward)
    per_step = (
        f"Micro-batches per step: {found.micro_batches:g}; {found.unattributed:.6f} s of computing per step "
        "in no pass (data, clipping, the optimizer) are not in the costs."
    )
    return CostFile(FORMAT, source, {model.name: model}, (entry,)), (per_step, *found.notes)
