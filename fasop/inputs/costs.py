"""Measured costs of a model's units, and what is made of them where something was not measured.

A cost file is JSON: ``format`` 1; ``source``, where the numbers come from; ``models``, the shapes they
were measured with; ``entries``, each ``{model, gpu, tp, mbs, forward, backward}`` in seconds a unit (as
``Model.units`` orders them; ``backward`` null: twice the forward); ``growth``, by model, GPU and kind of
unit (E, T, D for decoder layers, P), how costs grow with the micro-batch b: steps ``[from b, factors,
divisor]``, the product of the factors, times b/divisor where that is not 0. ``growth_hpdc24`` holds what
the published tool does otherwise. ``profile`` writes such files, ``data/costs.json`` is the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from chakra_et import files
from fasop.errors import PlanError, nearest
from fasop.inputs.clusters import Gpu
from fasop.inputs.models import Model
from fasop.memo import memo

PUBLISHED = Path(__file__).parents[1] / "data" / "costs.json"
FORMAT = 1

Growth = dict[str, dict[str, dict[str, list[tuple[float, list[float], float]]]]]

Passes = tuple[list[float], list[float]]  # forward and backward seconds of each unit


@dataclass(frozen=True)
class Entry:
    """Seconds of one micro-batch of ``mbs`` sequences, a unit each."""

    model: str
    gpu: str
    tp: int
    mbs: int
    forward: tuple[float, ...]
    backward: tuple[float, ...] | None = None


@dataclass(frozen=True)
class CostFile:
    """What a cost file holds; ``source`` is one or two sentences."""

    format: int
    source: str
    models: dict[str, Model]
    entries: tuple[Entry, ...]
    growth: Growth | None = None
    growth_hpdc24: Growth | None = None


@dataclass(frozen=True)
class UnitCosts:
    """Seconds a unit, forward and backward, and in ``notes`` what was not measured but modelled."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    notes: tuple[str, ...] = ()


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
        for values in (entry.forward, entry.backward):
            if values is not None and (len(values) != units or min(values) < 0):
                raise PlanError(
                    f"{path}: {entry.model}, {entry.gpu}, tp {entry.tp}: give {units} costs, none below 0."
                )
        if entry.tp < 1 or entry.mbs < 1:
            raise PlanError(f"{path}: entry {entry.model}, {entry.gpu}: tp and mbs must be at least 1.")
    return costs


class Costs:
    """Unit costs for any GPU, tp degree and micro-batch of one model, looked up or modelled."""

    def __init__(self, cost_files: list[CostFile], model: Model, hpdc24: bool = False) -> None:
        """``cost_files``: the later ones win. Raises ``PlanError`` where no file knows the model's costs."""
        self.model = model
        # The published tool's unit is the whole pass, multiplied before anything else.
        self.passes = 3.0 if hpdc24 else 1.0
        wanted = [name for name in (model.name, model.costs) if name]
        known = sorted({entry.model for file in cost_files for entry in file.entries})
        self.name = next((name for name in wanted if name in known), "")
        if not self.name:
            raise PlanError(
                f"no costs for model {model.name}: set 'costs' in the models file, or measure it with "
                f"'python -m fasop profile': {nearest(model.name, known)}"
            )
        self.shape = [file.models[self.name] for file in cost_files if self.name in file.models][-1]
        self.entries: dict[tuple[str, int, int], Entry] = {}
        self.growth: dict[str, dict[str, list[tuple[float, list[float], float]]]] = {}
        for file in cost_files:
            for entry in file.entries:
                if entry.model == self.name:
                    self.entries[entry.gpu, entry.tp, entry.mbs] = entry
            for table in (file.growth, file.growth_hpdc24 if hpdc24 else None):
                for gpu, kinds in (table or {}).get(self.name, {}).items():
                    self.growth[gpu] = {**self.growth.get(gpu, {}), **kinds}

    def known_gpus(self) -> list[str]:
        return sorted({gpu for gpu, _, _ in self.entries})

    def of(self, gpu: Gpu, tp: int, mbs: int) -> UnitCosts:
        """Costs of every unit of the model. Raises ``PlanError`` for a GPU of which nothing is known."""
        return self._of(gpu.like or gpu.name, gpu.name, gpu.speed, tp, mbs)

    @memo
    def _of(self, source: str, gpu: str, speed: float, tp: int, mbs: int) -> UnitCosts:
        degrees = sorted({degree for name, degree, _ in self.entries if name == source})
        if not degrees:
            raise PlanError(
                f"no costs of {self.model.name} on GPU {source!r}: in the cluster file give {gpu} 'like' "
                f"({' or '.join(self.known_gpus())}) and 'speed', or measure it with 'fasop profile'."
            )
        notes = []
        if source != gpu or speed != 1:
            notes.append(f"{gpu}: costs of {source} divided by {speed:g}")
        if self.shape.units != self.model.units or replace(self.shape, name=self.model.name) != replace(
            self.model, costs="", global_batch=self.shape.global_batch
        ):
            notes.append(f"{self.model.name}: costs of {self.name} at as many tokens, by ratio of work")
        # A micro-batch of the model stands for one of as many tokens of the measured shape.
        batch = mbs * self.model.seq / self.shape.seq
        if tp in degrees:
            forward, backward = self._measured(source, tp, batch)
        else:
            forward, backward = self._other_degree(source, degrees, tp, batch)
            notes.append(f"{gpu}: tp {tp} was not measured: costs follow the last measured change of tp")
        ratios = self._ratios()
        return UnitCosts(
            tuple(value * ratio / speed for value, ratio in zip(forward, ratios, strict=True)),
            tuple(value * ratio / speed for value, ratio in zip(backward, ratios, strict=True)),
            tuple(notes),
        )

    def _measured(self, gpu: str, tp: int, batch: float) -> Passes:
        sizes = sorted(size for name, degree, size in self.entries if (name, degree) == (gpu, tp))
        # The largest measured micro-batch that is not above the wanted one, grown from there.
        size = max((size for size in sizes if size <= batch), default=sizes[0])
        entry = self.entries[gpu, tp, size]
        rules = self.growth.get(gpu, {})
        kinds = _kinds(self.shape)
        growth = {}
        for kind in set(kinds):
            steps = rules.get(kind)
            growth[kind] = _grow(steps, batch) / _grow(steps, size) if steps else batch / size
        forward = [
            self.passes * value * growth[kind] for value, kind in zip(entry.forward, kinds, strict=True)
        ]
        if entry.backward is None:
            backward = [2 * value for value in forward]
        else:
            backward = [value * growth[kind] for value, kind in zip(entry.backward, kinds, strict=True)]
        return self._to_units(forward), self._to_units(backward)

    def _other_degree(self, gpu: str, degrees: list[int], tp: int, batch: float) -> Passes:
        """Degree ``tp`` from the nearest measured one: each doubling changes a unit as the last one did."""
        near = max((degree for degree in degrees if degree < tp), default=degrees[0])
        base = self._measured(gpu, near, batch)
        below = [degree for degree in degrees if degree < near]
        if not below or tp < near:
            return base
        before = self._measured(gpu, below[-1], batch)
        power = math.log(tp / near) / math.log(near / below[-1])
        forward, backward = (
            [now * (now / then) ** power if then else now for now, then in zip(a, b, strict=True)]
            for a, b in zip(base, before, strict=True)
        )
        return forward, backward

    def _to_units(self, values: list[float]) -> list[float]:
        """Costs of the measured shape's units given to the model's, which may have more or fewer layers."""
        if self.shape.units == self.model.units:
            return values
        by_kind: dict[str, list[float]] = {}
        for kind, value in zip(_kinds(self.shape), values, strict=True):
            by_kind.setdefault(kind, []).append(value)
        result = []
        for kind in _kinds(self.model):
            source = by_kind.get(kind) or by_kind["T" if kind == "D" else "E"]
            result.append(source[len(source) // 2])
        return result

    def _ratios(self) -> list[float]:
        """Work a token of each unit, over that of the measured shape.

        Layer: 24h² + 4sh multiply-adds a token (projections; attention), E: h, P: hV.
        """
        model, shape = self.model, self.shape

        def layer(m: Model) -> float:
            return 24 * m.hidden**2 + 4 * m.seq * (m.d_kv * m.heads if m.d_kv else m.hidden)

        ratio = {"T": layer(model) / layer(shape), "E": model.hidden / shape.hidden}
        ratio["D"] = ratio["T"]
        ratio["P"] = model.hidden * model.vocab / (shape.hidden * shape.vocab)
        return [ratio[kind] for kind in _kinds(model)]


def _kinds(model: Model) -> str:
    """``Model.units`` with D for the layers of a decoder that has an encoder before it."""
    if model.encoder_layers is None:
        return model.units
    head = 1 + model.encoder_layers
    return model.units[: head + 1] + "D" * (model.layers - model.encoder_layers)


def _grow(steps: list[tuple[float, list[float], float]], batch: float) -> float:
    scale = 1.0
    for begin, factors, divisor in steps:
        if batch >= begin or begin == steps[0][0]:
            scale = 1.0
            for factor in factors:
                scale *= factor
            if divisor:
                scale *= batch / divisor
    return scale
