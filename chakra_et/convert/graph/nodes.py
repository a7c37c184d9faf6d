"""Nodes and edges of one rank's execution graph, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.convert.graph.timeline import Lane, Timeline
from chakra_et.findings import Findings


class NodeKind(IntEnum):
    """The kind of a node. The names are the values of the attribute ``kind``."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    COLLECTIVE = 6
    P2P = 7
    HOST_OVERHEAD = 8
    DEVICE_OVERHEAD = 9


class EdgeKind(IntEnum):
    """The kind of a dependency."""

    PROGRAM_ORDER = 0
    LAUNCH = 1
    STREAM_ORDER = 2
    SYNCHRONISATION = 3
    INTER_THREAD = 4
    COLLECTIVE = 5


KIND_NAMES = [kind.name.lower().replace("_", "-") for kind in NodeKind]
Edges = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Source, target and kind of each edge; the first two are rows or nodes."""


@dataclass(eq=False, repr=False)
class Rows:
    """Nodes, before they are numbered in any order.

    - ``start``, ``end``: ns since the first event; ``lane``: index into the lanes
    - ``event``: row in the device trace, -1 for overhead outside events
    - ``item``: index of the communication, -1 for none; ``kind``: ``NodeKind``

    Indices are int32 and kinds int8, as more than one copy of the columns of all nodes exists at a time.
    """

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    event: np.ndarray
    kind: np.ndarray
    item: np.ndarray

    def __post_init__(self) -> None:
        for name in ("lane", "event", "item"):
            setattr(self, name, getattr(self, name).astype(np.int32, copy=False))
        self.kind = self.kind.astype(np.int8, copy=False)

    def rearrange(self, index: np.ndarray) -> None:
        """Replace row i by row ``index[i]``."""
        for name, column in vars(self).items():
            setattr(self, name, column[index])


@dataclass(eq=False, repr=False)
class Graph(Rows):
    """N nodes in order of start time; E edges.

    - ``segment``: index among the nodes of the event, 0 for the first, then its further self time
    - ``source``, ``target``, ``edge_kind``: the edges
    - ``launch_latency``: ns between the end of the launch and the earliest start, of device work or of the
      overhead in front of it; -1 for none
    - ``stream_gap``: ns of such overhead that remain after the other dependencies; -1 for none
    """

    segment: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge_kind: np.ndarray
    launch_latency: np.ndarray
    stream_gap: np.ndarray
    lanes: list[Lane]
    findings: Findings

    def __len__(self) -> int:
        return len(self.start)

    @property
    def is_first(self) -> np.ndarray:
        """bool[N]: whether each node is the first of its event."""
        return (self.event >= 0) & (self.segment == 0)

    def node_of(self, events: int) -> np.ndarray:
        """int64[events]: the first node of each event, -1 for none."""
        node_of = np.full(events, -1, dtype=np.int64)
        first = np.flatnonzero(self.is_first)[::-1]
        node_of[self.event[first]] = first
        return node_of


class Dependencies:
    """The dependencies of one rank, as they are found; times in ns.

    An edge connects two points (lane, time). A blocking interval (lane, from, to) is time that a thread
    waited. It becomes no node, as the edge at its end accounts for it. ``lanes``: the lanes of the timeline,
    followed by one or more per process group that communicates on the CPU. ``placed``: index of a
    communication on such a lane → (lane, start, end).
    """

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = list(lanes)
        self.placed: dict[int, tuple[int, int, int]] = {}
        self.findings = Findings()
        self._edges = [np.zeros((0, 5), dtype=np.int64)]
        self._waits: list[tuple[int, int, int]] = []

    @property
    def edges(self) -> np.ndarray:
        """int64[E, 5]: kind, source lane, source time, target lane, target time."""
        return np.concatenate(self._edges)

    @property
    def waits(self) -> np.ndarray:
        """int64[W, 3]: the blocking intervals as lane, from, to."""
        return np.array(self._waits, dtype=np.int64).reshape(-1, 3)

    def edge(self, kind: EdgeKind, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Add an edge between two points."""
        self._edges.append(np.array([[kind, *source, *target]], dtype=np.int64))

    def connect(self, kind: EdgeKind, time: Timeline, source: int, target: int) -> None:
        """Add an edge from the end of one event to the start of another."""
        from_ = int(time.lane[source]), int(time.end[source])
        self.edge(kind, from_, (int(time.lane[target]), int(time.start[target])))

    def add_edges(self, kind: EdgeKind, *columns: np.ndarray | int) -> None:
        """Add edges: source lanes, source times, target lanes and target times, each int64 or one for all."""
        self._edges.append(np.stack(np.broadcast_arrays(int(kind), *columns), axis=1))

    def wait(self, lane: int, begin: int, end: int) -> None:
        """Add a blocking interval."""
        if end > begin:
            self._waits.append((lane, begin, end))

    def new_lane(self, lane: Lane) -> int:
        """Add a lane and return its index."""
        self.lanes.append(lane)
        return len(self.lanes) - 1
