"""What measured products are beyond a model, by their number of tiles, bytes and operations: boosted trees.

Where a library splits K or takes another kernel depends on products of sizes, as m × n, more than on single
ones, and changes from one shape to the next. Trees find such borders (J. H. Friedman, Greedy function
approximation: a gradient boosting machine, 2001); what they leave, ``smoothing.py`` takes up.
"""

from __future__ import annotations

import numpy as np

_TREES, _DEPTH, _RATE, _CUT = 400, 7, 0.1, 0.1
"""Errors beyond ``_CUT`` count as that much: outliers don't move a tree."""
_ROWS, _COLUMNS, _LEAST, _MORE = 0.8, 0.5, 8, 1.0
"""Each tree sees so much of the rows and columns; a leaf has ``_LEAST`` rows, and ``_MORE`` without error."""
_BINS = 64
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


def boosted(columns: np.ndarray, logs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """What ``logs[R]`` at ``columns[R, D]`` say of ``wanted[Q, D]``; float[Q]."""
    chance = np.random.default_rng(0)
    known, asked = _binned(columns, wanted)
    said, answers = np.full(len(known), np.median(logs)), np.full(len(asked), np.median(logs))
    for _ in range(_TREES):
        rows = np.flatnonzero(chance.random(len(known)) < _ROWS)
        seen = chance.permutation(known.shape[1])[: int(_COLUMNS * known.shape[1])]
        errors = np.clip(logs - said, -_CUT, _CUT)[rows]
        splits = _grown(known[rows], errors, seen)
        leaf = _leaf(splits, known)
        sums, counts = (np.bincount(leaf[rows], each, 1 << _DEPTH) for each in (errors, None))
        values = _RATE * sums / (counts + _MORE)
        said += values[leaf]
        answers += values[_leaf(splits, asked)]
    return answers


Splits = list[tuple[np.ndarray, np.ndarray]]
"""Of each level, by node: the column, and its last bin that goes left."""


def _grown(known: np.ndarray, errors: np.ndarray, seen: np.ndarray) -> Splits:
    """The tree that leaves the smallest squares of ``errors[R]``, level by level."""
    splits: Splits = []
    for level in range(_DEPTH):
        node, nodes = _leaf(splits, known), 1 << level
        column, last = np.zeros(nodes, int), np.full(nodes, _BINS)
        best = np.zeros(nodes)
        for each in seen:
            place, size = node * _BINS + known[:, each], nodes * _BINS
            left = np.bincount(place, errors, size).reshape(nodes, _BINS).cumsum(axis=1)
            count = np.bincount(place, minlength=size).reshape(nodes, _BINS).cumsum(axis=1)
            right, others = left[:, -1:] - left, count[:, -1:] - count
            gain = left**2 / (count + _MORE) + right**2 / (others + _MORE)
            gain -= left[:, -1:] ** 2 / (count[:, -1:] + _MORE)
            gain[(count < _LEAST) | (others < _LEAST)] = 0
            most = gain.max(axis=1)
            better = most > best
            column[better], last[better] = each, gain.argmax(axis=1)[better]
            best = np.maximum(best, most)
        splits.append((column, last))
    return splits


def _leaf(splits: Splits, rows: np.ndarray) -> np.ndarray:
    """The node of the last level in which each row ends."""
    node = np.zeros(len(rows), int)
    every = np.arange(len(rows))
    for column, last in splits:
        node = 2 * node + (rows[every, column[node]] > last[node])
    return node


def _binned(columns: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as numbers of bins with about as many rows of ``columns`` in each."""
    known, asked = [], []
    for column, other in zip(columns.T, wanted.T, strict=True):
        values = np.unique(column)
        edges = (values[1:] + values[:-1]) / 2
        if len(values) > _BINS:
            edges = np.unique(np.quantile(column, np.arange(1, _BINS) / _BINS))
        known.append(np.searchsorted(edges, column))
        asked.append(np.searchsorted(edges, other))
    return np.stack(known, axis=1), np.stack(asked, axis=1)
