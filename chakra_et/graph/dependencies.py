"""How causes are said: as edges between points (lane, time) and as waits (lane, from, to).

A wait is a stretch in which a thread was blocked; it takes no time of its own in the graph, as the edge at
its end carries it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class EdgeKind(IntEnum):
    """Why one node comes after another."""

    PROGRAM_ORDER = 0
    LAUNCH = 1
    STREAM_ORDER = 2
    SYNCHRONISATION = 3
    INTER_THREAD = 4
    COLLECTIVE = 5


@dataclass
class Causes:
    """``edges``: rows of (kind, source lane, source time, target lane, target time), ns, in no order.

    ``waits``: rows of (lane, from, to). ``placed``: for each communication on a lane of its own its (lane,
    start, end). ``notes``: counts of what was found by which rule, for the report.
    """

    edges: list[np.ndarray] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    placed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    def edge(self, kind: EdgeKind, source: tuple[int, int], target: tuple[int, int]) -> None:
        self.edges.append(np.array([[kind, *source, *target]], dtype=np.int64))

    def wait(self, lane: int, begin: int, end: int) -> None:
        if end > begin:
            self.waits.append((lane, begin, end))

    def note(self, what: str, count: int = 1) -> None:
        if count:
            self.notes[what] = self.notes.get(what, 0) + count
