"""The models of ``chakra_et/cost`` fitted to measured tables, and what these say of a GPU without one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.boosting import boosted, product_columns
from benchmarks.cost_tables import READERS, Table
from benchmarks.smoothing import ATTENTION, smooth
from chakra_et.cost import gpus, grids, kernel_times
from chakra_et.cost.fit import fit
from chakra_et.cost.gpus import Gpu
from chakra_et.cost.kernel_times import LIKE, MODELS, KernelTimes, Values
from chakra_et.cost.kernel_times import kernel_times as shipped
from chakra_et.cost.products import SCALED
from chakra_et.files import write_text
from chakra_et.predict.measure_gpu import MeasureGpuConfig, product_shapes

OF_KIND = ("burst", "hot")
"""Parameters that differ between kinds of memory: of the other kind, the prior says more."""
FIT_ROWS, SHAPES = 800, 100
"""Rows of a table that its parameters are fitted to; shapes that stand for what ``measure-gpu`` measures."""


def fitted(kind: str, table: Table) -> dict[str, float]:
    """The parameters of a kind of kernel by some of a table's rows."""
    model, some = MODELS[kind], table.some(FIT_ROWS)
    return fit(
        lambda values: model.micros(some.gpu, values, some.points),
        some.micros,
        model.start(table.gpu),
        model.widths,
    )


def grid_of(kind: str, table: Table, values: Values) -> grids.Grid:
    """What a table's kernels took beyond the model."""
    model = MODELS[kind]
    beyond = np.log(table.micros / model.micros(table.gpu, values, table.points))
    places = model.place(table.points)
    if kind == "attention":
        return smooth(places, beyond, ATTENTION)
    m, n, k = (np.unique(column) for column in places.T)
    between = 8 * np.rint(np.sqrt(n[1:] * n[:-1]) / 8)  # what trees say changes there: not by a straight line
    axes = m, np.unique(np.concatenate([n, between])), k
    every = np.stack([each.reshape(-1) for each in np.meshgrid(*axes, indexing="ij")], axis=1)
    shapes = np.unique(places[:, 1:], axis=0, return_inverse=True)[1].reshape(-1)
    known, asked = (product_columns(each, table.gpu.units) for each in (places, every))
    logs = boosted(known, beyond, shapes, asked)
    return grids.Grid(axes, logs.reshape([len(sizes) for sizes in axes]))


def own_times(kind: str, table: Table) -> KernelTimes:
    values = fitted(kind, table)
    grid = {} if kind == "float" else {kind: grid_of(kind, table, values)}
    return KernelTimes(table.gpu, {kind: values}, grid)


def mean_parameters(gpu: Gpu, kind: str, fitted: Sequence[tuple[Gpu, Values]]) -> dict[str, float]:
    """Those of a GPU that wasn't measured: the geometric means over the ``fitted`` ones, and the prior where
    few say something; of attention the medians, as one library's kernels may be unlike all others (B200's
    don't pack heads)."""
    middle = np.median if kind == "attention" else np.mean
    found = {}
    for name, prior in MODELS[kind].start(gpu).items():
        alike = [each[name] for of, each in fitted if name not in OF_KIND or of.kind == gpu.kind]
        alike += [prior] if name in OF_KIND and kind != "attention" else []
        found[name] = float(np.exp(middle(np.log(alike)))) if alike else prior
    return found


def like(gpu: Gpu, of: KernelTimes) -> KernelTimes:
    """The times of a GPU that wasn't measured but is like one that was."""
    faded = {kind: replace(grid, logs=grid.logs * LIKE) for kind, grid in of.grids.items()}
    return KernelTimes(gpu, of.parameters, faded)


def stranger(kind: str, gpu: Gpu, known: Sequence[KernelTimes]) -> KernelTimes:
    """A GPU of which nothing was measured, from those of others of its vendor; without any, as shipped."""
    alike = [(each.gpu, each.parameters[kind]) for each in known if each.gpu.vendor == gpu.vendor]
    return KernelTimes(gpu, {kind: mean_parameters(gpu, kind, alike)}, {}) if alike else shipped(gpu)


def drawn(kind: str, table: Table) -> np.ndarray:
    """Rows of a table that stand for what ``measure-gpu`` measures: of products in 16 and 8 bits the nearest
    to its shapes, of other kernels by chance."""
    if kind not in ("16 bit", "8 bit"):
        return np.random.default_rng(1).choice(len(table.micros), min(SHAPES, len(table.micros) // 2), False)
    sizes = np.log2(table.points[:, 1:4])
    shapes = np.log2(product_shapes(3 * SHAPES, MeasureGpuConfig.largest))
    nearest = [int(((sizes - each) ** 2).sum(axis=1).argmin()) for each in shapes]
    return np.array(list(dict.fromkeys(nearest))[:SHAPES])


def write(folder: Path, kinds: Sequence[str]) -> None:
    """The fit to all given tables of these kinds of kernels; what is known of others stays."""
    made: dict[str, dict[str, Values]] = {}
    saved = dict(grids.load())
    for kind in kinds:
        tables = READERS[kind](folder).values()
        times = [own_times(kind, table) for table in tables]
        for each in times:
            saved |= {f"{each.gpu.name} {of}": grid for of, grid in each.grids.items()}
        fits = {kind: [(each.gpu, each.parameters[kind]) for each in times]}
        if kind == "8 bit":  # other libraries' products, which may have any tiles
            with mock.patch.dict(SCALED, clear=True):
                fits["8 bit alone"] = [(table.gpu, fitted(kind, table)) for table in tables]
        for name, found in fits.items():
            for of, values in found:
                made.setdefault(of.name, {})[name] = values
            for gpu in map(gpus.gpu, ("H100", "L40S")):
                made.setdefault(f"nvidia {gpu.kind}", {})[name] = mean_parameters(gpu, name, found)
    write_parameters(made)
    save(saved)


def save(by_name: Mapping[str, grids.Grid], path: Path = grids.FILE) -> None:
    """Write grids as ``grids.load`` reads them."""
    arrays: dict[str, np.ndarray] = {}
    for name, grid in by_name.items():
        arrays[name] = np.clip(np.rint(grid.logs / grids.STEP), -127, 127).astype(np.int8)
        arrays |= {f"{name}/{at}": sizes for at, sizes in enumerate(grid.axes)}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def write_parameters(made: Mapping[str, Mapping[str, Values]]) -> None:
    """Into ``kernel_times.json``, beside those of other GPUs and kinds of kernels."""
    old = json.loads(kernel_times.FILE.read_text(encoding="utf-8"))
    all_of = {name: {**old.get(name, {}), **made.get(name, {})} for name in sorted({*old, *made})}
    rounded = {
        name: {
            kind: {key: float(f"{each:.4g}") for key, each in values.items()} for kind, values in of.items()
        }
        for name, of in all_of.items()
    }
    text = json.dumps(rounded, indent=1)
    text = re.sub(r"\{([^{}]*)\}", lambda match: "{" + " ".join(match[1].split()) + "}", text)
    write_text(kernel_times.FILE, text + "\n")
