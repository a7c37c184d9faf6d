"""A run as tables, which every data-frame library takes without one being needed; CSV, Parquet, workbooks."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np

from chakra_et.diagnose.rates import KernelClass
from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.et.node_attributes import EDGE_NAMES
from chakra_et.files import atomic_file
from chakra_et.report import collectives as communication
from chakra_et.report.run import COMM_NAMES, NODE_KINDS, PHASES, ReportRun
from chakra_et.report.timeline import lay_out
from chakra_et.report.times import Entry, by_name, find_steps
from chakra_et.simulate.breakdown import ACTIVITIES

# Integer attributes that are columns under their own names, null (CSV: empty) where a node lacks them.
ATTRIBUTES = ("stream", "num_ops", "tensor_size", "comm_size", "comm_src", "comm_dst", "comm_tag")


@functools.cache
def dictionary() -> dict[str, str]:
    """What the columns of all tables mean."""
    return json.loads((resources.files("chakra_et.export") / "columns.json").read_text(encoding="utf-8"))


class Table:
    """Columns of equal length by name. ``table["name"]`` is a list; None stands for a missing value.

    ``pandas.DataFrame.from_arrow(table)``, ``polars.DataFrame(table)`` and ``pyarrow.table(table)`` read it
    through the Arrow C stream; ``arrow()`` and ``pandas()`` do the same. These need pyarrow.
    """

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def __len__(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"Table({len(self):,} rows: {', '.join(self.columns)})"

    def rows(self) -> list[dict[str, Any]]:
        """Each row as a dict."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def arrow(self) -> Any:
        """A ``pyarrow.Table``; its columns have the ``description`` of ``dictionary``. Raises ``TraceError``
        where pyarrow is not installed."""
        try:
            import pyarrow
        except ImportError:
            raise TraceError(
                "Parquet and data-frame libraries need pyarrow: pip install pyarrow (or --format csv)"
            ) from None
        table = pyarrow.table(self.columns)
        meaning = dictionary()
        described = [
            each.with_metadata({"description": meaning[each.name]}) if each.name in meaning else each
            for each in table.schema
        ]
        return table.cast(pyarrow.schema(described))

    def pandas(self) -> Any:
        """A ``pandas.DataFrame``, which needs no pyarrow."""
        import pandas

        return pandas.DataFrame(self.columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """The Arrow PyCapsule interface."""
        return self.arrow().__arrow_c_stream__(requested_schema)


def nodes(run: ReportRun) -> Table:
    """Rank by rank, row by row of the timeline: times in ns on the run's clock, text where names are known,
    None for none."""
    graph, (rows, row_of) = run.graph, lay_out(run)
    node = np.lexsort((run.end_ns, run.start_ns, row_of))
    row = [rows[at] for at in row_of[node].tolist()]
    code, names = run.names
    phase, _ = run.graph.codes("phase", PHASES)
    module, modules = run.graph.codes("module")
    communicates = graph.types >= NodeType.COMM_SEND
    on_path = np.isin(node, run.path.node)
    found: dict[str, list[Any]] = {
        "rank": [each.rank for each in row],
        "id": run.ids[node].tolist(),
        "name": _texts(names, code[node]),
        "kind": _texts(NODE_KINDS, run.node_kinds[node]),
        "row": [each.label for each in row],
        "start_ns": run.start_ns[node].tolist(),
        "duration_ns": (run.end_ns - run.start_ns)[node].tolist(),
        "wait_ns": run.wait_ns[node].tolist(),
        "phase": _texts(PHASES, phase[node]),
        "module": _texts(modules, module[node]),
        "parent": _known(np.where(run.parent >= 0, run.ids[run.parent], -1)[node]),
        "comm_type": _texts(COMM_NAMES, np.where(communicates, run.comm_types, -1)[node]),
        "comm_group": _texts(graph.groups, np.where(communicates, graph.group, -1)[node]),
        "on_critical_path": on_path.tolist(),
    }
    found |= {name: _known(graph.attribute(name, -1)[node]) for name in ATTRIBUTES}
    return Table(found)


def _known(values: np.ndarray) -> list[int | None]:
    return [value if value >= 0 else None for value in values.tolist()]


def _texts(table: Sequence[str], index: np.ndarray) -> list[str | None]:
    return [table[at] if at >= 0 else None for at in index.tolist()]


def edges(run: ReportRun) -> Table:
    """Dependencies: the rank and both ids; the target waits for the source."""
    graph = run.graph
    return Table(
        {
            "rank": np.array(run.ranks)[graph.trace_of[graph.target]].tolist(),
            "source": run.ids[graph.source].tolist(),
            "target": run.ids[graph.target].tolist(),
            "kind": _texts(EDGE_NAMES, run.edge_kinds),
        }
    )


def operators(run: ReportRun, kinds: Collection[str] = ()) -> Table:
    """``times.Entry`` for each kind and name, the most time first; ``kinds``: only these."""
    names = [each.name for each in fields(Entry) if each.name != "rank_ns"]
    return Table(_columns([each for each in by_name(run) if not kinds or each.kind in kinds], names))


def kernel_classes(run: ReportRun) -> Table:
    """``diagnose.rates.KernelClass``, the most time first."""
    return Table(_columns(run.kernel_classes, [each.name for each in fields(KernelClass)]))


def collectives(run: ReportRun) -> Table:
    """``report.collectives.collectives``; ``last_rank``: the one that came last most often."""
    found = communication.collectives(run)
    names = ("type", "bytes", "group", "ranks", "count", "transfer_ns", "algorithm", "bus", "usual_bus")
    last = [each["last"] for each in found]
    return Table(
        {name: [each[name] for each in found] for name in names}
        | {
            "skew_ns": [each["skew_ns"] and each["skew_ns"][0] for each in found],
            "longest_skew_ns": [each["skew_ns"] and each["skew_ns"][1] for each in found],
            "last_rank": [max(times, key=times.__getitem__, default=None) for times in last],
        }
    )


def steps(run: ReportRun) -> Table:
    """``times.ReportStep``: one column for each activity, which add up, and for each phase."""
    found = find_steps(run)
    columns = _columns(found, ("rank", "name", "start_ns", "end_ns", "hidden_ns", "replayed_ns"))
    for parts, of in ((ACTIVITIES, "parts_ns"), (PHASES, "phases_ns")):
        for at, part in enumerate(parts):
            columns[f"{part.replace(' ', '_')}_ns"] = [getattr(each, of)[at] for each in found]
    return Table(columns)


def critical_path(run: ReportRun) -> Table:
    """The nodes of the path in time order, and the time that each accounts for, ns of the joint replay."""
    node = run.path.node
    code, names = run.names
    return Table(
        {
            "rank": np.array(run.ranks)[run.graph.trace_of[node]].tolist(),
            "id": run.ids[node].tolist(),
            "name": _texts(names, code[node]),
            "kind": _texts(NODE_KINDS, run.node_kinds[node]),
            "from_ns": run.path.from_ns.tolist(),
            "to_ns": run.path.to_ns.tolist(),
        }
    )


def notes(run: ReportRun) -> Table:
    """What is missing, guessed or assumed."""
    return Table({"note": list(dict.fromkeys(run.lacks))})


SHEETS: dict[str, Callable[[ReportRun], Table]] = {
    "steps": steps,
    "kernel_classes": kernel_classes,
    "operators": operators,
    "collectives": collectives,
    "critical_path": critical_path,
    "notes": notes,
}
"""The tables of a workbook, which nodes and edges don't fit in."""
TABLES = {"nodes": nodes, "edges": edges, **SHEETS}


def _columns(entries: Sequence[Any], names: Iterable[str]) -> dict[str, list[Any]]:
    return {name: [getattr(each, name) for each in entries] for name in names}


def write_csv(table: Table, file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
    writer = csv.writer(text)
    writer.writerow(table.columns)
    writer.writerows(zip(*table.columns.values(), strict=True))
    text.detach()


def write_parquet(table: Table, file: IO[bytes]) -> None:
    """Raises ``TraceError`` where pyarrow is not installed."""
    columns = table.arrow()
    import pyarrow.parquet

    pyarrow.parquet.write_table(columns, file)


WRITERS = {"parquet": write_parquet, "csv": write_csv}

MOST_ROWS = 1_048_000
"""Of a sheet; Excel takes 1,048,576."""
_UNSAFE = ("=", "+", "-", "@")


def write_workbook(run: ReportRun, headline: list[str], path: Path) -> None:
    """Write the workbook. Raises ``TraceError`` where openpyxl is not installed."""
    try:
        import openpyxl
    except ImportError:
        raise TraceError("--xlsx needs openpyxl: pip install openpyxl") from None
    book = openpyxl.Workbook(write_only=True)
    found = {name: table(run) for name, table in SHEETS.items()}
    used = dict.fromkeys(column for table in found.values() for column in table.columns)
    meaning = [dictionary()[column] for column in used]
    found = {"summary": Table({"summary": list(headline)})} | found
    found["columns"] = Table({"column": list(used), "meaning": meaning})
    for name, table in found.items():
        sheet = book.create_sheet(name)
        sheet.freeze_panes = "A2"
        sheet.append(list(table.columns))
        for row in list(zip(*table.columns.values(), strict=True))[:MOST_ROWS]:
            sheet.append([_cell(value) for value in row])
    with atomic_file(path) as file:
        book.save(file)


def _cell(value: Any) -> Any:
    """A value that a sheet can hold: a name from a trace is never a formula."""
    if not isinstance(value, str):
        return value
    text = "".join(letter if letter.isprintable() else " " for letter in value)
    return f"'{text}" if text.startswith(_UNSAFE) else text
