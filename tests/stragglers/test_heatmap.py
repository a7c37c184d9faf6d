"""The heat maps as text and as JSON."""

from __future__ import annotations

import numpy as np

from chakra_et.stragglers.heatmap import MOST_COLUMNS, MOST_ROWS, HeatMap, rank_by_step, stage_by_dp_rank


def test_the_smaller_slowdown_of_dp_rank_and_stage_is_the_workers() -> None:
    workers = {0: (0, 0), 4: (1, 0), 8: (0, 1), 12: (1, 1)}
    by_dp_rank = {7: {0: 1.5, 1: 1.1}, 9: {0: 1.0, 1: 1.3}}
    by_stage = {7: {0: 1.4, 1: 1.2}, 9: {0: 1.2, 1: 1.25}}
    found = rank_by_step([7, 9], workers, by_dp_rank, by_stage)
    assert found.slowdown.tolist() == [[1.4, 1.0], [1.1, 1.2], [1.2, 1.0], [1.1, 1.25]]
    assert found.as_json() == {"ranks": [0, 4, 8, 12], "steps": [7, 9], "slowdown": found.slowdown.tolist()}
    places = stage_by_dp_rank(by_dp_rank[7], by_stage[7])
    assert places.as_json() == {"stages": [0, 1], "dp_ranks": [0, 1], "slowdown": [[1.4, 1.1], [1.2, 1.1]]}


def test_darker_is_slower() -> None:
    lines = HeatMap("rank", "step", [0, 12], [3, 4, 5], np.array([[1.0, 0.9, 1.5], [2.0, 1.25, 1.75]])).draw()
    assert lines == [
        "slowdown by rank and step, '█' is 2.00:",
        " rank 0 |  ▒|",
        "rank 12 |█░▓|",
        "         step 3 … 5",
    ]


def test_no_slowdown_at_all_is_blank() -> None:
    assert HeatMap("rank", "step", [0], [3], np.array([[1.0]])).draw()[1:] == ["rank 0 | |", "        step 3"]


def test_many_rows_and_columns_are_cut_to_the_slowest() -> None:
    slowdown = np.ones((100, 150))
    slowdown[70, 149] = 3.0
    lines = HeatMap("rank", "step", list(range(100)), list(range(150)), slowdown).draw()
    rows = [line for line in lines if line.endswith("|")]
    assert len(rows) == MOST_ROWS
    width = {len(line.partition("|")[2]) - 1 for line in rows}
    assert width == {50} and max(width) <= MOST_COLUMNS
    (slow,) = (line for line in rows if "█" in line)
    assert slow.startswith("rank 70 |") and slow.endswith("█|")
    assert lines[-2:] == ["         one character is 3 steps", "         68 less slow ranks not shown"]
