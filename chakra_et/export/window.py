"""The part of a run that is exported: some ranks, or one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.report.columns import EDGE_NAMES, edge_kinds, name_codes, page_kinds
from chakra_et.report.run import ReportRun
from chakra_et.report.timeline import Curve, Row, curves, lay_out, queues
from chakra_et.report.times import find_steps
from chakra_et.traces.sets import rank_choice


@dataclass(frozen=True)
class Window:
    """M nodes of a run, rank by rank, row by row of its timeline, and by start within a row.

    ``node``: their numbers in the run; ``id`` uint64: in their files; ``row``, ``name`` and ``kind``: indices
    into ``rows``, ``names`` and ``NODE_KINDS``; these, ``rank``, ``start_ns`` and ``end_ns`` are int64[M]. An
    end is cut at the start of the next node of the row, as starts and durations are rounded to µs
    independently, so that neighbours may overlap by a µs or two, which viewers would take for nesting.
    ``source``, ``target`` int64[F]: the dependencies between them, as places in ``node``; ``edge_kind``: the
    name of each one's kind.
    """

    run: ReportRun
    node: np.ndarray
    id: np.ndarray
    rank: np.ndarray
    rows: list[Row]
    row: np.ndarray
    names: list[str]
    name: np.ndarray
    kind: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge_kind: list[str]

    def __len__(self) -> int:
        return len(self.node)

    def used_rows(self) -> list[int]:
        """The rows that have nodes."""
        return list(np.unique(self.row).tolist())

    def curves(self) -> list[Curve]:
        """Curves of the run at the moments at which a chosen node changes them."""
        found = []
        for curve in (*curves(self.run), *queues(self.run, edge_kinds(self.run))):
            at = np.flatnonzero(np.isin(curve.node, self.node))
            reserved = None if curve.reserved is None else curve.reserved[at]
            columns = (curve.time_ns[at], curve.allocated[at], reserved, curve.node[at])
            found += [Curve(curve.rank, curve.device, *columns)] if len(at) else []
        return found


def choose(run: ReportRun, step: str = "", ranks: str = "") -> Window:
    """The nodes that fit all of the choices; an empty text chooses everything.

    ``step``: the number of a step; a node belongs to it by its start. ``ranks``: such as 0-7,12. Raises
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
    if not chosen.any():
        raise TraceError("no node fits --step and --ranks together")
    rows, row_of = lay_out(run)
    node = np.flatnonzero(chosen)
    node = node[np.lexsort((run.end_ns[node], run.start_ns[node], row_of[node]))]
    row, start, end = row_of[node], run.start_ns[node], run.end_ns[node].copy()
    same = row[1:] == row[:-1]
    end[:-1][same] = np.minimum(end[:-1], np.maximum(start[1:], start[:-1]))[same]
    place = np.full(len(run.graph), -1, dtype=np.int64)
    place[node] = np.arange(len(node))
    source, target = place[run.graph.source], place[run.graph.target]
    edge = np.flatnonzero((source >= 0) & (target >= 0))
    name, names = name_codes(run)
    return Window(
        run,
        node,
        run.graph.gather([trace.ids for trace in run.traces])[node],
        np.array(run.ranks, dtype=np.int64)[run.graph.trace_of[node]],
        rows,
        row,
        names,
        name[node],
        page_kinds(run)[node],
        start,
        end,
        source[edge],
        target[edge],
        [EDGE_NAMES[kind] for kind in edge_kinds(run)[edge].tolist()],
    )


def _in_step(run: ReportRun, step: str) -> np.ndarray:
    steps = find_steps(run)
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
