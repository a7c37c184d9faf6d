"""Dependency edges and blocking intervals.

An edge runs between two points (lane, time). A blocking interval (lane, from, to) is time in which a thread
waited: it becomes no node, as the edge at its end explains it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from chakra_et.findings import Findings
from chakra_et.graph.timeline import Lane


class EdgeKind(IntEnum):
    """Why one node comes after another."""

    PROGRAM_ORDER = 0
    LAUNCH = 1
    STREAM_ORDER = 2
    SYNCHRONISATION = 3
    INTER_THREAD = 4
    COLLECTIVE = 5


@dataclass
class Found:
    """Dependencies while they are collected; see ``Dependencies``."""

    first_lane: int
    lanes: list[Lane] = field(default_factory=list)
    edges: list[np.ndarray] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    placed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    def edge(self, kind: EdgeKind, source: tuple[int, int], target: tuple[int, int]) -> None:
        self.edges.append(np.array([[kind, *source, *target]], dtype=np.int64))

    def wait(self, lane: int, begin: int, end: int) -> None:
        if end > begin:
            self.waits.append((lane, begin, end))

    def new_lane(self, lane: Lane) -> int:
        """The index of one more lane behind those of the timeline."""
        self.lanes.append(lane)
        return self.first_lane + len(self.lanes) - 1


@dataclass(frozen=True)
class Dependencies:
    """Why each piece of work started when it did.

    ``edges`` is int64[E, 5]: kind, source lane, source time, target lane, target time, times in ns. ``waits``
    is int64[W, 3]: lane, from, to. ``lanes``: those of the timeline and, behind them, one or more for each
    process group that communicates on the CPU. ``placed``: index of a communication on such a lane → (lane,
    start, end). ``findings``: how many were found by which rule.
    """

    edges: np.ndarray
    waits: np.ndarray
    lanes: list[Lane]
    placed: dict[int, tuple[int, int, int]]
    findings: Findings


def collected(found: Found, lanes: list[Lane]) -> Dependencies:
    """The value of what was ``found``; ``lanes`` are the timeline's."""
    return Dependencies(
        np.concatenate(found.edges) if found.edges else np.zeros((0, 5), np.int64),
        np.array(found.waits, dtype=np.int64).reshape(-1, 3),
        [*lanes, *found.lanes],
        found.placed,
        found.findings,
    )
