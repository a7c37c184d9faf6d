"""Text for terminals: aligned tables, and untrusted names escaped for printing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


def printable(text: str) -> str:
    """``text`` on one line, with control characters and line breaks escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )


def shortened(text: str, length: int) -> str:
    """``printable(text)`` cut to at most ``length`` characters."""
    text = printable(text)
    return text if len(text) <= length else text[: length - 1] + "…"


def plural(count: int, one: str, several: str = "") -> str:
    """``no steps``, ``1 step``, ``2 steps``; ``several``: where it isn't ``one`` with an s."""
    return f"{count or 'no':{',' if count else ''}} {one if count == 1 else several or one + 's'}"


def duration(nanoseconds: float) -> str:
    """A time in the unit that fits, with three digits: 1.23 µs, 45.6 ms, 7.89 s."""
    scaled = _scaled(nanoseconds, (("s", 1e9), ("ms", 1e6), ("µs", 1e3)))
    return scaled or (f"{nanoseconds:.0f} ns" if nanoseconds else "0")


def size(number: float | None) -> str:
    """Bytes in the unit that fits, with three digits: 512 B, 1.23 MB; "-" for None."""
    if number is None:
        return "-"
    units = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return _scaled(number, units) or f"{number:.0f} B"


def _scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, factor in units:
        if number >= factor * 0.9995:
            value = number / factor
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    return ""


def list_ranks(ranks: Iterable[int]) -> str:
    """Ranks in order, consecutive ones as a range: ``0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def table(rows: Sequence[Sequence[str]], right: Collection[int] | None = None, indent: str = "") -> list[str]:
    """The rows as aligned lines; the first row is the header. No lines if there are no other rows.

    ``right``: indices of right-aligned columns; None: all columns that have only figures.
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


@contextlib.contextmanager
def progress_bar(total: int, doing: str, unit: str = "rank") -> Iterator[Callable[[], None]]:
    """A progress bar over ``total`` units: a function to call after each. None if stderr is no terminal."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no monitor thread: workers are forked from this process
    with tqdm(total=total, unit=unit, desc=doing) as bar:
        yield lambda: bar.update() and None
