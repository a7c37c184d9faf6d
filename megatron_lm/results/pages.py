"""Tables as Markdown and as one self-contained HTML page with charts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from chakra_et import files
from megatron_lm.errors import RunError

ROWS = 40  # of a table in Markdown; the HTML page has all rows
STYLE = (
    "body{font:15px sans-serif;margin:1em 2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}.wrong{color:#b00020}"
)


class Table(NamedTuple):
    """A table of text cells."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def markdown(heading: str, wrong: list[str], tables: list[Table]) -> str:
    """A heading, the problems as a list, and the tables; long tables keep their first and last rows."""
    lines = [f"# {heading}", ""]
    lines += [*(f"- **{_cell(text)}**" for text in wrong), ""] if wrong else []
    for table in tables:
        lines += [f"## {table.title}", "", _row(table.header), _row("---" for _ in table.header)]
        lines += [_row(row) for row in _shortened(table.rows)]
        lines.append("")
    return "\n".join(lines)


def page(heading: str, wrong: list[str], tables: list[Table], charts: list[str]) -> str:
    """One HTML page; ``charts`` are SVG."""
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(heading)}</title><style>{STYLE}</style></head>",
        f"<body><h1>{html.escape(heading)}</h1>",
        *(f"<p class='wrong'>{html.escape(text)}</p>" for text in wrong),
        *charts,
    ]
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>")
        parts += [f"<th>{html.escape(cell)}</th>" for cell in table.header]
        parts += ["</tr>" + "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows) + "</table>"]
    return "".join([*parts, "</body></html>\n"])


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises ``RunError``."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error.strerror or error}.") from None


def _shortened(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    if len(rows) <= ROWS:
        return rows
    gap = ("…", *("" for _ in rows[0][1:]))
    return [*rows[: ROWS // 2], gap, *rows[-ROWS // 2 :]]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _cells(row: tuple[str, ...]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
