"""Parameters of a model from measured times: maximum a posteriori by Levenberg and Marquardt's method.

Times are compared by their logarithms, robustly (loss ``2 (sqrt(1 + (error / _SCATTER)²) - 1)``); parameters
are positive and start from a prior: a value, and the standard deviation of its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

_SCATTER, _STEP, _ROUNDS = 0.12, 0.01, 60
_EACH = 200.0
"""Errors of like shapes are alike: more than so many measured times weigh no more than these."""


def fit(
    micros: Callable[[Mapping[str, float]], np.ndarray],
    measured: np.ndarray,
    start: Mapping[str, float],
    widths: Mapping[str, float],
    weights: np.ndarray | None = None,
) -> dict[str, float]:
    """The parameters by which ``micros`` comes close to ``measured[N]`` without leaving the prior far.
    ``weights[N]``: how many measured times each stands for."""
    names = [name for name in start if name in widths]
    prior = np.log([start[name] for name in names])
    width = np.array([widths[name] for name in names])
    root = np.sqrt(min(1.0, _EACH / len(measured)) if weights is None else weights) / _SCATTER
    target = np.log(measured)

    def values(at: np.ndarray) -> dict[str, float]:
        return dict(start) | dict(zip(names, np.exp(at).tolist(), strict=True))

    def errors(at: np.ndarray) -> np.ndarray:
        return (np.log(micros(values(at))) - target) * root

    def loss(error: np.ndarray, at: np.ndarray) -> float:
        robust = 2 * (np.sqrt(1 + error**2) - 1)
        return float(robust.sum() + (((at - prior) / width) ** 2).sum())

    at, damping = prior, 1e-2
    error = errors(at)
    for _ in range(_ROUNDS):
        slopes = np.stack([(errors(at + step) - error) / _STEP for step in _STEP * np.eye(len(at))], axis=1)
        robust = 1 / np.sqrt(1 + error**2)
        curvature = slopes.T @ (slopes * robust[:, None]) + np.diag(1 / width**2)
        slope = slopes.T @ (robust * error) + (at - prior) / width**2
        before = loss(error, at)
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
            tried = at + np.clip(step, -0.5, 0.5)
            new = errors(tried)
            if loss(new, tried) < before:
                break
            damping *= 5
        else:
            break
        gained = before - loss(new, tried)
        at, error, damping = tried, new, damping / 4
        if gained < 1e-5 * before:
            break
    return values(at)
