"""The graph's step against the steps of processes that were never traced.

    python -m benchmarks.step_truth [--scripts single,gpt2] [--sizes 0,1] [--turns 3] [--clock cpu|wall]
    python -m benchmarks.step_truth --modules [--scripts …]

Each script of ``step_truth_scripts`` runs without a tracer and with it; the traced run is converted.
With ``--clock cpu``, for machines with other work, both run at once and take turns after each step, as such a
machine is up to 20% slower half a minute later. The graph's step is the CPU time of the timed steps less
what the conversion took off in all threads, and the truth the CPU time of an untraced step, both without that
of gloo's threads that poll for messages. With ``--clock wall``, for machines with a core per process, one run
follows the other, and both are times of the clock. Over steps and
turns: medians; over ranks: means. ``again``: how far the truth of a turn is from the median of the turns, on
average, as processes of one script differ. ``own``: how far the untraced steps of the traced process are from
the truth, which is what a graph that is right about its own process is off by. ``traced`` and ``observed``:
the timed and the structure step as recorded, which is the state before and after. ``faults``: page faults of
rank 0 in an untraced and in a timed step. Then the mean and the worst error, of the medians over the turns.

``--modules``: the time by class of module, see ``step_truth_modules``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# Untraced steps before the recording, and timed ones, by the size of the script: more of short ones.
STEPS = (40, 20), (8, 6)
# By module, half of the timed steps are left out of the graph.
MODULE_STEPS = (40, 200), (8, 40)


class Turns:
    """After each step a rank hands over to the same rank of the other run and waits for its own turn, by two
    pipes in ``folder``. The untraced run begins."""

    def __init__(self, folder: str, rank: int, traced: bool):
        paths = [Path(folder, f"turn{rank}_{int(run)}") for run in (traced, not traced)]
        # Opened for both, so that nobody waits for the other to open it.
        self._own, self._other = (os.open(path, os.O_RDWR) for path in paths)
        if traced:
            self.wait()

    def hand_over(self) -> None:
        os.write(self._other, b".")

    def wait(self) -> None:
        os.read(self._own, 1)


def worker(name: str, size: int, folder: str, traced: bool, by_module: bool, in_turns: bool) -> None:
    """One process of a run: with ``traced`` under the tracer, else with the time of each step in a file."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_truth_modules import time_modules
    from benchmarks.step_truth_scripts import RANKS, SCRIPTS
    from chakra_et.capture.gloo import polling_clocks

    torch.set_num_threads(1)
    if RANKS[name] > 1:
        dist.init_process_group("gloo")
    rank, (wait, active) = int(os.environ.get("RANK", 0)), (MODULE_STEPS if by_module else STEPS)[size]
    seconds: list[tuple[float, float]] = []
    polling: list[int] = []

    def clocks() -> list[float]:
        return [time.perf_counter(), time.process_time() - sum(map(time.clock_gettime, polling))]

    last = clocks()
    spent = time_modules() if by_module else {}
    modules: list[dict[str, list[float]]] = []
    tracer: Any = None
    if traced:
        from chakra_et import ChakraTracer

        tracer = ChakraTracer(folder, "run", wait, 1, active)
        tracer.__enter__()
    turns = Turns(folder, rank, traced) if in_turns else None

    def page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    faults: list[int] = []
    at_start = [page_faults()]

    def after() -> None:
        faults.append(page_faults() - at_start[0])
        if turns:
            turns.hand_over()
            if len(faults) <= wait + active:
                turns.wait()
        end_step()
        at_start[0] = page_faults()

    def end_step() -> None:
        now = clocks()
        modules.append(dict(spent))
        spent.clear()
        if tracer is not None:
            tracer.step()
            return
        seconds.append((now[0] - last[0], now[1] - last[1]))
        if len(seconds) == 1:
            polling.extend(polling_clocks())
        last[:] = clocks()

    SCRIPTS[name](size, wait + 1 + active, after)
    Path(folder, f"faults{rank}_{int(traced)}.json").write_text(json.dumps(faults[wait + 1 :]))
    Path(folder, f"modules{rank}_{int(traced)}.json").write_text(json.dumps(modules[wait + 1 :]))
    if tracer is None:
        Path(folder, f"plain{rank}.json").write_text(json.dumps(seconds))
    if RANKS[name] > 1:
        dist.destroy_process_group()


def launch(
    name: str, size: int, folder: Path, traced: bool, by_module: bool, in_turns: bool
) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """Start a run; what it prints goes into the file."""
    from benchmarks.step_truth_scripts import RANKS

    flags = [str(int(flag)) for flag in (traced, by_module, in_turns)]
    own = ["-m", "benchmarks.step_truth", "--worker", name, str(size), str(folder), *flags]
    if RANKS[name] > 1:
        ranks = f"--nproc_per_node={RANKS[name]}"
        own = ["-m", "torch.distributed.run", "--standalone", ranks, *own]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    # glibc gives memory back and takes it again, at random: 0 to 18,000 page faults, 0 to 25 ms, per step.
    settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11)}
    errors = (folder / f"errors{int(traced)}").open("w+")
    return subprocess.Popen(
        [sys.executable, *own], cwd=folder, env=os.environ | settings, stdout=errors, stderr=errors
    ), errors


def run(
    name: str, size: int, folder: Path, traced: bool | None, by_module: bool = False, tries: int = 3
) -> None:
    """Run a script untraced, traced or, with None, both at once, taking turns."""
    from benchmarks.step_truth_scripts import RANKS

    for rank, one in itertools.product(range(RANKS[name]), (0, 1)):
        pipe = folder / f"turn{rank}_{one}"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    which = [False, True] if traced is None else [traced]
    jobs = [launch(name, size, folder, each, by_module, traced is None) for each in which]
    while any(job.poll() is None for job, _ in jobs) and not any(job.poll() for job, _ in jobs):
        time.sleep(0.1)
    failed = ""
    for job, errors in jobs:
        job.terminate()  # one that waits for the other's step, if that has failed
        if job.wait():
            errors.seek(0)
            failed += errors.read()[-2000:]
    if failed and tries == 1:
        raise RuntimeError(f"{name} {size}: {failed}")
    if failed:  # processes of gloo abort now and then when they end
        print(f"{name} {size} failed, again: {failed[:300]}", file=sys.stderr)
        run(name, size, folder, traced, by_module, tries - 1)


def measure(name: str, size: int, clock: str) -> tuple[float, ...]:
    """ms: untraced step of a process of its own; the graph's, the timed and the structure step; the untraced
    step of the traced process. And page faults of rank 0 in an untraced step and in a timed one."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.recording_cost import recorder_rows
    from chakra_et.convert.runs import convert_sets
    from chakra_et.et import file as et_file
    from chakra_et.traces.device import load
    from chakra_et.traces.sets import find

    at = 1 if clock == "cpu" else 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for traced in (None,) if clock == "cpu" else (False, True):
            run(name, size, folder, traced)
        plain = [json.loads(path.read_text()) for path in sorted(folder.glob("plain*.json"))]
        (result,) = convert_sets(find(folder), PairOptions())
        assert not result.failed, [*result.problems, *result.ranks.values()]
        graphs, timed, observed, own_steps = [], [], [], []
        for rank in result.good:
            recording = load(result.traces.pairs[rank].device).recording
            assert recording is not None
            trace = et_file.read(result.traces.et_file(rank))
            steps = [step[at] / 1000 for step in recording.timed_us]
            timed.append(median(steps))
            own_steps.append(median(step[at] / 1000 for step in recording.untraced_us))
            if clock == "cpu":  # what was taken off in all threads
                own = trace.attributes.get("recorded_micros")  # absent where nothing was taken off
                left = trace.duration_micros.astype(np.int64)
                inside = ~np.isin(own.rows, recorder_rows(trace)) if own else slice(0)  # of the timed steps
                taken = int((own.values - left[own.rows])[inside].sum()) if own else 0
            else:
                ends = [trace.metadata_int(f"{of}_end_micros") or 0 for of in ("recorded", "measured")]
                taken = ends[0] - ends[1]
            graphs.append(timed[-1] - taken / 1000 / len(steps))
            observed.append(recording.step_us[recording.structure_step][at] / 1000)
        faults = [median(json.loads((folder / f"faults0_{n}.json").read_text())) for n in (0, 1)]
    # Those beside the untraced and the timed steps that count.
    wait = STEPS[size][0]
    truth = mean(
        median(step[at] * 1000 for step in steps[wait // 2 : wait] + steps[wait + 1 :]) for steps in plain
    )
    return truth, mean(graphs), mean(timed), mean(observed), mean(own_steps), *faults


def main() -> int:
    from benchmarks.step_truth_scripts import SCRIPTS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--sizes", default="0,1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--modules", action="store_true", help="compare the time by class of module")
    config = parser.parse_args()
    if config.modules:
        from benchmarks.step_truth_modules import compare

        return compare(config.scripts.split(","), list(map(int, config.sizes.split(","))), config.turns)
    errors = []
    print(
        f"{'script':26} size  truth ms  graph ms  error %  again %  own %  traced/truth  observed/truth"
        "  faults",
        flush=True,
    )
    again = []
    for name in config.scripts.split(","):
        for size in map(int, config.sizes.split(",")):
            turns = [measure(name, size, config.clock) for _ in range(config.turns)]
            truth, graph, traced, observed, own, *faults = (
                median(column) for column in zip(*turns, strict=True)
            )
            errors.append(100 * (graph / truth - 1))
            again.append(100 * mean(abs(turn[0] / truth - 1) for turn in turns))
            print(
                f"{name:26} {size:4}  {truth:8.2f}  {graph:8.2f}  {errors[-1]:+7.1f}  {again[-1]:7.1f}"
                f"  {100 * (own / truth - 1):+5.1f}  {traced / truth:12.2f}  {observed / truth:14.2f}"
                f"  {faults[0]:.0f} → {faults[1]:.0f}",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    print(
        f"error: mean {mean(sizes):.1f}%, worst {max(sizes):.1f}% of {len(sizes)}; again {mean(again):.1f}%"
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4], *(flag == "1" for flag in sys.argv[5:]))
    else:
        sys.exit(main())
