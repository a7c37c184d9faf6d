"""What is on the page of a run, as columns and one JSON value; ``assets/report.js`` shows it.

name, base, made_by, facts      what ran: the manifest's entries, [label, text]
headline, lacks                 sentences
diagnosis                       see ``ReportRun.diagnosis``
ranks                           one dict for each rank: see ``rank_rows``
activities, phases              names of the parts of a step
steps                           see ``steps.ReportStep``, as lists in the order of its fields
path                            {kind: ns} of the critical path
gpu, roof, kernel_classes       see ``rates.Rates`` and ``rates.KernelClass``
entries, modules                see ``times``, as lists in the order of their fields
calls                           see ``times.Call``, as lists
idle                            see ``times.idle_time``, None without device work
collectives                     see ``collectives.collectives``, as dicts
memory                          see ``timeline.usage``, with the name of the peak's node
memory_owners                   what holds a rank's memory at its peak: rank, owner, bytes, blocks
traffic                         see ``collectives.traffic``
waits                           ns that the rank of the row waits for that of the column, see ``run.arrivals``
timeline                        the tables that the nodes' columns refer to: see ``columns``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.diagnose.gains import step_ms
from chakra_et.et.memory import is_memory
from chakra_et.findings import sentence
from chakra_et.report.collectives import collectives, split_imbalance, traffic
from chakra_et.report.columns import add_nodes
from chakra_et.report.page import MADE_BY, PackedColumns
from chakra_et.report.run import PHASES, ReportRun
from chakra_et.report.stacks import read_stacks
from chakra_et.report.timeline import largest_peak, usage
from chakra_et.report.times import WHOLE, ReportStep, by_module, by_name, call_tree, find_steps, idle_time
from chakra_et.simulate import replay_report
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.simulate.critical_path import waited_for
from chakra_et.simulate.time_by_kind import KINDS, overhead_part
from chakra_et.text import duration, plural, size

# Beyond these, a table of a page shows the entries with the most time.
MOST_ENTRIES, MOST_MODULES, MOST_STEPS, MOST_RANKS = 5000, 5000, 20_000, 256
LONGER = 1.02
"""The longest step is told where it is so many times the step of the run."""


def content(run: ReportRun, traces: Mapping[int, Path]) -> tuple[dict[str, Any], PackedColumns]:
    """The JSON and the columns of the page of ``run``, with the call stacks of its device ``traces``."""
    steps = find_steps(run)
    columns = PackedColumns()
    stacks, owners = read_stacks(run, traces, steps)
    timeline = add_nodes(run, columns, stacks)
    many = len(run.ranks) > MOST_RANKS
    missing = lacks(run, steps)
    if many:
        missing.append(f"tables of rank by rank: left out for more than {MOST_RANKS} ranks")
    if len(steps) > MOST_STEPS:
        missing.append(f"only the first {MOST_STEPS} of {len(steps)} steps are listed")
    code, names = run.names
    found = {
        "name": run.name,
        "base": run.base,
        "made_by": MADE_BY,
        "facts": facts(run),
        "headline": headline(run, steps),
        "diagnosis": run.diagnosis and run.diagnosis.as_json(),
        "lacks": missing,
        "ranks": rank_rows(run),
        "activities": ACTIVITIES,
        "phases": PHASES,
        "steps": steps[:MOST_STEPS],
        "path": path_by_kind(run),
        "gpu": run.rates.gpu,
        "roof": run.rates.roof,
        "kernel_classes": run.kernel_classes,
        "entries": by_name(run)[:MOST_ENTRIES],
        "modules": by_module(run)[:MOST_MODULES],
        "calls": call_tree(run),
        "idle": idle_time(run),
        "collectives": collectives(run),
        "memory": [each | {"peak_name": names[int(code[each["peak_node"]])]} for each in usage(run)],
        "memory_owners": owners,
        "traffic": None if many else {name: each.tolist() for name, each in traffic(run).items()},
        "waits": None if many else waited_for(run.graph, *run.arrivals).tolist(),
        "timeline": timeline,
    }
    return found, columns


def with_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` for programs: without the timeline, and each row of a table as a dict of its fields."""

    def named(rows: Any) -> Any:
        return [vars(each) if is_dataclass(each) else each for each in rows] if type(rows) is list else rows

    return {name: named(value) for name, value in found.items() if name != "timeline"}


def path_by_kind(run: ReportRun) -> dict[str, int]:
    """ns of the critical path by kind of node, overheads last."""
    time = np.bincount(run.job.kind[run.path.node], run.path.lasts_ns, len(KINDS)).tolist()
    return {name.replace("-", " "): int(ns) for name, ns in zip(KINDS, time, strict=True) if name != "wait"}


# Where a figure is worse than this, the page shows "check" beside it. Overhead as in `chakra-et convert`.
WORST_REPLAY_PERCENT, MOST_UNEXPLAINED, LEAST_LINKED = 3.0, 0.10, 0.99
LONGEST_FACT = 400
# What the conversion report has of each rank, and how the page calls it.
FINDINGS = {"warnings": "warning", "repairs": "repair", "losses": "left out", "notes": "note"}
NOT_MEASURED = {
    "planned": "a planned run: its times are predictions of the planner, not measurements",
    "predicted": "a predicted run: its times are what chakra-et predict computed, not measurements",
    "replayed": "no start times in the files: the timeline shows when the replay starts each node",
}


def rank_rows(run: ReportRun) -> list[dict[str, Any]]:
    """One dict for each rank, for the table of verdicts. Times in ns; None where a figure is not known.

    ``reasons``: one sentence for each thing that is wrong; ``findings``: [kind, sentence, count] of the
    conversion.
    """
    reports = _mapping(run.conversion.get("ranks"))
    rows = []
    for replay in replay_report.report(run.job, run.job.start_ns, run.job.end_ns):
        rank, measured = replay["rank"], replay["measured_us"] if run.base == "measured" else None
        report = _mapping(reports.get(str(rank)))
        error = None if measured is None else replay["error_percent"]
        rate = None if _without_host_trace(report) else report.get("link_rate")
        linked = float(rate) if isinstance(rate, int | float) else None
        overhead = None if measured is None else overhead_part(replay["critical_path_us"])
        problems = report.get("problems")
        reasons = list(map(str, problems)) if isinstance(problems, list) else []
        reasons += [run.apart] if run.apart else []
        if abs(error or 0) > WORST_REPLAY_PERCENT:
            reasons.append(f"the replay is off by {error:+.1f}%: dependencies are missing or wrong")
        if linked is not None and linked < LEAST_LINKED:
            reasons.append(f"only {linked:.1%} of the host operators are in the device trace")
        path = sum(replay["critical_path_us"].values())
        if measured is not None and replay["unexplained_us"] > MOST_UNEXPLAINED * path:
            share = replay["unexplained_us"] / path
            reasons.append(f"nothing recorded explains {share:.0%} of this rank's critical path")
        findings = [
            [kind, str(each.get("text", each.get("id", ""))), _count(each)]
            for name, kind in FINDINGS.items()
            for each in _entries(report, name)
        ]
        rows.append(
            {
                "rank": rank,
                "device": run.job.devices.get(rank, ""),
                "nodes": replay["nodes"],
                "linked": linked,
                "left_out": sum(map(_count, _entries(report, "losses"))) if report else None,
                "replay_error": error,
                "overhead": overhead,
                "measured_ns": None if measured is None else round(measured * 1000),
                "replayed_ns": round(replay["simulated_us"] * 1000),
                "reasons": reasons,
                "findings": findings,
            }
        )
    return rows


def step_ns(run: ReportRun) -> float:
    """The step of the run as its diagnosis has it: the mean step of the slowest rank."""
    return 1e6 * (run.diagnosis.step_ms if run.diagnosis else step_ms(run.job))


def headline(run: ReportRun, steps: list[ReportStep]) -> list[str]:
    """The run in a few sentences: its size, the diagnosis, and memory."""
    names, lasts = {step.name for step in steps}, step_ns(run)
    whole, longest = names == {WHOLE}, max(step.lasts_ns for step in steps)
    most = f", at most {duration(longest)}" if longest > LONGER * lasts else ""
    found = [
        f"{plural(len(run.ranks), 'rank')}, {plural(0 if whole else len(names), 'step')}: "
        f"{duration(lasts)} {'for the whole trace' if whole else 'per step'}"
        f"{'' if run.base == 'measured' else f' as {run.base}'}{most}."
    ]
    found += run.diagnosis.lines() if run.diagnosis else []
    if peak := largest_peak(usage(run)):
        reserved = f", {size(peak['reserved_bytes'])} reserved" if peak["reserved_bytes"] else ""
        place = f"on rank {peak['rank']}, {peak['device']}"
        found.append(f"Peak memory: {size(peak['peak_bytes'])} allocated{reserved}, {place}.")
    return found


def lacks(run: ReportRun, steps: list[ReportStep]) -> list[str]:
    """What the page can't show, and why: one sentence for each."""
    found = [NOT_MEASURED[run.base]] if run.base in NOT_MEASURED else []
    names = {step.name for step in steps}
    if names == {WHOLE}:
        found.append("no ProfilerStep annotations: the whole trace counts as one step")
    elif len(names) == 1:
        found.append("one step only: the variation between steps is unknown")
    if not run.manifest:
        found.append("no manifest: versions, devices and configuration of the run are not known")
    if not run.conversion:
        found.append("no conversion report: what was lost or guessed in the conversion is not known")
    elif any(map(_without_host_trace, map(_mapping, _mapping(run.conversion.get("ranks")).values()))):
        found.append(f"Kineto traces only: {sentence('no-host-trace').partition(': ')[2]}")
    attributes = {name for trace in run.traces for name in trace.attributes}
    if "module" not in attributes:
        found.append("no modules: record Python frames (with_stack) to see time by module")
    if not any(int(trace.column("num_ops").max(initial=0)) for trace in run.traces):
        found.append("no operation counts: rates in FLOP/s are not known")
    if run.base not in ("planned", "predicted") and not any(map(is_memory, attributes)):
        found.append("no memory: record allocations (--trace-memory, or profile_memory=True) to see it")
    if len(run.ranks) > 1 and not (run.arrivals[0] >= 0).any():
        found.append("no communication that all its ranks recorded: waiting can't be told from transfer")
    return [*found, *dict.fromkeys(run.lacks)]


def facts(run: ReportRun) -> list[list[str]]:
    """What ran, as [label, text], from the manifest where there is one."""
    manifest = run.manifest
    unfinished = manifest and manifest.get("complete") is not True
    found: dict[str, Any] = {
        "plan": run.traces[0].metadata.get("plan"),
        "created": manifest.get("created"),
        **{name.replace("_", " "): each for name, each in sorted(_mapping(manifest.get("run")).items())},
        "versions": {name: each for name, each in _mapping(manifest.get("versions")).items() if each},
        "schedule": _mapping(manifest.get("schedule")),
        "backend": manifest.get("backend"),
        "incomplete": (manifest.get("reason") or "yes") if unfinished else "",
        "ranks": len(run.ranks),
        "uneven all-to-alls": split_imbalance(run),
        "nodes": f"{len(run.graph):,}",
        "dependencies": f"{len(run.graph.source):,}",
        "conversion": run.conversion.get("engine"),
    }
    for label, value in found.items():
        if isinstance(value, Mapping):
            found[label] = ", ".join(f"{name} {each}" for name, each in value.items())
    return [
        [label, str(value)[:LONGEST_FACT]] for label, value in found.items() if value not in (None, "", [])
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _entries(report: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What a rank's conversion report lists under ``name``; the file may be damaged."""
    found = report.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _count(entry: Mapping[str, Any]) -> int:
    count = entry.get("count")
    return count if type(count) is int else 0


def _without_host_trace(report: Mapping[str, Any]) -> bool:
    return any(each.get("id") == "no-host-trace" for each in _entries(report, "notes"))
