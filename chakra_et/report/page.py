"""One self-contained HTML file: styles, scripts and data in place, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import html
import re
from importlib import resources
from pathlib import Path
from typing import Any

from chakra_et.files import atomic_file
from chakra_et.report.pack import PackedColumns

STYLES = ("page.css", "timeline.css")
SHARED = ("units.js", "data.js", "tables.js", "charts.js")
TIMELINE = (
    "nodes.js",
    "levels.js",
    "timeline.js",
    "draw.js",
    "ruler.js",
    "memory.js",
    "input.js",
    "details.js",
)
SCRIPTS = {
    "report": (*SHARED, *TIMELINE, "sections.js", "report.js", "start.js"),
    "schedule": (*SHARED, *TIMELINE, "schedule.js", "start.js"),
    "compare": (*SHARED, "compare.js", "start.js"),
}  # fmt: skip


def write_page(path: Path, kind: str, title: str, content: dict[str, Any], columns: PackedColumns) -> int:
    """Write a page atomically, and return its size in bytes."""
    with atomic_file(path) as file:
        return sum(file.write(part) for part in page_parts(kind, title, content, columns))


def page_parts(
    kind: str, title: str, content: dict[str, Any], columns: PackedColumns
) -> tuple[bytes, bytes, bytes]:
    """The parts of a page of one kind of ``SCRIPTS``, UTF-8.

    Names from traces go into the compressed data alone, which scripts show as text and never as markup.
    """
    head, tail = _page(kind, title).split("{data}")
    return head.encode(), base64.b64encode(columns.pack(content)), tail.encode()


def _page(kind: str, title: str) -> str:
    """The page with ``{data}`` in place of its data."""
    scripts = "\n".join(_asset(name) for name in SCRIPTS[kind])
    parts = {
        "title": html.escape(title),
        "styles": "\n".join(_asset(name) for name in STYLES),
        "scripts": scripts.replace("</script", r"<\/script"),
    }
    return re.sub(r"\{(title|styles|scripts)\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (resources.files("chakra_et.report") / "assets" / name).read_text(encoding="utf-8")
