"""Cost files: measured seconds of a model's units.

A cost file is JSON: ``format`` 1; ``source``, where the numbers come from; ``models``, the shapes they were
measured with; ``entries``, each ``{model, gpu, tp, mbs, forward, backward}`` in seconds per unit (as
``Model.units`` orders them; ``backward`` null: twice the forward), and where known ``update``, seconds of the
optimizer, ``kernels``, forward and backward where CUDA graphs start them, ``parameters`` and ``activations``,
bytes per GPU of one sequence; ``growth``, by model, GPU and kind of unit (E, T, D for decoder layers, P), how
costs grow with the micro-batch b: steps ``[from b, factors, divisor]``, the product of the factors, times
b/divisor where that is not 0. ``growth_hpdc24`` holds what the published tool does otherwise.
``collectives``: whether entries with tp above 1 hold the tensor-parallel collectives, and if so ``nodes``
gives what joined the GPUs where they were measured. ``precision`` and ``attention``: how the model ran, as in
``Options`` ("": not known). ``profile`` writes such files, ``data/costs.json`` is the default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from chakra_et import files
from fasop.errors import PlanError, nearest
from fasop.inputs import kinds
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.inputs.read_files import read_json

PUBLISHED = Path(__file__).parents[1] / "data" / "costs.json"
FORMAT = 1

Steps = list[tuple[kinds.FactorOrZero, list[kinds.Factor], kinds.FactorOrZero]]
Growth = dict[str, dict[str, dict[str, Steps]]]


@dataclass(frozen=True)
class Entry:
    """Seconds per unit of one micro-batch of ``mbs`` sequences; ``CostFile`` explains the rest."""

    model: str
    gpu: str
    tp: kinds.Count
    mbs: kinds.Count
    forward: tuple[kinds.SecondsPerUnit, ...]
    backward: tuple[kinds.SecondsPerUnit, ...] | None = None
    update: tuple[kinds.SecondsPerUnit, ...] | None = None
    parameters: tuple[kinds.UnitBytes, ...] | None = None
    activations: tuple[kinds.UnitBytes, ...] | None = None
    kernels: tuple[tuple[kinds.SecondsPerUnit, ...], tuple[kinds.SecondsPerUnit, ...]] | None = None


@dataclass(frozen=True)
class MeasuredOn:
    """The link between the GPUs of the node that a GPU was measured in, as in a cluster file.

    gpus: in that node (0: not known, or of no effect).
    """

    intra_bandwidth: kinds.Bandwidth
    shared_bus: bool = False
    gpus: int = 0


@dataclass(frozen=True)
class CostFile:
    """What a cost file holds; ``source`` is one or two sentences."""

    format: int
    source: str
    models: dict[str, Model]
    entries: tuple[Entry, ...]
    growth: Growth | None = None
    growth_hpdc24: Growth | None = None
    collectives: Literal["excluded", "included"] = "excluded"
    nodes: dict[str, MeasuredOn] = field(default_factory=dict)
    precision: str = ""
    attention: Literal["", "unfused", "flash", "flash2"] = ""


def write_costs(path: str | Path, costs: CostFile) -> None:
    """Write a cost file. Raises ``OSError``."""
    files.write_text(Path(path), msgspec.json.format(msgspec.json.encode(costs), indent=1).decode() + "\n")


def read_costs(path: str | Path = PUBLISHED) -> CostFile:
    """Read a cost file. Raises ``PlanError``."""
    costs = read_json(path, CostFile, "a cost file", "make one with 'python -m fasop profile'")
    if costs.format != FORMAT:
        raise PlanError(f"{path}: costs of format {costs.format}: this program reads format {FORMAT}.")
    for entry in costs.entries:
        where = f"{path}: {entry.model}, {entry.gpu}, tp {entry.tp}"
        if entry.model not in costs.models:
            raise PlanError(f"{path}: an entry is of model {entry.model!r}, which isn't under 'models'.")
        units = costs.models[entry.model].units
        bytes_, alone = (entry.parameters, entry.activations), entry.kernels or ()
        for values in (entry.forward, entry.backward, entry.update, *bytes_, *alone):
            if values is not None and len(values) != len(units):
                raise PlanError(f"{where}: {len(values)} costs for {len(units)} units: give one of each.")
        if not min(cost for kind, cost in zip(units, entry.forward, strict=True) if kind == "T"):
            raise PlanError(f"{where}: forward: a layer takes 0 s: give what was measured.")
    return costs


def growth_factor(steps: Steps, batch: float) -> float:
    """How much longer a micro-batch takes than one of one sequence, by a ``growth`` entry."""
    scale = 1.0
    for begin, factors, divisor in steps:
        if batch >= begin or begin == steps[0][0]:
            scale = math.prod(factors) * (batch / divisor if divisor else 1.0)
    return scale


def other_depth(measured: Model, values: tuple[float, ...], wanted: Model) -> list[float]:
    """Values of one model's units given to those of another, which may have more or fewer layers.

    Each unit takes the middle value of its kind.
    """
    if measured.units == wanted.units:
        return list(values)
    by_kind: dict[str, list[float]] = {}
    for kind, value in zip(measured.kinds, values, strict=True):
        by_kind.setdefault(kind, []).append(value)
    sources = [by_kind.get(kind) or by_kind["T" if kind in "DF" else "E"] for kind in wanted.kinds]
    return [source[len(source) // 2] for source in sources]


def work_ratios(measured: Model, wanted: Model) -> list[float]:
    """Work per token of each of a model's units, over that of a measured shape whose layers are as wide.

    Layer: 24h² + 4sh multiply-adds per token (projections; attention), E: h, P: hV.
    """
    new, old = (24 * each.hidden**2 + 4 * each.seq * each.width for each in (wanted, measured))
    ratio = {"E": 1.0, "P": wanted.vocab / measured.vocab}
    return [ratio.get(kind, new / old) for kind in wanted.kinds]


def is_measured(cost_files: Sequence[CostFile], model: Model, clusters: Sequence[Cluster]) -> bool:
    """Whether a file has the model's costs on one of the GPUs, with attention that isn't fused."""
    plain = [file for file in cost_files if file.attention in ("", "unfused")]
    known = {(entry.model, entry.gpu) for file in plain for entry in file.entries}
    gpus = {gpu.costs_of for cluster in clusters for gpu in cluster.gpus}
    return any((of, gpu) in known for of in (model.name, model.costs) for gpu in gpus)


def check_cost_name(cost_files: list[CostFile], model: Model) -> None:
    """Raises ``PlanError`` where a model names costs that no file has."""
    known = {entry.model for file in cost_files for entry in file.entries}
    if model.costs and model.costs not in known:
        how = f"give the file with --costs, or {nearest(model.costs, known)}"
        raise PlanError(f"model {model.name}: costs: no cost file has {model.costs!r}: {how}")
