"""The nodes of a run in the order in which exports have them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.report.columns import EDGE_NAMES, edge_kinds, name_codes, page_kinds
from chakra_et.report.run import ReportRun
from chakra_et.report.timeline import Row, lay_out


@dataclass(frozen=True)
class Window:
    """The N nodes of a run, rank by rank, row by row of its timeline, and by start within a row.

    ``node``: their numbers in the run; ``id``: in their files; ``row``, ``name`` and ``kind``: indices
    into ``rows``, ``names`` and ``NODE_KINDS``; these, ``rank``, ``start_ns`` and ``end_ns`` are int64[N]. An
    end is cut at the start of the next node of the row, as starts and durations are rounded to µs
    independently, so that neighbours may overlap by a µs or two, which viewers would take for nesting.
    ``source``, ``target`` int64[F]: the dependencies, as places in ``node``; ``edge_kind``: the
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


def all_nodes(run: ReportRun) -> Window:
    """The nodes of a run and their dependencies."""
    rows, row_of = lay_out(run)
    node = np.lexsort((run.end_ns, run.start_ns, row_of))
    row, start, end = row_of[node], run.start_ns[node], run.end_ns[node].copy()
    same = row[1:] == row[:-1]
    end[:-1][same] = np.minimum(end[:-1], np.maximum(start[1:], start[:-1]))[same]
    place = np.empty(len(node), dtype=np.int64)
    place[node] = np.arange(len(node))
    name, names = name_codes(run)
    return Window(
        run,
        node,
        run.ids[node],
        np.array(run.ranks, dtype=np.int64)[run.graph.trace_of[node]],
        rows,
        row,
        names,
        name[node],
        page_kinds(run)[node],
        start,
        end,
        place[run.graph.source],
        place[run.graph.target],
        [EDGE_NAMES[kind] for kind in edge_kinds(run).tolist()],
    )
