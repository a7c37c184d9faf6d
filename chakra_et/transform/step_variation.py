"""How much the compute time of ranks with the same work differs from step to step, and draws of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.simulate.measured_steps import step_rows

SLOWEST = 4.0
"""A drawn factor stays between 1 / SLOWEST and SLOWEST."""


def step_of(trace: ExecutionTrace) -> np.ndarray:
    """The step of each node, int64[N] from 0, by recorded start; all 0 without steps or start times."""
    names, rows = step_rows(trace)
    if len(names) < 2 or not trace.start_micros.any():
        return np.zeros(len(trace), dtype=np.int64)
    begins = np.sort(trace.start_micros[rows])
    return np.maximum(np.searchsorted(begins, trace.start_micros, side="right") - 1, 0)


def compute_micros(trace: ExecutionTrace) -> np.ndarray:
    """Time of all but communication in each step, float64[S]."""
    computes = trace.types < NodeType.COMM_SEND
    return np.bincount(step_of(trace)[computes], trace.duration_micros[computes].astype(np.float64), 1)


def relative_spread(busy: Sequence[np.ndarray]) -> float:
    """The standard deviation of a rank's compute time in a step, relative to its mean over the ranks.

    ``busy``: ``compute_micros`` of ranks with the same work. With one rank, over its steps; 0 with one step
    too.
    """
    steps = min(len(of_rank) for of_rank in busy)
    table = np.array([of_rank[:steps] for of_rank in busy])
    if len(busy) < 2:
        table = table.T
    if len(table) < 2 or not table.all():
        return 0.0
    deviation = table / table.mean(axis=0) - 1
    return float(np.sqrt((deviation**2).sum() / ((len(table) - 1) * table.shape[1])))


def deviation(own: np.ndarray, busy: Sequence[np.ndarray]) -> np.ndarray:
    """How a rank's compute time in each step differs from the mean of ranks with the same work, as factors,
    float64[S]: what a copy of it has to lose before it varies on its own."""
    steps = min(len(of_rank) for of_rank in busy)
    mean = np.array([of_rank[:steps] for of_rank in busy]).mean(axis=0)
    factors: np.ndarray = np.ones(steps)
    np.divide(own[:steps], mean, out=factors, where=(mean > 0) & (own[:steps] > 0))
    return factors


def draw(generator: np.random.Generator, spread: float, steps: int) -> np.ndarray:
    """A factor for each step, log-normal around a mean of 1, float64[steps]."""
    sigma = np.sqrt(np.log1p(spread**2))
    drawn = np.exp(generator.normal(-(sigma**2) / 2, sigma, steps))
    return np.clip(drawn, 1 / SLOWEST, SLOWEST)


def stretched(durations: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Durations (µs) times factors, rounded so that their sum stays right; uint64[N]."""
    edges = np.rint(np.concatenate(([0.0], np.cumsum(durations * factors))))
    return np.diff(edges).astype(np.uint64)
