"""Nodes and edges of one rank's execution graph, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.convert.graph.timeline import Lane
from chakra_et.findings import Findings
from chakra_et.traces.device_format import ANNOTATION, DRIVER, KERNEL, MEMCPY, MEMSET, RUNTIME


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


KIND_NAMES = [kind.name.lower().replace("_", "-") for kind in NodeKind]
KIND_OF_CATEGORY = {
    ANNOTATION: NodeKind.ANNOTATION,
    RUNTIME: NodeKind.RUNTIME,
    DRIVER: NodeKind.RUNTIME,
    KERNEL: NodeKind.KERNEL,
    MEMCPY: NodeKind.MEMCPY,
    MEMSET: NodeKind.MEMSET,
}


@dataclass(eq=False, repr=False)
class Graph:
    """N nodes in order of start time; E edges.

    - ``start``, ``end``: ns since the first event; ``lane``: index into ``lanes``
    - ``event``: row in the device trace, -1 for overhead outside events
    - ``segment``: index among the nodes of the event, 0 for the first, then its further self time
    - ``item``: index of the communication, -1 for none; ``kind``: ``NodeKind``
    - ``source``, ``target``, ``edge_kind``: the edges
    - ``launch_latency``: ns between the end of the launch and the earliest start, of device work or of the
      overhead in front of it; -1 for none
    - ``stream_gap``: ns of such overhead that remain after the other dependencies; -1 for none
    """

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    event: np.ndarray
    segment: np.ndarray
    item: np.ndarray
    kind: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge_kind: np.ndarray
    launch_latency: np.ndarray
    stream_gap: np.ndarray
    lanes: list[Lane]
    findings: Findings

    def __len__(self) -> int:
        return len(self.start)


@dataclass(eq=False, repr=False)
class Rows:
    """Nodes before they are numbered; the columns are those of ``Graph``.

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

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        return Rows(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))
