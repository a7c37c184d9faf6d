"""The heat map as text."""

from __future__ import annotations

import numpy as np

from chakra_et.stragglers.analyse import MOST_COLUMNS, MOST_ROWS, HeatMap


def test_darker_is_slower() -> None:
    lines = HeatMap([0, 12], [3, 4, 5], np.array([[1.0, 0.9, 1.5], [2.0, 1.25, 1.75]])).draw()
    assert lines == [
        "slowdown by rank and step, '█' is 2.00:",
        " rank 0 |  ▒|",
        "rank 12 |█░▓|",
        "         step 3 … 5",
    ]


def test_no_slowdown_at_all_is_blank() -> None:
    assert HeatMap([0], [3], np.array([[1.0]])).draw()[1:] == ["rank 0 | |", "        step 3"]


def test_many_rows_and_columns_are_cut_to_the_slowest() -> None:
    slowdown = np.ones((100, 150))
    slowdown[70, 149] = 3.0
    lines = HeatMap(list(range(100)), list(range(150)), slowdown).draw()
    rows = [line for line in lines if line.endswith("|")]
    assert len(rows) == MOST_ROWS
    width = {len(line.partition("|")[2]) - 1 for line in rows}
    assert width == {50} and max(width) <= MOST_COLUMNS
    (slow,) = (line for line in rows if "█" in line)
    assert slow.startswith("rank 70 |") and slow.endswith("█|")
    assert lines[-2:] == ["         one character is 3 steps", "         68 less slow ranks not shown"]
