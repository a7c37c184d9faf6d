"""The run in a few sentences, what the page lacks, and how far each rank's trace can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from chakra_et.diagnose.verdict import Diagnosis, diagnose
from chakra_et.et.memory import is_memory
from chakra_et.findings import sentence
from chakra_et.report.memory import memory_sentence
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import WHOLE, StepTimes
from chakra_et.simulate.run import devices_of
from chakra_et.simulate.time_by_kind import KINDS, OVERHEAD, Shares, node_kinds, shares
from chakra_et.text import plural

# Where a figure is worse than this, the page shows "check" beside it. Overhead as in `chakra-et convert`.
WORST_REPLAY_PERCENT, WORST_OVERHEAD, LEAST_LINKED = 3.0, 0.10, 0.99


def rank_rows(run: ReportRun, times: StepTimes) -> list[dict[str, Any]]:
    """One dict for each rank, for the table of verdicts. Times in ns; None where a figure is not known.

    ``reasons``: one sentence for each thing that is wrong; ``findings``: [kind, sentence, count] of the
    conversion.
    """
    reports = _reports(run)
    devices = devices_of(run.manifest)
    rows = []
    for number, rank in enumerate(run.ranks):
        report = reports.get(str(rank), {})
        replay = times.replays[number].total if times.replays else None
        measured = None if replay is None or run.base != "measured" else replay.measured_ns
        error = None if measured is None or replay is None else replay.error_percent
        linked = _number(report, "link_rate") if not _noted(report, "no-host-trace") else None
        overhead = _overhead(run, number)
        reasons = [str(text) for text in _list(report.get("problems"))]
        if error is not None and abs(error) > WORST_REPLAY_PERCENT:
            reasons.append(f"the replay is off by {error:+.1f}%: dependencies are missing or wrong")
        if linked is not None and linked < LEAST_LINKED:
            reasons.append(f"only {linked:.1%} of the host operators are in the device trace")
        if overhead is not None and overhead > WORST_OVERHEAD:
            reasons.append(f"no event explains {overhead:.0%} of this rank's critical path")
        rows.append(
            {
                "rank": rank,
                "device": devices.get(rank, ""),
                "nodes": len(run.traces[number]),
                "linked": linked,
                "left_out": sum(_count(each) for each in _list(report.get("losses"))) if report else None,
                "replay_error": error,
                "overhead": overhead,
                "measured_ns": measured,
                "replayed_ns": None if replay is None else replay.simulated_ns,
                "reasons": reasons,
                "findings": _findings(report),
            }
        )
    return rows


def headline(run: ReportRun, times: StepTimes, diagnosis: Diagnosis | None) -> list[str]:
    """The run in a few sentences: its size, the diagnosis, and memory."""
    steps = times.steps
    lasts = np.array([step.lasts_ns for step in steps], dtype=np.int64)
    slowest = steps[int(np.argmax(lasts))]
    names = {step.name for step in steps}
    mean, most = duration(lasts.mean()), duration(slowest.lasts_ns)
    longest = f", at most {most} ({_where(slowest.rank, slowest.name)})" if most != mean else ""
    what = {"measured": ""}.get(run.base, f" as {run.base}")
    per = "for the whole trace" if names == {WHOLE} else "per step"
    size = (
        f"{plural(len(run.ranks), 'rank')}, {plural(0 if names == {WHOLE} else len(names), 'step')}: "
        f"{mean} {per}{what}{longest}."
    )
    return [size, *(diagnosis.lines() if diagnosis else []), *memory_sentence(run)]


def diagnosis_of(run: ReportRun) -> Diagnosis | None:
    """The diagnosis of a run whose ranks can be replayed together."""
    return None if run.job is None else diagnose(run.job)


def path_by_kind(run: ReportRun) -> dict[str, int]:
    """ns of the critical path by kind of node, overheads last."""
    if run.path is None:
        return {}
    kind = run.graph.gather([node_kinds(trace) for trace in run.traces])[run.path.node]
    time = np.bincount(kind, run.path.lasts_ns, len(KINDS))
    kinds = {name.replace("-", " "): int(time[at]) for at, name in enumerate(KINDS)}
    return {name: ns for name, ns in kinds.items() if name != "wait"}


def _overhead(run: ReportRun, number: int) -> float | None:
    """The part of the rank's own critical path that no event explains, as `chakra-et convert` has it."""
    found: Shares | None = shares(run.traces[number])
    if run.base != "measured" or found is None:
        return None
    return sum(found.path[kind] for kind in OVERHEAD) / max(sum(found.path.values()), 1)


def _reports(run: ReportRun) -> dict[str, dict[str, Any]]:
    """What the conversion reported of each rank."""
    found = run.conversion.get("ranks")
    found = found if isinstance(found, dict) else {}
    return {str(rank): report for rank, report in found.items() if isinstance(report, dict)}


def _findings(report: Mapping[str, Any]) -> list[list[Any]]:
    kinds = {"warnings": "warning", "repairs": "repair", "losses": "left out", "notes": "note"}
    found: list[list[Any]] = []
    for name, kind in kinds.items():
        for entry in _list(report.get(name)):
            if isinstance(entry, dict):
                found.append([kind, str(entry.get("text", entry.get("id", ""))), _count(entry)])
    return found


def _noted(report: Mapping[str, Any], key: str) -> bool:
    return any(isinstance(entry, dict) and entry.get("id") == key for entry in _list(report.get("notes")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(entry: Any) -> int:
    count = entry.get("count") if isinstance(entry, dict) else None
    return count if type(count) is int else 0


def _number(report: Mapping[str, Any], name: str) -> float | None:
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _where(rank: int, step: str) -> str:
    return f"rank {rank}" if step == WHOLE else f"rank {rank}, step {step}"


def duration(nanoseconds: float) -> str:
    """A time in the unit that fits, with three digits: 1.23 µs, 45.6 ms, 7.89 s."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size * 0.9995:
            value = nanoseconds / size
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{nanoseconds:.0f} ns" if nanoseconds else "0"


def lacks(run: ReportRun, times: StepTimes) -> list[str]:
    """What the page can't show, and why: one sentence for each."""
    found = []
    if run.base == "planned":
        found.append("a planned run: its times are predictions of the planner, not measurements")
    elif run.base == "predicted":
        found.append("a predicted run: its times are what chakra-et predict computed, not measurements")
    elif run.base == "replayed":
        found.append("no start times in the files: the timeline shows when the replay starts each node")
    names = {step.name for step in times.steps}
    if names == {WHOLE}:
        found.append("no ProfilerStep annotations: the whole trace counts as one step")
    elif len(names) == 1:
        found.append("one step only: the variation between steps is unknown")
    if not run.manifest:
        found.append("no manifest: versions, devices and configuration of the run are not known")
    if not run.conversion:
        found.append("no conversion report: what was lost or guessed in the conversion is not known")
    elif any(_noted(report, "no-host-trace") for report in _reports(run).values()):
        found.append(f"Kineto traces only: {sentence('no-host-trace').partition(': ')[2]}")
    attributes = {name for trace in run.traces for name in trace.attributes}
    if "module" not in attributes:
        found.append("no modules: record Python frames (with_stack) to see time by module")
    if not any(int(trace.column("num_ops").max(initial=0)) for trace in run.traces):
        found.append("no operation counts: rates in FLOP/s are not known")
    if run.base not in ("planned", "predicted") and not any(is_memory(name) for name in attributes):
        found.append("no memory: record allocations (--trace-memory, or profile_memory=True) to see it")
    if len(run.ranks) > 1 and not len(run.operations):
        found.append("no communication that all its ranks recorded: waiting can't be told from transfer")
    return [*found, *dict.fromkeys(run.lacks)]
