"""Pictures as a page with the report's timeline: zoom, search, and what is under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.drawing.lanes import Picture, Span
from chakra_et.report.content import MADE_BY
from chakra_et.report.page import PackedColumns, make_page

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
    columns = PackedColumns()
    timeline = _add_spans(pictures, columns)
    content: dict[str, Any] = {
        "title": title,
        "note": note,
        "made_by": MADE_BY,
        "timeline": timeline,
        "steps": [step for picture, first in _firsts(pictures) for step in _steps(picture, first)],
        "tables": [vars(table) for table in tables],
    }
    return make_page("schedule", title, content, columns).decode()


def _firsts(pictures: Sequence[Picture]) -> list[tuple[Picture, int]]:
    """Each picture with the number of its first lane."""
    first = np.cumsum([0, *(len(picture.lanes) for picture in pictures)]).tolist()
    return list(zip(pictures, first, strict=False))


def _steps(picture: Picture, first: int) -> list[list[Any]]:
    """[lane, name, start ns, end ns] of each stretch between marks, for each lane of the picture."""
    end = picture.until or max((span.end for span in picture.spans), default=0.0)
    marks = sorted(picture.marks, key=lambda mark: mark.at)
    ends = [*(mark.at for mark in marks[1:]), end]
    return [
        [lane, mark.label, round(mark.at * 1e9), round(until * 1e9)]
        for lane in range(first, first + len(picture.lanes))
        for mark, until in zip(marks, ends, strict=True)
    ]


def _add_spans(pictures: Sequence[Picture], columns: PackedColumns) -> dict[str, Any]:
    """The columns that the timeline reads, see ``columns.add_nodes``, and the tables that they refer to."""
    placed: list[tuple[int, int, Span]] = []  # lane of all pictures, strip
    for picture, first in _firsts(pictures):
        for span in picture.spans:
            picture.check(span)
            placed.append((first + span.lane, span.strip, span))
    if not placed:
        raise ValueError("these pictures have no spans")
    placed.sort(key=lambda each: (*each[:2], each[2].start, each[2].end))
    kinds = {key: kind for picture in pictures for key, kind in picture.kinds.items()}
    lanes = [(picture, lane) for picture in pictures for lane in picture.lanes]
    rows = {row: at for at, row in enumerate(dict.fromkeys(each[:2] for each in placed))}
    names: dict[str, int] = {}
    spans = [span for _, _, span in placed]
    start = np.array([max(span.start, 0.0) for span in spans]) * 1e9
    end = np.maximum(np.array([span.end for span in spans]) * 1e9, start)
    unit = 100
    while end.max() / unit >= MOST_UNITS:
        unit *= 10
    begin, finish = np.rint(start / unit).astype(np.int64), np.rint(end / unit).astype(np.int64)
    columns.add("row", np.array([rows[each[:2]] for each in placed]), delta=True)
    columns.add("start", begin, delta=True)
    columns.add("length", finish - begin)
    columns.add("name", np.array([names.setdefault(span.label or span.kind, len(names)) for span in spans]))
    columns.add("kind", np.array([list(kinds).index(span.kind) for span in spans]))
    nothing, none = np.zeros(len(spans), dtype=np.int64), np.zeros(0, dtype=np.int64)
    for name in ("phase", "module", "parent", "flags", "degree"):
        columns.add(name, nothing)
    for name in ("edge", "edge_kind", "work_node", "comm_node", "comm_wait", "comm_operation"):
        columns.add(name, none)
    return {
        "unit_ns": unit,
        "rows": [[lane, "", "".join(lanes[lane][0].strip_labels[strip : strip + 1])] for lane, strip in rows],
        "names": list(names),
        "modules": [],
        "phases": [],
        "edge_kinds": [],
        "memory": [],
        "kinds": [kind.label for kind in kinds.values()],
        "colours": [kind.colour for kind in kinds.values()],
        "lanes": [
            f"{picture.title} · {lane.label}" if len(pictures) > 1 else lane.label for picture, lane in lanes
        ],
        "notes": [lane.note for _, lane in lanes],
        "rules": [first + lane for picture, first in _firsts(pictures) for lane in picture.rules],
    }
