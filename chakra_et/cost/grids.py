"""What measured times are beyond a model's: on a grid of sizes (``grids.npz``, written by
``benchmarks/cost_accuracy.py --write``), or around few measured shapes.

Between the sizes of the grid, the logarithm of measured over modelled time is interpolated along the
logarithms of the sizes; beyond them it fades. The grid itself is made from measured times, noise and gaps
among them: of products by ``benchmarks/boosting.py``, of attention by ``smoothing.py``.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("grids.npz")
STEP = 0.005
"""Of a stored logarithm, a signed byte."""
_SIZE, _OCTAVES, _NOISE, _OUTLIER = 0.1, 3.0, 0.08, 1.5
"""Of a model's errors: standard deviation, in how many octaves of a size they change, the noise of single
shapes, and how many times it makes an outlier."""


@dataclass(frozen=True)
class Grid:
    """``axes``: rising sizes; ``logs[len(axis), ...]``: logarithms of measured over modelled times."""

    axes: tuple[np.ndarray, ...]
    logs: np.ndarray

    def at(self, points: np.ndarray) -> np.ndarray:
        """The logarithms for ``points[R, D]``; float[R]."""
        ends, near = [], np.ones(len(points))
        for sizes, values in zip(self.axes, points.T, strict=True):
            place = np.interp(np.log(values), np.log(sizes), np.arange(len(sizes)))
            low = place.astype(int)
            ends.append(((low, 1 - place + low), (np.minimum(low + 1, len(sizes) - 1), place - low)))
            near *= np.minimum(sizes[-1] / values, 1) * np.minimum(values / sizes[0], 1)
        corners = (zip(*corner, strict=True) for corner in itertools.product(*ends))
        near *= sum(np.prod(weights, axis=0) * self.logs[index] for index, weights in corners)
        return near


@dataclass(frozen=True)
class Nearby:
    """``places[S, D]``: logarithms of few measured sizes; ``weights[S]``: what each says of those around."""

    places: np.ndarray
    weights: np.ndarray

    def at(self, points: np.ndarray) -> np.ndarray:
        """The logarithms of measured over modelled times for ``points[R, D]``; float[R]."""
        return _covariance(np.log2(points), self.places) @ self.weights


def nearby(points: np.ndarray, logs: np.ndarray) -> Nearby:
    """From ``logs[S]`` measured at ``points[S, D]``: the mean of a Gaussian process with outliers."""
    places = np.log2(points)
    covariance = _covariance(places, places)
    noise, weights = np.full(len(logs), _NOISE**2), np.zeros(len(logs))
    for _ in range(4):
        weights = np.linalg.solve(covariance + np.diag(noise), logs)
        noise = _NOISE**2 * (1 + ((logs - covariance @ weights) / _NOISE / _OUTLIER) ** 2)
    return Nearby(places, weights)


def _covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matérn's of order 3/2, along each axis."""
    far = np.sqrt(3) / _OCTAVES * np.abs(a[:, None] - b)
    return _SIZE**2 * ((1 + far) * np.exp(-far)).prod(axis=2)


@functools.cache
def load(path: Path = FILE) -> dict[str, Grid]:
    """The grids of a file, by GPU and kind of kernel ("H100 16 bit")."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return {
        name: Grid(tuple(arrays[f"{name}/{at}"] for at in range(logs.ndim)), logs * STEP)
        for name, logs in arrays.items()
        if "/" not in name
    }
