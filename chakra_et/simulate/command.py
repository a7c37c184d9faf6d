"""``chakra-et replay NAME…``: replay runs and compare the result with the measured times.

    chakra-et replay outputs/gpt2 --max-error 5
    chakra-et replay outputs/gpt2.0.et --semantics astra --json

The ranks of a run are replayed together, with their collectives matched. Exit status: 0; 1 if the error of a
rank exceeds ``--max-error``; 2 for unusable arguments or files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from chakra_et.cli import allow_missing_ranks, option, parse, run_names, skeletons
from chakra_et.convert.inputs import find_runs, read_ranks, with_et_files
from chakra_et.errors import TraceError
from chakra_et.et.sets import RankSet, Skeletons
from chakra_et.simulate.replay_report import report, table
from chakra_et.simulate.replays import astra_replay
from chakra_et.simulate.run import Run, make_run

_SIMULATORS: dict[str, Callable[[Run], tuple[np.ndarray, np.ndarray]]] = {
    "device": lambda run: (run.start_ns, run.end_ns),
    "astra": lambda run: astra_replay(run.graph, run.matching, run.timing),
}


@dataclass
class ReplayConfig:
    names: tuple[str, ...] = run_names("the runs")
    semantics: Literal["device", "astra", "both"] = option(
        "device: each thread and stream runs its nodes in order; astra: as ASTRA-sim issues nodes", "both"
    )
    max_error: float | None = option(
        "exit with 1 if a rank's step time is off by more than this percentage",
        None,
        metavar="PERCENT",
        least=0,
    )
    allow_missing_ranks: bool = allow_missing_ranks()
    skeletons: Skeletons = skeletons()
    json: bool = option("print JSON", False)


def main(argv: Sequence[str] | None = None) -> int:
    description = "Replay runs and compare the result with the measured times."
    config = parse(ReplayConfig, argv, description=description)
    status = 0
    answers: list[dict[str, Any]] = []
    for job in find_runs(config.names, config.allow_missing_ranks, config.skeletons):
        title = job.title if isinstance(job, RankSet) else job.name
        try:
            with with_et_files(job) as (ranks, failed):
                reports, notes = run(ranks, config)
        except (TraceError, OSError) as error:
            text = str(error) if title in str(error) else f"{title}: {error}"
            print(f"error: {text}", file=sys.stderr)
            answers.append({"name": title, "error": text})
            status = 2
            continue
        exceeded = [] if config.max_error is None else _exceeded(reports, config.max_error)
        status = max(status, 1 if exceeded else 0)
        notes = failed + notes + exceeded
        answers.append(
            {
                "name": title,
                "files": {rank: str(path) for rank, path in job.files.items()},
                "notes": notes,
                "replays": reports,
            }
        )
        if not config.json:
            print(*[f"{title}:", *table(reports), *(f"note: {note}" for note in notes), ""], sep="\n")
    if config.json:
        answer = {"max_error_percent": config.max_error, "status": status, "jobs": answers}
        print(json.dumps(answer, indent=2))
    return status


def run(job: RankSet, config: ReplayConfig) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """``report`` of the ranks of one job by semantics, and notes. Raises ``TraceError`` for bad files."""
    traces = read_ranks(job, config.skeletons)
    made = make_run(job.name, traces, list(job.files), job.groups)
    notes = [*job.notes, *made.notes]
    if any(not trace.start_micros.any() for trace in traces):
        notes.append(
            "the file has no start times, so there is nothing to compare with: convert with --timestamps"
        )
    replays = {}
    for name in _SIMULATORS if config.semantics == "both" else [config.semantics]:
        try:
            replays[name] = report(made, *_SIMULATORS[name](made))
        except TraceError as error:
            if config.semantics != "both" or config.max_error is not None:
                raise
            notes.append(f"no replay as ASTRA-sim issues nodes: {error}")
    return replays, notes


def _exceeded(reports: dict[str, list[dict[str, Any]]], max_error: float) -> list[str]:
    """One sentence per rank whose error exceeds ``max_error`` percent or has no measurement."""
    sentences = []
    for semantics, ranks in reports.items():
        for rank in ranks:
            error, who = rank["error_percent"], f"rank {rank['rank']} ({semantics})"
            if error is None:
                sentences.append(f"{who} has no measured time to check against --max-error")
            elif abs(error) > max_error:
                sentences.append(f"{who} is off by {error:+.2f}%, more than {max_error:g}%")
    return sentences
