"""Real runs for ``predict_benchmark.py``: two gloo ranks of a small GPT, in one case after another."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.predict_loopback import own_loopback
from benchmarks.predict_processes import (
    free_port,
    is_crowded,
    launch,
    measure_network,
    namespaces,
)
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.inputs import load_run
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.jobs import default_workers
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.traces import sets as trace_sets
from chakra_et.transform.changes import Change, Rebuild

STEPS = 3
"""Traced in each turn."""
SAMPLES = 1000
"""Of rounds, for an interval."""


@dataclass(frozen=True)
class Row:
    """One case, all in ms: the step before the change, measured and predicted after it. ``baseline``: what
    operations and bytes alone give; ``uncertainty``: one standard deviation; ``errors``: those of the rounds,
    percent; ``is_noise``: not judged."""

    name: str
    before: float
    measured: float
    predicted: float
    baseline: float | None = None
    uncertainty: float | None = None
    errors: Sequence[float] = ()
    is_noise: bool = False

    @property
    def error(self) -> float:
        """Percent, above 0 where the prediction is too long; the median of the rounds."""
        return float(np.median(self.errors or percent(self.predicted, self.measured)))

    @property
    def interval(self) -> tuple[float, float] | None:
        """In which the error lies with 95%, percent, from rounds drawn anew."""
        if not self.errors:
            return None
        drawn = np.random.default_rng(0).choice(self.errors, (SAMPLES, len(self.errors)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return float(low), float(high)


@dataclass(frozen=True)
class Case:
    """``settings`` for the workload; the ``changes`` that predict it from the case ``source``, of which only
    the first ``source_ranks`` count; they may depend on the round."""

    name: str
    settings: dict[str, Any]
    changes: Sequence[Change | Rebuild] | Callable[[int], list[Change | Rebuild]]
    baseline: Callable[[Run], float] | None = None
    source: str = "base"
    source_ranks: int | None = None


@dataclass(frozen=True)
class Part:
    """``cases``, run by as many ``processes``. ``shaped``: in network namespaces of their own; ``measured``:
    what else the predictions need of the machine, beforehand."""

    cases: Callable[[Path], list[Case]]
    processes: int = 2
    shaped: bool = False
    measured: Literal["network"] | None = None


@dataclass(frozen=True)
class Effort:
    """How much is run: ``rounds``, those of an earlier run into the same folder included, that begin within
    ``seconds``."""

    rounds: int = 5
    seconds: float = 600.0


def rows(of: Part, effort: Effort, folder: Path, again: bool = False) -> list[Row]:
    """Run a part's cases and compare, or, ``again``, compare with the traces that are in ``folder``. Raises
    ``TraceError`` where this machine can't run them."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = of.cases(folder)
    if not again:
        run(of, cases, effort, folder)
    how = convert_sets.RunOptions(workers=default_workers(), keep=True)
    convert_sets.convert_sets(trace_sets.find(folder, "*"), PairOptions(), how)
    compared = [case for case in cases if case.changes or case.name == "nothing"]
    found = [_compare(compared, folder, number) for number in range(rounds(folder))]
    if not found:
        raise TraceError(f"{folder}: no round was finished; give more --seconds, and --rounds of 1 or more")
    return [_row(case.name, [each[case.name] for each in found]) for case in compared]


def rounds(folder: Path) -> int:
    """How many were finished."""
    path = folder / "rounds.json"
    return int(json.loads(path.read_text())) if path.exists() else 0


def run(of: Part, cases: Sequence[Case], effort: Effort, folder: Path) -> None:
    """Run the cases in turns."""
    plan: dict[str, Any] = {
        "world_size": of.processes,
        "output": str(folder),
        "crowded": is_crowded(of.processes),
        "first_round": rounds(folder),
        "steps": STEPS,
        **asdict(effort),
        "cases": [{"name": file_name(case.name), **case.settings} for case in cases],
    }
    with contextlib.ExitStack() as stack:
        if of.shaped:
            prefixes, interfaces = stack.enter_context(namespaces())
            plan |= {"host": "10.77.0.1", "port": 29555}
            plan |= {"interface": dict(zip("01", interfaces, strict=True))}
        else:
            loopback = stack.enter_context(own_loopback())
            prefixes = [loopback] * of.processes
            interfaces = ["lo"] * of.processes
            plan |= {"host": "127.0.0.1", "port": free_port()}
            if of.measured == "network" and not (folder / "network.json").exists():
                measure_network(folder, prefixes)
        launch(plan, folder, prefixes, interfaces)


def file_name(case: str) -> str:
    """The name of a case in names of files."""
    return re.sub("[^A-Za-z0-9]+", "-", case)


def _compare(cases: Sequence[Case], folder: Path, number: int) -> dict[str, Row]:
    """Case → what a round's fastest steps are, predicted and measured."""
    runs: dict[tuple[str, int | None], Run] = {}

    def loaded(case: str, ranks: int | None) -> Run:
        key = case, ranks
        if key not in runs:
            runs[key] = load(folder / f"{file_name(case)}_r{number}", ranks)
        return runs[key]

    found = {}
    for case in cases:
        changes = case.changes(number) if callable(case.changes) else case.changes
        source = loaded(case.source, case.source_ranks)
        measured = loaded(case.name, case.settings.get("ranks"))
        prediction = predict(source, changes)
        steps = np.max([[step.after_ns for step in rank.steps] for rank in prediction.ranks], axis=0) / 1e6
        found[case.name] = Row(
            case.name,
            min(measured_steps_ms(source)),
            min(measured_steps_ms(measured)),
            float(steps.min()),
            case.baseline(source) if case.baseline else None,
            max(rank.uncertainty_ms for rank in prediction.ranks),
        )
    return found


def _row(name: str, found: Sequence[Row]) -> Row:
    """The medians of a case's rounds."""

    def median(of: str) -> float:
        return float(np.median([getattr(each, of) for each in found]))

    return Row(
        name,
        median("before"),
        median("measured"),
        median("predicted"),
        None if found[0].baseline is None else median("baseline"),
        median("uncertainty"),
        [each.error for each in found],
        is_noise=name == "nothing",
    )


def percent(predicted: float, measured: float) -> float:
    """How much longer the prediction is."""
    return 100 * (predicted / measured - 1)


def measured_steps_ms(run: Run) -> list[float]:
    """The measured steps, each as long as on its slowest rank."""
    return (np.max([steps.measured_ns for steps in run.steps], axis=0) / 1e6).tolist()


def measured_ms(run: Run) -> float:
    """The median measured step of the slowest rank."""
    return (
        max(float(np.median(steps.measured_ns)) for steps in run.steps if steps.measured_ns is not None) / 1e6
    )


def load(path: Path, ranks: int | None = None) -> Run:
    """A run, or the first ``ranks`` ranks of it."""
    if ranks is None:
        return load_run(str(path))
    traces = [et_file.read(f"{path}.{rank}.et") for rank in range(ranks)]
    # gloo's records don't name their group: the collectives of these ranks are of these ranks alone.
    groups = {str(name): list(range(ranks)) for name in range(1, 4)}
    return make_run(path.name, traces, range(ranks), groups)
