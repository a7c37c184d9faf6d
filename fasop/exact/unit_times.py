"""Seconds of a model's units on a GPU: measured where a cost file has them, else computed.

Measured costs are used for the model and GPU that they are from, at any depth, and for models whose layers
have the same widths; between measured micro-batches they are interpolated. They are never carried over to
layers of other widths: those are computed. What was not measured is in ``notes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from chakra_et.cost import gpus
from fasop.errors import PlanError, nearest
from fasop.exact.recipes import CALLED, guessed, hardware, host_seconds, kernel_seconds
from fasop.inputs.clusters import Gpu
from fasop.inputs.costs import CostFile, Entry, Steps, growth_factor, other_depth, work_ratios
from fasop.inputs.models import LAYERS, Model
from fasop.plans.options import NARROW, Options

# Settings of a model that change no layer's work: other depths have the same layers.
_NO_WORK = {"name", "costs", "global_batch", "parameters", "layers", "encoder_layers"}


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds per unit [unit]: forward, backward, the part of the forward that selective recomputation runs
    again, and the optimizer's update (None: not measured). has_collectives: the tensor-parallel collectives
    of the node they were measured in are in them. least: forward and backward [2, unit] where kernels, not
    their launches, decide. notes: what was not measured. hosts: in which a host starts kernels
    [2, unit], 0 where forward and backward were measured with it.
    """

    forward: np.ndarray
    backward: np.ndarray
    scores: np.ndarray
    update: np.ndarray | None
    has_collectives: bool
    least: np.ndarray
    notes: tuple[str, ...]
    hosts: np.ndarray = field(default_factory=lambda: np.zeros(1))


@dataclass(frozen=True)
class _Source:
    """One cost file's entries for the model, by GPU, tp and micro-batch."""

    file: CostFile
    shape: Model
    entries: dict[tuple[str, int, int], Entry]

    def degrees(self, gpu: str) -> list[int]:
        return sorted({tp for name, tp, _ in self.entries if name == gpu})

    def is_node(self, gpu: Gpu, size: int) -> bool:
        """Whether the costs of a GPU were measured in the same kind of node: one with the same link between
        its GPUs, and as many of them (``size``, 0 for groups over several nodes) where they share a bus.
        """
        node = self.file.nodes.get(gpu.costs_of)
        if node is None or not size or node.shared_bus != gpu.shared_bus:
            return False
        is_alike = 0.9 < node.intra_bandwidth / gpu.intra_bandwidth < 1.1
        return is_alike and (not gpu.shared_bus or node.gpus in (0, size))

    def sizes(self, gpu: str, tp: int) -> list[int]:
        return sorted(size for name, degree, size in self.entries if (name, degree) == (gpu, tp))

    def growth(self, gpu: str) -> dict[str, Steps] | None:
        return (self.file.growth or {}).get(self.shape.name, {}).get(gpu)


class Compute:
    """Unit costs of one model, run one way, for any GPU, tensor-parallel degree and micro-batch."""

    def __init__(self, cost_files: list[CostFile], model: Model, options: Options) -> None:
        """``cost_files``: the later ones win."""
        self.model, self.options = model, options
        self.skipped = ""
        self.sources = []
        for file in cost_files:
            for name in (model.name, model.costs):
                entries = {(e.gpu, e.tp, e.mbs): e for e in file.entries if e.model == name}
                if not entries:
                    continue
                if _widths(file.models[name]) == _widths(model):
                    self.sources.append(_Source(file, file.models[name], entries))
                else:
                    self.skipped = f"{model.name}: costs of {name} are for layers of other widths"
                break

    def of(self, kind: Gpu, tp: int, mbs: int, ep: int = 1, node: int = 0) -> UnitSeconds:
        """Costs of every unit. Raises ``PlanError`` for a GPU that is neither measured nor known.

        node: GPUs of the node that holds a whole tensor-parallel group; 0 where a group spans several.
        """
        gpu, name, speed = kind.costs_of, kind.name, kind.speed
        source = next((each for each in reversed(self.sources) if each.degrees(gpu)), None)
        source = None if self.options.adapters else source  # costs are those of training all weights
        slower = f" divided by {speed:g}" if speed != 1 else ""
        notes = () if gpu == name and not slower else (f"{name}: costs of {gpu}{slower}",)
        degrees, included = [], False
        if source is not None and ep == 1:
            degrees, included = source.degrees(gpu), source.file.collectives == "included"
            if tp > 1 and included and not (speed == 1 and source.is_node(kind, node)):
                # What holds the collectives of one node is no figure for another, nor for faster GPUs.
                notes = (*notes, f"{name}: costs with tp above 1 were measured in another kind of node")
                degrees, included = [1] if 1 in degrees else [], False
        if source is not None and degrees:
            found = self._from_source(source, gpu, tp, mbs, degrees)
        else:
            found = self._computed(gpu, name, tp, mbs, ep)
        update = None if found.update is None else found.update / speed
        each = (found.forward / speed, found.backward / speed, found.scores / speed, update)
        kernels, notes = found.least / speed, (*notes, *found.notes)
        return UnitSeconds(*each, included and tp > 1, kernels, notes, found.hosts)

    def sizes(self, gpu: Gpu, tp: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Measured parameters, and activation bytes per sequence, of each unit on one GPU."""
        for source in reversed(self.sources):
            for (name, degree, _), entry in source.entries.items():
                if (name, degree) == (gpu.costs_of, tp) and entry.parameters and entry.activations:
                    return np.array(entry.parameters), np.array(entry.activations)
        return None

    def _computed(self, gpu: str, name: str, tp: int, mbs: int, ep: int) -> UnitSeconds:
        of = hardware(gpu)
        if of is None:
            measured = {entry for source in self.sources for entry, _, _ in source.entries}
            near = nearest(gpu, {*gpus.names(), *CALLED, *measured})
            raise PlanError(
                f"no costs of {self.model.name} on GPU {gpu!r}: in the cluster file give {name} 'like' (a "
                f"GPU or the file of a datasheet) and 'speed', or measure it with 'fasop profile': {near}"
            )
        gpu = Path(gpu).name  # of a datasheet
        if (way := self.options.precision) in NARROW and (peak := NARROW[way][1]) not in of.peaks:
            raise PlanError(f"{gpu} has no {way} products (no {peak} peak): plan another precision.")
        notes = [f"{self.model.name} on {gpu}: not measured, computed by the model of the GPU"]
        notes += [text for text in (self.skipped, self.model.remark) if text]
        notes += ["the host's part in the optimizer is a guess: no run shows it"] * self.options.offload
        unset = guessed(of, self.model, self.options)
        if unset:
            each = ", ".join(f"{part} {factor:.2g} ×" for part, factor in unset.items())
            alone = "how much longer kernels take in training than alone"
            notes.append(f"{gpu}: no published run of this kind shows {alone}; assumed: {each}")
        forward, backward, scores = kernel_seconds(of, self.model, tp, mbs, self.options, ep)
        least, hosts = np.array([forward, backward]), host_seconds(self.model, tp, mbs, self.options, ep)
        return UnitSeconds(forward, backward, scores, None, False, least, tuple(notes), hosts)

    def _from_source(self, source: _Source, gpu: str, tp: int, mbs: int, degrees: list[int]) -> UnitSeconds:
        model, shape = self.model, source.shape
        notes = []
        names = {each.name for each in fields(Model)} - _NO_WORK
        if any(getattr(shape, name) != getattr(model, name) for name in names):
            notes.append(f"{model.name}: costs of {shape.name} at as many tokens, by ratio of work")
        # A micro-batch of the model stands for one of as many tokens of the measured shape.
        batch = mbs * model.seq / shape.seq
        if tp in degrees:
            rows = _grown(source, gpu, tp, batch)
        else:
            rows, note = self._other_degree(source, gpu, degrees, tp, batch, mbs)
            notes.append(note)
        ratios = np.array(work_ratios(shape, model))

        def of_model(row: np.ndarray) -> np.ndarray:
            return np.array(other_depth(shape, tuple(row), model))

        forward, backward, *least = (of_model(row) * ratios for row in rows[:4])
        if self.options.cuda_graphs in (True, "layer"):
            forward, backward = least
        update = of_model(rows[4]) if len(rows) > 4 else None
        # The scores' share of a layer's multiply-adds: 4s against 24h + 4s per token and channel.
        share = 4 * model.seq / (24 * model.hidden + 4 * model.seq)
        scores = forward * share * np.array([kind in LAYERS for kind in model.kinds])
        near = tp if tp in degrees else max((one for one in degrees if one < tp), default=degrees[0])
        # Micro-batches that were measured, those that ``growth`` stands for among them.
        steps = [step for kind in "TD" for step in (source.growth(gpu) or {}).get(kind, [])]
        sizes = [*source.sizes(gpu, near), *(divisor or begin for begin, _, divisor in steps)]
        below, above = min(sizes) / batch, batch / max(sizes)
        if max(below, above) > 1:
            far = f"1/{below:.3g} of the smallest" if below > 1 else f"{above:.3g} times the largest"
            notes.append(f"{gpu}: a micro-batch of {batch:g} sequences is {far} measured one")
        for was, wanted, what in (
            (source.file.precision, self.options.precision, "in {} precision"),
            (source.file.attention, self.options.attention, "with {} attention"),
        ):
            if was and was != wanted:
                how = f"{what.format(was)}, not {what.format(wanted)}"
                notes.append(f"{model.name} on {gpu}: costs were measured {how}")
        return UnitSeconds(forward, backward, scores, update, False, np.array(least), tuple(notes))

    def _other_degree(
        self, source: _Source, gpu: str, degrees: list[int], tp: int, batch: float, mbs: int
    ) -> tuple[list[np.ndarray], str]:
        """Degree ``tp`` from the nearest measured one below: by the computed ratio where the GPU is known."""
        near = max((degree for degree in degrees if degree < tp), default=degrees[0])
        base = _grown(source, gpu, near, batch)
        if of := hardware(gpu):
            new, old = (kernel_seconds(of, self.model, each, mbs, self.options) for each in (tp, near))
            ratio = [np.array(other_depth(self.model, row, source.shape)) for row in new[:2] / old[:2]]
            passes = [row * ratio[at % 2] for at, row in enumerate(base[:4])]
            rows = [*passes, *(row * near / tp for row in base[4:])]
            return rows, f"{gpu}: tp {tp} was not measured: tp {near} scaled by the computed ratio"
        return base, f"{gpu}: tp {tp} was not measured: costs of tp {near}"


def _grown(source: _Source, gpu: str, tp: int, batch: float) -> list[np.ndarray]:
    """Seconds of each unit of the measured shape, as of ``_passes``."""
    sizes = source.sizes(gpu, tp)
    rules = source.growth(gpu)
    if rules is not None:
        size = max((size for size in sizes if size <= batch), default=sizes[0])
        factors = np.array(
            [
                growth_factor(steps, batch) / growth_factor(steps, size) if steps else batch / size
                for steps in map(rules.get, source.shape.kinds)
            ]
        )
        rows = _passes(source.entries[gpu, tp, size])
        return [*(row * factors for row in rows[:4]), *rows[4:]]
    above = next((size for size in sizes if size >= batch), sizes[-1])
    below = next((size for size in reversed(sizes) if size <= batch), sizes[0])
    low, high = (_passes(source.entries[gpu, tp, size]) for size in (below, above))
    if above == below:
        # Outside the measured range: below it launches dominate, above it time grows with the tokens.
        factor = max(batch / above, 1.0) if len(sizes) > 1 else batch / above
        return [*(row * factor for row in low[:4]), *low[4:]]
    share = (batch - below) / (above - below)
    return [a + (b - a) * share for a, b in zip(low, high, strict=True)]


def _passes(entry: Entry) -> list[np.ndarray]:
    """Seconds of forward and backward, of their kernels alone and, where measured, of the update [unit]."""
    backward = entry.backward or tuple(2 * seconds for seconds in entry.forward)
    rows = [entry.forward, backward, *(entry.kernels or (entry.forward, backward)), entry.update]
    return [np.array(row) for row in rows if row is not None]


def _widths(model: Model) -> tuple[object, ...]:
    """What makes two models' layers the same matrix products per token."""
    return (
        *(model.hidden, model.width, model.kv_width, model.ffn_width, model.gated, model.experts),
        *(model.top_k if model.experts else 0, model.encoder_layers is None),
    )
