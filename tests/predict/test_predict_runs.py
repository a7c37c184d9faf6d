"""How ``benchmarks/predict_runs.py`` compares rounds, and the error of all runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predict_benchmark import overall
from benchmarks.predict_runs import Case, Effort, Part, Row, rows
from chakra_et.errors import TraceError


def test_each_round_is_compared_by_itself() -> None:
    # The second round ran on a slow machine, the third had a slow measured step.
    row = Row("case", 90, 100, 102, errors=(1.0, 2.0, -20.0))
    assert row.error == 1.0
    assert Row("case", 90, 100, 102).error == pytest.approx(2.0)


def test_the_interval_is_as_wide_as_the_rounds_differ() -> None:
    assert Row("case", 90, 100, 110, errors=[10.0] * 5).interval == (10, 10)
    low, high = Row("case", 90, 100, 106, errors=[0.0, 4.0, 8.0, 12.0]).interval or (0, 0)
    assert 0 <= low < 6 < high <= 12
    assert Row("case", 90, 100, 110).interval is None


def test_without_a_finished_round_nothing_is_compared(tmp_path: Path) -> None:
    part = Part(lambda _: [Case("base", {}, []), Case("nothing", {}, [])])
    with pytest.raises(TraceError):
        rows(part, Effort(), tmp_path, again=True)


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
