"""A picture of who does what when, as SVG: lanes from top to bottom, time from left to right.

For schedules and runs of any kind; ``chakra-et report`` shows traces. The picture follows the reader's light
or dark mode, and no name that is put in becomes markup.

    picture = Picture(
        "one step",
        [Lane("rank 0"), Lane("rank 1", note="20% idle")],
        [Span(0, 0.0, 1.5, "forward", label="0"), Span(1, 1.5, 2.0, "send", strip=1)],
        {"forward": Kind("forward", "#3b78c3"), "send": Kind("message", "#3c9a5f")},
        strips=(26, 10),
    )
    path.write_text(draw(picture))
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

WIDTH, LEFT, RIGHT, TOP, AXIS, GAP = 1400, 170, 100, 62, 34, 8
LETTER = 6.6  # pixels, of a label in a span
LEGEND_LETTER = 7.2
# Spans narrower than a pixel, one after another, of one kind and strip, are drawn as one.
NARROW = 1.0
# Wider ones have an outline, which keeps neighbours apart.
OUTLINED = 3.0
STYLE = """
.t{fill:#1b2330}.m{fill:#66707f}.l{fill:#eef1f5}.a{stroke:#8a94a3}.k{stroke:#1b2330;stroke-width:1.5}.w{fill:#fff}
.b{stroke:#eef1f5;stroke-width:.6}
@media(prefers-color-scheme:dark){.t{fill:#e4e8ee}.m{fill:#98a3b3}.l{fill:#1b212b}.k{stroke:#e4e8ee}.b{stroke:#1b212b}}
"""


@dataclass(frozen=True)
class Kind:
    """How spans of a kind are shown: the words of the legend and a CSS colour."""

    label: str
    colour: str


@dataclass(frozen=True)
class PictureLane:
    """A row; ``note`` stands at its right end."""

    label: str
    note: str = ""


@dataclass(frozen=True)
class Span:
    """What lane ``lane`` (from 0) does from ``start`` to ``end``, in seconds.

    ``label`` is drawn inside where it fits, ``title`` is shown under the cursor. ``strip``: which part of the
    lane, from the top.
    """

    lane: int
    start: float
    end: float
    kind: str
    label: str = ""
    title: str = ""
    strip: int = 0


@dataclass(frozen=True)
class Mark:
    """A line through all lanes at ``at`` seconds."""

    at: float
    label: str = ""


@dataclass(frozen=True)
class Picture:
    """What is drawn. ``strips``: heights of the parts of a lane, pixels. ``until``: seconds at the right
    end, None for the last end of a span. ``time``: how the axis shows a time. ``strip_labels``: of the parts,
    for pages that give each a row. ``rules``: lanes below which there is a bold line."""

    title: str
    lanes: Sequence[PictureLane]
    spans: Sequence[Span]
    kinds: Mapping[str, Kind]
    strips: Sequence[int] = (26,)
    marks: Sequence[Mark] = ()
    until: float | None = None
    time: Callable[[float], str] = field(default=lambda seconds: seconds_text(seconds))
    strip_labels: Sequence[str] = ()
    rules: Sequence[int] = ()

    def check(self, span: Span) -> None:
        """Raises ``ValueError`` for a span whose lane, strip or kind the picture lacks."""
        if not 0 <= span.lane < len(self.lanes) or not 0 <= span.strip < len(self.strips):
            raise ValueError(f"no lane {span.lane} with strip {span.strip} in this picture")
        if span.kind not in self.kinds:
            raise ValueError(f"no kind {span.kind!r} in this picture")


def draw(picture: Picture) -> str:
    """The SVG. Raises ``ValueError`` for a span whose lane, strip or kind the picture lacks."""
    height = sum(picture.strips) + GAP
    bottom = TOP + height * len(picture.lanes)
    until = picture.until or max((span.end for span in picture.spans), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / until
    title = html.escape(picture.title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + AXIS}" role="img" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<text class="t" x="12" y="22" font-size="15">{title}</text>',
    ]
    x = float(LEFT)
    for kind in picture.kinds.values():
        parts.append(tag("rect", x=f"{x:.0f}", y=37, width=12, height=12, fill=kind.colour))
        parts.append(tag("text", kind.label, class_="m", x=f"{x + 17:.0f}", y=47))
        x += 40 + LEGEND_LETTER * len(kind.label)
    right = LEFT + until * scale
    for at, lane in enumerate(picture.lanes):
        top, width = TOP + at * height, f"{right - LEFT:.1f}"
        middle = top + (height - GAP) / 2 + 4
        parts.append(tag("rect", class_="l", x=LEFT, y=top, width=width, height=height - GAP))
        parts.append(tag("text", lane.label, class_="t", x=12, y=middle))
        parts.append(tag("text", lane.note, class_="m", x=f"{right + 8:.1f}", y=middle))
    parts += [_bar(picture, span, scale) for span in _merged(picture, scale)]
    for mark in picture.marks:
        x = LEFT + mark.at * scale
        parts.append(tag("line", class_="k", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP - 4, y2=bottom))
        parts.append(tag("text", mark.label, class_="m", x=f"{x + 4:.1f}", y=TOP - 4, font_size=10))
    for rule in picture.rules:
        y = TOP + (rule + 1) * height - GAP / 2
        parts.append(tag("line", class_="k", style="stroke-width:3", x1=12, x2=WIDTH - RIGHT, y1=y, y2=y))
    step = round_step(until / 8)
    for number in range(int(until / step) + 1):
        place = f"{LEFT + number * step * scale:.1f}"
        parts.append(tag("line", class_="a", x1=place, x2=place, y1=bottom, y2=bottom + 6))
        text = picture.time(number * step)
        parts.append(tag("text", text, class_="m", x=place, y=bottom + 20, text_anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def page(pictures: Sequence[Picture], title: str) -> str:
    """Several pictures on one HTML page, one below the other."""
    body = "\n".join(draw(picture) for picture in pictures)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<style>body{margin:1em;font-family:system-ui,sans-serif}svg{width:100%;min-width:900px}"
        f"rect:hover{{opacity:.75}}</style></head>\n<body>\n{body}</body></html>\n"
    )


def _merged(picture: Picture, scale: float) -> list[Span]:
    """The spans, of which those too narrow to be seen alone are joined to their neighbours."""
    found: list[Span] = []
    open_at: dict[tuple[int, int, str], int] = {}
    for span in picture.spans:
        picture.check(span)
        key = (span.lane, span.strip, span.kind)
        at = open_at.pop(key, None)
        if (span.end - span.start) * scale < NARROW:
            if at is not None and 0 <= (span.start - found[at].end) * scale < NARROW:
                open_at[key] = at
                found[at] = replace(found[at], end=span.end, label="")
                continue
            open_at[key] = len(found)
        found.append(span)
    return found


def _bar(picture: Picture, span: Span, scale: float) -> str:
    top = TOP + span.lane * (sum(picture.strips) + GAP) + sum(picture.strips[: span.strip])
    tall, x = picture.strips[span.strip], LEFT + span.start * scale
    width = max((span.end - span.start) * scale, 0.4)
    edge = {"class_": "b"} if width > OUTLINED else {}
    title = tag("title", span.title) if span.title else ""
    place = {"x": f"{x:.2f}", "y": str(top), "width": f"{width:.2f}", "height": str(tall - 1)}
    text = tag("rect", inside=title, **edge, **place, fill=picture.kinds[span.kind].colour)
    if span.label and tall >= 14 and width >= LETTER * len(span.label) + 4:
        shown = {"class_": "w", "x": f"{x + width / 2:.2f}", "y": str(top + tall / 2 + 3.5)}
        style = {"text_anchor": "middle", "font_size": "11", "pointer_events": "none"}
        text += tag("text", span.label, **shown, **style)
    return text


def tag(name: str, text: str = "", inside: str = "", **attributes: object) -> str:
    """An element of SVG with ``text``, or with other elements ``inside``; ``class_`` is class, ``font_size``
    font-size."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    inside = inside or html.escape(text)
    return f"<{name}{given}>{inside}</{name}>" if inside or name == "text" else f"<{name}{given}/>"


def round_step(wanted: float) -> float:
    """1, 2 or 5 times a power of ten, the first that is not below ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def seconds_text(seconds: float) -> str:
    """``0.25 s``, ``20 ms``, ``5 µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9999:
            return f"{seconds / size:.4g} {unit}"
    return "0" if seconds == 0 else f"{seconds / 1e-9:.4g} ns"
