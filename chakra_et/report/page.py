"""One self-contained HTML file: styles, scripts and data in place, nothing loaded from anywhere.

The data is one gzip block: an unsigned 32-bit length, JSON of that many bytes, then the columns,
little-endian. The JSON has ``columns``, a list of [name, type, rows, encoding]: type is u1, u2, u4 or f8;
encoding ``delta`` means that each value was replaced by its difference from the one before (modulo 2^32), so
that sorted columns compress well. A column's bytes are ordered by significance (all lowest bytes first),
which puts equal bytes together. ``assets/data.js`` reads it.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et import __version__
from chakra_et.files import atomic_file
from chakra_et.text import duration

MADE_BY = f"mosim-llms {__version__}"
TYPES = {"u1": np.uint8, "u2": np.uint16, "u4": np.uint32, "f8": np.float64}
PLAIN_ROWS = 30
LEVEL = 6  # of gzip: higher ones take three times as long for 3% less
STYLES = ("page", "timeline")
SHARED = ("units", "data", "tables", "charts")
TIMELINE = ("nodes", "levels", "timeline", "draw", "ruler", "memory", "input", "details")
SCRIPTS = {
    "report": (*SHARED, *TIMELINE, "sections", "flame", "report", "start"),
    "figures": (*SHARED, "figures", "start"),
    "schedule": (*SHARED, *TIMELINE, "schedule", "start"),
    "compare": (*SHARED, "compare", "start"),
    "many": (*SHARED, "sections", "many", "start"),
}


class PackedColumns:
    """Collects the columns of a page."""

    def __init__(self) -> None:
        self._listed: list[tuple[str, str, int, str]] = []
        self._blocks: list[bytes] = []

    def add(self, name: str, values: np.ndarray, delta: bool = False) -> None:
        """Add whole numbers from 0 to 2^32 - 1, or doubles. With ``delta`` for columns that hardly change."""
        if values.dtype.kind == "f":
            kind = "f8"
        elif delta:
            kind = "u4"
            values = np.diff(values.astype(np.int64), prepend=np.int64(0)).astype(np.int64) & 0xFFFFFFFF
        else:
            most = int(values.max(initial=0))
            kind = "u1" if most < 1 << 8 else "u2" if most < 1 << 16 else "u4"
        column = np.ascontiguousarray(values, dtype=TYPES[kind])
        self._listed.append((name, kind, len(column), "delta" if delta else "plain"))
        self._blocks.append(column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes())

    def pack(self, content: dict[str, Any]) -> bytes:
        """Columns and ``content`` as one block, dataclasses as lists; the same input gives the same bytes."""
        found = content | {"columns": self._listed}
        text = json.dumps(found, separators=(",", ":"), default=_row).encode()
        block = b"".join([struct.pack("<I", len(text)), text, *self._blocks])
        return gzip.compress(block, compresslevel=LEVEL, mtime=0)


def _row(entry: object) -> list[Any]:
    return list(vars(entry).values())


def make_page(kind: str, title: str, content: dict[str, Any], columns: PackedColumns) -> bytes:
    """A page of one kind of ``SCRIPTS``, UTF-8, with the beginnings of its tables for those without scripts.

    Scripts show names from traces as text and never as markup.
    """
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS[kind])
    parts = {
        "title": html.escape(title),
        "plain": _plain(content),
        "styles": "\n".join(_asset(f"{name}.css") for name in STYLES),
        "scripts": scripts.replace("</script", r"<\/script"),
        "data": base64.b64encode(columns.pack(content)).decode(),
    }
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], _asset("page.html")).encode()


def _plain(content: dict[str, Any]) -> str:
    """The sentences and the tables of a page as HTML."""
    texts = [*content.get("headline", content.get("notes", ())), *content.get("lacks", ())]
    parts = [f"<p>{html.escape(text)}</p>" for text in texts]
    for name, found in content.items():
        rows = [vars(each) if is_dataclass(each) else each for each in found] if type(found) is list else []
        if name != "timeline" and rows and all(isinstance(row, dict) for row in rows):
            head = "".join(f"<th>{html.escape(column.replace('_ns', ''))}</th>" for column in rows[0])
            lines = (
                "".join(f"<td>{html.escape(_cell(*each))}</td>" for each in row.items())
                for row in rows[:PLAIN_ROWS]
            )
            body = "".join(f"<tr>{line}</tr>\n" for line in lines)
            parts.append(f"<h2>{name.replace('_', ' ')}</h2>\n<table><tr>{head}</tr>\n{body}</table>")
    return "\n".join(parts)


def _cell(column: str, value: Any) -> str:
    """Text of a figure: ns as a duration, others with three digits."""
    if isinstance(value, tuple | list):
        return ", ".join(_cell(column, each) for each in value)
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, int | float) and column.endswith("_ns"):
        return duration(value)
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def write_page(path: Path, kind: str, title: str, content: dict[str, Any], columns: PackedColumns) -> int:
    """Write a page atomically, and return its size in bytes."""
    with atomic_file(path) as file:
        return file.write(make_page(kind, title, content, columns))


def _asset(name: str) -> str:
    return (resources.files("chakra_et.report") / "assets" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class TextTable:
    """A table of text below the timeline; columns of numbers sort as numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def figures_page(title: str, wrong: Sequence[str], charts: Sequence[str], tables: Sequence[TextTable]) -> str:
    """An HTML page of charts (SVG, well-formed) and tables, below sentences that stand out."""
    content: dict[str, Any] = {
        "title": title,
        "wrong": list(wrong),
        "charts": list(charts),
        "made_by": MADE_BY,
        "tables": [vars(table) for table in tables],
    }
    return make_page("figures", title, content, PackedColumns()).decode()
