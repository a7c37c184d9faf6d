#!/usr/bin/env python3
"""How true the straggler analysis is: ideal step times against runs that were never analysed.

    python benchmarks/straggler_benchmark.py

Of two gloo ranks on this machine one works or waits for input longer than the other. The ideal step time of
that run is compared with the measured one of a run in which the same work is spread evenly. The two take
turns in the same processes, and each round is compared by itself: the median counts, and half of the rounds
lie between the quartiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from chakra_et import cli
from chakra_et.stragglers.analyse import find_stragglers
from chakra_et.text import table

ROOT = Path(__file__).resolve().parents[1]
# What rank 0 and rank 1 do in the uneven run, and in the even one: cases of straggler_worker.py.
SPREADS = {
    "waiting for input": {"uneven": {"delays_ms": [0, 200]}, "even": {"delays_ms": [100, 100]}},
    "forward and backward": {"uneven": {"repeats": [2, 6]}, "even": {"repeats": [4, 4]}},
}


@dataclass
class Config:
    """What is measured."""

    rounds: int = field(default=20, metadata={"help": "pairs of real runs of each kind"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    print("\n".join(table(real(config.rounds))))
    return 0


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
            found = [find_stragglers(f"{folder}/uneven_r{each}") for each in range(rounds)]
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
