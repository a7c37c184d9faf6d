"""Parameters between measured times and their prior."""

from __future__ import annotations

import numpy as np
import pytest

from chakra_et.cost.fit import fit


def fitted(count: int, weights: np.ndarray | None = None) -> float:
    """One parameter of 1 ± 10%, of ``count`` measured times that all say 2."""
    found = fit(
        lambda given: np.full(count, given["rate"]),
        np.full(count, 2.0),
        {"rate": 1.0},
        {"rate": 0.1},
        weights,
    )
    return found["rate"]


def test_more_measured_times_leave_the_prior_further_up_to_a_limit() -> None:
    assert 1 < fitted(1) < fitted(20) < fitted(200) < 2
    assert fitted(5000) == pytest.approx(fitted(200), rel=1e-3)
    assert fitted(1) < fitted(1, np.array([2.0])) < fitted(1, np.array([20.0]))
