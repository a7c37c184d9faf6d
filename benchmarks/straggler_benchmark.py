#!/usr/bin/env python3
"""How true the straggler analysis is: published jobs, and ideal step times against runs that were never
analysed.

    python benchmarks/straggler_benchmark.py

Published jobs (--dir): every figure of the paper's artifact beside ours, worst difference of each kind, and
the time that reading and analysis take. Real runs (--pairs; 0 leaves them out): of two gloo ranks on this
machine one works or waits for input longer than the other. The ideal step time of that run is compared with
the measured one of a run in which the same work is spread evenly; the two alternate, medians count, and the
spread of the even runs is the noise. The exit status is 1 if a published job misses its target: step times
within 0.5%, slowdowns within 0.01.
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

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.stragglers.analyse import analyse
from chakra_et.stragglers.load import read_job
from chakra_et.text import table

ROOT = Path(__file__).resolve().parents[1]
STEP_TARGET_PERCENT, SLOWDOWN_TARGET = 0.5, 0.01
# What rank 0 and rank 1 do in the uneven run, and in the even one: flags of straggler_worker.py.
SPREADS = {
    "waiting for input": (["--delays-ms", "0", "200"], ["--delays-ms", "100", "100"]),
    "forward and backward": (["--repeats", "2", "6"], ["--repeats", "4", "4"]),
}


@dataclass
class Config:
    """What is measured."""

    dir: str = field(
        default="../shared/data/traces/straggler",
        metadata={"help": "folder of trace-X.parquet, meta-X.yaml, result-X.json, ms-X.json, mw-X.json"},
    )
    pairs: int = field(default=3, metadata={"help": "pairs of real runs of each kind"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    rows, missed = published(Path(config.dir))
    print(
        "\n".join(table(rows)) if len(rows) > 1 else f"no published jobs in {config.dir}: left out",
        end="\n\n",
    )
    if config.pairs > 0:
        print("\n".join(table(real(config.pairs))))
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


def real(pairs: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "uneven between 2 ranks",
            "uneven ms",
            "slowdown",
            "ideal ms",
            "even run ms",
            "error",
            "spread of even runs",
        )
    ]
    for name, (uneven, even) in SPREADS.items():
        measured: dict[str, list[float]] = {"uneven": [], "ideal": [], "even": []}
        slowdowns = []
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as folder:
                measured["uneven"].append(run(folder, "uneven", uneven))
                measured["even"].append(run(folder, "even", even))
                converted = [sys.executable, "-m", "chakra_et", "convert", folder]
                subprocess.run(converted, cwd=ROOT, check=True, capture_output=True)
                found = analyse(read_job(f"{folder}/uneven")).analysis
            measured["ideal"].append(median(found.step_t_noblk.values()))
            slowdowns.append(found.blocking_slowdown)
        ideal, truth = median(measured["ideal"]), median(measured["even"])
        spread = (max(measured["even"]) - min(measured["even"])) / truth
        rows.append(
            (
                name,
                f"{median(measured['uneven']) * 1e3:.1f}",
                f"{median(slowdowns):.3f}",
                f"{ideal * 1e3:.1f}",
                f"{truth * 1e3:.1f}",
                f"{ideal / truth - 1:+.1%}",
                f"{spread:.1%}",
            )
        )
    return rows


def run(folder: str, name: str, flags: list[str]) -> float:
    """Capture one run; its median step time in s, by the clock of its rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "benchmarks" / "straggler_worker.py"), folder, name, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"step_s"'))
    return float(median(json.loads(line)["step_s"]))


if __name__ == "__main__":
    sys.exit(main())
