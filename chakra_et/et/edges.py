"""The dependencies of one .et file as edges between rows. Invalid files are allowed."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import ExecutionTrace, Ragged

# Use a lookup table unless the range of ids exceeds the number of nodes by this factor.
SPARSE = 8


@dataclass(eq=False, repr=False)
class Edges:
    """All E dependencies, data before ctrl.

    ``child`` int64[E]: rows; ``parent`` int64[E]: rows, -1 if no node has the id; ``dependency`` uint64[E]:
    the id in the file.
    """

    child: np.ndarray
    parent: np.ndarray
    dependency: np.ndarray


def edges_of(trace: ExecutionTrace) -> Edges:
    """The edges of a trace. A duplicate id refers to its last node, as in ASTRA-sim."""
    children = [
        np.repeat(np.arange(len(trace)), np.diff(deps.offsets)) for deps in (trace.data_deps, trace.ctrl_deps)
    ]
    dependency = np.concatenate([trace.data_deps.values, trace.ctrl_deps.values])
    return Edges(
        child=np.concatenate(children),
        parent=rows_of(trace.ids, dependency),
        dependency=dependency,
    )


def rows_of(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """int64[W]: the last row with each wanted id, -1 if there is none."""
    if not len(ids) or not len(wanted):
        return np.full(len(wanted), -1)
    low, high = int(ids.min()), int(ids.max())
    if high - low <= SPARSE * len(ids) + 1024:
        table = np.full(high - low + 2, -1)
        table[(ids - np.uint64(low)).astype(np.int64)] = np.arange(len(ids))
        inside = (wanted >= low) & (wanted <= high)
        place = np.where(inside, wanted - np.uint64(low), np.uint64(high - low + 1))
        return table[place.astype(np.int64)]
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (ids[found] == wanted), found, -1)


def repeated(deps: Ragged) -> np.ndarray:
    """The rows whose list has an id more than once."""
    owner = np.repeat(np.arange(len(deps.offsets) - 1), np.diff(deps.offsets))
    values = deps.values
    same_list = owner[1:] == owner[:-1]
    if (same_list & (values[1:] < values[:-1])).any():
        order = np.lexsort((values, owner))
        owner, values = owner[order], values[order]
    return np.unique(owner[1:][same_list & (values[1:] == values[:-1])])


def find_cycle(count: int, parent: np.ndarray, child: np.ndarray) -> list[int]:
    """A cycle of ``count`` nodes with these edges, lowest first: each is a dependency of the next, the last
    one of the first; [] where there is none."""
    left = np.ones(count, bool)
    left[topological_order(count, parent, child)] = False
    inside = left[parent] & left[child]
    # Every remaining node depends on another remaining node, so walking back must revisit a node.
    waits_for = dict(zip(child[inside].tolist(), parent[inside].tolist(), strict=True))
    row = next(iter(waits_for), None)
    walked: dict[int, None] = {}
    while row is not None and row not in walked:
        walked[row] = None
        row = waits_for[row]
    path = list(walked)
    cycle = path[path.index(row) :][::-1] if row is not None else []
    lowest = cycle.index(min(cycle)) if cycle else 0
    return cycle[lowest:] + cycle[:lowest]


def topological_order(count: int, source: np.ndarray, target: np.ndarray) -> list[int]:
    """Nodes 0 … count − 1 in topological order, lowest ready number first (Kahn's algorithm).

    Nodes on or behind a cycle are left out: a shorter list means that there is a cycle.
    """
    offsets, successors = successor_lists(count, source, target)
    degrees = np.bincount(target, minlength=count)
    # Ascending, so already a heap.
    ready, waiting, order = np.flatnonzero(degrees == 0).tolist(), degrees.tolist(), []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for successor in successors[offsets[node] : offsets[node + 1]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                heapq.heappush(ready, successor)
    return order


def successor_lists(count: int, source: np.ndarray, target: np.ndarray) -> tuple[list[int], list[int]]:
    """Edges as (offsets, successors): node i has ``successors[offsets[i]:offsets[i + 1]]``."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=count))))
    return offsets.tolist(), target[np.argsort(source, kind="stable")].tolist()
