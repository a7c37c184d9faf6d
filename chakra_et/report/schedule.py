"""Pictures as a page with the report's timeline: zoom, search, and what is under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.drawing.lanes import Picture, Span
from chakra_et.report.content import MADE_BY
from chakra_et.report.pack import PackedColumns
from chakra_et.report.page import page_parts

MOST_UNITS = 1 << 32


@dataclass(frozen=True)
class TextTable:
    """A table of text below the timeline; columns of numbers sort as numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def schedule_page(
    title: str, pictures: Sequence[Picture], tables: Sequence[TextTable] = (), note: str = ""
) -> str:
    """An HTML page with all pictures in one timeline, each from the moment 0 of a common axis.

    Every lane is a group of rows, one for each strip, headed by its label and note; with several pictures,
    also by the picture's title, which is best one word. Marks divide a picture's lanes into named stretches.
    A span's ``label`` is drawn and searched for; its ``title`` is left to pictures on paper. Raises
    ``ValueError`` without spans, and for a span whose lane, strip or kind its picture lacks.
    """
    spans = [_Placed(*each) for each in _placed(pictures)]
    if not spans:
        raise ValueError("these pictures have no spans")
    columns = PackedColumns()
    kinds = {key: kind for picture in pictures for key, kind in picture.kinds.items()}
    timeline = _add_nodes(pictures, sorted(spans, key=_order), list(kinds), columns)
    timeline |= {
        "kinds": [kind.label for kind in kinds.values()],
        "colours": [kind.colour for kind in kinds.values()],
        "lanes": _lanes(pictures),
        "notes": [lane.note for picture in pictures for lane in picture.lanes],
        "rules": [first + lane for picture, first in _firsts(pictures) for lane in picture.rules],
    }
    content: dict[str, Any] = {
        "title": title,
        "note": note,
        "made_by": MADE_BY,
        "timeline": timeline,
        "steps": _steps(pictures),
        "tables": [vars(table) for table in tables],
    }
    return b"".join(page_parts("schedule", title, content, columns)).decode()


@dataclass(frozen=True)
class _Placed:
    """A span in the row (lane of all pictures, strip)."""

    lane: int
    strip: int
    span: Span


def _order(placed: _Placed) -> tuple[int, int, float, float]:
    return placed.lane, placed.strip, placed.span.start, placed.span.end


def _firsts(pictures: Sequence[Picture]) -> list[tuple[Picture, int]]:
    """Each picture with the number of its first lane."""
    first = np.cumsum([0, *(len(picture.lanes) for picture in pictures)]).tolist()
    return list(zip(pictures, first, strict=False))


def _placed(pictures: Sequence[Picture]) -> list[tuple[int, int, Span]]:
    found = []
    for picture, first in _firsts(pictures):
        for span in picture.spans:
            if not 0 <= span.lane < len(picture.lanes) or not 0 <= span.strip < len(picture.strips):
                raise ValueError(f"no lane {span.lane} with strip {span.strip} in this picture")
            if span.kind not in picture.kinds:
                raise ValueError(f"no kind {span.kind!r} in this picture")
            found.append((first + span.lane, span.strip, span))
    return found


def _lanes(pictures: Sequence[Picture]) -> list[str]:
    return [
        f"{picture.title} · {lane.label}" if len(pictures) > 1 else lane.label
        for picture in pictures
        for lane in picture.lanes
    ]


def _steps(pictures: Sequence[Picture]) -> list[list[Any]]:
    """[lane, name, start ns, end ns] of each stretch between marks, for each lane of their picture."""
    found: list[list[Any]] = []
    for picture, first in _firsts(pictures):
        end = picture.until or max((span.end for span in picture.spans), default=0.0)
        marks = sorted(picture.marks, key=lambda mark: mark.at)
        ends = [*(mark.at for mark in marks[1:]), end]
        for lane in range(first, first + len(picture.lanes)):
            found += [
                [lane, mark.label, round(mark.at * 1e9), round(until * 1e9)]
                for mark, until in zip(marks, ends, strict=True)
            ]
    return found


def _add_nodes(
    pictures: Sequence[Picture], spans: list[_Placed], kinds: list[str], columns: PackedColumns
) -> dict[str, Any]:
    """The columns that the timeline reads, see ``columns.add_nodes``; the spans are in order of rows."""
    rows = sorted({(each.lane, each.strip) for each in spans})
    number = {row: at for at, row in enumerate(rows)}
    strips = [picture.strip_labels for picture in pictures for _ in picture.lanes]
    names: dict[str, int] = {}
    code = [names.setdefault(each.span.label or each.span.kind, len(names)) for each in spans]
    start = np.array([max(each.span.start, 0.0) for each in spans]) * 1e9
    end = np.maximum(np.array([each.span.end for each in spans]) * 1e9, start)
    unit = 100
    while end.max() / unit >= MOST_UNITS:
        unit *= 10
    begin, finish = np.rint(start / unit).astype(np.int64), np.rint(end / unit).astype(np.int64)
    columns.add("row", np.array([number[each.lane, each.strip] for each in spans]), delta=True)
    columns.add("start", begin, delta=True)
    columns.add("length", finish - begin)
    columns.add("name", np.array(code))
    columns.add("kind", np.array([kinds.index(each.span.kind) for each in spans]))
    nothing, none = np.zeros(len(spans), dtype=np.int64), np.zeros(0, dtype=np.int64)
    for name in ("phase", "module", "parent", "flags", "degree"):
        columns.add(name, nothing)
    for name in ("edge", "edge_kind", "work_node", "comm_node", "comm_wait", "comm_operation"):
        columns.add(name, none)
    return {
        "unit_ns": unit,
        "rows": [
            [lane, "", strips[lane][strip] if strip < len(strips[lane]) else ""] for lane, strip in rows
        ],
        "names": list(names),
        "modules": [],
        "phases": [],
        "edge_kinds": [],
        "memory": [],
    }
