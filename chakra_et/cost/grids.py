"""What measured times are beyond a model's, on a grid of sizes: ``grids.npz``, written by
``benchmarks/cost_accuracy.py --write``.

A library's choices for single shapes follow no formula, but neighbouring shapes share them: between the sizes
that were measured, the logarithm of measured over modelled time is interpolated along the logarithms of the
sizes; beyond them it fades.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("grids.npz")
_STEP, _MOST = 0.005, 127
"""Of a stored logarithm, a signed byte."""


@dataclass(frozen=True)
class Grid:
    """``axes``: rising sizes; ``logs[len(axis), ...]``: logarithms of measured over modelled times."""

    axes: tuple[np.ndarray, ...]
    logs: np.ndarray

    def faded(self, part: float) -> Grid:
        """A grid of which only a part holds."""
        return self if part == 1 else Grid(self.axes, self.logs * part)

    def at(self, points: np.ndarray) -> np.ndarray:
        """The logarithms for ``points[R, D]``; float[R]."""
        below, share, near = [], [], np.ones(len(points))
        for sizes, values in zip(self.axes, points.T, strict=True):
            place = np.interp(np.log(values), np.log(sizes), np.arange(len(sizes)))
            low = np.minimum(place.astype(int), max(len(sizes) - 2, 0))
            below.append(low)
            share.append(place - low)
            near *= np.minimum(sizes[-1] / values, 1) * np.minimum(values / sizes[0], 1)
        total = np.zeros(len(points))
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            weight = near.copy()
            for up, part in zip(corner, share, strict=True):
                weight *= part if up else 1 - part
            index = tuple(
                np.minimum(low + up, len(sizes) - 1)
                for low, up, sizes in zip(below, corner, self.axes, strict=True)
            )
            total += weight * self.logs[index]
        return total


def make_grid(points: np.ndarray, logs: np.ndarray, held: Sequence[int] = ()) -> Grid:
    """The grid of ``logs[R]`` at ``points[R, D]``, each place the median of what was measured there, and of
    its neighbours where nothing was, along all axes but those ``held``."""
    axes = tuple(np.unique(column) for column in points.T)
    shape = tuple(len(sizes) for sizes in axes)
    places = np.ravel_multi_index(
        tuple(np.searchsorted(sizes, column) for sizes, column in zip(axes, points.T, strict=True)), shape
    )
    order = np.lexsort((logs, places))
    found, first, count = np.unique(places[order], return_index=True, return_counts=True)
    filled = np.full(np.prod(shape), np.nan)
    filled[found] = logs[order][first + count // 2]
    return Grid(axes, _filled(filled.reshape(shape), held))


def _filled(logs: np.ndarray, held: Sequence[int]) -> np.ndarray:
    """With unknown places as the mean of their nearest known neighbours."""
    while np.isnan(logs).any():
        around, known = np.zeros_like(logs), np.zeros_like(logs)
        for axis in range(logs.ndim):
            if axis in held:
                continue
            for way in (-1, 1):
                moved = np.roll(logs, way, axis)
                edge = [slice(None)] * logs.ndim
                edge[axis] = slice(0, 1) if way > 0 else slice(-1, None)
                moved[tuple(edge)] = np.nan
                around += np.nan_to_num(moved)
                known += ~np.isnan(moved)
        if not known[np.isnan(logs)].any():
            break
        logs = np.where(np.isnan(logs) & (known > 0), around / np.maximum(known, 1), logs)
    filled: np.ndarray = np.nan_to_num(logs)
    return filled


def save(grids: dict[str, Grid], path: Path = FILE) -> None:
    """Write grids by name."""
    arrays: dict[str, np.ndarray] = {}
    for name, grid in grids.items():
        arrays[name] = np.clip(np.rint(grid.logs / _STEP), -_MOST, _MOST).astype(np.int8)
        arrays |= {f"{name}/{at}": sizes for at, sizes in enumerate(grid.axes)}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


@functools.cache
def load(path: Path = FILE) -> dict[str, Grid]:
    """The grids of a file, by GPU and kind of kernel ("H100 16 bit")."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return {
        name: Grid(tuple(arrays[f"{name}/{at}"] for at in range(logs.ndim)), logs * _STEP)
        for name, logs in arrays.items()
        if "/" not in name
    }
