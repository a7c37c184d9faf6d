"""The attributes of nodes that allocated or freed memory, see ``et.memory``."""

from __future__ import annotations

import numpy as np

from chakra_et.arrays import coded_pairs, first_rows, unique
from chakra_et.convert.columns import Add
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Graph
from chakra_et.et import memory as names
from chakra_et.traces.memory import Memory


def add_memory(rank: LinkedRank, graph: Graph, add: Add) -> None:
    """What each node allocated and freed, and the level of each device after it."""
    memory = rank.device.memory
    if not len(memory):
        return
    node = _nodes(rank, graph, memory)
    for number, device in enumerate(memory.devices):
        own = np.flatnonzero(memory.device == number)
        own = own[np.argsort(node[own], kind="stable")]
        if len(own):
            _add_device(memory, own, node[own], device, add)


def _nodes(rank: LinkedRank, graph: Graph, memory: Memory) -> np.ndarray:
    """int64[K]: the node of the thread that ran at the time of each event, or that was its last one.

    Events of threads without nodes, and those before the first node, belong to the main thread's node and the
    first one.
    """
    of_thread = _lanes(rank, graph)
    lane = np.array([of_thread.get(thread, rank.timeline.main) for thread in memory.thread.tolist()])
    node = np.zeros(len(memory), dtype=np.int64)
    for number in unique(lane).tolist():
        rows = np.flatnonzero(graph.lane == number)
        at = np.flatnonzero(lane == number)
        if len(rows):
            place = np.searchsorted(graph.start[rows], memory.time[at], side="right") - 1
            node[at] = rows[np.maximum(place, 0)]
    return node


def _lanes(rank: LinkedRank, graph: Graph) -> dict[int, int]:
    """The lane of each thread that has nodes."""
    thread, lane = rank.device.thread, rank.timeline.lane
    placed = np.flatnonzero((thread >= 0) & (lane >= 0))
    used = set(unique(graph.lane).tolist())
    pairs, _ = coded_pairs(thread[placed], lane[placed])
    return {each: number for each, number in pairs if number in used}


def _add_device(memory: Memory, own: np.ndarray, node: np.ndarray, device: str, add: Add) -> None:
    """``own``: the events of the device, node by node and in order of time; ``node``: their nodes."""
    rows, first = first_rows(node)
    last = np.append(first[1:], len(node)) - 1
    size, level = memory.bytes[own], memory.allocated[own]
    # A node that only frees memory has its peak before its first event.
    highest = np.maximum(np.maximum.reduceat(level, first), level[first] - size[first])
    values = {
        names.ALLOCATED: level[last],
        names.PEAK: highest,
        names.RESERVED: memory.reserved[own][last],
        names.ALLOCATIONS: np.add.reduceat((size > 0).astype(np.int64), first),
        names.FREES: np.add.reduceat((size < 0).astype(np.int64), first),
        names.ALLOCATED_IN: np.add.reduceat(np.maximum(size, 0), first),
        names.FREED_IN: np.add.reduceat(np.maximum(-size, 0), first),
    }
    for field, column in values.items():
        if field != names.RESERVED or column.any():
            add(names.attribute(device, field), "int64", rows, column)
