"""Dependency edges and blocking intervals.

An edge connects two points (lane, time). A blocking interval (lane, from, to) is time that a thread waited.
It becomes no node, as the edge at its end accounts for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from chakra_et.convert.graph.timeline import Lane
from chakra_et.findings import Findings


class EdgeKind(IntEnum):
    """The kind of a dependency."""

    PROGRAM_ORDER = 0
    LAUNCH = 1
    STREAM_ORDER = 2
    SYNCHRONISATION = 3
    INTER_THREAD = 4
    COLLECTIVE = 5


@dataclass(eq=False, repr=False)
class Collector:
    """Collects dependencies, see ``Dependencies``. ``first_lane``: number of lanes of the timeline."""

    first_lane: int
    lanes: list[Lane] = field(default_factory=list)
    edges: list[np.ndarray] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    placed: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    def edge(self, kind: EdgeKind, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Add an edge between two points (lane, ns)."""
        self.edges.append(np.array([[kind, *source, *target]], dtype=np.int64))

    def wait(self, lane: int, begin: int, end: int) -> None:
        """Add a blocking interval, ns."""
        if end > begin:
            self.waits.append((lane, begin, end))

    def new_lane(self, lane: Lane) -> int:
        """Add a lane after those of the timeline and return its index."""
        self.lanes.append(lane)
        return self.first_lane + len(self.lanes) - 1


@dataclass(eq=False, repr=False)
class Dependencies:
    """The dependencies of one rank; times in ns.

    ``edges`` int64[E, 5]: kind, source lane, source time, target lane, target time. ``waits`` int64[W, 3]:
    the blocking intervals as lane, from, to. ``lanes``: the lanes of the timeline, followed by one or more
    per process group that communicates on the CPU. ``placed``: index of a communication on such a lane →
    (lane, start, end). ``findings``: counts by rule.
    """

    edges: np.ndarray
    waits: np.ndarray
    lanes: list[Lane]
    placed: dict[int, tuple[int, int, int]]
    findings: Findings


def collected(found: Collector, lanes: list[Lane]) -> Dependencies:
    """``found`` as ``Dependencies``; ``lanes`` are the timeline's."""
    return Dependencies(
        np.concatenate(found.edges) if found.edges else np.zeros((0, 5), np.int64),
        np.array(found.waits, dtype=np.int64).reshape(-1, 3),
        [*lanes, *found.lanes],
        found.placed,
        found.findings,
    )
