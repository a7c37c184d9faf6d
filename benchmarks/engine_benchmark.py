#!/usr/bin/env python3
"""What Dask adds to a conversion, and how fast it schedules ranks.

    python benchmarks/engine_benchmark.py [--events 400000] [--repeat 3] [--tasks 4096]

Converts eight synthetic pairs by two of our own processes and by `--cluster local` with two workers, in
turns: time by the clock and of CPU, all processes counted. Then schedules tasks that do nothing on two
workers. The exit status is 1 if the engine takes more than 10% longer (of the least times, CPU), or the tasks
more than 30 s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.convert_benchmark import best
from benchmarks.synthetic import write_pair

COPIES, MOST_ADDED, MOST_SECONDS = 8, 1.10, 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--events", type=int, default=400_000, help="of each pair")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=4096)
    config = parser.parse_args()
    costs = {"two processes": [], "--cluster local": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "traces")
        folder.mkdir()
        write_pair(folder, config.events)
        for path in list(folder.iterdir()):
            stem, _, kind = path.stem.rpartition("_")
            for copy in range(1, COPIES):
                (folder / f"{stem}{copy}_{kind}.json").symlink_to(path)
        words = [sys.executable, "-m", "chakra_et", "convert", str(folder), "--workers", "2", "--output"]
        for turn in range(config.repeat):
            for number, (name, found) in enumerate(costs.items()):
                flags = ["--cluster", "local"] if number else []
                found.append(best([*words, str(Path(scratch, f"{turn}-{number}")), *flags], 1))
                print(f"{name}: {found[-1].wall:.1f} s, {found[-1].cpu:.1f} s of CPU", flush=True)
    ours, engine = (min(found, key=lambda cost: cost.cpu) for found in costs.values())
    added = engine.cpu / ours.cpu
    print(f"of the least: {added:.3f} × the CPU time, {engine.wall / ours.wall:.3f} × the time by the clock")
    seconds = scheduled(config.tasks)
    print(f"{config.tasks:,} tasks that do nothing: {seconds:.1f} s")
    return int(added > MOST_ADDED or seconds > MOST_SECONDS)


def scheduled(tasks: int) -> float:
    """Seconds from the first submission to the last result of tasks, as ``ranks.cluster`` submits them."""
    from chakra_et.ranks import cluster

    cluster._in_process = nothing
    with cluster.jobs_on("local", 2) as run:
        began = time.monotonic()
        assert sum(1 for _ in run(print, range(tasks), 2)) == tasks
        return time.monotonic() - began


def nothing(folder: str, function: object, argument: object) -> None:
    """In place of a rank's process."""


if __name__ == "__main__":
    sys.exit(main())
