"""One line of ``cost_accuracy.py``'s result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LONG = 20.0
"""µs from which a kernel counts as long."""
BMM_FLOORS = {"T4": "17.1"}
"""Where trees of the GPU's own other rows are further off than the target (``cost_floor.py``)."""

HEAD = (
    "| judged on | GPU | rows | mean | from 20 µs | signed | by time | signed | median | target, % |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """One line of the result; ``target``: of the mean error, all and long, in percent. ``batch``: of
    products in 32 bits."""

    judged: str
    gpu: str
    micros: np.ndarray
    errors: np.ndarray
    target: str = ""
    batch: np.ndarray | None = None

    def by_operator(self) -> list[Row]:
        """Products of 32 bits as linear and bmm, others as they are."""
        if self.batch is None:
            return [self]
        found = []
        bmm = BMM_FLOORS.get(self.gpu, "14")
        for name, chosen, target in (("linear", self.batch == 1, "15"), ("bmm", self.batch > 1, bmm)):
            if chosen.any():
                goal, words = target if self.target else "", self.judged.replace("products", name)
                found.append(Row(words, self.gpu, self.micros[chosen], self.errors[chosen], goal))
        return found

    def line(self) -> str:
        size, long = np.abs(self.errors), self.micros >= LONG
        means = [size.mean(), size[long].mean() if long.any() else np.nan]
        weighted, signed = np.average(size, weights=self.micros), np.average(self.errors, weights=self.micros)
        figures = [f"{each:.1%}" for each in means] + [f"{self.errors.mean():+.1%}", f"{weighted:.1%}"]
        figures += [f"{signed:+.1%}", f"{np.median(size):.1%}", self.target]
        return f"| {self.judged} | {self.gpu} | {len(size):,} | {' | '.join(figures)} |"
