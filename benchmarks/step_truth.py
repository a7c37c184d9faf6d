"""The graph's step against the steps of processes that were never traced.

    python -m benchmarks.step_truth [--scripts single,gpt2] [--sizes 0,1] [--turns 3] [--clock cpu|wall]

Each script of ``step_truth_scripts`` runs in turns without a tracer and with it; the traced run is converted.
With ``--clock cpu``, for machines with other work, the graph's step is the CPU time of the timed steps less
what the conversion took off, and the truth the CPU time of an untraced step; with ``--clock wall`` both are
times of the clock. Over steps and turns: medians, but with ``--clock cpu`` the shortest, as other work slows
caches down; over ranks: means. ``traced`` and ``observed``: the timed steps and the structure step as
recorded, which is the state before and after.

Printed: truth, graph, its error, traced / truth, observed / truth; then the mean and the worst error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAIT, ACTIVE = 8, 6


def worker(name: str, size: int, folder: str, traced: bool) -> None:
    """One process of a run: with ``traced`` under the tracer, else with the time of each step in a file."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_truth_scripts import RANKS, SCRIPTS

    torch.set_num_threads(1)
    if RANKS[name] > 1:
        dist.init_process_group("gloo")
    rank, steps = int(os.environ.get("RANK", 0)), WAIT + 1 + ACTIVE
    seconds: list[tuple[float, float]] = []
    last = [time.perf_counter(), time.process_time()]
    tracer: Any = None
    if traced:
        from chakra_et import ChakraTracer

        tracer = ChakraTracer(folder, "run", WAIT, 1, ACTIVE)
        tracer.__enter__()

    def after() -> None:
        if tracer is not None:
            tracer.step()
            return
        now = [time.perf_counter(), time.process_time()]
        seconds.append((now[0] - last[0], now[1] - last[1]))
        last[:] = now

    SCRIPTS[name](size, steps, after)
    if tracer is None:
        timed = seconds[WAIT + 1 :]
        Path(folder, f"plain{rank}.json").write_text(json.dumps(timed))
    if RANKS[name] > 1:
        dist.destroy_process_group()


def run(name: str, size: int, folder: Path, traced: bool) -> None:
    from benchmarks.step_truth_scripts import RANKS

    own = ["benchmarks.step_truth", "--worker", name, str(size), str(folder), str(int(traced))]
    launch = ["-m", *own]
    if RANKS[name] > 1:
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={RANKS[name]}",
            "-m",
            *own,
        ]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launch], cwd=folder, env=os.environ | settings, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} {size}: {done.stderr[-2000:]}")


def measure(name: str, size: int, clock: str) -> tuple[float, float, float, float]:
    """ms: untraced step of a process of its own; the graph's, the timed and the structure step."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import convert_sets
    from chakra_et.et import file as et_file
    from chakra_et.traces.device import load
    from chakra_et.traces.sets import find

    at, typical = (1, min) if clock == "cpu" else (0, median)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(name, size, folder, False)
        plain = [json.loads(path.read_text()) for path in sorted(folder.glob("plain*.json"))]
        run(name, size, folder, True)
        (result,) = convert_sets(find(folder), PairOptions())
        assert not result.failed, [*result.problems, *result.ranks.values()]
        graphs, traced, observed = [], [], []
        for rank in result.good:
            recording = load(result.traces.pairs[rank].device).recording
            assert recording is not None
            trace = et_file.read(result.traces.et_file(rank))
            ends = [trace.metadata_int(f"{name}_end_micros") or 0 for name in ("recorded", "measured")]
            steps = [step[at] / 1000 for step in recording.timed_us]
            traced.append(typical(steps))
            graphs.append(traced[-1] - (ends[0] - ends[1]) / 1000 / len(steps))
            observed.append(recording.step_us[recording.structure_step][at] / 1000)
    truth = mean(typical(step[at] * 1000 for step in steps) for steps in plain)
    return truth, mean(graphs), mean(traced), mean(observed)


def main() -> int:
    from benchmarks.step_truth_scripts import SCRIPTS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--sizes", default="0,1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    config = parser.parse_args()
    errors = []
    print(f"{'script':26} size  truth ms  graph ms  error %  traced/truth  observed/truth", flush=True)
    for name in config.scripts.split(","):
        for size in map(int, config.sizes.split(",")):
            turns = [measure(name, size, config.clock) for _ in range(config.turns)]
            typical = min if config.clock == "cpu" else median
            truth, graph, traced, observed = (typical(column) for column in zip(*turns, strict=True))
            errors.append(100 * (graph / truth - 1))
            print(
                f"{name:26} {size:4}  {truth:8.2f}  {graph:8.2f}  {errors[-1]:+7.1f}  {traced / truth:12.2f}"
                f"  {observed / truth:14.2f}",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    print(f"error: mean {mean(sizes):.1f}%, worst {max(sizes):.1f}% of {len(sizes)}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1")
    else:
        sys.exit(main())
