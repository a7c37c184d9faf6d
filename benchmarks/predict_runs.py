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

from benchmarks.core_probe import is_disturbed
from benchmarks.predict_loopback import own_loopback
from benchmarks.predict_processes import (
    free_port,
    is_crowded,
    launch,
    measure_network,
    measure_threads,
    namespaces,
)
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.predict.changes import Change
from chakra_et.predict.predict import predict
from chakra_et.predict.rebuild import Rebuild
from chakra_et.predict.run import Run, load_run, make_run
from chakra_et.traces import sets as trace_sets

STEPS = {"plain": 1, "active": 8}
FEWEST = 3
"""Undisturbed steps of a case."""
SAMPLES = 1000
"""Of rounds, for an interval."""


@dataclass(frozen=True)
class Row:
    """One case, all in ms: the step before the change, measured and predicted after it. ``baseline``: what
    operations and bytes alone give; ``uncertainty``: one standard deviation; ``interval``: in which the error
    lies with 95%, as far as the rounds differ, in percent; ``is_noise``: not judged."""

    name: str
    before: float
    measured: float
    predicted: float
    baseline: float | None = None
    uncertainty: float | None = None
    interval: tuple[float, float] | None = None
    is_noise: bool = False

    @property
    def error(self) -> float:
        """Percent, above 0 where the prediction is too long."""
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True)
class Case:
    """``settings`` for the workload; the ``changes`` that predict it from the case ``source``, of which only
    the first ``source_ranks`` count."""

    name: str
    settings: dict[str, Any]
    changes: Sequence[Change | Rebuild] | Callable[[], list[Change | Rebuild]]
    baseline: Callable[[Run], float] | None = None
    source: str = "base"
    source_ranks: int | None = None


@dataclass(frozen=True)
class Part:
    """``cases``, run by as many ``processes``. ``shaped``: in network namespaces of their own; ``measured``:
    what else the predictions need of the machine, measured beforehand."""

    cases: Callable[[Path], list[Case]]
    processes: int = 2
    shaped: bool = False
    measured: Literal["network", "threads"] | None = None


@dataclass(frozen=True)
class Effort:
    """How much is run: ``rounds``, those of an earlier run into the same folder included, that begin within
    ``seconds``. ``all_steps``: those in which a core was disturbed count too."""

    rounds: int = 5
    seconds: float = 600.0
    all_steps: bool = False


def rows(of: Part, effort: Effort, folder: Path, again: bool = False) -> list[Row]:
    """Run a part's cases and compare, or, ``again``, compare with the traces that are in ``folder``. Raises
    ``TraceError`` where this machine can't run them."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = of.cases(folder)
    if not again:
        run(of, cases, effort, folder)
    convert_sets.convert_sets(trace_sets.find(folder, "*"), PairOptions(), convert_sets.RunOptions(keep=True))
    calm = counted(folder, effort.all_steps)
    return [_row(case, calm, folder) for case in cases if case.changes or case.name == "nothing"]


def turns(folder: Path) -> list[dict[str, Any]]:
    """The turns, see ``predict_rank.py``."""
    path = folder / "turns_0.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def counted(folder: Path, all_steps: bool = False) -> dict[str, dict[int, list[int]]]:
    """Case → round → the traced steps in which no core was disturbed, or ``all_steps``. Raises ``TraceError``
    where a case has too few."""
    found: dict[str, dict[int, list[int]]] = {}
    log = turns(folder)
    probes = np.array([turn["probe_us"] for turn in log], float)
    disturbed = is_disturbed(probes) & (not all_steps) if len(log) else probes
    for turn, steps in zip(log, disturbed, strict=True):
        found.setdefault(turn["case"], {})[turn["round"]] = np.flatnonzero(~steps).tolist()
    few = [case for case, rounds in found.items() if sum(map(len, rounds.values())) < FEWEST]
    if few or not found:
        raise TraceError(
            f"fewer than {FEWEST} steps of {', '.join(few) or folder} were undisturbed: go on with --keep "
            "or use --all-steps"
        )
    return found


def run(of: Part, cases: Sequence[Case], effort: Effort, folder: Path) -> None:
    """Run the cases in turns."""
    log = turns(folder)
    plan: dict[str, Any] = {
        "world_size": of.processes,
        "output": str(folder),
        "crowded": is_crowded(of.processes),
        "first_round": 1 + log[-1]["round"] if log else 0,
        **asdict(effort),
        **STEPS,
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
            if of.measured == "threads" and not (folder / "threads.json").exists():
                measure_threads(folder)
        launch(plan, folder, prefixes, interfaces)


def file_name(case: str) -> str:
    """The name of a case in names of files."""
    return re.sub("[^A-Za-z0-9]+", "-", case)


def _row(case: Case, calm: dict[str, dict[int, list[int]]], folder: Path) -> Row:
    """The medians over all undisturbed steps, of the source case before and predicted, and of the case."""
    changes = case.changes() if callable(case.changes) else case.changes
    before, predicted, baseline, uncertainty = [], [], [], []
    for number, steps in calm[file_name(case.source)].items():
        if not steps:
            continue
        source = load(folder / f"{file_name(case.source)}_r{number}", case.source_ranks)
        prediction = predict(source, changes)
        before.append([measured_steps_ms(source)[step] for step in steps])
        predicted.append(
            [max(rank.steps[step].after_ns for rank in prediction.ranks) / 1e6 for step in steps]
        )
        uncertainty.append(max(rank.uncertainty_ms for rank in prediction.ranks))
        if case.baseline:
            baseline.append(case.baseline(source))
    measured = []
    for number, steps in calm[file_name(case.name)].items():
        if steps:
            run = load(folder / f"{file_name(case.name)}_r{number}", case.settings.get("ranks"))
            measured.append([measured_steps_ms(run)[step] for step in steps])
    return Row(
        case.name,
        *(float(np.median(np.concatenate(each))) for each in (before, measured, predicted)),
        float(np.median(baseline)) if baseline else None,
        float(np.median(uncertainty)),
        interval(predicted, measured),
        is_noise=case.name == "nothing",
    )


def interval(
    predicted: Sequence[Sequence[float]], measured: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """In which the error lies with 95%, percent, from rounds drawn anew."""
    random = np.random.default_rng(0)

    def median(rounds: Sequence[Sequence[float]]) -> float:
        drawn = random.integers(len(rounds), size=len(rounds))
        return float(np.median(np.concatenate([rounds[at] for at in drawn])))

    errors = [100 * (median(predicted) / median(measured) - 1) for _ in range(SAMPLES)]
    low, high = np.percentile(errors, [2.5, 97.5])
    return float(low), float(high)


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
