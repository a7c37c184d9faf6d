"""``chakra-et report --xlsx``: a sheet for each table of a run, and what their columns mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.export import tables
from chakra_et.export.tables import Table
from chakra_et.files import atomic_file
from chakra_et.report.run import ReportRun

MOST_ROWS = 1_048_000
"""Of a sheet; Excel takes 1,048,576."""
_UNSAFE = ("=", "+", "-", "@")


def write_workbook(run: ReportRun, headline: list[str], path: Path) -> None:
    """Write the workbook. Raises ``TraceError`` where openpyxl is not installed."""
    try:
        import openpyxl
    except ImportError:
        raise TraceError("--xlsx needs openpyxl: pip install 'mosim-llms[excel]'") from None
    book = openpyxl.Workbook(write_only=True)
    found = {name: table(run) for name, table in tables.OF_RUN.items()}
    used = dict.fromkeys(column for table in found.values() for column in table.columns)
    meaning = [tables.dictionary()[column] for column in used]
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
