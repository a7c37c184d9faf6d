"""Pictures of lanes and spans."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from chakra_et.drawing.lanes import (
    Kind,
    Mark,
    Picture,
    PictureLane,
    Span,
    draw,
    page,
    round_step,
    seconds_text,
)
from tests.report.made_run import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"
KINDS = {"work": Kind("work", "#123456"), "send": Kind("message", "#654321")}


def bars(text: str, colour: str) -> list[tuple[float, float, float]]:
    """(x, y, width) of the rectangles of a colour; the first is that of the legend."""
    found = [each for each in ET.fromstring(text).iter(f"{SVG}rect") if each.get("fill") == colour]
    return [
        (float(each.get("x", 0)), float(each.get("y", 0)), float(each.get("width", 0))) for each in found[1:]
    ]


def test_bars_stand_where_their_times_are() -> None:
    spans = [Span(0, 0.0, 1.0, "work"), Span(1, 1.0, 4.0, "work"), Span(1, 2.0, 4.0, "send", strip=1)]
    text = draw(Picture("step", [PictureLane("a"), PictureLane("b", "idle")], spans, KINDS, strips=(20, 8)))
    (first, second), (message,) = bars(text, "#123456"), bars(text, "#654321")
    assert second[2] == pytest.approx(3 * first[2])
    assert second[0] == pytest.approx(first[0] + first[2], abs=0.02)
    assert message[1] == second[1] + 20 > first[1]


def test_neighbours_too_narrow_to_be_seen_are_one_bar() -> None:
    spans = [Span(0, at / 1e6, (at + 1) / 1e6, "work") for at in range(10_000)] + [Span(0, 0.5, 1.0, "work")]
    found = bars(draw(Picture("step", [PictureLane("a")], spans, KINDS)), "#123456")
    assert len(found) == 2


def test_names_are_never_markup() -> None:
    spans = [Span(0, 0.0, 1.0, "work", HOSTILE, HOSTILE)]
    text = page(
        [Picture(HOSTILE, [PictureLane(HOSTILE, HOSTILE)], spans, KINDS, marks=[Mark(0.5, HOSTILE)])], HOSTILE
    )
    assert "<img" not in text
    assert "&lt;img" in text


@pytest.mark.parametrize(
    "span", [Span(1, 0, 1, "work"), Span(0, 0, 1, "rest"), Span(0, 0, 1, "work", strip=1)]
)
def test_a_span_that_fits_nowhere_is_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="in this picture"):
        draw(Picture("step", [PictureLane("a")], [span], KINDS))


def test_round_figures_on_the_axis() -> None:
    assert [round_step(wanted) for wanted in (0.3, 2.0, 7.0)] == pytest.approx([0.5, 2.0, 10.0])
    assert [seconds_text(each) for each in (0, 2.5, 0.02, 5e-6)] == ["0", "2.5 s", "20 ms", "5 µs"]
