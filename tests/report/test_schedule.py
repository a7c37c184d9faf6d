"""Pages of schedules: lanes of spans in the report's timeline."""

from __future__ import annotations

from pathlib import Path

from chakra_et.report.schedule import Kind, Picture, Span, schedule_page
from tests.report.made_run import HOSTILE
from tests.report.page_data import page_data

KINDS = {"work": Kind("work", "#123456"), "send": Kind("message", "#654321")}


def test_spans_stand_in_the_rows_of_their_lanes_at_their_times(tmp_path: Path) -> None:
    spans = [
        Span(1, 1.0, 4.0, "work", HOSTILE),
        Span(0, 0.0, 1.0, "work"),
        Span(1, 2.0, 4.0, "send", strip=1),
    ]
    lanes = [("a", ""), ("b", "idle")]
    picture = Picture("one", lanes, spans, KINDS, ("upper", "lower"), [(2.0, "y"), (0.0, "x")], [0])
    path = tmp_path / "page.html"
    path.write_text(schedule_page("steps", [picture, Picture("two", lanes[:1], spans[1:2], KINDS)]))
    content, columns = page_data(path)
    timeline = content["timeline"]
    assert timeline["lanes"] == ["one · a", "one · b", "two · a"] and timeline["rules"] == [0]
    assert timeline["rows"] == [[0, "", "upper"], [1, "", "upper"], [1, "", "lower"], [2, "", ""]]
    assert columns["row"].tolist() == [0, 1, 2, 3]
    assert (columns["start"] * timeline["unit_ns"] / 1e9).tolist() == [0, 1, 2, 0]
    assert (columns["length"] * timeline["unit_ns"] / 1e9).tolist() == [1, 3, 2, 1]
    assert content["steps"][:2] == [[0, "x", 0, 2_000_000_000], [0, "y", 2_000_000_000, 4_000_000_000]]
    assert "<img" not in path.read_text() and HOSTILE in timeline["names"]
