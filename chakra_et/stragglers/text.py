"""The analysis as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from chakra_et.stragglers.analyse import Restored, Stragglers
from chakra_et.text import table

MOST_PARTS = 8


def text(name: str, found: Stragglers, diagnosis: Sequence[str] = ()) -> str:
    """What a terminal shows of ``found``; ``name``: the trace or run; ``diagnosis``: sentences on ranks."""
    analysis, meta = found.analysis, found.job_meta
    measured, recorded, ideal = (
        fmean(times.values())
        for times in (analysis.step_t_base, analysis.step_t_nodelay, analysis.step_t_noblk)
    )
    slowdown = analysis.blocking_slowdown
    lines = [
        f"{name}: {meta.world_size} ranks, dp {meta.dp_size} × pp {meta.pp_size} × tp {meta.tp_size}, "
        f"steps: {len(analysis.step_t_base)}",
        "",
        *table(
            [
                ("mean step time", "s", "slowdown"),
                ("measured", f"{measured:.4f}", f"{analysis.launch_slowdown:.4f}"),
                ("simulated, recorded durations", f"{recorded:.4f}", f"{slowdown:.4f}"),
                ("simulated, typical durations", f"{ideal:.4f}", ""),
            ]
        ),
        "",
        f"Stragglers waste {max(0.0, 1 - ideal / recorded):.1%} of each step: it takes {slowdown:.2f} times "
        "as long as with typical durations.",
        *diagnosis,
    ]
    if found.worst_workers is None:
        lines.append("That is below the threshold, so it is not attributed to ranks, stages and operators.")
    else:
        ranks = ", ".join(map(str, found.worst_ranks or []))
        lines.append(
            f"Typical durations on the worst ranks ({ranks}): {_share(found.worst_workers)} less waste."
        )
        if meta.pp_size > 1:
            lines.append(f"Typical durations on the last stage: {_share(found.last_stage)} less waste.")
    parts = {
        "operator type": analysis.blocking_decompose_by_optype,
        "rank": found.worker_slowdown,
        "dp rank": analysis.blocking_decompose_by_dp_rank,
        "stage": analysis.blocking_decompose_by_stage,
        "step": analysis.blocking_step_slowdown,
        "delays before": analysis.launch_decompose_by_optype,
    }
    for heading, slowdowns in parts.items():
        lines += _parts(heading, slowdowns or {})
    for heat_map in (found.rank_by_step, found.stage_by_dp_rank):
        if heat_map is not None and heat_map.slowdown.size > 1:
            lines += ["", *heat_map.draw()]
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def _share(restored: Restored) -> str:
    return f"{round(100 * (restored.rem or 0))}%"


def _parts(heading: str, slowdowns: Mapping[Any, float]) -> list[str]:
    """The largest of ``slowdowns``, which come first."""
    if len(slowdowns) < 2:
        return []
    shown = list(slowdowns.items())[:MOST_PARTS]
    rows = [(heading, "slowdown"), *((str(part), f"{slowdown:.4f}") for part, slowdown in shown)]
    left = len(slowdowns) - len(shown)
    return ["", *table(rows), *([f"… and {left} more"] if left else [])]
