"""A run as tables: dicts of columns, and nodes and edges as CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import IO, Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.export.window import Window
from chakra_et.report import collectives as communication
from chakra_et.report import profile
from chakra_et.report.columns import (
    COMM_NAMES,
    NODE_KINDS,
    PHASES,
    comm_types,
    name_codes,
    page_kinds,
    shared_codes,
)
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import find_times
from chakra_et.simulate.breakdown import ACTIVITIES

# Integer attributes that are columns under their own names, null (CSV: empty) where a node lacks them.
ATTRIBUTES = ("stream", "num_ops", "tensor_size", "comm_size", "comm_src", "comm_dst", "comm_tag")


def nodes(window: Window) -> dict[str, list[Any]]:
    """Columns of nodes: times in ns on the run's clock, text where names are known, None for none."""
    run, node = window.run, window.node
    phase, _ = shared_codes(run, "phase", PHASES)
    module, modules = shared_codes(run, "module")
    communicates = run.graph.types[node] >= NodeType.COMM_SEND
    types = np.where(communicates, comm_types(run)[node], -1)
    groups = np.where(communicates, run.graph.group[node], -1)
    parent = run.parent[node]
    ids = run.graph.gather([trace.ids.astype(np.int64) for trace in run.traces])
    on_path = np.zeros(len(run.graph), dtype=bool)
    if run.path is not None:
        on_path[run.path.node] = True
    found: dict[str, list[Any]] = {
        "rank": window.rank.tolist(),
        "id": window.id.tolist(),
        "name": _texts(window.names, window.name),
        "kind": _texts(NODE_KINDS, window.kind),
        "row": [window.rows[row].label for row in window.row.tolist()],
        "start_ns": window.start_ns.tolist(),
        "duration_ns": (run.end_ns[node] - window.start_ns).tolist(),
        "wait_ns": run.wait_ns[node].tolist(),
        "phase": _texts(PHASES, phase[node]),
        "module": _texts(modules, module[node]),
        "parent": _known(np.where(parent >= 0, ids[parent], -1)),
        "comm_type": _texts(COMM_NAMES, types),
        "comm_group": _texts(run.graph.groups, groups),
        "on_critical_path": on_path[node].tolist(),
    }
    for name in ATTRIBUTES:
        found[name] = _known(run.graph.attribute(name, -1)[node])
    return found


def _known(values: np.ndarray) -> list[int | None]:
    return [value if value >= 0 else None for value in values.tolist()]


def _texts(table: Sequence[str], index: np.ndarray) -> list[str | None]:
    return [table[at] if at >= 0 else None for at in index.tolist()]


def edges(window: Window) -> dict[str, list[Any]]:
    """Columns of dependencies: the rank and both ids; the target waits for the source."""
    return {
        "rank": window.rank[window.target].tolist(),
        "source": window.id[window.source].tolist(),
        "target": window.id[window.target].tolist(),
        "kind": window.edge_kind,
    }


def by_name(run: ReportRun, kinds: Collection[str] = ()) -> dict[str, list[Any]]:
    """Columns of ``profile.Entry`` for each kind and name, the most time first; ``kinds``: only these."""
    entries = [each for each in profile.by_name(run) if not kinds or each.kind in kinds]
    names = [each.name for each in fields(profile.Entry) if each.name != "rank_ns"]
    return {name: [getattr(each, name) for each in entries] for name in names}


def collectives(run: ReportRun) -> dict[str, list[Any]]:
    """Columns of ``report.collectives.Collective``; ``last_rank``: the one that came last most often."""
    found = communication.collectives(run)
    names = ("type", "bytes", "group", "ranks", "count", "transfer_ns", "algorithm", "bus")
    return {name: [getattr(each, name) for each in found] for name in names} | {
        "skew_ns": [each.skew_ns and each.skew_ns[0] for each in found],
        "longest_skew_ns": [each.skew_ns and each.skew_ns[1] for each in found],
        "last_rank": [max(each.last, key=lambda rank: each.last[rank], default=None) for each in found],
    }


def steps(run: ReportRun) -> dict[str, list[Any]]:
    """Columns of ``report.steps.ReportStep``: one for each activity, which add up, and for each phase."""
    found = find_times(run).steps
    names = ("rank", "name", "start_ns", "end_ns", "hidden_ns", "replayed_ns")
    columns = {name: [getattr(each, name) for each in found] for name in names}
    for parts, of in ((ACTIVITIES, "parts_ns"), (PHASES, "phases_ns")):
        for at, part in enumerate(parts):
            columns[f"{part.replace(' ', '_')}_ns"] = [getattr(each, of)[at] for each in found]
    return columns


def critical_path(run: ReportRun) -> dict[str, list[Any]]:
    """The nodes of the path in time order, and the time that each accounts for, ns of the joint replay."""
    path = run.path
    node = np.zeros(0, np.int64) if path is None else path.node
    code, names = name_codes(run)
    ids = run.graph.gather([trace.ids.astype(np.int64) for trace in run.traces])
    return {
        "rank": [run.ranks[at] for at in run.graph.trace_of[node].tolist()],
        "id": ids[node].tolist(),
        "name": _texts(names, code[node]),
        "kind": _texts(NODE_KINDS, page_kinds(run)[node]),
        "from_ns": [] if path is None else path.from_ns.tolist(),
        "to_ns": [] if path is None else path.to_ns.tolist(),
    }


def write_csv(table: dict[str, list[Any]], file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
    writer = csv.writer(text)
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    text.flush()
    text.detach()


def write_parquet(table: dict[str, list[Any]], file: IO[bytes]) -> None:
    """Raises ``TraceError`` where pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError("parquet needs pyarrow: pip install pyarrow, or choose --format csv") from None
    pyarrow.parquet.write_table(pyarrow.table(table), file)
