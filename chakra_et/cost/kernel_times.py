"""What kernels take on a GPU: models fitted to public measurements, and what shapes took beyond them.

A GPU that was measured has its own parameters and grids (``kernel_times.json``, ``grids.npz``); one that is
``like`` it has those too, the grids in part; others take the mean of all measured GPUs of their vendor and
kind of memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from chakra_et.cost import attention, grids, products
from chakra_et.cost.fit import fit
from chakra_et.cost.gpus import Gpu
from chakra_et.cost.grids import Nearby

FILE = Path(__file__).with_name("kernel_times.json")
_TABLE: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text(encoding="utf-8"))
LIKE = 0.8
"""The part of a GPU's grids that holds for one that is like it."""

Values = Mapping[str, float]


class KernelModel(NamedTuple):
    """Of a kind of kernel: ``micros(gpu, parameters, points[R, D])``, ``start(gpu)`` and ``widths``, the
    parameters' prior, and ``place``, where on the grid of measured shapes points lie."""

    micros: Callable[[Gpu, Values, np.ndarray], np.ndarray]
    start: Callable[[Gpu], dict[str, float]]
    widths: Values
    place: Callable[[np.ndarray], np.ndarray]


MODELS = {
    number: KernelModel(
        functools.partial(products.product_micros, number=number),
        functools.partial(products.start, number=number),
        products.WIDTHS,
        lambda points: np.stack([points[:, 0] * points[:, 1], points[:, 2], points[:, 3]], axis=1),
    )
    for number in ("16 bit", "8 bit", "tf32", "float", "double")
}
"""By kind of kernel: matrix products by type of number, and attention."""
MODELS["attention"] = KernelModel(
    attention.attention_micros, attention.start, attention.WIDTHS, lambda points: points[:, [5, 1, 2, 3, 0]]
)
MODELS["8 bit alone"] = MODELS["8 bit"]._replace(
    micros=functools.partial(products.product_micros, number="8 bit", quantised=True)
)
_AS = {"tf32": "16 bit", "double": "float"}
"""Kinds of which nothing was measured, and those whose parameters they take."""


@dataclass(frozen=True)
class KernelTimes:
    """The times of kernels on ``gpu``: ``parameters``, ``grids`` and ``nearby``, what few shapes measured on
    it say of others, by kind of kernel."""

    gpu: Gpu
    parameters: Mapping[str, Values]
    grids: Mapping[str, grids.Grid]
    nearby: Mapping[str, Nearby] = field(default_factory=dict)

    def of(self, kind: str) -> Values:
        """The parameters of a kind of kernel; of one that was never measured, the prior."""
        return self.parameters.get(_AS.get(kind, kind)) or MODELS[kind].start(self.gpu)

    def micros(self, kind: str, points: Any) -> np.ndarray:
        """µs of kernels of a kind (key of ``MODELS``) at ``points[R, D]``; float[R]."""
        rows = np.atleast_2d(np.asarray(points, float))
        model = MODELS[kind]
        taken = model.micros(self.gpu, self.of(kind), rows)
        beyond = [known[kind].at(model.place(rows)) for known in (self.grids, self.nearby) if kind in known]
        return taken * np.exp(sum(beyond))


def calibrated(times: KernelTimes, kind: str, points: np.ndarray, micros: np.ndarray) -> KernelTimes:
    """With the parameters by which measured shapes come out, and what these say of others; the grids stay."""
    model, grid = MODELS[kind], times.grids.get(kind)
    beyond = 1.0 if grid is None else np.exp(grid.at(model.place(points)))
    values = fit(
        lambda tried: model.micros(times.gpu, tried, points) * beyond, micros, times.of(kind), model.widths
    )
    left = np.log(micros / (model.micros(times.gpu, values, points) * beyond))
    known = {**times.nearby, kind: grids.nearby(model.place(points), left)}
    return replace(times, parameters={**times.parameters, kind: values}, nearby=known)


def kernel_times(gpu: Gpu) -> KernelTimes:
    """From what was measured of this GPU, of the one that it is like, or of others."""
    known = grids.load()
    parameters = dict(_TABLE.get(f"{gpu.vendor} {gpu.kind}", {}))
    found: dict[str, grids.Grid] = {}
    for name, part in ((gpu.like, LIKE), (gpu.name, 1.0)):
        parameters |= _TABLE.get(name, {})
        own = {kind: known[f"{name} {kind}"] for kind in MODELS if f"{name} {kind}" in known}
        found |= {kind: replace(grid, logs=grid.logs * part) for kind, grid in own.items()}
    parameters |= {kind: dict(values) for kind, values in gpu.measured.items() if kind in MODELS}
    near = {
        kind: Nearby(np.array(rows)[:, :-1], np.array(rows)[:, -1])
        for kind, rows in gpu.measured.get("nearby", {}).items()
    }
    return KernelTimes(gpu, parameters, found, near)
