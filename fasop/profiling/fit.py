"""Costs of embedding, layer and head from the times of whole stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.inputs.models import Model


class KindSeconds(NamedTuple):
    """Seconds of the embedding, one transformer layer and the head."""

    embedding: float
    layer: float
    head: float

    def of_model(self, model: Model) -> tuple[float, ...]:
        """Seconds of every unit of the model, as ``Model.units`` orders them."""
        seconds = {"E": self.embedding, "T": self.layer, "P": self.head}
        return tuple(seconds[unit] for unit in model.units)


def fit_units(partitions: Sequence[Sequence[int]], times: Sequence[Sequence[float]]) -> KindSeconds:
    """Least squares of the relative errors, with no unit below 0.

    partitions: layers of each stage, of each run; times: seconds of its stages. Raises ``ValueError`` where
    no stage took any time.
    """
    matrix = np.array(
        [
            (float(stage == 0), float(count), float(stage == len(layers) - 1))
            for layers in partitions
            for stage, count in enumerate(layers)
        ]
    )
    seconds = np.array([value for of_run in times for value in of_run], dtype=float)
    # A stage without a measurable time has no relative error.
    known = seconds > 0
    if not known.any():
        raise ValueError("every stage took 0 seconds: nothing can be fitted")
    matrix, seconds = matrix[known], seconds[known]
    return KindSeconds(*_non_negative(matrix / seconds[:, None]).tolist())


def _non_negative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 for which |matrix · x − 1| is least, found by trying which of the three are 0."""
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = range(matrix.shape[1])
    for size in columns:
        for chosen in itertools.combinations(columns, size + 1):
            found = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)), rcond=None)[0]
            x = np.zeros(matrix.shape[1])
            x[list(chosen)] = found
            error = float(((matrix @ x - 1) ** 2).sum())
            if found.min() >= 0 and error < least - 1e-12:
                best, least = x, error
    return best
