"""The part of a run that is exported: some ranks, one step, or the neighbourhood of one node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.report.columns import EDGE_NAMES, NODE_KINDS, edge_kinds, name_codes, page_kinds
from chakra_et.report.lanes import Row, lay_out
from chakra_et.report.memory import Curve, curves
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import find_times
from chakra_et.traces.sets import rank_choice


@dataclass(frozen=True)
class Window:
    """M nodes of a run, rank by rank, row by row of its timeline, and by start within a row.

    ``node`` int64[M]: their numbers in the run. ``source``, ``target`` int64[F]: the dependencies between
    them, as places in ``node``; ``edge`` int64[F]: their numbers in the run's graph.
    """

    run: ReportRun
    rows: list[Row]
    row_of: np.ndarray
    node: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge: np.ndarray

    def __len__(self) -> int:
        return len(self.node)

    @cached_property
    def row(self) -> np.ndarray:
        """Index into ``rows`` of each node, int64[M]."""
        found: np.ndarray = self.row_of[self.node]
        return found

    @cached_property
    def start_ns(self) -> np.ndarray:
        found: np.ndarray = self.run.start_ns[self.node]
        return found

    @cached_property
    def end_ns(self) -> np.ndarray:
        """Ends, cut at the start of the next node of the row, int64[M].

        Starts and durations are rounded to µs independently, so that neighbours may overlap by a µs or two,
        which viewers would take for nesting.
        """
        end: np.ndarray = self.run.end_ns[self.node].copy()
        same = self.row[1:] == self.row[:-1]
        end[:-1][same] = np.minimum(end[:-1], np.maximum(self.start_ns[1:], self.start_ns[:-1]))[same]
        return end

    @cached_property
    def names(self) -> tuple[np.ndarray, list[str]]:
        """(index int64[M], names)."""
        code, names = name_codes(self.run)
        return code[self.node], names

    @cached_property
    def kind(self) -> np.ndarray:
        """Index into ``NODE_KINDS``, int64[M]."""
        found: np.ndarray = page_kinds(self.run)[self.node]
        return found

    @cached_property
    def edge_kind(self) -> list[str]:
        """The name of each dependency's kind."""
        return [EDGE_NAMES[kind] for kind in edge_kinds(self.run)[self.edge].tolist()]

    @cached_property
    def rank(self) -> np.ndarray:
        ranks = np.array(self.run.ranks, dtype=np.int64)
        found: np.ndarray = ranks[self.run.graph.trace_of[self.node]]
        return found

    @cached_property
    def id(self) -> np.ndarray:
        """The nodes' ids in their files, uint64[M]."""
        ids = self.run.graph.gather([trace.ids for trace in self.run.traces])
        found: np.ndarray = ids[self.node]
        return found

    def memory(self) -> list[Curve]:
        """The memory of the devices, at the moments at which a chosen node changes it."""
        chosen = np.zeros(len(self.run.graph), dtype=bool)
        chosen[self.node] = True
        found = [each.take(np.flatnonzero(chosen[each.node])) for each in curves(self.run)]
        return [each for each in found if len(each.time_ns)]

    def kind_names(self) -> list[str]:
        return [NODE_KINDS[kind] for kind in self.kind.tolist()]


def choose(run: ReportRun, step: str = "", ranks: str = "", around: str = "", hops: int = 2) -> Window:
    """The nodes that fit all of the choices; an empty text chooses everything.

    ``step``: the number of a step; a node belongs to it by its start. ``ranks``: such as 0-7,12. ``around``:
    RANK:ID, or ID in a run of one rank; with it come the nodes up to ``hops`` dependencies away. Raises
    ``TraceError`` where nothing fits.
    """
    chosen = np.ones(len(run.graph), dtype=bool)
    if ranks:
        try:
            wanted = rank_choice(ranks)
        except ValueError as error:
            raise TraceError(f"--ranks: {error}") from None
        chosen &= np.array([wanted(rank) for rank in run.ranks])[run.graph.trace_of]
        if not chosen.any():
            raise TraceError(f"--ranks {ranks}: this run has ranks {', '.join(map(str, run.ranks[:20]))}")
    if step:
        chosen &= _in_step(run, step)
    if around:
        chosen &= _near(run, _node(run, around), hops)
    if not chosen.any():
        raise TraceError("no node fits --step, --ranks and --around together")
    rows, row_of = lay_out(run)
    node = np.flatnonzero(chosen)
    node = node[np.lexsort((run.end_ns[node], run.start_ns[node], row_of[node]))]
    place = np.full(len(run.graph), -1, dtype=np.int64)
    place[node] = np.arange(len(node))
    source, target = place[run.graph.source], place[run.graph.target]
    edge = np.flatnonzero((source >= 0) & (target >= 0))
    return Window(run, rows, row_of, node, source[edge], target[edge], edge)


def _in_step(run: ReportRun, step: str) -> np.ndarray:
    steps = find_times(run).steps
    chosen = np.zeros(len(run.graph), dtype=bool)
    place = {rank: at for at, rank in enumerate(run.ranks)}
    for each in steps:
        if each.name == step:
            inside = (run.start_ns >= each.start_ns) & (run.start_ns < each.end_ns)
            chosen |= inside & (run.graph.trace_of == place[each.rank])
    if not chosen.any():
        names = ", ".join(dict.fromkeys(each.name for each in steps))
        raise TraceError(f"--step {step}: this run has steps {names[:200]}")
    return chosen


def _node(run: ReportRun, text: str) -> int:
    """The number of the node that ``RANK:ID`` or ``ID`` means."""
    rank_text, _, id_text = text.rpartition(":")
    if not id_text.isdigit() or (rank_text and not rank_text.isdigit()):
        raise TraceError(f"--around {text}: give RANK:ID, such as 0:1234, or ID in a run of one rank")
    if not rank_text and len(run.ranks) > 1:
        raise TraceError(f"--around {text}: this run has {len(run.ranks)} ranks, so give RANK:ID")
    rank = int(rank_text) if rank_text else run.ranks[0]
    if rank not in run.ranks:
        raise TraceError(f"--around {text}: no rank {rank} in this run")
    ids = run.graph.gather([trace.ids.astype(np.int64) for trace in run.traces])
    found = np.flatnonzero((ids == int(id_text)) & (run.graph.trace_of == run.ranks.index(rank)))
    if not len(found):
        raise TraceError(f"--around {text}: rank {rank} has no node {id_text}")
    return int(found[0])


def _near(run: ReportRun, node: int, hops: int) -> np.ndarray:
    """bool[N]: nodes up to ``hops`` dependencies from ``node``, in either direction."""
    near = np.zeros(len(run.graph), dtype=bool)
    near[node] = True
    source, target = run.graph.source, run.graph.target
    for _ in range(hops):
        reached = near.copy()
        reached[source[near[target]]] = True
        reached[target[near[source]]] = True
        near = reached
    return near
