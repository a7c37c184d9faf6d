"""``chakra-et compare A B …``: runs side by side, as a table and as a page.

    chakra-et compare outputs/gpt2_1gpu outputs/gpt2_2gpu -o both.html
    chakra-et compare h100.json.gz mi300.json.gz --top 5

Each name is a run as in ``chakra-et report``; all are compared with the first. Exit status: 0; 2 for
arguments or files that can't be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.report.compare import (
    Matched,
    Side,
    compare_content,
    efficiency,
    match_entries,
    notes,
    side,
    speedup,
)
from chakra_et.report.content import with_names
from chakra_et.report.inputs import find_runs
from chakra_et.report.memory import size
from chakra_et.report.pack import PackedColumns
from chakra_et.report.page import write_page
from chakra_et.report.run import load
from chakra_et.report.verdict import duration
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.text import shortened, table

LONGEST_NAME = 60
Times = tuple[float | None, ...]


@dataclass
class CompareConfig:
    """The command's arguments."""

    names: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "two or more runs; the first is the baseline"}
    )
    output: str | None = field(default=None, metadata={"short": "-o", "help": "also write this HTML page"})
    json: bool = field(default=False, metadata={"help": "print JSON, with all that the page has"})
    top: int = field(default=15, metadata={"help": "operators to list, the greatest change first"})
    allow_missing_ranks: bool = cli.allow_missing_ranks()

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ValueError("give at least two runs to compare")
        if self.top < 0:
            raise ValueError(f"--top must be 0 or more, not {self.top}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = cli.parse(
        CompareConfig, argv, description="Compare runs: step times, breakdown, operators, modules."
    )
    return cli.run(lambda: compare(config), TraceError)


def compare(config: CompareConfig) -> None:
    chosen = find_runs(config.names, config.allow_missing_ranks)
    if len(chosen) < 2:
        raise TraceError(
            f"all names are files of one run ({chosen[0].name}): give at least two runs, "
            "or use `chakra-et report`"
        )
    # One run at a time is in memory.
    sides = [side(load(each)) for each in chosen]
    found = compare_content(sides)
    if config.json:
        print(
            json.dumps(with_names(found, {"entries": Matched, "modules": Matched}) | {"page": config.output})
        )
    else:
        print("\n".join(lines(sides, config.top)))
    if config.output:
        title = "compared: " + ", ".join(each.name for each in sides)
        written = write_page(Path(config.output), "compare", title, found, PackedColumns())
        if not config.json:
            print(f"\n{config.output}: {written / 1e6:.1f} MB, open it in a browser")


def lines(sides: list[Side], top: int) -> list[str]:
    """The comparison as text: a row for each run, then the operators and kernels that changed most."""
    several = len({each.ranks for each in sides}) > 1
    memory = any(each.peak_bytes is not None for each in sides)
    head = [
        "run",
        "ranks",
        "steps",
        "step",
        "speed-up",
        *(["weak", "strong"] if several else []),
        *ACTIVITIES,
        "hidden",
        *(["peak memory"] if memory else []),
    ]
    rows = [head]
    for at, each in enumerate(sides):
        scaling = [f"{share:.0%}" for share in efficiency(sides, at)] if several else []
        rows.append(
            [
                shortened(each.name, LONGEST_NAME),
                str(each.ranks),
                str(each.steps or "-"),
                duration(each.step_ns),
            ]
            + [
                f"{speedup(sides, at):.2f}x",
                *scaling,
                *map(duration, each.parts_ns),
                duration(each.hidden_ns),
                *([size(each.peak_bytes)] if memory else []),
            ]
        )
    text = table(rows, right=range(1, len(head)))
    text += [f"note: {note}" for note in notes(sides)]
    matched = match_entries(sides)
    text += _listed("What changed most", sides, [(each, each.self_ns) for each in matched], top)
    launching = [
        (each, each.device_ns) for each in matched if each.kind == "operator" and any(each.device_ns)
    ]
    return text + _listed("Device time of the operators that launched it", sides, launching, top)


def _listed(title: str, sides: list[Side], rows: list[tuple[Matched, Times]], top: int) -> list[str]:
    """The ``top`` rows whose time changed most from the first run to the last."""
    rows = sorted(rows, key=lambda row: -abs(_difference(row[1])))[:top]
    if not rows:
        return []
    header = ["kind", "name", *(shortened(each.name, 20) for each in sides), "difference", "ratio"]
    lines = [header, *(_changed(each, times) for each, times in rows)]
    return ["", f"{title}, per step and rank:", *table(lines, right=range(2, len(header)))]


def _changed(each: Matched, times: Times) -> list[str]:
    before, after, difference = times[0], times[-1], _difference(times)
    ratio = f"{after / before:.2f}x" if before and after else "-"
    cells = ["-" if time is None else duration(time) for time in times]
    change = f"{'+' if difference > 0 else '-'}{duration(abs(difference))}" if difference else "0"
    return [each.kind, shortened(each.name, LONGEST_NAME), *cells, change, ratio]


def _difference(times: Times) -> float:
    return (times[-1] or 0.0) - (times[0] or 0.0)
