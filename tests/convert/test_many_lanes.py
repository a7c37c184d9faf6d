"""Many streams and threads convert in time linear in the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.many_lanes import seconds, streams, threads


@pytest.mark.parametrize("make", [streams, threads])
def test_time_is_linear_in_the_number_of_lanes(make, tmp_path: Path) -> None:
    """Eight times the lanes take about 8 times as long; with a scan of all events for each lane, 64 times."""
    seconds(make(100), tmp_path)
    few = min(seconds(make(1_200), tmp_path) for _ in range(2))
    many = min(seconds(make(9_600), tmp_path) for _ in range(2))
    assert many < 24 * few
