"""Unit costs fitted to the times of stages."""

from __future__ import annotations

import numpy as np
import pytest

from fasop.profiling.measure import fit_units

PARTITIONS = [(3, 1), (1, 3), (2, 2)]
E, T, P = 0.001, 0.004, 0.006


def times(factors: list[list[float]] | None = None) -> list[list[float]]:
    whole = [[E + first * T, last * T + P] for first, last in PARTITIONS]
    given = factors or [[1.0, 1.0]] * len(whole)
    return [[t * f for t, f in zip(*pair, strict=True)] for pair in zip(whole, given, strict=True)]


def test_exact_times_give_the_exact_costs() -> None:
    assert fit_units(PARTITIONS, times()) == pytest.approx((E, T, P))


def test_unsteady_times_give_costs_near_them() -> None:
    dice = np.random.default_rng(0)
    noisy = [(1 + 0.05 * dice.standard_normal((3, 2))).tolist() for _ in range(40)]
    layers = [fit_units(PARTITIONS, times(each)).layer for each in noisy]
    assert np.mean(layers) == pytest.approx(T, rel=0.03) and np.std(layers) < 0.1 * T


def test_the_stage_without_a_time_divides_by_nothing() -> None:
    with np.errstate(all="raise"):
        fit = fit_units(PARTITIONS, [[E + 3 * T, T + P], [0.0, 3 * T + P], [E + 2 * T, 2 * T + P]])
    assert fit == pytest.approx((E, T, P))
    with pytest.raises(ValueError, match="every stage took 0 seconds"):
        fit_units(PARTITIONS, [[0.0, 0.0]] * 3)


def test_a_unit_below_zero_is_fitted_at_zero_and_the_others_without_it() -> None:
    """Two stages that take the same: cutting a negative head off would leave the layer too slow."""
    fit = fit_units([(3, 1), (1, 3)], [[0.030, 0.010], [0.010, 0.030]])
    assert fit == pytest.approx((0, 0.01, 0), abs=1e-9)
    skewed = fit_units([(3, 1), (1, 3)], [[0.030, 0.008], [0.010, 0.028]])
    assert min(skewed) >= 0 and skewed.head == 0
    assert 3 * skewed.layer + skewed.embedding == pytest.approx(0.030, rel=0.1)
