#!/usr/bin/env python3
"""Asks every trace what-ifs whose answers are known, as a replay of the measured times can't show a wait that
was kept as work.

    python benchmarks/what_if_consistency.py                      the public traces in ../shared
    python benchmarks/what_if_consistency.py DIR… --details       those in DIR, with the longest gaps
    python benchmarks/what_if_consistency.py --update             and put the table into CONVERSION_SUMMARY.md

All work on the device takes half as long, then twice as long (``predict --gpu-kernels``). If the device is
busy for at least 90% of a step, halving must save at least 80% of half the busy time, and doubling must add
at least the time of the busiest stream. *Unexplained*: the part of the critical path that is overhead, or a
call that waits for the device although nothing on the device explains it; longer than 50 µs, it is counted
by kind. Twins, which are traces of one model on two GPUs (``h100_NAME``, ``mi300_NAME``), must agree in what
bounds them. The exit status is 1 where one of this fails, or more than 5% of a GPU-bound step is unexplained.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.convert.inputs import load_run
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.runs import RunOptions, convert_sets
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.findings import sentence
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import NodeTimes, Run
from chakra_et.simulate.time_by_kind import KINDS, OVERHEAD, critical_path, node_kinds
from chakra_et.text import printable, table
from chakra_et.traces import sets as trace_sets
from chakra_et.transform.durations import GpuKernels

BOUND, LEAST_SAVED, MOST_UNEXPLAINED, NAMED, LONG_US = 0.9, 0.8, 0.05, 0.10, 50
HOST = ("operator", "runtime", "host-overhead")
DEVICE = ("kernel", "copy", "device-overhead")
TWINS = ("h100_", "mi300_")
# Calls in which the host waits for the device.
WAITING_CALL = ("Synchronize", "Memcpy", "Query", "Launch")


@dataclass
class Config:
    """What is asked, and how the answers are shown."""

    dirs: tuple[str, ...] = field(
        default=("../shared/data/traces/public",),
        metadata={"positional": True, "help": "folders of traces, with all folders below them"},
    )
    details: bool = field(default=False, metadata={"help": "print the longest gaps of each trace"})
    json: bool = field(default=False, metadata={"help": "print JSON: trace → its figures"})
    update: bool = field(default=False, metadata={"help": "put the table into CONVERSION_SUMMARY.md"})


@dataclass
class Answers:
    """One run; times in ms.

    ``busy``: time in which a device works, ``stream``: the busiest stream, both of the rank that takes
    longest; ``half`` and ``double``: the time with work on devices of half and twice the length;
    ``unexplained``: part (0 to 1) of the critical path, ``reason``: of most of it; ``gaps``: kind → number of
    gaps longer than 50 µs on it; ``longest``: those.
    """

    step: float
    busy: float
    stream: float
    half: float
    double: float
    unexplained: float
    bound: str
    reason: str
    gaps: dict[str, int]
    longest: list[str]

    @property
    def on_device(self) -> float:
        return self.busy / self.step

    @property
    def saved(self) -> float:
        """The part of half the busy time that half the kernels save."""
        return (self.step - self.half) / (self.busy / 2) if self.busy else 1.0

    @property
    def added(self) -> float:
        """What twice the kernels cost, as a part of what the busiest stream takes."""
        return (self.double - self.step) / self.stream if self.stream else 1.0

    def failures(self) -> list[str]:
        """One sentence for each answer that is wrong, of a step that the device bounds."""
        if self.on_device < BOUND:
            return []
        return [
            text
            for wrong, text in (
                (self.saved < LEAST_SAVED, f"half the kernels save {self.saved:.0%} of what they could"),
                (self.added < 0.99, f"twice the kernels cost {self.added:.0%} of the busiest stream"),
                (self.unexplained > MOST_UNEXPLAINED, f"{self.unexplained:.1%} of the step is unexplained"),
            )
            if wrong
        ]


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return cli.run(lambda: benchmark(config), TraceError)


def benchmark(config: Config) -> int:
    found: dict[str, Answers] = {}
    for folder in map(Path, config.dirs):
        found |= answers(folder)
    if not found:
        raise TraceError(f"{', '.join(config.dirs)}: no traces with device work: give a folder that has some")
    failures = {name: each.failures() for name, each in found.items()}
    failures |= {pair: [sentence] for pair, sentence in disagreeing_twins(found).items()}
    failures = {name: sentences for name, sentences in failures.items() if sentences}
    lines = [*table(summary(found)), *(f"{name}: {'; '.join(each)}" for name, each in failures.items())]
    if config.json:
        print(json.dumps({name: asdict(each) for name, each in found.items()}, indent=2))
    else:
        print("\n".join(lines))
    for name, each in found.items() if config.details else ():
        print("\n".join([name, *(f"  {line}" for line in each.longest)]))
    if config.update:
        header, *rows = summary(found)
        put("what-if", [_row(header), _row(("---",) * len(header)), *map(_row, rows)])
    return int(bool(failures))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def answers(top: Path) -> dict[str, Answers]:
    """Run → answers, for all traces of devices in ``top`` and below."""
    found = {}
    for folder in [top, *sorted(path for path in top.rglob("*") if path.is_dir())]:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                sets = trace_sets.find(folder, output=Path(scratch))
            except TraceError:
                continue  # a folder without traces
            for traces in sorted(sets, key=lambda each: each.name):
                convert_sets([traces], PairOptions(), RunOptions(workers=0, allow_missing_ranks=True))
                name = (folder.relative_to(top) / traces.name).as_posix()
                try:
                    found[printable(name)] = ask(load_run(str(traces.folder / traces.name)))
                except TraceError as error:
                    print(f"note: {printable(str(error))}", file=sys.stderr)
    return found


def ask(run: Run) -> Answers:
    """The answers of one run. Raises ``TraceError`` where it has no work on a device."""
    half, double = (predict(run, [GpuKernels(factor)]) for factor in (0.5, 2.0))
    at = int(np.argmax([_whole(half.before, rank) for rank in range(len(run.graph.ranks))]))
    trace = run.graph.traces[at]
    start, length = (column.astype(np.int64) for column in (trace.start_micros, trace.duration_micros))
    kind = node_kinds(trace)
    streams = np.where(trace.column("is_cpu_op") == 0, trace.column("stream", -1), -1)
    work = np.flatnonzero((streams >= 0) & (kind != KINDS.index("device-overhead")))
    work = work[np.argsort(start[work], kind="stable")]
    reach = np.maximum.accumulate(np.append(0, (start + length)[work]))
    busy = np.maximum((start + length)[work] - np.maximum(start[work], reach[:-1]), 0).sum()

    path = critical_path(trace)[::-1]
    name = np.array([trace.names[row] for row in path])
    calls = np.array([any(part in each for part in WAITING_CALL) for each in name])
    overhead = np.isin(kind[path], [KINDS.index(each) for each in OVERHEAD])
    waiting = (kind[path] == KINDS.index("runtime")) & calls & (length[path] > LONG_US)
    doubtful = path[overhead | waiting]
    long = doubtful[length[doubtful] > LONG_US]
    what = {row: _kind(KINDS[kind[row]], trace.names[row]) for row in long.tolist()}
    longest = [
        f"{length[row]:,} µs at {start[row]:,}: {what[row]}, {printable(trace.names[row])}"
        for row in long[np.argsort(-length[long], kind="stable")][:12].tolist()
    ]
    shares = half.ranks[at].bound_before
    host, device = (sum(shares.get(each, 0.0) for each in kinds) for kinds in (HOST, DEVICE))
    parts = {"host": host, "device": device, "communication": 1 - host - device}
    return Answers(
        step=_whole(half.before, at),
        busy=float(busy) / 1e3,
        stream=float(np.bincount(streams[work], length[work]).max(initial=0)) / 1e3,
        half=_whole(half.after, at),
        double=_whole(double.after, at),
        unexplained=float(length[doubtful].sum() / max(length[path].sum(), 1)),
        bound=max(parts, key=lambda each: parts[each]),
        reason=_reason(trace, np.bincount(kind[doubtful], length[doubtful], len(KINDS))),
        gaps=dict(Counter(what.values()).most_common()),
        longest=longest,
    )


def _whole(timeline: NodeTimes, at: int) -> float:
    """ms from the begin of one rank's first node to the end of its last one."""
    low, high = timeline.setting.graph.first[at : at + 2]
    return float(timeline.end_ns[low:high].max() - timeline.start_ns[low:high].min()) / 1e6


def _reason(trace: ExecutionTrace, by_kind: np.ndarray) -> str:
    """Why time is unexplained, by the kind of most of it (``by_kind``: µs by index into ``KINDS``) and by
    what the conversion found."""
    found = json.loads(trace.metadata_str("conversion_report"))["findings"]
    most = KINDS[int(by_kind.argmax())]
    if most == "device-overhead":
        return sentence("work-before-recording") if "work-before-recording" in found else "the device idles"
    if most == "runtime":
        return "calls last although no device work explains it"
    return "Python between operators" + (
        "" if "python-frame" in found else ", or sleep: no Python frames recorded"
    )


def _kind(kind: str, name: str) -> str:
    return name if kind == "runtime" else kind


def disagreeing_twins(found: dict[str, Answers]) -> dict[str, str]:
    """Pair → a sentence, where one model is bound by another thing on the other GPU."""
    wrong = {}
    for name, each in found.items():
        twin = name.replace(*TWINS)
        if twin != name and twin in found and found[twin].bound != each.bound:
            wrong[f"{name}, {twin}"] = (
                f"one is bound by the {each.bound}, the other by the {found[twin].bound}"
            )
    return wrong


def summary(found: dict[str, Answers]) -> list[tuple[str, ...]]:
    """The table: ``busy`` is the device's part of the step; see ``Answers`` for the others."""
    rows: list[tuple[str, ...]] = [
        ("trace", "ms", "busy", "× 0.5, ms", "of possible", "× 2, ms", "of stream", "bound by", "unexplained",
         f"gaps > {LONG_US} µs", "reason")
    ]  # fmt: skip
    for name, each in found.items():
        gaps = ", ".join(f"{kind} {count}" for kind, count in list(each.gaps.items())[:4])
        rows.append(
            (name, f"{each.step:,.2f}", f"{each.on_device:.0%}", f"{each.half:,.2f}", f"{each.saved:.0%}",
             f"{each.double:,.2f}", f"{each.added:.0%}", each.bound, f"{each.unexplained:.1%}", gaps or "–",
             each.reason if each.unexplained > NAMED else "")
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
