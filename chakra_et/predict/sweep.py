"""``chakra-et predict NAME --sweep dp=8,16 bandwidth=100Gbit/s,400Gbit/s``: one prediction per combination.

Each is a job of its own, on this host or on the workers of a cluster; a refused one is a row of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from chakra_et import text
from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.jobs import default_workers
from chakra_et.predict.predict import describe, figures
from chakra_et.ranks.cluster import jobs_on

if TYPE_CHECKING:
    from chakra_et.predict.command import PredictConfig

MOST = 10_000
"""Combinations."""
_OF_THE_RUN = ("name", "allow_missing_ranks", "skeletons", "json", "cluster", "sweep", "output")


def sweep(config: PredictConfig, predict: Callable[[PredictConfig], dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per combination of the values of ``--sweep``, in their order: ``with``, flag → value, and what
    ``predict`` finds with these or, where that is refused, ``error``. Raises ``TraceError`` for a flag that
    can't be swept."""
    jobs = list(_combinations(config))
    rows: list[dict[str, Any]] = [{"with": given} for given, _ in jobs]
    workers = default_workers()
    with (
        jobs_on(config.cluster, workers) as run,
        text.progress_bar(len(jobs), "predicting", "run") as progress,
    ):
        for number, outcome in run(predict, [each for _, each in jobs], workers):
            rows[number] |= {"error": str(outcome)} if isinstance(outcome, TraceError) else outcome
            progress()
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as text. What was refused and the notes of all predictions, each once, follow the table."""
    table = [(*rows[0]["with"], "before ms", "predicted ms", "±", "change", "bound after")]
    for row in rows:
        if "error" in row:
            table.append((*row["with"].values(), *["-"] * 4, "refused"))
            continue
        slowest = max(row["ranks"], key=lambda rank: rank["after_us"])
        times = row["step_us"]["before"], row["step_us"]["after"], slowest["uncertainty_us"]
        shown = figures(*(time and time / 1e3 for time in times))
        table.append((*row["with"].values(), *shown, describe(slowest["bound_after"])))
    said = Counter(f"error: {row['error']}" for row in rows if "error" in row)
    said.update(f"note: {note}" for row in rows for note in row.get("notes", ()))
    about = [
        each + (f" ({count} of {len(rows)})" if count < len(rows) else "") for each, count in said.items()
    ]
    return [*text.table(table, right=range(len(table[0]) - 1)), *about]


def _combinations(config: PredictConfig) -> Iterator[tuple[dict[str, str], PredictConfig]]:
    """Each combination as text, and the command's arguments with it."""
    if config.output:
        raise TraceError("--sweep writes no runs: leave --output out")
    swept: dict[str, list[str]] = {}
    for word in config.sweep:
        flag, _, values = word.partition("=")
        swept[flag.lstrip("-")] = [value.strip() for value in values.split(",") if value.strip()]
    refused = [flag for flag in swept if flag.replace("-", "_") in _OF_THE_RUN or not swept[flag]]
    if refused:
        raise TraceError(f"--sweep {refused[0]}: give a flag that changes the run, and its values: dp=8,16")
    if (count := math.prod(map(len, swept.values()))) > MOST:
        raise TraceError(f"--sweep: {count:,} combinations are more than {MOST:,}")
    plain = parse(type(config), [config.name])
    for combination in itertools.product(*swept.values()):
        given = dict(zip(swept, combination, strict=True))
        own = parse(type(config), [config.name, *(f"--{flag}={value}" for flag, value in given.items())])
        changed = {name: value for name, value in vars(own).items() if value != vars(plain)[name]}
        try:
            yield given, dataclasses.replace(config, sweep=(), **changed)
        except ValueError as error:
            raise TraceError(f"--sweep: {error}") from None
