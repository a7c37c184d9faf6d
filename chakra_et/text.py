"""Text for terminals: aligned tables, and untrusted names made safe to print."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def printable(text: str) -> str:
    """``text`` on one line, with control characters and line breaks as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )


def shortened(text: str, length: int) -> str:
    """At most ``length`` printable characters."""
    text = printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def table(rows: Sequence[Sequence[str]], right: Collection[int] | None = None, indent: str = "") -> list[str]:
    """Rows, of which the first is the header, as aligned lines.

    ``right``: the columns to align right; None: those that hold only figures.
    """
    if len(rows) < 2:
        return []
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if right is None:
        right = [at for at, column in enumerate(columns) if all(_is_figure(cell) for cell in column[1:])]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _is_figure(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("+-")[:1].isdigit()
