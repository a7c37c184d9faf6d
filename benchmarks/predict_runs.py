"""Real runs for ``predict_benchmark.py``: two gloo ranks of a small GPT, in one case after another."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_loopback import own_loopback
from benchmarks.predict_processes import (
    free_port,
    launch,
    measure_network,
    measure_threads,
    namespaces,
    parts_of_a_core,
)
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.predict.changes import Change
from chakra_et.predict.predict import predict
from chakra_et.predict.rebuild import Rebuild
from chakra_et.predict.run import Run, load_run, make_run
from chakra_et.replay.report import measured_times, step_rows
from chakra_et.traces import sets as trace_sets

STEPS = {"warmup": 1, "plain": 1, "active": 4}


@dataclass(frozen=True)
class Row:
    """One case, all in ms: the step before the change, measured and predicted after it. ``baseline``: what
    operations and bytes alone give; ``uncertainty``: one standard deviation; ``is_noise``: not judged."""

    name: str
    before: float
    measured: float
    predicted: float
    baseline: float | None = None
    uncertainty: float | None = None
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
    """``cases``, run by as many ``processes``. ``shaped``: in network namespaces of their own; ``core``: the
    part of a core that each may use, in a control group of its own."""

    cases: Callable[[Path], list[Case]]
    processes: int = 2
    shaped: bool = False
    core: float | None = None


def rows(of: Part, rounds: int, folder: Path, again: bool = False) -> list[Row]:
    """Run a part's cases and compare, or, ``again``, compare with the traces that are in ``folder``. Raises
    ``TraceError`` where this machine can't run them."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = of.cases(folder)
    if not again:
        _run(of, cases, rounds, folder)
    return [_row(case, rounds, folder) for case in cases if case.changes or case.name == "nothing"]


def _run(of: Part, cases: Sequence[Case], rounds: int, folder: Path) -> None:
    """Run the cases in turns and convert their traces."""
    plan: dict[str, Any] = {
        "world_size": of.processes,
        "output": str(folder),
        "rounds": rounds,
        **STEPS,
        "cases": [{"name": file_name(case.name), **case.settings} for case in cases],
    }
    with contextlib.ExitStack() as stack:
        if of.shaped:
            prefixes, interfaces = stack.enter_context(namespaces())
            plan |= {"init": "tcp://10.77.0.1:29555", "interface": dict(zip("01", interfaces, strict=True))}
        else:
            cores = stack.enter_context(parts_of_a_core(of.processes, of.core)) if of.core else None
            loopback = stack.enter_context(own_loopback())
            prefixes = [[*loopback, *core] for core in cores or [[]] * of.processes]
            interfaces = ["lo"] * of.processes
            plan |= {"init": f"tcp://127.0.0.1:{free_port()}"}
            if of.core:
                measure_network(folder, prefixes)
            elif of.processes == 1:
                measure_threads(folder)
        launch(plan, folder, prefixes, interfaces)
    convert_sets.convert_sets(trace_sets.find(folder, "*"), PairOptions())


def file_name(case: str) -> str:
    """The name of a case in names of files."""
    return re.sub("[^A-Za-z0-9]+", "-", case)


def _row(case: Case, rounds: int, folder: Path) -> Row:
    """The medians over all rounds; a round is predicted from the source case of that round."""
    before, measured, predicted, baseline, uncertainty = [], [], [], [], []
    ranks = case.settings.get("ranks")
    changes = case.changes() if callable(case.changes) else case.changes
    for number in range(rounds):
        source = load(folder / f"{file_name(case.source)}_r{number}", case.source_ranks)
        prediction = predict(source, changes)
        before.append(measured_ms(source))
        predicted.append(prediction.after_ms)
        uncertainty.append(max(rank.uncertainty_ms for rank in prediction.ranks))
        measured += steps_ms(folder, f"{file_name(case.name)}_r{number}", ranks)
        if case.baseline:
            baseline.append(case.baseline(source))
    values = [float(np.median(each)) for each in (before, measured, predicted)]
    return Row(
        case.name,
        *values,
        float(np.median(baseline)) if baseline else None,
        float(np.median(uncertainty)),
        is_noise=case.name == "nothing",
    )


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


def steps_ms(folder: Path, name: str, ranks: int | None = None) -> list[float]:
    """The measured steps of a run, each as long as on the slowest of all ranks, or of the first ``ranks``."""
    columns = []
    for path in sorted(folder.glob(f"{name}.[0-9]*.et"))[:ranks]:
        trace = et_file.read(path)
        starts, end = measured_times(trace)
        assert starts is not None
        columns.append(np.diff(np.append(starts[step_rows(trace)[1]], end)))
    if not columns:
        raise TraceError(f"{folder / name}: the run wasn't converted")
    return (np.max(columns, axis=0) / 1e6).tolist()
