"""Layer costs learned from measured steps, so that estimates of these runs give what was measured.

Costs start as computed from the GPU's datasheet. Two factors, of layers and of embedding with head, correct
them for each tensor-parallel degree and micro-batch. Their logarithms are Gaussian around 0 before any run is
seen, alike for neighbours, and a run's logarithm errs by ``NOISE``: few runs move a factor little, and one
without runs follows its neighbours (Rasmussen and Williams 2006, "Gaussian Processes for Machine Learning").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chakra_et.text import plural
from fasop.errors import PlanError
from fasop.exact.recipes import with_host
from fasop.exact.training_runs import Run, predicted
from fasop.exact.unit_times import Compute
from fasop.inputs.costs import FORMAT, CostFile, Entry
from fasop.inputs.models import Model
from fasop.plans.layout import Layout

# Standard deviations of a factor's logarithm: what all of a model on a GPU have in common, and its own part,
# of which a neighbour with twice the degree, or four times the micro-batch, has 1/e.
COMMON, OWN, NOISE = 0.1, 0.15, 0.05
NUDGE = 0.05  # of a factor's logarithm, by which its effect is measured
# What decides a layer's kernels: a cost file holds costs of one way to run them.
SAME = ("attention", "precision", "engine", "again", "cuda_graphs", "adapters", "unfused")
Pairs = Sequence[tuple[Run, Layout]]


class _Cell(NamedTuple):
    model: str
    gpu: str
    tp: int
    mbs: int


def from_runs(pairs: Pairs, name: str) -> tuple[CostFile, list[str]]:
    """Costs learned from runs of a file, each with its layout; and lines about each factor and the errors.

    Raises ``PlanError`` where runs differ in more than the layout.
    """
    models, own = _models(pairs), [_cells(layout) for _, layout in pairs]
    cells = sorted({near for cell in set().union(*own) for near in _neighbours(cell, models[cell.model])})
    options = pairs[0][0].options
    gpus = {gpu.costs_of: replace(gpu, speed=1.0) for _, layout in pairs for gpu in layout.cluster.gpus}
    computed = []
    for cell in cells:
        units = Compute([], models[cell.model], options).of(gpus[cell.gpu], cell.tp, cell.mbs)
        computed.append(with_host(np.array([units.forward, units.backward]), units.hosts))

    def costs(logs: np.ndarray) -> CostFile:
        """By logarithms of the factors [part and cell]."""
        factors, entries = np.exp(logs.reshape(2, -1)), []
        for at, cell in enumerate(cells):
            scale = np.array([factors[int(kind in "EP"), at] for kind in models[cell.model].kinds])
            forward, backward = (tuple(float(f"{one:.5g}") for one in way) for way in computed[at] * scale)
            entries.append(Entry(*cell, forward, backward))
        source = f"Learned from {len(pairs)} steps of {Path(name).name} by 'fasop profile --from-runs'."
        how: dict[str, Any] = {"precision": options.precision, "attention": options.attention}
        return CostFile(FORMAT, source, models, tuple(entries), **how)

    def steps(logs: np.ndarray, of: Pairs = pairs) -> np.ndarray:
        file = (costs(logs),)
        return np.log([predicted(run._replace(costs=file), layout)[0] for run, layout in of])

    none = np.zeros(2 * len(cells))
    base, measured = steps(none), np.log([run.seconds for run, _ in pairs])
    slopes = np.zeros((len(pairs), len(none)))  # how much each factor moves the steps
    for at in range(len(none)):
        if rows := [row for row, each in enumerate(own) if cells[at % len(cells)] in each]:
            moved = steps(NUDGE * (np.arange(len(none)) == at), [pairs[row] for row in rows])
            slopes[rows, at] = (moved - base[rows]) / NUDGE
    # How the factors' logarithms vary together before any run is seen.
    at_log = np.log2([(cell.tp, math.sqrt(cell.mbs)) for cell in cells])
    alike = np.array([[one[:2] == other[:2] for other in cells] for one in cells])
    apart = np.abs(at_log[:, None] - at_log).sum(axis=2)
    prior = np.kron(np.eye(2), alike * (COMMON**2 + OWN**2 * np.exp(-apart)))

    def learned(seen: np.ndarray) -> np.ndarray:
        """Logarithms of the factors by some of the runs."""
        gain = slopes[seen] @ prior
        noise = NOISE**2 * np.eye(len(gain))
        found: np.ndarray = gain.T @ np.linalg.solve(gain @ slopes[seen].T + noise, (measured - base)[seen])
        return found

    logs, without = learned(np.ones(len(pairs), dtype=bool)), base.copy()
    degrees = [[[one.tp for one in stage.replicas] for stage in layout.stages] for _, layout in pairs]
    keys = np.array([run.left_out_with or str(tp) for (run, _), tp in zip(pairs, degrees, strict=True)])
    for key in set(keys.tolist()):
        without[keys == key] += slopes[keys == key] @ learned(keys != key)
    lines = []
    for cell, (layers, others) in zip(cells, np.exp(logs.reshape(2, -1).T), strict=True):
        count = sum(cell in each for each in own)
        what = f"layers × {layers:.2f}, embedding and head × {others:.2f}"
        by = f"from {plural(count, 'run')}" if count else "by its neighbours"
        lines.append(f"{cell.model} on {cell.gpu}, tp {cell.tp}, mbs {cell.mbs}: {what}, {by}")
    before, after, out_of_it = (abs(np.expm1(x - measured)).mean() for x in (base, steps(logs), without))
    off = f"{before:.1%} as computed, {after:.1%} as learned, {out_of_it:.1%} without a layout's own runs"
    return costs(logs), [*lines, f"off on average: {off}"]


def _models(pairs: Pairs) -> dict[str, Model]:
    """The models by their names, with one layer of each kind. Raises ``PlanError``."""
    if not pairs:
        raise PlanError("there is no run to learn from.")
    models: dict[str, Model] = {}
    for run, layout in pairs:
        for name in SAME:
            if getattr(run.options, name) != getattr(pairs[0][0].options, name):
                raise PlanError(f"{run.name}: {name} isn't the first run's: give runs of one kind.")
        depth = 1 if layout.model.encoder_layers is None else 2  # with as many costs per unit as kinds
        shallow: dict[str, Any] = {"layers": depth, "encoder_layers": None if depth == 1 else 1}
        model = replace(layout.model, **shallow, global_batch=1, parameters=0)
        if models.setdefault(model.name, model) != model:
            raise PlanError(f"{run.name}: {model.name} has another size or sequence length in another run.")
        if any(one.ep > 1 for stage in layout.stages for one in stage.replicas):
            raise PlanError(f"{run.name}: costs of experts that ranks share can't be learned.")
    return models


def _cells(layout: Layout) -> set[_Cell]:
    name, of = layout.model.name, layout.cluster.gpu
    replicas = [one for stage in layout.stages for one in stage.replicas]
    return {_Cell(name, of(part.gpu).costs_of, one.tp, one.mbs) for one in replicas for part in one.group}


def _neighbours(cell: _Cell, model: Model) -> list[_Cell]:
    """A cell, and those with half or twice its degree or micro-batch."""
    degrees = [tp for tp in (cell.tp // 2, cell.tp, 2 * cell.tp) if tp and model.most_tp % tp == 0]
    batches = [mbs for mbs in (cell.mbs // 2, cell.mbs, 2 * cell.mbs) if mbs]
    return [cell._replace(tp=tp, mbs=mbs) for tp in degrees for mbs in batches]
