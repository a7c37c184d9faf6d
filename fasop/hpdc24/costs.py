"""Unit costs as the published tool looks them up: measured at micro-batch 1, grown by its factors.

Source: FASOP (HPDC 2024), as its published tool applies them. Other GPUs, widths and tensor-parallel degrees
than it has are scaled, which ``notes`` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fasop.errors import PlanError, nearest
from fasop.inputs.clusters import Gpu
from fasop.inputs.costs import CostFile, Entry, Steps, cost_name, growth_factor, other_depth, work_ratios
from fasop.inputs.models import Model
from fasop.memo import memo

PASSES = 3.0  # the tool's unit is a whole pass, multiplied before anything else


@dataclass(frozen=True)
class PublishedUnits:
    """Seconds per unit of a whole pass, and in ``notes`` what was not measured."""

    seconds: tuple[float, ...]
    notes: tuple[str, ...] = ()


class PublishedCosts:
    """Unit costs for any GPU, tensor-parallel degree and micro-batch of one model."""

    def __init__(self, cost_files: list[CostFile], model: Model) -> None:
        """``cost_files``: the later ones win. Raises ``PlanError`` where no file has the model's costs."""
        self.model = model
        self.name = cost_name(cost_files, model)
        if not self.name:
            known = sorted({entry.model for file in cost_files for entry in file.entries})
            raise PlanError(
                f"no costs for model {model.name}: set 'costs' in the models file, measure it with "
                f"'python -m fasop profile', or use --cost-model exact: {nearest(model.name, known)}"
            )
        self.shape = [file.models[self.name] for file in cost_files if self.name in file.models][-1]
        self.entries: dict[tuple[str, int, int], Entry] = {}
        self.growth: dict[str, dict[str, Steps]] = {}
        for file in cost_files:
            for entry in file.entries:
                if entry.model == self.name:
                    self.entries[entry.gpu, entry.tp, entry.mbs] = entry
            for table in (file.growth, file.growth_hpdc24):
                for gpu, kinds in (table or {}).get(self.name, {}).items():
                    self.growth[gpu] = {**self.growth.get(gpu, {}), **kinds}

    def of(self, gpu: Gpu, tp: int, mbs: int) -> PublishedUnits:
        """Costs of every unit of the model. Raises ``PlanError`` for a GPU without costs."""
        return self._of(gpu.costs_of, gpu.name, gpu.speed, tp, mbs)

    @memo
    def _of(self, source: str, gpu: str, speed: float, tp: int, mbs: int) -> PublishedUnits:
        degrees = sorted({degree for name, degree, _ in self.entries if name == source})
        if not degrees:
            known = " or ".join(sorted({name for name, _, _ in self.entries}))
            raise PlanError(
                f"no costs of {self.model.name} on GPU {source!r}: in the cluster file give {gpu} 'like' "
                f"({known}) and 'speed', or measure it with 'fasop profile'."
            )
        notes = []
        if source != gpu or speed != 1:
            notes.append(f"{gpu}: costs of {source} divided by {speed:g}")
        if _sizes(self.shape) != _sizes(self.model):
            notes.append(f"{self.model.name}: costs of {self.name} at as many tokens, by ratio of work")
        # A micro-batch of the model stands for one of as many tokens of the measured shape.
        batch = mbs * self.model.seq / self.shape.seq
        if tp in degrees:
            values = self._measured(source, tp, batch)
        else:
            values = self._other_degree(source, degrees, tp, batch)
            notes.append(f"{gpu}: tp {tp} was not measured: costs follow the last measured change of tp")
        ratios = work_ratios(self.shape, self.model)
        seconds = tuple(value * ratio / speed for value, ratio in zip(values, ratios, strict=True))
        return PublishedUnits(seconds, tuple(notes))

    def _measured(self, gpu: str, tp: int, batch: float) -> list[float]:
        sizes = sorted(size for name, degree, size in self.entries if (name, degree) == (gpu, tp))
        # The largest measured micro-batch that is not above the wanted one, grown from there.
        size = max((size for size in sizes if size <= batch), default=sizes[0])
        rules = self.growth.get(gpu, {})
        growth = {}
        for kind in set(self.shape.kinds):
            steps = rules.get(kind)
            growth[kind] = growth_factor(steps, batch) / growth_factor(steps, size) if steps else batch / size
        forward = self.entries[gpu, tp, size].forward
        grown = (PASSES * value * growth[kind] for value, kind in zip(forward, self.shape.kinds, strict=True))
        return other_depth(self.shape, tuple(grown), self.model)

    def _other_degree(self, gpu: str, degrees: list[int], tp: int, batch: float) -> list[float]:
        """Degree ``tp`` from the nearest measured one: each doubling changes a unit as the last one did."""
        near = max((degree for degree in degrees if degree < tp), default=degrees[0])
        base = self._measured(gpu, near, batch)
        below = [degree for degree in degrees if degree < near]
        if not below or tp < near:
            return base
        before = self._measured(gpu, below[-1], batch)
        power = math.log(tp / near) / math.log(near / below[-1])
        return [now * (now / then) ** power if then else now for now, then in zip(base, before, strict=True)]


def _sizes(model: Model) -> Model:
    """What of a model costs depend on."""
    return replace(model, name="", costs="", global_batch=1, causal=True)
