"""What is on the page of a run, as columns and one JSON value; ``assets/report.js`` shows it.

name, base, made_by, facts      what ran: the manifest's entries, [label, text]
headline, lacks                 sentences
diagnosis                       see ``diagnose.verdict.Diagnosis``, None where the ranks can't be replayed
ranks                           one dict for each rank: see ``summary.rank_rows``
activities, phases              names of the parts of a step
steps                           see ``steps.ReportStep``, as lists in the order of its fields
path                            {kind: ns} of the critical path
entries, modules                see ``profile``, as lists in the order of their fields
collectives                     see ``collectives.Collective``, as dicts
memory                          see ``memory.Usage``, as dicts, with the name of the peak's node
traffic                         {messages, collectives}: bytes, rows send
late                            {labels, ns}: rows are ranks, null where a rank took no part
waits                           ns that the rank of the row waited for the rank of the column
stragglers                      see ``slowdowns``, None where there is nothing to show
timeline                        the tables that the nodes' columns refer to: see ``columns``
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from chakra_et import __version__
from chakra_et.diagnose.verdict import diagnose
from chakra_et.errors import TraceError
from chakra_et.report.collectives import collectives, lateness, traffic
from chakra_et.report.columns import PHASES, add_nodes, name_codes
from chakra_et.report.memory import device_name, usage
from chakra_et.report.page import PackedColumns
from chakra_et.report.profile import by_module, by_name
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import find_times
from chakra_et.report.summary import facts, headline, lacks, rank_rows
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.simulate.critical_path import waited_for
from chakra_et.simulate.time_by_kind import KINDS, node_kinds
from chakra_et.stragglers.analyse import rank_slowdowns
from chakra_et.stragglers.heatmap import HeatMap
from chakra_et.stragglers.recorded import job_of

# Beyond these, a table of a page shows the entries with the most time.
MOST_ENTRIES, MOST_MODULES, MOST_STEPS, MOST_RANKS = 5000, 5000, 20_000, 256
# Every rank is one more replay of all nodes: beyond this many nodes in all, a page would take minutes.
MOST_REPLAYED = 100_000_000
MADE_BY = f"mosim-llms {__version__}"


def content(run: ReportRun) -> tuple[dict[str, Any], PackedColumns]:
    """The JSON and the columns of the page of ``run``."""
    times = find_times(run)
    columns = PackedColumns()
    timeline = add_nodes(run, columns)
    messages, shared = traffic(run)
    labels, late = lateness(run)
    many = len(run.ranks) > MOST_RANKS
    stragglers, missing = slowdowns(run)
    diagnosis = None if run.job is None else diagnose(run.job)
    missing = [*lacks(run, times), *missing]
    if many:
        missing.append(f"tables of rank by rank: left out for more than {MOST_RANKS} ranks")
    if len(times.steps) > MOST_STEPS:
        missing.append(f"only the first {MOST_STEPS} of {len(times.steps)} steps are listed")
    code, names = name_codes(run)
    found = {
        "name": run.name,
        "base": run.base,
        "made_by": MADE_BY,
        "facts": facts(run),
        "headline": headline(run, times, diagnosis),
        "diagnosis": diagnosis and diagnosis.as_json(),
        "lacks": missing,
        "ranks": rank_rows(run, times),
        "activities": ACTIVITIES,
        "phases": PHASES,
        "steps": times.steps[:MOST_STEPS],
        "path": path_by_kind(run),
        "entries": by_name(run)[:MOST_ENTRIES],
        "modules": by_module(run)[:MOST_MODULES],
        "collectives": [vars(each) for each in collectives(run)],
        "memory": [
            vars(each) | {"device": device_name(each.device), "peak_name": names[int(code[each.peak_node])]}
            for each in usage(run)
        ],
        "traffic": None if many else {"messages": messages.tolist(), "collectives": shared.tolist()},
        "late": {"labels": labels, "ns": [[_rounded(ns) for ns in row] for row in late.tolist()]},
        "stragglers": stragglers,
        "waits": None if many else waited_for(run.graph, run.operations, run.wait_ns).tolist(),
        "timeline": timeline,
    }
    return found, columns


def _rounded(value: float) -> int | None:
    return None if math.isnan(value) else round(value)


def with_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` for programs: without the timeline, and each row of a table as a dict of its fields."""
    return {
        name: [vars(each) if is_dataclass(each) else each for each in value]
        if isinstance(value, list)
        else value
        for name, value in found.items()
        if name != "timeline"
    }


def path_by_kind(run: ReportRun) -> dict[str, int]:
    """ns of the critical path by kind of node, overheads last."""
    if run.path is None:
        return {}
    kind = run.graph.gather([node_kinds(trace) for trace in run.traces])[run.path.node]
    time = np.bincount(kind, run.path.lasts_ns, len(KINDS)).tolist()
    return {name.replace("-", " "): int(ns) for name, ns in zip(KINDS, time, strict=True) if name != "wait"}


def slowdowns(run: ReportRun) -> tuple[dict[str, Any] | None, list[str]]:
    """What ``chakra_et.stragglers`` finds: (what the page shows, what it lacks). ``slowdown`` of the run,
    ``rank_by_step`` and ``stage_by_dp_rank`` as {rows, columns, values}, ``notes``; None for one rank, a
    plan, and ranks without communication."""
    if len(run.ranks) < 2 or run.base == "planned" or run.job is None or not run.job.matching.channels:
        return None, []
    if len(run.ranks) * len(run.graph) > MOST_REPLAYED:
        return None, [
            "no slowdown by rank: it takes too long for a run of this size, see chakra-et stragglers"
        ]
    try:
        job = job_of(run.name, run.graph, run.job.matching, run.job.timing)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = rank_slowdowns(job)
    except TraceError as error:
        return None, [f"no slowdown by rank: {error}"]

    def finite(value: float) -> float | None:
        return round(value, 4) if math.isfinite(value) else None

    def cells(map_: HeatMap) -> dict[str, Any]:
        values = [[finite(each) for each in row] for row in map_.slowdown.tolist()]
        return {"rows": map_.rows, "columns": map_.columns, "values": values}

    return {
        "slowdown": finite(found.slowdown),
        "rank_by_step": cells(found.rank_by_step),
        "stage_by_dp_rank": cells(found.stage_by_dp_rank),
        "notes": found.notes,
    }, []
