"""Runs side by side: step times, breakdown, and the time of each operator, kernel and module.

Operators and kernels are matched by kind and name, modules by path; times are per step and rank. Kernels of
different vendors have different names, so the device time of the operators that launched them is compared
too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.diagnose.verdict import Diagnosis
from chakra_et.report.columns import PHASES
from chakra_et.report.content import MADE_BY, facts
from chakra_et.report.memory import largest_peak
from chakra_et.report.profile import Entry, Module, by_module, by_name
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import WHOLE, find_times
from chakra_et.report.verdict import diagnosis_of, lacks
from chakra_et.simulate.breakdown import ACTIVITIES

# A page lists the entries with the most time; a difference in more than this many can't be read.
MOST_ROWS = 3000


@dataclass(frozen=True)
class Side:
    """One run. Times are means per step and rank, ns; ``steps`` is 0 where the whole trace is one stretch.
    ``peak_bytes``: see ``largest_peak``; ``diagnosis``: None where the ranks can't be replayed together."""

    name: str
    ranks: int
    steps: int
    base: str
    step_ns: float
    replayed_ns: float | None
    parts_ns: tuple[float, ...]
    hidden_ns: float
    phases_ns: tuple[float, ...]
    peak_bytes: int | None
    entries: list[Entry]
    modules: list[Module]
    facts: list[list[str]]
    lacks: list[str]
    diagnosis: Diagnosis | None

    @property
    def shares(self) -> float:
        """What to divide a sum over all ranks and steps by."""
        return float(self.ranks * max(self.steps, 1))


@dataclass(frozen=True)
class Matched:
    """One operator, kernel or module in every run: ns per step and rank, None where a run lacks it.

    ``device_ns``: of the device work that an operator launched, or that belongs to a module.
    """

    kind: str
    name: str
    self_ns: tuple[float | None, ...]
    device_ns: tuple[float | None, ...]
    count: tuple[float | None, ...]

    @property
    def difference_ns(self) -> float:
        """Last run minus first: own time, plus device time of a module."""
        return self._total(-1) - self._total(0)

    def _total(self, at: int) -> float:
        device = self.device_ns[at] if self.kind == "module" else 0
        return (self.self_ns[at] or 0.0) + (device or 0.0)


def side(run: ReportRun) -> Side:
    """What is compared of a run."""
    times = find_times(run)
    steps = times.steps
    names = {step.name for step in steps}
    replayed = [step.replayed_ns for step in steps if step.replayed_ns is not None]
    parts = np.array([step.parts_ns for step in steps], dtype=np.float64).mean(axis=0)
    phases = np.array([step.phases_ns for step in steps], dtype=np.float64).mean(axis=0)
    return Side(
        name=run.name,
        ranks=len(run.ranks),
        steps=0 if names == {WHOLE} else len(names),
        base=run.base,
        step_ns=float(np.mean([step.lasts_ns for step in steps])),
        replayed_ns=float(np.mean(replayed)) if len(replayed) == len(steps) else None,
        parts_ns=tuple(parts.tolist()),
        hidden_ns=float(np.mean([step.hidden_ns for step in steps])),
        phases_ns=tuple(phases.tolist()),
        peak_bytes=largest_peak(run),
        entries=by_name(run),
        modules=by_module(run),
        facts=facts(run.manifest, run),
        lacks=lacks(run, times),
        diagnosis=diagnosis_of(run),
    )


def match_entries(sides: list[Side]) -> list[Matched]:
    """Operators, calls, kernels and communication by kind and name, the greatest change first."""
    keys = dict.fromkeys((entry.kind, entry.name) for each in sides for entry in each.entries)
    known = [{(entry.kind, entry.name): entry for entry in each.entries} for each in sides]
    found = []
    for kind, name in keys:
        entries = [of_run.get((kind, name)) for of_run in known]
        found.append(
            Matched(
                kind,
                name,
                _per_step(sides, [None if entry is None else entry.self_ns for entry in entries]),
                _per_step(sides, [None if entry is None else entry.device_ns for entry in entries]),
                _per_step(sides, [None if entry is None else entry.count for entry in entries]),
            )
        )
    return sorted(found, key=lambda each: -abs(each.difference_ns))


def match_modules(sides: list[Side]) -> list[Matched]:
    """Modules by path, without the time of modules inside, in the order of their paths."""
    known = [{module.path: module for module in each.modules} for each in sides]
    found = []
    for path in sorted({path for of_run in known for path in of_run}):
        modules = [of_run.get(path) for of_run in known]
        found.append(
            Matched(
                "module",
                path,
                _per_step(sides, [None if module is None else module.host_ns for module in modules]),
                _per_step(sides, [None if module is None else module.device_ns for module in modules]),
                _per_step(sides, [None if module is None else module.count for module in modules]),
            )
        )
    return found


def _per_step(sides: list[Side], totals: list[int | None]) -> tuple[float | None, ...]:
    return tuple(
        None if total is None else total / each.shares for total, each in zip(totals, sides, strict=True)
    )


def speedup(sides: list[Side], at: int) -> float:
    """How many times faster than the first run a step is."""
    return sides[0].step_ns / sides[at].step_ns if sides[at].step_ns else 0.0


def efficiency(sides: list[Side], at: int) -> tuple[float, float]:
    """Scaling efficiency against the first run: (weak, strong).

    Weak: each rank has the same work in both runs, so an ideal step takes as long. Strong: all ranks share
    the same work, so an ideal step on twice the ranks takes half as long.
    """
    weak = speedup(sides, at)
    return weak, weak * sides[0].ranks / sides[at].ranks


def notes(sides: list[Side]) -> list[str]:
    """What bounds each run, and what makes a comparison doubtful."""
    found = [f"{each.name}: {each.diagnosis.lines()[0]}" for each in sides if each.diagnosis]
    if len({each.steps == 0 for each in sides}) > 1 or any(each.steps == 0 for each in sides):
        whole = ", ".join(each.name for each in sides if each.steps == 0)
        found.append(
            f"no steps in {whole}: whole traces are compared, which may hold different numbers of steps"
        )
    if len({each.base for each in sides}) > 1:
        found.append("times of different origin: " + ", ".join(f"{each.name} {each.base}" for each in sides))
    common = [each for each in match_entries(sides) if None not in each.self_ns]
    if not common:
        found.append("the runs have no operator or kernel in common")
    return found


def compare_content(sides: list[Side]) -> dict[str, Any]:
    """The JSON of the page; ``assets/compare.js`` shows it. Lists are in the order of the runs."""
    entries, modules = match_entries(sides), match_modules(sides)
    return {
        "made_by": MADE_BY,
        "notes": notes(sides),
        "activities": ACTIVITIES,
        "phases": PHASES,
        "runs": [
            {
                "name": each.name,
                "ranks": each.ranks,
                "steps": each.steps,
                "base": each.base,
                "step_ns": each.step_ns,
                "replayed_ns": each.replayed_ns,
                "parts_ns": each.parts_ns,
                "hidden_ns": each.hidden_ns,
                "phases_ns": each.phases_ns,
                "peak_bytes": each.peak_bytes,
                "speedup": speedup(sides, at),
                "efficiency": efficiency(sides, at),
                "facts": each.facts,
                "lacks": each.lacks,
                "diagnosis": each.diagnosis and each.diagnosis.as_json(),
            }
            for at, each in enumerate(sides)
        ],
        "entries": [_row(each) for each in entries[:MOST_ROWS]],
        "modules": [_row(each) for each in modules[:MOST_ROWS]],
    }


def _row(each: Matched) -> list[Any]:
    return [each.kind, each.name, _whole(each.self_ns), _whole(each.device_ns), each.count]


def _whole(times: tuple[float | None, ...]) -> list[int | None]:
    return [None if time is None else round(time) for time in times]
