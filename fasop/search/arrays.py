"""Array operations of the search.

``distinct`` and ``Noise`` stand in for ``np.unique`` and ``np.random``, which would load masked arrays and
random generators: a tenth of the start-up.
"""

from __future__ import annotations

import numpy as np

INF = np.inf
SMALL = 200_000  # elements up to which one array operation beats a loop over the stage sizes


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct value comes first, in ascending order of values; and which of them each one is."""
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.append(np.ones(min(len(values), 1), dtype=bool), ordered[1:] != ordered[:-1])
    which = np.empty(len(values), dtype=int)
    which[order] = is_new.cumsum() - 1
    return order[is_new], which


class Noise:
    """The same random numbers each time (Steele et al. 2014, "Fast splittable pseudorandom number
    generators", SplitMix64).
    """

    def __init__(self) -> None:
        self._drawn = 0

    def exponential(self, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of mean 1."""
        count = int(np.prod(shape))
        state = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        bits = state * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        uniform = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
        numbers: np.ndarray = -np.log1p(-uniform).reshape(shape)
        return numbers


def by_size(table: np.ndarray) -> np.ndarray:
    """A table [a, b] as [b − a, b]: a stage's units, and where it ends; inf where it would begin before 0."""
    n = len(table)
    above = np.concatenate([np.full_like(table, INF), table])
    # One unit more is a row up, a later end a row down and a column to the right.
    row, one = above.strides
    return np.ndarray((n, n), buffer=above, offset=row * n, strides=(-row, row + one)).copy()


def min_plus(values: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """min over size of values[k, :, end − size] + sums[k, size, end], as [k, :, end]."""
    bounds, states, width = values.shape
    sizes = sums.shape[1]
    if not sizes:
        return np.full(values.shape, INF)
    if bounds * states * sizes * width <= SMALL:
        padded = np.full((bounds, states, sizes - 1 + width), INF)
        padded[:, :, sizes - 1 :] = values
        # [k, :, size, end] without a copy: one unit more is one place further to the left.
        far, near, one = padded.strides
        shape, strides = (bounds, states, sizes, width), (far, near, -one, one)
        shifted = np.ndarray(shape, buffer=padded, offset=one * (sizes - 1), strides=strides)
        least: np.ndarray = (shifted + sums[:, None]).min(axis=2)
        return least
    result: np.ndarray = values + sums[:, None, 0]
    for size in range(1, sizes):
        step = sums[:, None, size, size:]
        if np.isfinite(step).any():
            later = result[:, :, size:]
            np.minimum(later, values[:, :, : width - size] + step, out=later)
    return result
