"""Nodes and edges as two tables, CSV or Parquet."""

from __future__ import annotations

import csv
import io
from typing import IO, Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.export.window import Window
from chakra_et.report.columns import COMM_NAMES, PHASES, comm_types, shared_codes

# Integer attributes that are columns under their own names, null (CSV: empty) where a node lacks them.
ATTRIBUTES = ("stream", "num_ops", "tensor_size", "comm_size", "comm_src", "comm_dst", "comm_tag")


def nodes(window: Window) -> dict[str, list[Any]]:
    """Columns of nodes: times in ns on the run's clock, text where names are known, None for none."""
    run, node = window.run, window.node
    code, names = window.names
    phase, _ = shared_codes(run, "phase", PHASES)
    module, modules = shared_codes(run, "module")
    communicates = run.graph.types[node] >= NodeType.COMM_SEND
    types = np.where(communicates, comm_types(run)[node], -1).tolist()
    groups = np.where(communicates, run.graph.group[node], -1).tolist()
    parent = run.parent[node]
    ids = run.graph.gather([trace.ids.astype(np.int64) for trace in run.traces])
    on_path = np.zeros(len(run.graph), dtype=bool)
    if run.path is not None:
        on_path[run.path.node] = True
    found: dict[str, list[Any]] = {
        "rank": window.rank.tolist(),
        "id": window.id.tolist(),
        "name": [names[at] for at in code.tolist()],
        "kind": window.kind_names(),
        "row": [window.rows[row].label for row in window.row.tolist()],
        "start_ns": window.start_ns.tolist(),
        "duration_ns": (run.end_ns[node] - window.start_ns).tolist(),
        "wait_ns": run.wait_ns[node].tolist(),
        "phase": [PHASES[at] if at >= 0 else None for at in phase[node].tolist()],
        "module": [modules[at] if at >= 0 else None for at in module[node].tolist()],
        "parent": [at if at >= 0 else None for at in np.where(parent >= 0, ids[parent], -1).tolist()],
        "comm_type": [COMM_NAMES[at] if at >= 0 else None for at in types],
        "comm_group": [run.graph.groups[at] if at >= 0 else None for at in groups],
        "on_critical_path": on_path[node].tolist(),
    }
    for name in ATTRIBUTES:
        values = run.graph.attribute(name, -1)[node]
        found[name] = [value if value >= 0 else None for value in values.tolist()]
    return found


def edges(window: Window) -> dict[str, list[Any]]:
    """Columns of dependencies: the rank and both ids; the target waits for the source."""
    return {
        "rank": window.rank[window.target].tolist(),
        "source": window.id[window.source].tolist(),
        "target": window.id[window.target].tolist(),
        "kind": window.edge_kind,
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
