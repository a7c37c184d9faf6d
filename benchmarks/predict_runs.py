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
from chakra_et.predict.accumulate import Accumulate
from chakra_et.predict.buckets import Buckets
from chakra_et.predict.changes import Change, RankAs, Scale
from chakra_et.predict.fit import read_model
from chakra_et.predict.measure_threads import read_fractions
from chakra_et.predict.network import Network
from chakra_et.predict.overlap import Overlap
from chakra_et.predict.predict import predict
from chakra_et.predict.ranks import Ranks
from chakra_et.predict.rebuild import Rebuild
from chakra_et.predict.resize import Resize, operator_ratios
from chakra_et.predict.run import Run, load_run, make_run
from chakra_et.predict.threads import Threads
from chakra_et.replay.report import measured_times, step_rows
from chakra_et.traces import sets as trace_sets

WORKLOAD = Path(__file__).with_name("predict_workload.py")
STEPS = {"warmup": 1, "plain": 1, "active": 4}
PERIOD_US = 10_000
"""In which a rank gets its part of a core."""
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


def rows(part: str, rounds: int, folder: Path, again: bool = False) -> list[Row]:
    """Run a part's cases and compare, or, ``again``, compare with the traces that are in ``folder``. Raises
    ``TraceError`` where this machine can't run them."""
    of = PARTS[part]
    folder.mkdir(parents=True, exist_ok=True)
    cases = of.cases(folder)
    if not again:
        _run(of, cases, rounds, folder)
    return [_row(case, rounds, folder) for case in cases if case.name not in {each.source for each in cases}]


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
            prefixes, interfaces = cores or [[]] * of.processes, ["lo"] * of.processes
            plan |= {"init": f"tcp://127.0.0.1:{_free_port()}"}
            if of.core:
                measure_network(folder, prefixes)
            elif of.processes == 1:
                measure_threads(folder)
        launch(plan, folder, prefixes, interfaces)
    convert_sets.convert_sets(trace_sets.find(folder, "*"), PairOptions())


def file_name(case: str) -> str:
    """The name of a case in names of files."""
    return re.sub("[^A-Za-z0-9]+", "-", case)


def launch(
    plan: dict[str, Any], folder: Path, prefixes: Sequence[list[str]], interfaces: Sequence[str]
) -> None:
    """Run all ranks of a plan. Raises ``TraceError`` with their last words where one fails."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    commands = [
        [*prefix, sys.executable, str(WORKLOAD), str(path), str(rank)] for rank, prefix in enumerate(prefixes)
    ]
    _run_all(commands, folder, [{"GLOO_SOCKET_IFNAME": interface} for interface in interfaces])


def measure_network(folder: Path, prefixes: Sequence[list[str]]) -> None:
    """Measure gloo among as many ranks; the file is folder/network.json."""
    words = ["-m", "chakra_et", "measure-network", "--largest", "25", "--repeats", "5"]
    commands = [
        [*prefix, sys.executable, *words, "--output", str(folder / "network.json")] for prefix in prefixes
    ]
    port = str(_free_port())
    more = {"WORLD_SIZE": str(len(prefixes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    root = str(Path(__file__).resolve().parents[1])
    ranks = [
        {"RANK": str(at), "LOCAL_RANK": str(at), "PYTHONPATH": root, **more} for at in range(len(prefixes))
    ]
    _run_all(commands, folder, ranks)


def measure_threads(folder: Path) -> None:
    """Measure what two threads share; the file is folder/threads.json."""
    words = ["-m", "chakra_et", "measure-threads", "--output", str(folder / "threads.json")]
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    _run_all([[sys.executable, *words]], folder, [environment])


def _run_all(commands: Sequence[list[str]], folder: Path, environments: Sequence[dict[str, str]]) -> None:
    ranks = []
    for rank, (command, more) in enumerate(zip(commands, environments, strict=True)):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
        log = open(folder / f"rank{rank}.log", "w")  # noqa: SIM115
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
def parts_of_a_core(count: int, part: float) -> Iterator[list[list[str]]]:
    """Control groups that may each use a ``part`` of a core: the commands that enter them.

    Raises ``TraceError`` where they can't be made.
    """
    root = Path("/sys/fs/cgroup/cpu")
    folders = [root / f"cp{os.getpid() % 100_000}r{rank}" for rank in range(count)]
    try:
        for folder in folders:
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(round(part * PERIOD_US)))
        enter = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
        yield [["bash", "-c", enter, str(folder)] for folder in folders]
    except OSError as error:
        raise TraceError(f"parts of a core need control groups of version 1 and root: {error}") from None
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


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
    return make_run(path.name, traces, range(ranks))


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


def _network(_: Path) -> list[Case]:
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


def _compute(_: Path) -> list[Case]:
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


def _shapes(_: Path) -> list[Case]:
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


def _steps(_: Path) -> list[Case]:
    """Other buckets and accumulation."""
    base = {"bucket_mb": 4}
    return [
        Case("base", base, []),
        Case("nothing", base, []),
        Case("buckets of 1 MiB", {"bucket_mb": 1}, [Buckets(1)], _base_step),
        Case("one bucket", {"bucket_mb": 100}, [Buckets(100)], _base_step),
        Case("2 passes", base | {"accumulation": 2}, [Accumulate(2)], _times_computing(2)),
        Case("4 passes", base | {"accumulation": 4}, [Accumulate(4)], _times_computing(4)),
    ]


def _ranks(folder: Path) -> list[Case]:
    """One rank to two and four, two to four. All processes always run, so that the machine is as busy."""
    one, two, four = ({"ranks": ranks, "bucket_mb": 4} for ranks in (1, 2, 4))

    def measured(ranks: int) -> list[Change | Rebuild]:
        # gloo works on the part of a core on which the rank computes: nothing runs beside it.
        return [Ranks(ranks, 4, read_model(folder / "network.json")), Overlap(False)]

    return [
        Case("one rank", one, []),
        Case("two ranks", two, []),
        Case("1 → 2 ranks", two, lambda: measured(2), _alone, "one rank", 1),
        Case("1 → 4 ranks", four, lambda: measured(4), _alone, "one rank", 1),
        Case("2 → 4 ranks", four, [Ranks(4)], _alone, "two ranks", 2),
    ]


def _threads(folder: Path) -> list[Case]:
    def measured(before: int, after: int) -> list[Change | Rebuild]:
        return [Threads(before, after, read_fractions(folder / "threads.json"))]

    return [
        Case("2 threads", {"threads": 2}, []),
        Case("nothing", {"threads": 2}, [], source="2 threads"),
        Case("1 thread", {"threads": 1}, []),
        Case("2 → 1 threads", {"threads": 1}, lambda: measured(2, 1), _base_step, "2 threads"),
        Case("1 → 2 threads", {"threads": 2}, lambda: measured(1, 2), _base_step, "1 thread"),
    ]


def _base_step(run: Run) -> float:
    """Operations and bytes are the same."""
    return measured_ms(run)


def _alone(run: Run) -> float:
    return _computing(run)


def _times_computing(passes: int) -> Callable[[Run], float]:
    return lambda run: passes * _computing(run)


PARTS: dict[str, Part] = {
    "network": Part(_network, shaped=True),
    "compute": Part(_compute),
    "shapes": Part(_shapes),
    "steps": Part(_steps),
    "ranks": Part(_ranks, 4, core=0.45),
    "threads": Part(_threads, 1),
}
