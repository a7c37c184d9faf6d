"""``chakra-et compare A B …``: runs side by side, as a table and as a page.

    chakra-et compare outputs/gpt2_1gpu outputs/gpt2_2gpu -o both.html
    chakra-et compare h100.json.gz mi300.json.gz --top 5

Each name is a run as in ``chakra-et report``; all are compared with the first. Operators and kernels are
matched by kind and name, modules and calls by path; times are per step and rank. Kernels of different vendors
have different names, so their classes and the device time of the operators that launched them are compared
too. What has no partner has rows of its own, so that every list adds up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et import cli
from chakra_et.convert.inputs import find_run
from chakra_et.diagnose.kernel_names import kernel_name
from chakra_et.report.content import facts, lacks, step_ns, with_names
from chakra_et.report.page import MADE_BY, PackedColumns, write_page
from chakra_et.report.run import PHASES, ReportRun, load
from chakra_et.report.timeline import largest_peak, usage
from chakra_et.report.times import WHOLE, Call, by_module, by_name, call_tree, find_steps
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.text import duration, plural, shortened, size, table

# A page lists the entries with the most time; a difference in more than this many can't be read.
MOST_ROWS = 3000
LONGEST_NAME = 60
TABLES = ("entries", "modules", "classes", "calls")
HOST_KINDS = ("operator", "runtime", "host overhead")
DEVICE_KINDS = ("kernel", "copy", "transfer", "device overhead")
Times = tuple["float | None", ...]
Side = dict[str, Any]


@dataclass
class CompareConfig:
    names: tuple[str, ...] = cli.option("two or more runs; the first is the baseline", (), positional=True)
    output: str | None = cli.option("also write this HTML page", None, short="-o")
    json: bool = cli.option("print JSON, with all that the page has", False)
    top: int = cli.option("operators to list, the greatest change first", 15, least=0)
    allow_missing_ranks: bool = cli.allow_missing_ranks()

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ValueError("give at least two runs to compare")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(CompareConfig, argv, description="Compare runs: steps, breakdown, operators, modules.")
    runs = [find_run([name], config.allow_missing_ranks) for name in config.names]
    sides = [side(load(run)) for run in runs]  # one run at a time is in memory
    found = compare_content(sides)
    if config.json:
        print(json.dumps(with_names(found) | {"page": config.output}))
    else:
        print("\n".join(lines(sides, config.top)))
    if config.output:
        title = "compared: " + ", ".join(each["name"] for each in sides)
        written = write_page(Path(config.output), "compare", title, found, PackedColumns())
        if not config.json:
            print(f"\n{config.output}: {size(written)}, open it in a browser")
    return 0


@dataclass(frozen=True)
class Matched:
    """One operator, kernel or module in every run: ns per step and rank, None where a run lacks it.

    ``device_ns``: of the device work that an operator launched, or that belongs to a module.
    """

    kind: str
    name: str
    self_ns: Times
    device_ns: Times
    count: Times


def side(run: ReportRun) -> Side:
    """What is compared of a run.

    ``step_ns``: see ``content.step_ns``; the other times are means per step and rank. ``steps`` is 0 where
    the whole trace is one stretch; ``peak_bytes``: of ``largest_peak``; ``TABLES`` aren't part of the page.
    """
    steps = find_steps(run)
    names = {step.name for step in steps}
    peak = largest_peak(usage(run))
    return {
        "name": run.name,
        "ranks": len(run.ranks),
        "steps": 0 if names == {WHOLE} else len(names),
        "base": run.base,
        "step_ns": step_ns(run),
        "parts_ns": np.mean([step.parts_ns for step in steps], axis=0).tolist(),
        "hidden_ns": float(np.mean([step.hidden_ns for step in steps])),
        "phases_ns": np.mean([step.phases_ns for step in steps], axis=0).tolist(),
        "peak_bytes": peak["peak_bytes"] if peak else None,
        "facts": facts(run),
        "lacks": lacks(run, steps),
        "diagnosis": run.diagnosis,
        "entries": {
            (each.kind, each.name): (each.self_ns, each.device_ns, each.count) for each in by_name(run)
        },
        "classes": {("class", each.kind): (each.time_ns, 0, each.count) for each in run.kernel_classes},
        "calls": calls_by_path(call_tree(run)),
        "modules": {
            ("module", each.path): (each.host_ns, each.device_ns, each.count) for each in by_module(run)
        },
    }


def calls_by_path(calls: list[Call]) -> dict[tuple[str, str], tuple[int, ...]]:
    """("call", names from the outermost call on) → time of host and device, without calls inside; count."""
    found = defaultdict[tuple[str, str], tuple[int, ...]](lambda: (0, 0, 0))
    paths: list[str] = []
    for call in calls:
        name = call.name.replace("/", "∕")[:LONGEST_NAME]
        paths.append(f"{paths[call.above]}/{name}" if call.above >= 0 else name)
        host, device, count = found["call", paths[-1]]
        found["call", paths[-1]] = host + call.host_ns, device + call.device_ns, count + call.count
        if call.above >= 0:
            host, device, count = found["call", paths[call.above]]
            found["call", paths[call.above]] = host - call.host_ns, device - call.device_ns, count
    return found


def match(sides: list[Side], table: str) -> list[Matched]:
    """The entries of one of ``TABLES`` with each run's sums, per step and rank; the greatest change first."""
    found = []
    for key in dict.fromkeys(key for each in sides for key in each[table]):
        rows: list[tuple[float | None, ...]] = []
        for each in sides:
            share, figures = each["ranks"] * max(each["steps"], 1), each[table].get(key)
            rows.append(tuple(round(ns / share, 2) for ns in figures) if figures else (None,) * 3)
        found.append(Matched(*key, *zip(*rows, strict=True)))
    return sorted(found, key=lambda each: -abs(_difference(each.self_ns)) - abs(_difference(each.device_ns)))


def _difference(times: Times) -> float:
    """Last run minus first."""
    return (times[-1] or 0.0) - (times[0] or 0.0)


def speedup(sides: list[Side], at: int) -> float:
    """How many times faster than the first run a step is."""
    return sides[0]["step_ns"] / sides[at]["step_ns"] if sides[at]["step_ns"] else 0.0


def strong_scaling(sides: list[Side], at: int) -> float:
    """Scaling efficiency against the first run where all ranks share the same work: an ideal step on twice
    the ranks takes half as long. Where each rank has the same work (weak scaling), it is ``speedup``."""
    return speedup(sides, at) * float(sides[0]["ranks"] / sides[at]["ranks"])


def notes(sides: list[Side]) -> list[str]:
    """What bounds each run, and what makes a comparison doubtful."""
    found = [f"{each['name']}: {each['diagnosis'].lines()[0]}" for each in sides if each["diagnosis"]]
    if whole := ", ".join(each["name"] for each in sides if each["steps"] == 0 and each["base"] != "planned"):
        found.append(f"no steps in {whole}: whole traces are compared, which may have other numbers of steps")
    if len({each["base"] for each in sides}) > 1:
        origins = ", ".join(f"{each['name']} {each['base']}" for each in sides)
        found.append(f"times of different origin: {origins}")
    if all(None in each.self_ns for each in match(sides, "entries")):
        found.append("the runs have no operator or kernel in common")
    return found


def compare_content(sides: list[Side]) -> dict[str, Any]:
    """The JSON of the page; ``assets/compare.js`` shows it. Lists are in the order of the runs."""
    runs = [{name: value for name, value in each.items() if name not in TABLES} for each in sides]
    for at, each in enumerate(runs):
        each["speedup"], each["strong_scaling"] = speedup(sides, at), strong_scaling(sides, at)
        each["diagnosis"] = each["diagnosis"] and each["diagnosis"].as_json()
    return {
        "made_by": MADE_BY,
        "notes": notes(sides),
        "activities": ACTIVITIES,
        "phases": PHASES,
        "runs": runs,
        **{table: match(sides, table)[:MOST_ROWS] for table in TABLES},
    }


def lines(sides: list[Side], top: int) -> list[str]:
    """The comparison as text: a row for each run, then the operators and kernels that changed most."""
    several = len({each["ranks"] for each in sides}) > 1
    memory = any(each["peak_bytes"] is not None for each in sides)
    head = ["run", "ranks", "steps", "step", "speed-up", *(["strong scaling"] if several else [])]
    rows = [[*head, *ACTIVITIES, "hidden", *(["peak memory"] if memory else [])]]
    for at, each in enumerate(sides):
        row = [shortened(each["name"], LONGEST_NAME), str(each["ranks"]), str(each["steps"] or "-")]
        row += [duration(each["step_ns"]), f"{speedup(sides, at):.2f}x"]
        row += [f"{strong_scaling(sides, at):.0%}"] if several else []
        row += [*map(duration, each["parts_ns"]), duration(each["hidden_ns"])]
        rows.append([*row, *([size(each["peak_bytes"])] if memory else [])])
    text = table(rows, right=range(1, len(rows[0])))
    text += ["step: of the slowest rank; what it is made of: means of the ranks"]
    text += [f"note: {note}" for note in notes(sides)]
    classes, matched = ([(each, each.self_ns) for each in match(sides, of)] for of in ("classes", "entries"))
    launching = (each for each, _ in matched if each.kind == "operator" and any(each.device_ns))
    for title, found in {
        "Kernels and copies by class": classes,
        "What changed most on the host": [row for row in matched if row[0].kind in HOST_KINDS],
        "What changed most on the device": [row for row in matched if row[0].kind in DEVICE_KINDS],
        "Device time of the operators that launched it": [(each, each.device_ns) for each in launching],
    }.items():
        text += _listed(title, sides, found, top)
    return text


def _listed(title: str, sides: list[Side], found: list[tuple[Matched, Times]], top: int) -> list[str]:
    """The ``top`` rows whose time changed most from the first run to the last, without those that didn't
    change; then the sums of the rows that aren't listed, apart where a run has no partner for them."""
    found = sorted(found, key=lambda row: -abs(_difference(row[1])))
    top = sum(_difference(times) != 0 for _, times in found[:top])
    rows = [["kind", "name", *(shortened(each["name"], 20) for each in sides), "difference", "ratio"]]
    for each, times in found[:top]:
        name = kernel_name(each.name) if each.kind == "kernel" else each.name
        rows.append(_row(each.kind, shortened(name, LONGEST_NAME), times))
    if len(rows) < 2:
        return []
    left: dict[str, list[Times]] = {}
    for _, times in found[top:]:
        only = [each["name"] for each, time in zip(sides, times, strict=True) if time is not None]
        left.setdefault("" if len(only) > 1 else f", only in {shortened(only[0], 20)}", []).append(times)
    rows += [_row("", plural(len(of), "other") + which, _sums(of)) for which, of in sorted(left.items())]
    rows.append(_row("", "all", _sums([times for _, times in found])))
    return ["", f"{title}, per step and rank:", *table(rows, right=range(2, len(rows[0])))]


def _sums(rows: list[Times]) -> Times:
    """The sum of each run's times, None where it has none."""
    known = ([time for time in column if time is not None] for column in zip(*rows, strict=True))
    return tuple(sum(column) if column else None for column in known)


def _row(kind: str, name: str, times: Times) -> list[str]:
    before, after, difference = times[0], times[-1], _difference(times)
    change = f"{'+' if difference > 0 else '-'}{duration(abs(difference))}" if difference else "0"
    ratio = f"{after / before:.2f}x" if before and after else "-"
    return [kind, name, *("-" if time is None else duration(time) for time in times), change, ratio]
