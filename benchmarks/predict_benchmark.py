#!/usr/bin/env python3
"""How far predictions are off: each row is a real run, or a simulated machine's, that the prediction never
saw.

    python benchmarks/predict_benchmark.py                       all parts (over an hour)
    python benchmarks/predict_benchmark.py --parts network       two network namespaces; needs root, ip and tc
    python benchmarks/predict_benchmark.py --parts gpu --pairs DIR

Parts: ``machine``: the simulated GPU machine of tests/generator; ``compute``: operators slowed in forward,
backward and optimizer, and a slow rank, on two gloo ranks; ``network``: two ranks behind a veth pair limited
by tbf; ``shapes``: other batch, sequence and hidden sizes; ``steps``: other buckets, gradient accumulation;
``blocks``: twice the layers, FSDP2 in place of DDP; ``ranks``: one rank and two on a core each; ``four``: one
and two ranks to four, sharing the cores where these are fewer;
``gpu``: one model on H100 and on MI300X (--pairs).

The cases of a part run in turns, several rounds of them, in the same processes, one thread and one core per
rank. Each round is compared by itself: the fastest step predicted from its traces of the base case with the
fastest measured one; the median of the rounds counts. So whatever slows this machine for longer than a round
meets both, and what slows single steps meets neither. "nothing" is the base case measured once more: its
error is the noise of the machine. 95%: the interval of an error, from rounds drawn anew. ``baseline`` is what
one gets without a graph: computing scaled by its operations, plus the bytes that are sent over the bandwidth.
A last table has all gloo runs of these parts (with --again, of those kept) beside the targets. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import predict_runs
from benchmarks.predict_cases import PARTS
from benchmarks.predict_gpus import gpu_rows
from benchmarks.predict_runs import Effort, Row
from chakra_et import cli
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.errors import TraceError
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import make_run
from chakra_et.text import table
from chakra_et.traces.sets import Pair
from chakra_et.transform.durations import Scale
from tests.generator import Features, generate
from tests.generator.machine import run as run_machine

MEAN, WORST, MACHINE, PER_CLASS = 3.3, 10.0, 1.0, 12.0
"""Targets, percent."""


@dataclass
class Config:
    """What is measured."""

    parts: tuple[str, ...] = field(default=("machine", *PARTS, "gpu"), metadata={"help": "parts to run"})
    rounds: int = field(default=20, metadata={"help": "times that the cases of a part are run in turns"})
    seconds: float = field(default=600.0, metadata={"help": "time within which the rounds of a part begin"})
    pairs: str = field(
        default="../shared/data/traces/public/pairs",
        metadata={"help": "folder of h100_MODEL.json.gz and mi300_MODEL.json.gz"},
    )
    keep: str | None = field(
        default=None,
        metadata={"help": "folder in which the traces are kept, and rounds of an earlier run go on"},
    )

    again: bool = field(
        default=False, metadata={"help": "predict anew from the traces kept by an earlier run"}
    )

    def __post_init__(self) -> None:
        if self.again and not self.keep:
            raise ValueError("--again needs --keep, the folder with the traces")
        known = ("machine", *PARTS, "gpu")
        unknown = set(self.parts) - set(known)
        if unknown:
            raise ValueError(f"--parts {min(unknown)}: use {', '.join(known)}")


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    # Stopped by a signal, the ranks have to end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    missed = 0
    gloo: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(config.keep or scratch)
        for part in config.parts:
            print(f"\n## {part}\n", flush=True)
            try:
                rows, targets = measure(part, config, folder / part)
            except (TraceError, OSError) as error:
                print(f"left out: {error}")
                continue
            missed += show(rows, targets)
            if part in PARTS:
                gloo[part] = rows
    if len(gloo) > 1:
        print("\n## all gloo runs\n")
        print("\n".join(table(overall(gloo))))
    return 1 if missed else 0


def overall(parts: Mapping[str, Sequence[Row]]) -> list[tuple[str, ...]]:
    """The lines of the last table: of each part and of all, the judged rows with their mean and worst error,
    and the mean noise, in percent. Each row counts alike."""
    head = ("part", "rows", "mean", "worst", "noise", "worst row")
    lines: list[tuple[str, ...]] = [head]
    every = [(part, row) for part, rows in parts.items() for row in rows]
    for name in (*parts, "all"):
        mine = [(part, row) for part, row in every if name in (part, "all")]
        judged = [(abs(row.error), part, row.name) for part, row in mine if not row.is_noise]
        noise = [abs(row.error) for _, row in mine if row.is_noise]
        worst, of, case = max(judged)
        lines.append(
            (
                name,
                str(len(judged)),
                f"{np.mean([error for error, *_ in judged]):.2f}%",
                f"{worst:.2f}%",
                f"{np.mean(noise):.2f}%" if noise else "-",
                case if name == of else f"{of}: {case}",
            )
        )
    return [*lines, ("target", "", f"{MEAN:g}%", f"{WORST:g}%", "", "")]


def measure(part: str, config: Config, folder: Path) -> tuple[list[Row], dict[str, float]]:
    """The rows of a part, and its targets in percent by name."""
    if part == "machine":
        return machine_rows(), {"worst": MACHINE}
    if part == "gpu":
        return gpu_rows(Path(config.pairs)), {"worst": PER_CLASS}
    rows = predict_runs.rows(PARTS[part], Effort(config.rounds, config.seconds), folder, config.again)
    print(f"{predict_runs.rounds(folder)} rounds of {predict_runs.STEPS} steps")
    return rows, {"mean": MEAN, "worst": WORST}


def show(rows: list[Row], targets: dict[str, float]) -> int:
    """Print the table and how the targets fared; the number that was missed."""
    head = ("case", "before", "measured", "predicted", "error", "95%", "±", "baseline", "error")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        lines.append(
            (
                row.name,
                f"{row.before:,.1f}",
                f"{row.measured:,.1f}",
                f"{row.predicted:,.1f}",
                f"{row.error:+.1f}%",
                "-" if row.interval is None else "{:+.1f} to {:+.1f}%".format(*row.interval),
                "-" if row.uncertainty is None else f"{100 * row.uncertainty / row.predicted:.1f}%",
                "-" if row.baseline is None else f"{row.baseline:,.1f}",
                "-" if row.baseline is None else f"{predict_runs.percent(row.baseline, row.measured):+.1f}%",
            )
        )
    print("\n".join(table(lines, right=range(1, 9))))
    judged = [abs(row.error) for row in rows if not row.is_noise]
    found = {"mean": float(np.mean(judged)), "worst": max(judged)}
    missed = 0
    for name, most in targets.items():
        ok = found[name] <= most
        failed = [row.name for row in rows if not row.is_noise and abs(row.error) > most]
        missed += not ok
        where = f" in {', '.join(failed)}" if failed and name == "worst" else ""
        print(f"{name} {found[name]:.2f}% (target {most:g}%): {'met' if ok else 'missed' + where}")
    known = [row for row in rows if row.uncertainty is not None and not row.is_noise]
    if known:
        inside = sum(abs(row.predicted - row.measured) <= 2 * (row.uncertainty or 0) for row in known)
        print(f"within two standard deviations: {inside} of {len(known)}")
    return missed


def machine_rows() -> list[Row]:
    """What-ifs on the simulated GPU machine, whose program is run again with the changed durations; ms."""
    kinds: dict[str, dict] = {
        "one stream": {"operators": 40},
        "side streams and waits": {"operators": 30, "side_streams": True, "waits": ("item", "event")},
        "autograd thread, NCCL": {
            "operators": 30,
            "autograd_thread": True,
            "nccl": ("allreduce", "broadcast"),
        },
        "two GPUs": {"operators": 20, "devices": 2},
    }
    rows = []
    for name, more in kinds.items():
        delays = {"latency": 4000, "tail": 3000, "wake_up": 2000, "pick_up": 2000}
        made = generate(Features(seed=11, resolution=1000, steps=3, **delays, **more))
        with tempfile.TemporaryDirectory() as folder:
            converted = convert_pair(Pair(-1, *made.write(Path(folder))), PairOptions())
        run = make_run(name, [converted.trace], [0])
        for factor in (0.1, 0.25, 4.0):
            changes = {
                event.key: round(event.busy * (factor - 1))
                for event in made.run.events
                if event.category == "kernel" and event.key and event.comm is None
            }
            again = run_machine(made.program, changes)
            prediction = predict(run, [Scale("^void kernel", factor)])
            before, after = (
                int(end.end_ns.max() - end.start_ns.min()) for end in (prediction.before, prediction.after)
            )
            rows.append(Row(f"{name}: kernels × {factor:g}", before / 1e6, _length(again) / 1e6, after / 1e6))
    return rows


def _length(run) -> int:  # type: ignore[no-untyped-def]
    recorded = [event for event in run.events if event.recorded]
    return max(event.end for event in recorded) - min(event.start for event in recorded)


if __name__ == "__main__":
    sys.exit(main())
