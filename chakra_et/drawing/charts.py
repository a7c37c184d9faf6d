"""Line charts as SVG, whose figures are shown under the cursor.

losses = {"run 1": [(1, 9.5), (2, 8.25)], "run 2": [(1, 9.0), (2, None)]}
path.write_text(line_chart("Loss", "iteration", "loss", losses))
"""

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
    """Lines by name through points (x, y); one without a finite y interrupts its line; lines that are named
    ``unjoined`` are points alone. The axis of y begins at 0. Empty without points.
    """
    known = [(x, y) for points in lines.values() for x, y in points if y is not None and math.isfinite(y)]
    if not known:
        return ""
    low, high, most = min(x for x, _ in known), max(x for x, _ in known), max(y for _, y in known)
    width, most = high - low or 1, most if most > 0 else 1.0

    def across(x: float) -> float:
        return LEFT + (x - low) / width * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, x_title, y_title, list(lines))
    step = round_step(most / 4)
    for number in range(int(most / step + 1e-9) + 1):
        y = down(number * step)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke="#ddd"))
        parts.append(_text(LEFT - 6, y + 4, f"{number * step:.6g}", "end"))
    step = round_step(max(width / 8, 1e-9))
    first = -(-low // step)
    for number in range(int((low + width - first * step) / step + 1e-9) + 1):
        value = (first + number) * step
        parts.append(_text(across(value), HEIGHT - BOTTOM + 16, f"{value:.6g}", "middle"))
    for at, (name, points) in enumerate(lines.items()):
        colour, pen, path = COLOURS[at % len(COLOURS)], "M", ""
        for x, value_y in points:
            if value_y is None or not math.isfinite(value_y):
                pen = "M"
                continue
            path += f"{pen}{across(x):.1f} {down(value_y):.1f}"
            pen = "L"
            if len(points) <= DOTTED or name in unjoined:
                about = tag("title", f"{name}: {value_y:.6g} {y_title} at {x_title} {x:g}")
                place = {"cx": f"{across(x):.1f}", "cy": f"{down(value_y):.1f}"}
                parts.append(tag("circle", inside=about, **place, r=3, fill=colour))
        if name not in unjoined:
            parts.append(tag("path", d=path, fill="none", stroke=colour, stroke_width="1.5"))
    return "\n".join([*parts, "</svg>"])


def _frame(title: str, x_title: str, y_title: str, names: list[str]) -> list[str]:
    """The opening of the SVG, the titles, and a legend where there are several names."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'style="max-width: 100%; height: auto" font-family="sans-serif" font-size="12">',
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
