"""``chakra-et stragglers NAME``: what slow ranks cost.

    chakra-et stragglers outputs/gpt2 --json

Step times against those of an ideal job, in which each operation takes what is typical of its kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chakra_et.cli import cluster, parse
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.command import DiagnoseConfig
from chakra_et.diagnose.verdict import Diagnosis, diagnose
from chakra_et.stragglers.analyse import THRESHOLD, Stragglers, analyse
from chakra_et.stragglers.recorded import recorded_job
from chakra_et.text import table

MOST_PARTS = 8


@dataclass
class StragglersConfig(DiagnoseConfig):
    cluster: str = cluster()


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(StragglersConfig, argv, description="Find slow ranks and what they cost.")
    how = config.allow_missing_ranks, config.skeletons, config.cluster
    run = load_run(config.name, *how, among_given=True)
    found, diagnosis = analyse(recorded_job(run)), diagnose(run)
    if config.json:
        print(json.dumps(found.as_json() | {"diagnosis": diagnosis.as_json()}, indent=2))
    else:
        print(_text(config.name, found, diagnosis))
    return 0


def _text(name: str, found: Stragglers, diagnosis: Diagnosis) -> str:
    """What a terminal shows of ``found``; ``name``: of the run."""
    meta, slowdown = found.job_meta, found.blocking_slowdown
    lines = [
        f"{name}: {meta['world_size']} ranks, dp {meta['dp_size']} × pp {meta['pp_size']}, "
        f"{diagnosis.duration()}",
        f"Stragglers waste {max(0.0, 1 - 1 / slowdown):.1%} of each step: it takes {slowdown:.2f} times "
        "as long as with typical durations.",
        *diagnosis.about_ranks(),
    ]
    if found.worker_slowdown is None:
        lines.append(f"Below {THRESHOLD}, waste is not attributed to ranks, stages and operators.")
    parts = {
        "operator type": found.blocking_decompose_by_optype,
        "rank": found.worker_slowdown,
        "dp rank": found.blocking_decompose_by_dp_rank,
        "stage": found.blocking_decompose_by_stage,
        "step": found.blocking_step_slowdown,
    }
    for heading, slowdowns in parts.items():
        lines += _parts(heading, slowdowns or {})
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def _parts(heading: str, slowdowns: Mapping[Any, float]) -> list[str]:
    """The largest of ``slowdowns``, which come first."""
    if len(slowdowns) < 2:
        return []
    shown = list(slowdowns.items())[:MOST_PARTS]
    rows = [(heading, "slowdown"), *((str(part), f"{slowdown:.4f}") for part, slowdown in shown)]
    left = len(slowdowns) - len(shown)
    return ["", *table(rows), *([f"… and {left} more"] if left else [])]
