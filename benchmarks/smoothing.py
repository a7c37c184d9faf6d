"""What measured times are beyond a model's, as a smooth function of sizes: the mean of a Gaussian process.

A library's choices for single shapes follow no formula, but shapes nearby share them, and shapes on the same
side of a tile's edge. So the logarithm of measured over modelled time is a sum of parts, each of which
changes within some octaves of each size, and noise that has outliers. Sizes lie on a grid, on which the
covariance of a part is a product over the axes: conjugate gradients solve for all measured points at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from chakra_et.cost.grids import Grid

_NOISE, _OUTLIER = 0.05, 1.5
"""Standard deviation of single times, and how many of them make an outlier."""
_AGAIN, _STEPS, _ENOUGH = 3, 300, 1e-4
"""Rounds in which outliers lose their weight; most steps, and the part of the target left when done."""
_LARGEST = 1.2
"""Larger logarithms are cut: an outlier of a neighbour says nothing."""
_TILE_OCTAVES = 0.3


class Part(NamedTuple):
    """Standard deviation; octaves along each axis; the tile whose multiples matter along the first axis."""

    size: float
    octaves: tuple[float, ...]
    tile: int = 0


PRODUCT = (
    Part(0.08, (3, 4, 3)),
    Part(0.08, (1.2, 1, 1)),
    Part(0.07, (7, 1, 2), 64),
    Part(0.09, (0.5, 1.7, 1.2), 128),
    Part(0.05, (0.6, 0.2, 2.4), 256),
    Part(0.05, (1, 3, 0.2)),
    Part(0.03, (0.9, 1.2, 0.8)),
)
"""Along m, n and k. Chosen by the products of L40S and B200 and 8-bit ones of H100, a third left out."""
ATTENTION = (
    Part(0.1, (3, 3, 3, 3, 3)),
    Part(0.1, (1, 1, 1, 1, 1)),
    Part(0.05, (1, 3, 3, 0.5, 0.5)),
    Part(0.05, (1, 0.5, 3, 3, 0.5)),
)
"""Along head size, heads, heads of keys, tokens and batch."""


def smooth(points: np.ndarray, logs: np.ndarray, parts: Sequence[Part]) -> Grid:
    """The grid of all sizes in ``points[R, D]``, near ``logs[R]`` where these were measured."""
    axes = tuple(np.unique(column) for column in points.T)
    shape = tuple(len(sizes) for sizes in axes)
    places = np.ravel_multi_index(
        tuple(np.searchsorted(sizes, column) for sizes, column in zip(axes, points.T, strict=True)), shape
    )
    count = np.bincount(places, minlength=int(np.prod(shape)))
    cut = np.clip(logs, -_LARGEST, _LARGEST)
    target = (np.bincount(places, cut, len(count)) / np.maximum(count, 1)).reshape(shape)
    known = (count > 0).reshape(shape)
    covariances = [_factors(part, axes) for part in parts]

    def spread(values: np.ndarray) -> np.ndarray:
        """The covariance times values on the grid."""
        total = np.zeros(shape)
        for factors in covariances:
            moved = values
            for factor in factors:  # each turns its axis to the end, so that all have turned once
                moved = np.tensordot(moved, factor, (0, 0))
            total += moved
        return total

    noise = np.full(shape, _NOISE)
    weights, found = np.zeros(shape), np.zeros(shape)
    for _ in range(_AGAIN):
        weights = _solved(spread, known, target, noise, weights)
        found = spread(weights)
        noise = _NOISE * np.sqrt(1 + ((target - found) / _NOISE / _OUTLIER) ** 2)
    return Grid(axes, found)


def _factors(part: Part, axes: Sequence[np.ndarray]) -> list[np.ndarray]:
    factors = [_matern(np.log2(sizes) / octaves) for sizes, octaves in zip(axes, part.octaves, strict=True)]
    factors[0] = factors[0] * part.size**2
    if part.tile:
        factors[0] = factors[0] * _matern(np.log2(np.ceil(axes[0] / part.tile)) / _TILE_OCTAVES)
    return factors


def _matern(places: np.ndarray) -> np.ndarray:
    """Matérn's covariance of order 3/2."""
    far = np.sqrt(3) * np.abs(places[:, None] - places)
    covariance: np.ndarray = (1 + far) * np.exp(-far)
    return covariance


def _solved(
    spread: Callable[[np.ndarray], np.ndarray],
    known: np.ndarray,
    target: np.ndarray,
    noise: np.ndarray,
    start: np.ndarray,
) -> np.ndarray:
    """Weights on the known places whose spread and noise make the target."""
    scaled = known / noise

    def product(values: np.ndarray) -> np.ndarray:
        applied: np.ndarray = scaled * spread(scaled * values) + values
        return applied

    wanted = scaled * target
    at = start * noise
    left = wanted - product(at)
    way, size = left, float((left**2).sum())
    least = _ENOUGH * float((wanted**2).sum())
    for _ in range(_STEPS):
        if size < least:
            break
        moved = product(way)
        step = size / float((way * moved).sum())
        at, left = at + step * way, left - step * moved
        before, size = size, float((left**2).sum())
        way = left + size / before * way
    solved: np.ndarray = scaled * at
    return solved
