"""A page of schedules: lanes from top to bottom, time from left to right, in the timeline of ``report``.

picture = Picture(
    "one step",
    [("rank 0", ""), ("rank 1", "20% idle")],
    [Span(0, 0.0, 1.5, "forward", "0"), Span(1, 1.5, 2.0, "send", strip=1)],
    {"forward": Kind("forward", "#3b78c3"), "send": Kind("message", "#3c9a5f")},
    strips=("compute", "communication"),
)
path.write_text(schedule_page("A plan", [picture]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from chakra_et.report.page import MADE_BY, PackedColumns, TextTable, make_page

MOST_UNITS = 1 << 32


class Kind(NamedTuple):
    """How spans of a kind are shown: the words of the legend and a CSS colour."""

    label: str
    colour: str


class Span(NamedTuple):
    """What lane ``lane`` (from 0) does from ``start`` to ``end``, in seconds, in its row ``strip`` (from 0).
    ``label`` is drawn inside where it fits, and is what a search finds."""

    lane: int
    start: float
    end: float
    kind: str
    label: str = ""
    strip: int = 0


@dataclass(frozen=True)
class Picture:
    """What is drawn. ``lanes``: the label of each group of rows, and a note beside it; ``strips``: the labels
    of the rows of each lane. ``marks``: the time, in seconds, at which a named stretch of all lanes begins.
    ``rules``: lanes below which there is a bold line."""

    title: str
    lanes: Sequence[tuple[str, str]]
    spans: Sequence[Span]
    kinds: Mapping[str, Kind]
    strips: Sequence[str] = ("",)
    marks: Sequence[tuple[float, str]] = ()
    rules: Sequence[int] = ()


def schedule_page(
    title: str, pictures: Sequence[Picture], tables: Sequence[TextTable] = (), note: str = ""
) -> str:
    """An HTML page with all pictures in one timeline, each from the moment 0 of a common axis.

    With several pictures, the title of each, best one word, is part of its lanes' labels.
    """
    columns = PackedColumns()
    timeline, steps = _add_spans(pictures, columns)
    content: dict[str, Any] = {
        "title": title,
        "note": note,
        "made_by": MADE_BY,
        "timeline": timeline,
        "steps": steps,
        "tables": [vars(table) for table in tables],
    }
    return make_page("schedule", title, content, columns).decode()


def _add_spans(
    pictures: Sequence[Picture], columns: PackedColumns
) -> tuple[dict[str, Any], list[tuple[int, str, int, int]]]:
    """The columns that the timeline reads, see ``columns.add_nodes``, the tables that they refer to, and
    (lane, name, start ns, end ns) of each stretch that a mark begins."""
    placed: list[tuple[int, Span]] = []  # with the lane among those of all pictures
    lanes: list[Any] = []
    rules, steps, kinds = [], [], dict[str, Kind]()
    for picture in pictures:
        first = len(lanes)
        placed += [(first + span.lane, span) for span in picture.spans]
        head = f"{picture.title} · " if len(pictures) > 1 else ""
        lanes += [(head + label, note, picture.strips) for label, note in picture.lanes]
        rules += [first + lane for lane in picture.rules]
        marks = sorted(picture.marks)
        ends = [*(at for at, _ in marks[1:]), max((span.end for span in picture.spans), default=0.0)]
        steps += [
            (first + lane, label, round(at * 1e9), round(end * 1e9))
            for lane in range(len(picture.lanes))
            for (at, label), end in zip(marks, ends, strict=False)
        ]
        kinds |= picture.kinds
    placed.sort(key=lambda each: (each[0], each[1].strip, each[1].start, each[1].end))
    row_of = [(lane, span.strip) for lane, span in placed]
    rows = {row: at for at, row in enumerate(dict.fromkeys(row_of))}
    names: dict[str, int] = {}
    spans = [span for _, span in placed]
    start = np.array([max(span.start, 0.0) for span in spans]) * 1e9
    end = np.maximum(np.array([span.end for span in spans]) * 1e9, start)
    unit = 100
    while end.max() / unit >= MOST_UNITS:
        unit *= 10
    begin, finish = (np.rint(each / unit).astype(np.int64) for each in (start, end))
    columns.add("row", np.array([rows[row] for row in row_of]), delta=True)
    columns.add("start", begin, delta=True)
    columns.add("length", finish - begin)
    columns.add("name", np.array([names.setdefault(span.label or span.kind, len(names)) for span in spans]))
    columns.add("kind", np.array([list(kinds).index(span.kind) for span in spans]))
    timeline = {
        "unit_ns": unit,
        "rows": [[lane, "", lanes[lane][2][strip]] for lane, strip in rows],
        "names": list(names),
        "kinds": [kind.label for kind in kinds.values()],
        "colours": [kind.colour for kind in kinds.values()],
        "lanes": [label for label, _, _ in lanes],
        "notes": [note for _, note, _ in lanes],
        "rules": rules,
    }
    return timeline, steps
