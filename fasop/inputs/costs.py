"""Cost files: measured seconds of a model's units.

A cost file is JSON: ``format`` 1; ``source``, where the numbers come from; ``models``, the shapes they were
measured with; ``entries``, each ``{model, gpu, tp, mbs, forward, backward}`` in seconds per unit (as
``Model.units`` orders them; ``backward`` null: twice the forward), and where known ``update``, seconds of the
optimizer, ``parameters`` and ``activations``, bytes per GPU of one sequence; ``growth``, by model, GPU and
kind of unit (E, T, D for decoder layers, P), how costs grow with the micro-batch b: steps ``[from b, factors,
divisor]``, the product of the factors, times b/divisor where that is not 0. ``growth_hpdc24`` holds what the
published tool does otherwise. ``collectives``: whether entries with tp above 1 hold the tensor-parallel
collectives, and if so ``nodes`` gives what joined the GPUs where they were measured. ``profile`` writes such
files, ``data/costs.json`` is the default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from chakra_et import files
from fasop.errors import PlanError
from fasop.inputs.models import Model

PUBLISHED = Path(__file__).parents[1] / "data" / "costs.json"
FORMAT = 1

Steps = list[tuple[float, list[float], float]]
Growth = dict[str, dict[str, dict[str, Steps]]]


@dataclass(frozen=True)
class Entry:
    """Seconds per unit of one micro-batch of ``mbs`` sequences; ``CostFile`` explains the rest."""

    model: str
    gpu: str
    tp: int
    mbs: int
    forward: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    update: tuple[float, ...] | None = None
    parameters: tuple[float, ...] | None = None
    activations: tuple[float, ...] | None = None


@dataclass(frozen=True)
class MeasuredOn:
    """The link between the GPUs of the node that a GPU was measured in, as in a cluster file."""

    intra_bandwidth: float
    shared_bus: bool = False


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


def write_costs(path: str | Path, costs: CostFile) -> None:
    """Write a cost file. Raises ``OSError``."""
    files.write_text(Path(path), msgspec.json.format(msgspec.json.encode(costs), indent=1).decode() + "\n")


def read_costs(path: str | Path = PUBLISHED) -> CostFile:
    """Read a cost file. Raises ``PlanError``."""
    try:
        costs = msgspec.json.decode(Path(path).read_bytes(), type=CostFile)
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{path}: not a cost file ({error}): make one with 'python -m fasop profile'."
        ) from None
    if costs.format != FORMAT:
        raise PlanError(f"{path}: costs of format {costs.format}: this program reads format {FORMAT}.")
    for entry in costs.entries:
        if entry.model not in costs.models:
            raise PlanError(
                f"{path}: an entry is for model {entry.model!r}, whose shape is not under 'models'."
            )
        units = len(costs.models[entry.model].units)
        for values in (entry.forward, entry.backward, entry.update, entry.parameters, entry.activations):
            if values is not None and (len(values) != units or min(values) < 0):
                raise PlanError(
                    f"{path}: {entry.model}, {entry.gpu}, tp {entry.tp}: give {units} costs, none below 0."
                )
        if max(entry.forward) > 1e4:
            raise PlanError(
                f"{path}: {entry.model}, {entry.gpu}, tp {entry.tp}: a unit takes {max(entry.forward):g}: "
                "expected seconds per unit, below 10000."
            )
        if entry.tp < 1 or entry.mbs < 1:
            raise PlanError(f"{path}: entry {entry.model}, {entry.gpu}: tp and mbs must be at least 1.")
    return costs


def growth_factor(steps: Steps, batch: float) -> float:
    """How much longer a micro-batch takes than one of one sequence, by a ``growth`` entry."""
    scale = 1.0
    for begin, factors, divisor in steps:
        if batch >= begin or begin == steps[0][0]:
            scale = 1.0
            for factor in factors:
                scale *= factor
            if divisor:
                scale *= batch / divisor
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
    result = []
    for kind in wanted.kinds:
        source = by_kind.get(kind) or by_kind["T" if kind == "D" else "E"]
        result.append(source[len(source) // 2])
    return result


def work_ratios(measured: Model, wanted: Model) -> list[float]:
    """Work per token of each of a model's units, over that of the measured shape's.

    Layer: 24h² + 4sh multiply-adds per token (projections; attention), E: h, P: hV.
    """

    def layer(model: Model) -> float:
        return 24 * model.hidden**2 + 4 * model.seq * (
            model.d_kv * model.heads if model.d_kv else model.hidden
        )

    ratio = {"T": layer(wanted) / layer(measured), "E": wanted.hidden / measured.hidden}
    ratio["D"] = ratio["T"]
    ratio["P"] = wanted.hidden * wanted.vocab / (measured.hidden * measured.vocab)
    return [ratio[kind] for kind in wanted.kinds]


def cost_name(cost_files: list[CostFile], model: Model) -> str:
    """The name under which some file has costs for a model, "" for none."""
    known = {entry.model for file in cost_files for entry in file.entries}
    return next((name for name in (model.name, model.costs) if name in known), "")
