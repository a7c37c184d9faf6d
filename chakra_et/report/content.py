"""What is on the page of a run, as columns and one JSON value; ``assets/report.js`` shows it.

name, base, made_by, facts      what ran: the manifest's entries, [label, text]
headline, lacks                 sentences
diagnosis                       see ``diagnose.verdict.Diagnosis``, None where the ranks can't be replayed
ranks                           one dict for each rank: see ``verdict.rank_rows``
activities, phases              names of the parts of a step
steps                           [rank, step, start, end, parts, hidden, phases, replayed], ns
path                            {kind: ns} of the critical path
entries, modules                see ``profile``, as lists in the order of their fields
collectives                     see ``collectives.Collective``, as dicts
memory                          see ``memory.Usage``, as dicts, with the name of the peak's node
traffic                         {messages, collectives}: bytes, rows send
late                            {labels, ns}: rows are ranks, null where a rank took no part
waits                           ns that the rank of the row waited for the rank of the column
stragglers                      see ``slowdown.slowdowns``, None where there is nothing to show
timeline                        the tables that the nodes' columns refer to: see ``columns``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from typing import Any

import numpy as np

from chakra_et import __version__
from chakra_et.report.collectives import collectives, lateness, traffic, waits_by_rank
from chakra_et.report.columns import PHASES, add_nodes, name_codes
from chakra_et.report.memory import device_name, usage
from chakra_et.report.pack import PackedColumns
from chakra_et.report.profile import Entry, Module, by_module, by_name
from chakra_et.report.run import ReportRun
from chakra_et.report.slowdown import slowdowns
from chakra_et.report.steps import ReportStep, StepTimes, find_times
from chakra_et.report.verdict import diagnosis_of, headline, lacks, path_by_kind, rank_rows
from chakra_et.simulate.breakdown import ACTIVITIES

# Beyond these, a table of a page shows the entries with the most time.
MOST_ENTRIES, MOST_MODULES, MOST_STEPS, MOST_RANKS = 5000, 5000, 20_000, 256
LONGEST_FACT = 400
# Tables whose rows are lists: the fields of these.
ROWS = {"steps": ReportStep, "entries": Entry, "modules": Module}
MADE_BY = f"mosim-llms {__version__}"


def content(run: ReportRun) -> tuple[dict[str, Any], PackedColumns]:
    """The JSON and the columns of the page of ``run``."""
    times = find_times(run)
    columns = PackedColumns()
    timeline = add_nodes(run, columns)
    found = tables(run, times)
    return found | {"timeline": timeline}, columns


def with_names(found: Mapping[str, Any], rows: Mapping[str, Any] = ROWS) -> dict[str, Any]:
    """``found`` for programs: without the timeline, and the tables of ``rows`` as dicts of their fields."""
    return {
        name: [dict(zip((each.name for each in fields(rows[name])), row, strict=True)) for row in value]
        if name in rows
        else value
        for name, value in found.items()
        if name != "timeline"
    }


def tables(run: ReportRun, times: StepTimes) -> dict[str, Any]:
    """Everything but the timeline."""
    messages, shared = traffic(run)
    labels, late = lateness(run)
    many = len(run.ranks) > MOST_RANKS
    stragglers, without = slowdowns(run)
    diagnosis = diagnosis_of(run)
    missing = [*lacks(run, times), *without]
    if many:
        missing.append(f"tables of rank by rank: left out for more than {MOST_RANKS} ranks")
    if len(times.steps) > MOST_STEPS:
        missing.append(f"only the first {MOST_STEPS} of {len(times.steps)} steps are listed")
    return {
        "name": run.name,
        "base": run.base,
        "made_by": MADE_BY,
        "facts": facts(run.manifest, run),
        "headline": headline(run, times, diagnosis),
        "diagnosis": diagnosis and diagnosis.as_json(),
        "lacks": missing,
        "ranks": rank_rows(run, times),
        "activities": ACTIVITIES,
        "phases": PHASES,
        "steps": [astuple(each) for each in times.steps[:MOST_STEPS]],
        "path": path_by_kind(run),
        "entries": [astuple(entry) for entry in by_name(run)[:MOST_ENTRIES]],
        "modules": [astuple(module) for module in by_module(run)[:MOST_MODULES]],
        "collectives": [asdict(each) for each in collectives(run)],
        "memory": memory_rows(run),
        "traffic": None if many else {"messages": messages.tolist(), "collectives": shared.tolist()},
        "late": {"labels": labels, "ns": _rounded(late)},
        "stragglers": stragglers,
        "waits": None if many else waits_by_rank(run).tolist(),
    }  # fmt: skip


def _rounded(values: np.ndarray) -> list[list[int | None]]:
    return [[None if each != each else round(each) for each in row] for row in values.tolist()]


def memory_rows(run: ReportRun) -> list[dict[str, Any]]:
    """One dict for each rank and device with memory."""
    found = usage(run)
    code, names = name_codes(run) if found else (np.zeros(0, np.int64), [])
    return [
        asdict(each) | {"device": device_name(each.device), "peak_name": names[int(code[each.peak_node])]}
        for each in found
    ]


def facts(manifest: Mapping[str, Any], run: ReportRun) -> list[list[str]]:
    """What ran, as [label, text], from the manifest where there is one."""
    rows: list[list[str]] = []

    def add(label: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            text = _flat(value) if isinstance(value, Mapping) else str(value)
            rows.append([label, text[:LONGEST_FACT]])

    add("created", manifest.get("created"))
    for name, value in sorted(_mapping(manifest.get("run")).items()):
        add(name.replace("_", " "), value)
    add("versions", {name: value for name, value in _mapping(manifest.get("versions")).items() if value})
    add("schedule", _mapping(manifest.get("schedule")))
    add("backend", manifest.get("backend"))
    if manifest and manifest.get("complete") is not True:
        add("incomplete", manifest.get("reason") or "yes")
    add("ranks", len(run.ranks))
    add("nodes", f"{len(run.graph):,}")
    add("dependencies", f"{len(run.graph.source):,}")
    add("conversion", run.conversion.get("engine"))
    return rows


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flat(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items())
