"""Where slowdowns are, as two tables: rank × step, and stage × data-parallel rank.

The slowdown of a worker is the smaller one of its data-parallel rank and its stage (equation 4 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# From 1 (no slowdown) to the largest.
SHADES = " ░▒▓█"
MOST_ROWS, MOST_COLUMNS = 32, 64


@dataclass(frozen=True)
class HeatMap:
    """``slowdown`` float64[rows, columns]; ``row_name``, ``column_name``: what ``rows`` and ``columns``
    number, such as ``rank`` and ``step``."""

    row_name: str
    column_name: str
    rows: list[int]
    columns: list[int]
    slowdown: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """``{"ranks": [0, …], "steps": [5, …], "slowdown": [[1.2, …], …]}``, with the names in the plural."""
        return {
            f"{self.row_name}s": self.rows,
            f"{self.column_name}s": self.columns,
            "slowdown": self.slowdown.tolist(),
        }

    def draw(self) -> list[str]:
        """One character per cell, darker for a larger slowdown.

        At most ``MOST_ROWS`` rows, those with the largest slowdowns, and ``MOST_COLUMNS`` columns: where
        there are more, one character shows the largest of several neighbours.
        """
        chosen = np.sort(np.argsort(-self.slowdown.max(axis=1), kind="stable")[:MOST_ROWS])
        width = -(-len(self.columns) // MOST_COLUMNS)
        cells = np.maximum.reduceat(self.slowdown[chosen], np.arange(0, len(self.columns), width), axis=1)
        largest = float(cells.max())
        level = np.clip((cells - 1) / max(largest - 1, 1e-9), 0, 1) * (len(SHADES) - 1)
        labels = [f"{self.row_name} {self.rows[row]}" for row in chosen.tolist()]
        margin = max(map(len, labels))
        lines = [f"slowdown by {self.row_name} and {self.column_name}, '{SHADES[-1]}' is {largest:.2f}:"]
        for label, row in zip(labels, level.tolist(), strict=True):
            lines.append(f"{label:>{margin}} |{''.join(SHADES[round(each)] for each in row)}|")
        ends = " … ".join(map(str, [self.columns[0], *self.columns[1:][-1:]]))
        below = [f"{self.column_name} {ends}"]
        if width > 1:
            below.append(f"one character is {width} {self.column_name}s")
        if len(chosen) < len(self.rows):
            below.append(f"{len(self.rows) - len(chosen)} less slow {self.row_name}s not shown")
        return lines + [f"{'':{margin}}  {line}" for line in below]


def rank_by_step(
    steps: Sequence[int],
    workers: Mapping[int, tuple[int, int]],
    by_dp_rank: Mapping[int, Mapping[int, float]],
    by_stage: Mapping[int, Mapping[int, float]],
) -> HeatMap:
    """``workers``: rank → (data-parallel rank, stage); the others: step → part → slowdown."""
    cells = [
        [min(by_dp_rank[step][dp_rank], by_stage[step][stage]) for step in steps]
        for dp_rank, stage in workers.values()
    ]
    return HeatMap("rank", "step", list(workers), list(steps), np.array(cells))


def stage_by_dp_rank(by_dp_rank: Mapping[int, float], by_stage: Mapping[int, float]) -> HeatMap:
    """Each stage of each data-parallel rank over all steps; arguments: part → slowdown."""
    stages, dp_ranks = sorted(by_stage), sorted(by_dp_rank)
    cells = [[min(by_dp_rank[dp_rank], by_stage[stage]) for dp_rank in dp_ranks] for stage in stages]
    return HeatMap("stage", "dp_rank", stages, dp_ranks, np.array(cells))
