"""Small line and bar charts as SVG, for the summary page; figures are shown under the cursor."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 260, 70, 20, 50, 45
COLOURS = ("#3b78c3", "#e8841a", "#2f9e6e", "#c94f7c", "#8a6fc9", "#12919c", "#a47148", "#6b8e23")
DOTTED = 200  # points of a line; beyond that they touch each other

Points = Sequence[tuple[float, float | None]]


def line_chart(
    title: str, x_title: str, y_title: str, lines: Mapping[str, Points], unjoined: Sequence[str] = ()
) -> str:
    """Lines by name through points (x, y); a point without y interrupts its line; those that are named
    ``unjoined`` are points alone. Empty without points.
    """
    known = [(x, y) for points in lines.values() for x, y in points if y is not None]
    if not known:
        return ""
    axes = _Axes(min(x for x, _ in known), max(x for x, _ in known), max(y for _, y in known))
    parts = [*_frame(title, x_title, y_title, list(lines)), *axes.ticks()]
    for at, (name, points) in enumerate(lines.items()):
        colour, pen, path = COLOURS[at % len(COLOURS)], "M", ""
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            path += f"{pen}{axes.x(x):.1f} {axes.y(y):.1f}"
            pen = "L"
            if len(points) <= DOTTED or name in unjoined:
                about = tag("title", f"{name}: {y:.6g} {y_title} at {x_title} {x:g}")
                place = {"cx": f"{axes.x(x):.1f}", "cy": f"{axes.y(y):.1f}"}
                parts.append(tag("circle", inside=about, **place, r=3, fill=colour))
        if name not in unjoined:
            parts.append(tag("path", d=path, fill="none", stroke=colour, stroke_width="1.5"))
    return "\n".join([*parts, "</svg>"])


def bar_chart(title: str, x_title: str, y_title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Bars by name and place: ``bars["max allocated"]["rank 0"]``; the places are those of the first name."""
    places = list(next(iter(bars.values()), {}))
    if not places:
        return ""
    axes = _Axes(0.0, float(len(places)), max(value for each in bars.values() for value in each.values()))
    width = (axes.x(1) - axes.x(0)) * 0.8 / len(bars)
    parts = [*_frame(title, x_title, y_title, list(bars)), *axes.ticks(across=False)]
    each_label = -(-len(places) // 20)
    for number, place in enumerate(places):
        for at, (name, values) in enumerate(bars.items()):
            left, top = axes.x(number + 0.1) + at * width, axes.y(values[place])
            about = tag("title", f"{name}, {x_title} {place}: {values[place]:.6g} {y_title}")
            size = {"width": f"{width:.1f}", "height": f"{axes.y(0) - top:.1f}"}
            colour = COLOURS[at % len(COLOURS)]
            parts.append(tag("rect", inside=about, x=f"{left:.1f}", y=f"{top:.1f}", **size, fill=colour))
        if number % each_label == 0:
            parts.append(_text(axes.x(number + 0.5), HEIGHT - BOTTOM + 16, place, "middle"))
    return "\n".join([*parts, "</svg>"])


class _Axes:
    """Where values stand, in pixels; y begins at 0."""

    def __init__(self, low: float, high: float, most: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self.most = most if most > 0 else 1.0

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.most * (HEIGHT - TOP - BOTTOM)

    def ticks(self, across: bool = True) -> list[str]:
        """Grid lines with figures, and with ``across`` the figures below."""
        parts = []
        step = round_step(self.most / 4)
        for number in range(int(self.most / step + 1e-9) + 1):
            y = self.y(number * step)
            parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke="#ddd"))
            parts.append(_text(LEFT - 6, y + 4, f"{number * step:.6g}", "end"))
        step = round_step(max((self.high - self.low) / 8, 1e-9))
        first = -(-self.low // step)
        for number in range(int((self.high - first * step) / step + 1e-9) + 1 if across else 0):
            value = (first + number) * step
            parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, f"{value:.6g}", "middle"))
        return parts


def _frame(title: str, x_title: str, y_title: str, names: list[str]) -> list[str]:
    """The opening of the SVG, the titles, and a legend where there are several names."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="12" y="20" font-size="15">{html.escape(title)}</text>',
        _text(WIDTH / 2, HEIGHT - 8, x_title, "middle"),
        _text(12, TOP - 8, y_title, "start"),
    ]
    x = float(LEFT)
    for at, name in enumerate(names if len(names) > 1 else []):
        colour = COLOURS[at % len(COLOURS)]
        parts.append(tag("rect", x=f"{x:.0f}", y=29, width=11, height=11, fill=colour))
        parts.append(_text(x + 15, 39, name, "start"))
        x += 32 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, fill="#555")


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
