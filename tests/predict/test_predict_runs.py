"""Which steps ``benchmarks/predict_runs.py`` counts, the interval of an error, and the error of all runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.core_probe import CoreProbe, is_disturbed
from benchmarks.predict_benchmark import overall
from benchmarks.predict_runs import FEWEST, Row, counted, interval
from chakra_et.errors import TraceError


def test_the_probe_leaves_the_thread_its_cores() -> None:
    before = os.sched_getaffinity(0)
    assert CoreProbe(before).slowest_us() > 0
    assert os.sched_getaffinity(0) == before


def test_slow_probes_are_of_disturbed_cores() -> None:
    # A single probe that was faster than any other doesn't count.
    probes = np.array([160.0] + [174.0, 176.0] * 40 + [215.0, 300.0] * 20)
    assert is_disturbed(probes).tolist() == [False] * 81 + [True] * 40


def test_disturbed_steps_dont_count(tmp_path: Path) -> None:
    def turn(number: int, *probes: float) -> dict:
        return {"case": "base", "round": number, "probe_us": probes, "steps_ms": [1.0]}

    path = tmp_path / "turns_0.json"
    path.write_text(json.dumps([turn(0, 100, 130, 104), turn(1, 190, 101, 120)]))
    assert counted(tmp_path) == {"base": {0: [0, 2], 1: [1]}}
    assert counted(tmp_path, all_steps=True) == {"base": {0: [0, 1, 2], 1: [0, 1, 2]}}
    path.write_text(json.dumps([turn(0, *[100] * (FEWEST - 1), 130)]))
    with pytest.raises(TraceError, match=f"fewer than {FEWEST} steps of base were undisturbed"):
        counted(tmp_path)
    with pytest.raises(TraceError, match="fewer than"):
        counted(tmp_path / "absent")


def test_the_interval_is_as_wide_as_the_rounds_differ() -> None:
    assert interval([[110.0, 110.0], [110.0]], [[100.0], [100.0]]) == pytest.approx((10, 10))
    low, high = interval([[100.0], [104.0], [108.0], [112.0]], [[100.0], [100.0]])
    assert 0 <= low < 6 < high <= 12.01


def test_all_runs_count_alike_in_the_last_table() -> None:
    parts = {
        "two": [
            Row("nothing", 1, 100, 96, is_noise=True),
            Row("a", 1, 100, 103),
            Row("b", 1, 100, 99),
        ],
        "one": [Row("nothing", 1, 100, 102, is_noise=True), Row("c", 1, 100, 92)],
        "no noise": [Row("a", 1, 100, 100)],
    }
    assert overall(parts)[1:] == [
        ("two", "2", "2.00%", "3.00%", "4.00%", "a"),
        ("one", "1", "8.00%", "8.00%", "2.00%", "c"),
        ("no noise", "1", "0.00%", "0.00%", "-", "a"),
        ("all", "4", "3.00%", "8.00%", "3.00%", "one: c"),
        ("target", "", "3.3%", "10%", "", ""),
    ]
