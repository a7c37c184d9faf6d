"""Nodes and edges of one rank's execution graph, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.findings import Findings
from chakra_et.graph.timeline import Lane
from chakra_et.traces.device_format import ANNOTATION, DRIVER, KERNEL, MEMCPY, MEMSET, RUNTIME


class NodeKind(IntEnum):
    """What a node is; the names are the values of the ``kind`` attribute."""

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


@dataclass
class Graph:
    """N nodes in order of start time; E edges.

    ``start``, ``end``: ns since the first event. ``lane``: index into ``lanes``. ``event``: row of the device
    trace that the node is or goes on with, -1 for overhead outside of events. ``segment``: 0 for the node
    that stands for the event, 1, 2, … for the further stretches of its own time. ``item``: index of the
    communication, or -1. ``kind``: ``NodeKind``. ``source``, ``target``, ``edge_kind``: the edges.
    ``launch_latency``: of device work or of the overhead in front of it, ns, -1 for none: it starts no
    earlier than this after its launch has ended. ``stream_gap``: of such overhead, ns, -1 for none: what
    remains of it behind its other dependencies.
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


@dataclass
class Rows:
    """Nodes before they have numbers; the columns are those of ``Graph``."""

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    event: np.ndarray
    kind: np.ndarray
    item: np.ndarray
    launch_latency: np.ndarray
    stream_gap: np.ndarray

    def take(self, index: np.ndarray) -> Rows:
        return Rows(*(column[index] for column in vars(self).values()))

    @staticmethod
    def join(parts: list[Rows]) -> Rows:
        return Rows(*(np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])))


def rows_of(
    lane: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    event: np.ndarray,
    kind: np.ndarray,
    item: np.ndarray,
) -> Rows:
    """Rows of events, which have no launch latency of their own."""
    none = np.full(len(lane), -1, dtype=np.int64)
    return Rows(lane, start, end, event, kind, item, none, none)
