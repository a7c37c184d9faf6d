"""The operations of replayed .et files, and the duration of each node with other times for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.job.axes import dp_ranks_of
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching
from chakra_et.simulate.timing import Timing
from chakra_et.stragglers.operations import JobOperations
from chakra_et.stragglers.stretches import Stretches

NS = 1e-9


@dataclass(frozen=True)
class Table:
    """The M operations, and how they and the N nodes belong together; arrays are int64.

    A stretch is what one rank's host, or device, computes between two communications. ``stretch_of_node``
    [N]: -1 for communication. ``stretch`` [M]: -1 for communication and for stretches that only other ranks
    have. ``node`` [M]: of communication, else -1. ``trace`` [M]: index of the rank.
    """

    operations: JobOperations
    stretch_of_node: np.ndarray
    stretch: np.ndarray
    node: np.ndarray
    trace: np.ndarray
    notes: list[str]

    def durations(self, own_ns: np.ndarray, work_ns: np.ndarray) -> np.ndarray:
        """The nodes' ``own_ns``, int64[N], with these times for the operations, float64[M].

        All nodes of a stretch grow in proportion, as a rank may have no node of a type that others have.
        """
        own = own_ns.astype(np.float64)
        inside, computes = self.stretch_of_node >= 0, self.stretch >= 0
        count = int(self.stretch_of_node.max(initial=-1)) + 1
        recorded = np.bincount(self.stretch_of_node[inside], own[inside], count)
        wanted = np.bincount(self.stretch[computes], work_ns[computes], count)
        factor = np.divide(wanted, recorded, out=np.ones(count), where=recorded > 0)
        own[inside] *= factor[self.stretch_of_node[inside]]
        communicates = self.node >= 0
        own[self.node[communicates]] = work_ns[communicates]
        return np.rint(own).astype(np.int64)


def make_table(
    graph: ReplayGraph, found: Stretches, matching: Matching, times: Timing, stages: dict[int, int]
) -> Table:
    """``stages``: rank → its stage. Ranks of one stage whose steps communicate alike do the same work."""
    steps = len(found.steps)
    cell = graph.trace_of * steps + found.step
    kind_of_cell = _kinds_of_cells(graph, found, cell, stages)
    place = (found.ordinal * 2 + found.on_host) * len(found.optypes) + found.optype
    places = int(place.max()) + 1
    nodes, comm = np.flatnonzero(~found.communicates), np.flatnonzero(found.communicates)

    groups, group_of_node = np.unique((kind_of_cell[cell] * places + place)[nodes], return_inverse=True)
    row_group, row_cell, row_of_node = _rows(kind_of_cell, groups // places, group_of_node, cell[nodes])
    work = np.bincount(row_of_node, graph.own_ns[nodes], len(row_group))
    row_place = groups[row_group] % places

    stretches = int(place.max()) // len(found.optypes) + 1
    stretch_of_node = np.full(len(graph), -1, dtype=np.int64)
    known, stretch_of_node[nodes] = np.unique(
        (cell * stretches + place // len(found.optypes))[nodes], return_inverse=True
    )
    wanted = row_cell * stretches + row_place // len(found.optypes)
    stretch = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    stretch = np.where(known[stretch] == wanted, stretch, -1)

    _, comm_group = np.unique((kind_of_cell[cell] * places + place)[comm], return_inverse=True)
    trace = np.concatenate([row_cell, cell[comm]]) // steps
    transfer = _transfers(graph, matching, times)
    rank = np.array(graph.ranks)[trace]
    dp_rank = dp_ranks_of(stages)
    _, first = np.unique(trace, return_index=True)
    delay = np.zeros(len(trace))
    delay[first] = np.array(times.release_ns) * NS
    nothing = np.full(len(comm), -1, dtype=np.int64)
    operations = JobOperations(
        optypes=found.optypes,
        optype=np.concatenate([row_place % len(found.optypes), found.optype[comm]]),
        dp_rank=np.array([dp_rank[each] for each in graph.ranks])[trace],
        stage=np.array([stages[each] for each in graph.ranks])[trace],
        rank=rank,
        step=np.array(found.steps)[np.concatenate([row_cell, cell[comm]]) % steps],
        group=np.concatenate([row_group, len(groups) + comm_group]),
        by_median=np.arange(len(trace)) >= len(row_group),
        work_s=np.concatenate([work, transfer[comm]]) * NS,
        delay_s=delay,
        is_first=np.isin(np.arange(len(trace)), first),
    )
    return Table(
        operations=operations,
        stretch_of_node=stretch_of_node,
        stretch=np.concatenate([stretch, nothing]),
        node=np.concatenate([np.full(len(row_group), -1, dtype=np.int64), comm]),
        trace=trace,
        notes=_notes(kind_of_cell, steps, stretch),
    )


def _kinds_of_cells(
    graph: ReplayGraph, found: Stretches, cell: np.ndarray, stages: dict[int, int]
) -> np.ndarray:
    """One number for the cells, (rank, step), that do the same work: of one stage, with the same
    communication."""
    comm = np.flatnonzero(found.communicates)
    comm = comm[np.lexsort((found.ordinal[comm], cell[comm]))]
    cells = len(graph.traces) * len(found.steps)
    bounds = np.searchsorted(cell[comm], np.arange(cells + 1))
    numbers: dict[tuple[int, bytes], int] = {}
    kinds = []
    for at in range(cells):
        sequence = found.optype[comm[bounds[at] : bounds[at + 1]]].tobytes()
        key = stages[graph.ranks[at // len(found.steps)]], sequence
        kinds.append(numbers.setdefault(key, len(numbers)))
    return np.array(kinds, dtype=np.int64)


def _rows(
    kind_of_cell: np.ndarray, group_kind: np.ndarray, group_of_node: np.ndarray, cell_of_node: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row for each group and cell of its kind, also where the cell has no node: group and cell of each
    row, and the row of each node."""
    cells = np.argsort(kind_of_cell, kind="stable")
    count = np.bincount(kind_of_cell)
    first = np.cumsum(count) - count
    member = np.empty(len(cells), dtype=np.int64)
    member[cells] = np.arange(len(cells)) - first[kind_of_cell[cells]]
    rows = count[group_kind]
    offset = np.cumsum(rows) - rows
    group = np.repeat(np.arange(len(group_kind)), rows)
    cell = cells[first[group_kind[group]] + np.arange(len(group)) - offset[group]]
    return group, cell, offset[group_of_node] + member[cell_of_node]


def _transfers(graph: ReplayGraph, matching: Matching, times: Timing) -> np.ndarray:
    """What each communication node takes once its peers are there, float64[N] in ns; the duration where it
    has none."""
    if times.transfer_ns is not None:
        return np.where(matching.channel >= 0, times.transfer_ns, graph.own_ns).astype(np.float64)
    transfer = graph.own_ns.astype(np.float64)
    nodes = np.flatnonzero(matching.channel >= 0)
    key = matching.channel[nodes] * len(graph) + matching.ordinal[nodes]
    _, together = np.unique(key, return_inverse=True)
    shortest = np.full(int(together.max(initial=-1)) + 1, np.inf)
    np.minimum.at(shortest, together, graph.duration_ns[nodes])
    transfer[nodes] = shortest[together]
    return transfer


def _notes(kind_of_cell: np.ndarray, steps: int, stretch: np.ndarray) -> list[str]:
    notes = []
    traces = np.arange(len(kind_of_cell)) // steps
    ranks_of_kind = [np.unique(traces[kind_of_cell == kind]) for kind in range(kind_of_cell.max() + 1)]
    shared = {int(rank) for ranks in ranks_of_kind if len(ranks) > 1 for rank in ranks}
    alone = len(np.unique(traces)) - len(shared)
    if alone:
        notes.append(
            f"ranks whose work no other rank does, compared only with their own other steps: {alone}"
        )
    absent = int((stretch < 0).sum())
    if absent:
        notes.append(
            f"operations of other ranks for which a rank has no node, left out of its ideal: {absent}"
        )
    return notes
