"""The straggler heat maps of a page, see ``chakra_et.stragglers``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.report.run import ReportRun
from chakra_et.simulate.timing import timing
from chakra_et.stragglers.analyse import rank_slowdowns
from chakra_et.stragglers.heatmap import HeatMap
from chakra_et.stragglers.recorded import job_of

# Every rank is one more replay of all nodes: beyond this many nodes in all, a page would take minutes.
MOST_REPLAYED = 100_000_000


def slowdowns(run: ReportRun) -> tuple[dict[str, Any] | None, list[str]]:
    """(what the page shows, what it lacks): ``slowdown`` of the run, ``rank_by_step`` and
    ``stage_by_dp_rank`` as {rows, columns, values}, ``notes``; None for one rank, a plan, and ranks without
    communication."""
    if len(run.ranks) < 2 or run.base == "planned" or run.replay is None or not run.matching.channels:
        return None, []
    if len(run.ranks) * len(run.graph) > MOST_REPLAYED:
        return None, [
            "no slowdown by rank: it takes too long for a run of this size, see chakra-et stragglers"
        ]
    try:
        job = job_of(run.name, run.graph, run.matching, timing(run.graph, run.matching))
        with np.errstate(divide="ignore", invalid="ignore"):
            found = rank_slowdowns(job)
    except TraceError as error:
        return None, [f"no slowdown by rank: {error}"]
    shown = {
        "slowdown": _finite(found.slowdown),
        "rank_by_step": _map(found.rank_by_step),
        "stage_by_dp_rank": _map(found.stage_by_dp_rank),
        "notes": found.notes,
    }
    return shown, []


def _map(found: HeatMap) -> dict[str, Any]:
    values = [[_finite(each) for each in row] for row in found.slowdown.tolist()]
    return {"rows": found.rows, "columns": found.columns, "values": values}


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
