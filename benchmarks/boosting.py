"""What measured products are beyond a model, by their number of tiles, bytes and operations: boosted trees.

Where a library splits K or takes another kernel depends on products of sizes, as m × n, more than on single
ones, and changes from one shape to the next. Trees find such borders. LightGBM makes them; the product ships
what they say (``grids.npz``).
"""

from __future__ import annotations

import numpy as np

from chakra_et.errors import TraceError

_MOST, _PATIENCE = 1000, 50
"""Trees; the training stops after so many that didn't help."""
_SETTINGS = {
    "objective": "l1",  # of outliers, only the sign counts
    "learning_rate": 0.05,
    "num_leaves": 63,
    "min_data_in_leaf": 8,
    "lambda_l2": 1.0,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbose": -1,
}
_TILES = 64, 128, 256


def product_columns(points: np.ndarray, units: int) -> np.ndarray:
    """What trees see of ``points[R, 3]`` (m, n, k) on a GPU of so many multiprocessors; float[R, 31]."""
    m, n, k = points.T
    sizes = np.log2(points)
    moved = np.log2(m * k + k * n + m * n)
    columns = [*sizes.T, sizes.sum(axis=1), moved, sizes.sum(axis=1) - moved, m % 2]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        columns += [sizes[:, first] + sizes[:, second], sizes[:, second] - sizes[:, first]]
    for high in _TILES:
        for wide in _TILES:
            waves = np.ceil(m / high) * np.ceil(n / wide) / units
            columns += [waves, waves / np.ceil(waves)]
    return np.stack(columns, axis=1)


def boosted(columns: np.ndarray, logs: np.ndarray, groups: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """What ``logs[R]`` at ``columns[R, D]`` say of ``wanted[Q, D]``; float[Q]. The number of trees is the one
    by which a third of the groups, whose numbers are ``groups[R]``, follow best from the others. Raises
    ``TraceError`` without LightGBM."""
    try:
        import lightgbm
    except ImportError:
        raise TraceError("the fit of products needs LightGBM: pip install lightgbm") from None
    third = np.random.default_rng(1).permutation(groups.max() + 1)[groups] % 3 == 0
    known, left, every = (
        lightgbm.Dataset(columns[rows], logs[rows]) for rows in (~third, third, third | ~third)
    )
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    trees = lightgbm.train(_SETTINGS, known, _MOST, valid_sets=[left], callbacks=[stop]).best_iteration
    said: np.ndarray = lightgbm.train(_SETTINGS, every, trees).predict(wanted)
    return said
