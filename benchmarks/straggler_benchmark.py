#!/usr/bin/env python3
"""How true the straggler analysis is: published jobs, and ideal step times against runs that were never
analysed.

    python benchmarks/straggler_benchmark.py

Published jobs (--dir): every figure of the paper's artifact beside ours, worst difference of each kind, and
the time that reading and analysis take. Real runs (--rounds; 0 leaves them out): of two gloo ranks on this
machine one works or waits for input longer than the other. The ideal step time of that run is compared with
the measured one of a run in which the same work is spread evenly. The two take turns in the same processes,
and each round is compared by itself: the median counts, and half of the rounds lie between the quartiles. The
exit status is 1 if a published job misses its target: step times within 0.5%, slowdowns within 0.01.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.stragglers.analyse import analyse, read_job
from chakra_et.text import table

ROOT = Path(__file__).resolve().parents[1]
STEP_TARGET_PERCENT, SLOWDOWN_TARGET = 0.5, 0.01
# What rank 0 and rank 1 do in the uneven run, and in the even one: cases of straggler_worker.py.
SPREADS = {
    "waiting for input": {"uneven": {"delays_ms": [0, 200]}, "even": {"delays_ms": [100, 100]}},
    "forward and backward": {"uneven": {"repeats": [2, 6]}, "even": {"repeats": [4, 4]}},
}


@dataclass
class Config:
    """What is measured."""

    dir: str = field(
        default="../shared/data/traces/straggler",
        metadata={"help": "folder of trace-X.parquet, meta-X.yaml, result-X.json, ms-X.json, mw-X.json"},
    )
    rounds: int = field(default=20, metadata={"help": "pairs of real runs of each kind"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    rows, missed = published(Path(config.dir))
    print(
        "\n".join(table(rows)) if len(rows) > 1 else f"no published jobs in {config.dir}: left out",
        end="\n\n",
    )
    if config.rounds > 0:
        print("\n".join(table(real(config.rounds))))
    return 1 if missed else 0


def published(folder: Path) -> tuple[list[tuple[str, ...]], bool]:
    """A row for each job, and whether one misses its target."""
    rows: list[tuple[str, ...]] = [
        ("job", "operations", "step times off by", "slowdowns off by", "read s", "analyse s")
    ]
    missed = False
    for trace in sorted(folder.glob("trace-*.parquet")):
        name = trace.stem.removeprefix("trace-")
        begin = time.perf_counter()
        try:
            job = read_job(str(trace), str(folder / f"meta-{name}.yaml"))
            read = time.perf_counter()
            answer = json.loads(json.dumps(analyse(job).as_json()))
        except TraceError as error:
            print(f"error: {error}", file=sys.stderr)
            missed = True
            continue
        seconds = read - begin, time.perf_counter() - read
        step_percent, slowdown = compared(folder, name, answer)
        missed = missed or step_percent > STEP_TARGET_PERCENT or slowdown > SLOWDOWN_TARGET
        times = (f"{each:.2f}" for each in seconds)
        rows.append((name, f"{len(job.operations):,}", f"{step_percent:.6f}%", f"{slowdown:.7f}", *times))
    return rows, missed


def compared(folder: Path, name: str, answer: dict[str, Any]) -> tuple[float, float]:
    """The worst difference of the step times in percent, and of the slowdowns; infinite where one is
    missing."""
    worst = {"time": 0.0, "slowdown": 0.0}

    def visit(key: str, found: Any, wanted: Any) -> None:
        if isinstance(wanted, dict):
            for each in set(wanted) | set(found or {}):
                visit(key, (found or {}).get(each), wanted.get(each))
        elif isinstance(wanted, float) or isinstance(found, float):
            off = float("inf") if found is None or wanted is None else abs(found - wanted)
            is_time = key.startswith("step_t") or key in ("trem", "tadd", "tori", "tideal")
            kind, off = ("time", off / wanted * 100) if is_time and wanted else ("slowdown", off)
            worst[kind] = max(worst[kind], off)

    for kind in ("result", "ms", "mw"):
        path = folder / f"{kind}-{name}.json"
        if path.exists():
            found = answer if kind == "result" else answer[kind]
            for key, wanted in json.loads(path.read_text()).items():
                visit(key, (found or {}).get(key), wanted)
    return worst["time"], worst["slowdown"]


def real(rounds: int) -> list[tuple[str, ...]]:
    """A row for each kind of real runs."""
    head = (
        "uneven between 2 ranks",
        "uneven ms",
        "slowdown",
        "ideal ms",
        "even run ms",
        "error",
        "quartiles",
    )
    rows: list[tuple[str, ...]] = [head]
    for name, cases in SPREADS.items():
        with tempfile.TemporaryDirectory() as folder:
            measured = run(folder, cases, rounds)
            converted = [sys.executable, "-m", "chakra_et", "convert", folder]
            subprocess.run(converted, cwd=ROOT, check=True, capture_output=True)
            found = [analyse(read_job(f"{folder}/uneven_r{each}")).analysis for each in range(rounds)]
        ideal = np.array([median(each.step_t_noblk.values()) for each in found])
        uneven, even = (
            np.array([median(measured[f"{case}_r{each}"]) for each in range(rounds)])
            for case in ("uneven", "even")
        )
        low, middle, high = np.percentile(100 * (ideal / even - 1), [25, 50, 75])
        times = [f"{1e3 * median(each):.1f}" for each in (uneven, ideal, even)]
        slowdown = f"{median(each.blocking_slowdown for each in found):.3f}"
        rows.append((name, times[0], slowdown, *times[1:], f"{middle:+.1f}%", f"{low:+.1f} to {high:+.1f}%"))
    return rows


def run(folder: str, cases: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Capture the cases in turns; the step times of each trace, s, by the clock of its rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "benchmarks" / "straggler_worker.py"), folder]
    command += ["--cases", json.dumps(cases), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 + 30 * rounds)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"step_s"'))
    times: dict[str, list[float]] = json.loads(line)["step_s"]
    return times


if __name__ == "__main__":
    sys.exit(main())
