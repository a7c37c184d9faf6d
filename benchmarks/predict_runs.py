"""Real runs for ``predict_benchmark.py``: two gloo ranks of a small GPT, in one case after another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from chakra_et.network.units import parse_bandwidth
from chakra_et.predict.changes import Change, RankAs, Scale
from chakra_et.predict.network import Network
from chakra_et.predict.predict import predict
from chakra_et.predict.resize import Resize, operator_ratios
from chakra_et.predict.run import Run, load_run
from chakra_et.replay.report import measured_times, step_rows
from chakra_et.traces import sets as trace_sets

WORKLOAD = Path(__file__).with_name("predict_workload.py")
STEPS = {"warmup": 1, "plain": 1, "active": 5}
LATENCY_NS = 50_000.0
"""Of a message between two processes on one machine; too short to matter beside buckets of megabytes."""


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
    """``settings`` for the workload; the ``changes`` that predict it from the case ``source``."""

    name: str
    settings: dict[str, Any]
    changes: Sequence[Change]
    baseline: Callable[[Run], float] | None = None
    source: str = "base"


def rows(part: str, rounds: int, folder: Path) -> list[Row]:
    """Run a part's cases and compare. Raises ``TraceError`` where this machine can't run them."""
    cases = CASES[part]()
    folder.mkdir(parents=True, exist_ok=True)
    plan: dict[str, Any] = {
        "world_size": 2,
        "output": str(folder),
        "rounds": rounds,
        **STEPS,
        "cases": [{"name": file_name(case.name), **case.settings} for case in cases],
    }
    if part == "network":
        with namespaces() as (prefixes, interfaces):
            plan |= {"init": "tcp://10.77.0.1:29555", "interface": dict(zip("01", interfaces, strict=True))}
            launch(plan, folder, prefixes, interfaces)
    else:
        plan |= {"init": f"tcp://127.0.0.1:{_free_port()}"}
        launch(plan, folder, [[], []], ["lo", "lo"])
    convert_sets.convert_sets(trace_sets.find(folder, "*"), PairOptions())
    return [_row(case, rounds, folder) for case in cases if case.name != "base"]


def file_name(case: str) -> str:
    """The name of a case in names of files."""
    return re.sub("[^A-Za-z0-9]+", "-", case)


def launch(plan: dict[str, Any], folder: Path, prefixes: list[list[str]], interfaces: Sequence[str]) -> None:
    """Run both ranks of a plan. Raises ``TraceError`` with their last words where one fails."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    ranks = []
    for rank, (prefix, interface) in enumerate(zip(prefixes, interfaces, strict=True)):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115
        command = [*prefix, sys.executable, str(WORKLOAD), str(path), str(rank)]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        )
    try:
        statuses = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(statuses):
        last = (folder / "rank0.log").read_text().strip().splitlines()[-1:] or ["no output"]
        raise TraceError(f"the runs failed: {last[0]}")


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[list[list[str]], list[str]]]:
    """Two network namespaces joined by a veth pair: the commands that enter them, and their interfaces.

    Raises ``TraceError`` where they can't be made: not root, or no ``ip`` or ``tc``.
    """
    reason = cannot_shape()
    if reason:
        raise TraceError(reason)
    number = os.getpid() % 100_000
    names, interfaces = [f"cp{number}{side}" for side in "ab"], [f"cv{number}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ["type", "veth", "peer", "name", interfaces[1], "netns", names[1]]
        _ip("link", "add", interfaces[0], "netns", names[0], *peer)
        for at, (name, interface) in enumerate(zip(names, interfaces, strict=True), 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", interface)
            for each in (interface, "lo"):
                _ip("-n", name, "link", "set", each, "up")
        yield [["ip", "netns", "exec", name] for name in names], interfaces
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def cannot_shape() -> str | None:
    """Why no limited network can be made here, None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"network namespaces need the program {absent[0]}"
    name = f"cp{os.getpid() % 100_000}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise TraceError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _row(case: Case, rounds: int, folder: Path) -> Row:
    """The medians over all rounds; a round is predicted from the source case of that round."""
    before, measured, predicted, baseline, uncertainty = [], [], [], [], []
    for number in range(rounds):
        source = load_run(str(folder / f"{file_name(case.source)}_r{number}"))
        prediction = predict(source, case.changes)
        before.append(measured_ms(source))
        predicted.append(prediction.after_ms)
        uncertainty.append(max(rank.uncertainty_ms for rank in prediction.ranks))
        measured += steps_ms(folder, f"{file_name(case.name)}_r{number}")
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


def steps_ms(folder: Path, name: str) -> list[float]:
    """The measured steps of a run, each as long as on its slowest rank."""
    columns = []
    for path in sorted(folder.glob(f"{name}.[0-9]*.et")):
        trace = et_file.read(path)
        starts, end = measured_times(trace)
        assert starts is not None
        columns.append(np.diff(np.append(starts[step_rows(trace)[1]], end)))
    if not columns:
        raise TraceError(f"{folder / name}: the run wasn't converted")
    return (np.max(columns, axis=0) / 1e6).tolist()


def _bytes(run: Run) -> float:
    """Bytes that rank 0 sends per step: an all-reduce of two ranks sends as much as it reduces."""
    nodes = (run.graph.types == NodeType.COMM_COLL) & (run.graph.trace_of == 0)
    return float(run.graph.attribute("comm_size", 0)[nodes].sum()) / len(run.steps[0].names)


def _computing(run: Run) -> float:
    """ms per step of rank 0 without communication."""
    nodes = ~run.is_communication & (run.graph.trace_of == 0)
    return float(run.graph.own_ns[nodes].sum()) / len(run.steps[0].names) / 1e6


def _by_operations(sizes: Mapping[int, int]) -> Callable[[Run], float]:
    """Predict by scaling the compute time per step with its operations and keeping the communication time."""

    def scaled(run: Run) -> float:
        trace = run.graph.traces[0]
        operations, ratio, works_itself = operator_ratios(trace, sizes)
        assert trace.inputs is not None
        counted = (operations * works_itself)[trace.inputs.rows]
        return _computing(run) * float((counted * ratio[trace.inputs.rows]).sum() / counted.sum())

    return scaled


def _by_bytes(rate: str) -> Callable[[Run], float]:
    return lambda run: _computing(run) + _bytes(run) / parse_bandwidth(rate) * 1e3


def _network() -> list[Case]:
    shaped = (("1gbit", "1 Gbit/s"), ("500mbit", "500 Mbit/s"), ("200mbit", "200 Mbit/s"))
    return [
        Case("base", {"bucket_mb": 4}, []),
        Case("nothing", {"bucket_mb": 4}, []),
        *(
            Case(
                rate,
                {"bucket_mb": 4, "network": limit},
                [Network(parse_bandwidth(rate), LATENCY_NS)],
                _by_bytes(rate),
            )
            for limit, rate in shaped
        ),
    ]


def _compute() -> list[Case]:
    slow = {
        "gelu": ("forward", "^aten::gelu$", 16),
        "gelu_backward": ("backward", "^aten::gelu_backward$", 12),
    }
    slow["lerp"] = ("optimizer", "^aten::(_foreach_lerp_|lerp_)$", 16)
    cases = [Case("base", {}, []), Case("nothing", {}, [])]
    for name, (phase, pattern, times) in slow.items():
        cases.append(Case(f"{phase} operator × {times}", {"slow": {name: times}}, [Scale(pattern, times)]))
    cases.append(
        Case("rank 1 slow", {"slow": {"gelu": 16}, "slow_ranks": [1]}, [_OnRank(1, "^aten::gelu$", 16)])
    )
    cases.append(Case("slow rank as the other", {}, [RankAs(1)], source="rank 1 slow"))
    return cases


@dataclass(frozen=True)
class _OnRank:
    """Scale on one rank alone."""

    rank: int
    pattern: str
    factor: float

    def apply(self, run: Run, setting: Any) -> Any:
        scaled = Scale(self.pattern, self.factor).apply(run, setting)
        here = run.graph.trace_of == run.graph.ranks.index(self.rank)
        return replace(scaled, own_ns=np.where(here, scaled.own_ns, setting.own_ns))


def _shapes() -> list[Case]:
    """The sizes of predict_workload.MODEL: a batch of 10, sequences of 72, 256 wide, in 4 heads of 64."""
    batch, sequence = {10: 20, 720: 1440}, {72: 144, 73: 145, 720: 1440}
    wide = {256: 384, 768: 1152, 1024: 1536, 64: 96}
    return [
        Case("base", {"bucket_mb": 4}, []),
        Case("nothing", {"bucket_mb": 4}, []),
        Case("batch × 2", {"bucket_mb": 4, "model": {"batch": 20}}, [Resize(batch)], _by_operations(batch)),
        Case(
            "sequence × 2",
            {"bucket_mb": 4, "model": {"sequence": 144}},
            [Resize(sequence)],
            _by_operations(sequence),
        ),
        Case(
            "hidden × 1.5", {"bucket_mb": 4, "model": {"hidden": 384}}, [Resize(wide)], _by_operations(wide)
        ),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {"network": _network, "compute": _compute, "shapes": _shapes}
