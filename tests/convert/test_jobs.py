"""Functions in processes of their own."""

from __future__ import annotations

import time

import pytest

from chakra_et.jobs import run


def slept(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_every_argument_has_its_result(workers: int) -> None:
    """Also those that still run once none waits."""
    arguments = [0.05, 0.0, 0.02]
    assert sorted(run(slept, arguments, workers)) == list(enumerate(arguments))
