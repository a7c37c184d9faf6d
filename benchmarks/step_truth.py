"""The graph's step against the steps of processes that were never traced.

    python -m benchmarks.step_truth [--scripts single,gpt2] [--sizes 0,1] [--turns 3] [--clock cpu|wall]
    python -m benchmarks.step_truth --modules [--scripts …]

Each script of ``step_truth_scripts`` runs in turns without a tracer and with it; the traced run is converted.
With ``--clock cpu``, for machines with other work, the graph's step is the CPU time of the timed steps less
what the conversion took off in all threads, and the truth the CPU time of an untraced step, both without that
of gloo's threads that poll for messages; with ``--clock wall`` both are times of the clock. Over steps and
turns: medians; over ranks: means. ``again``: how far the truth of a turn is from the median of the turns, on
average, as processes of one script differ. ``own``: how far the untraced steps of the traced process are from
the truth, which is what a graph that is right about its own process is off by. ``traced`` and ``observed``:
the timed and the structure step as recorded, which is the state before and after. Then the mean
and the worst error.

``--modules``: where the time goes. Hooks around each call of an ``nn.Module`` open a record and read the
clock. Printed is, by class of module, the time per step in its forward calls by the clock of the untraced
process, by that of the timed steps of the traced one, and in its graph: the graph's durations are not CPU
time, so this needs an idle machine. Where the second is above the first, what recording costs, such as page
faults of the memory that it takes from tensors, is larger in these modules than elsewhere. Classes with less
than a twentieth of the step are left out.
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

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# Untraced steps before the recording, and timed ones, by the size of the script: more of short ones.
STEPS = (40, 20), (8, 6)
PREFIX = "module: "


def time_modules() -> dict[str, float]:
    """The time, s, in calls of each class of module from now on; each call has its annotation."""
    import torch
    from torch.nn.modules import module as modules

    spent: dict[str, float] = {}
    began: list[tuple[Any, float]] = []

    # The class record_function takes 6 µs of Python, as long as a small layer; these take 1 µs, of which a
    # recorded call has as much as the clock around them.
    def before(called: Any, inputs: Any) -> None:
        at = time.perf_counter()
        began.append((torch.autograd._record_function_with_args_enter(PREFIX + type(called).__name__), at))

    def after(called: Any, inputs: Any, output: Any) -> None:
        record, at = began.pop()
        torch.autograd._record_function_with_args_exit(record)
        took = time.perf_counter() - at
        spent[type(called).__name__] = spent.get(type(called).__name__, 0.0) + took

    modules.register_module_forward_pre_hook(before)
    modules.register_module_forward_hook(after)
    return spent


def worker(name: str, size: int, folder: str, traced: bool, by_module: bool) -> None:
    """One process of a run: with ``traced`` under the tracer, else with the time of each step in a file."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_truth_scripts import RANKS, SCRIPTS
    from chakra_et.capture.gloo import polling_clocks

    torch.set_num_threads(1)
    if RANKS[name] > 1:
        dist.init_process_group("gloo")
    rank, (wait, active) = int(os.environ.get("RANK", 0)), STEPS[size]
    seconds: list[tuple[float, float]] = []
    polling: list[int] = []

    def clocks() -> list[float]:
        return [time.perf_counter(), time.process_time() - sum(map(time.clock_gettime, polling))]

    last = clocks()
    spent = time_modules() if by_module else {}
    modules: list[dict[str, float]] = []
    tracer: Any = None
    if traced:
        from chakra_et import ChakraTracer

        tracer = ChakraTracer(folder, "run", wait, 1, active)
        tracer.__enter__()

    def after() -> None:
        if tracer is not None:
            tracer.step()
            modules.append(dict(spent))
            spent.clear()
            return
        now = clocks()
        seconds.append((now[0] - last[0], now[1] - last[1]))
        modules.append(dict(spent))
        spent.clear()
        if len(seconds) == 1:
            polling.extend(polling_clocks())
        last[:] = clocks()

    SCRIPTS[name](size, wait + 1 + active, after)
    if tracer is None:
        Path(folder, f"plain{rank}.json").write_text(json.dumps(seconds[wait + 1 :]))
    Path(folder, f"modules{rank}_{int(traced)}.json").write_text(json.dumps(modules[wait + 1 :]))
    if RANKS[name] > 1:
        dist.destroy_process_group()


def run(name: str, size: int, folder: Path, traced: bool, by_module: bool = False) -> None:
    from benchmarks.step_truth_scripts import RANKS

    flags = str(int(traced)), str(int(by_module))
    own = ["benchmarks.step_truth", "--worker", name, str(size), str(folder), *flags]
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
    # glibc gives memory back and takes it again, at random: 0 to 18,000 page faults, 0 to 25 ms, per step.
    settings |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11)}
    for _ in range(3):  # processes of gloo abort now and then when they end
        done = subprocess.run(
            [sys.executable, *launch], cwd=folder, env=os.environ | settings, capture_output=True, text=True
        )
        if not done.returncode:
            return
        print(f"{name} {size} failed, again: {done.stderr[:300]}", file=sys.stderr)
    raise RuntimeError(f"{name} {size}: {done.stderr[-2000:]}")


def measure(name: str, size: int, clock: str) -> tuple[float, float, float, float, float]:
    """ms: untraced step of a process of its own; the graph's, the timed and the structure step; the untraced
    step of the traced process."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import convert_sets
    from chakra_et.et import file as et_file
    from chakra_et.traces.device import load
    from chakra_et.traces.sets import find

    at = 1 if clock == "cpu" else 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(name, size, folder, False)
        plain = [json.loads(path.read_text()) for path in sorted(folder.glob("plain*.json"))]
        run(name, size, folder, True)
        (result,) = convert_sets(find(folder), PairOptions())
        assert not result.failed, [*result.problems, *result.ranks.values()]
        graphs, traced, observed, own_steps = [], [], [], []
        for rank in result.good:
            recording = load(result.traces.pairs[rank].device).recording
            assert recording is not None
            trace = et_file.read(result.traces.et_file(rank))
            steps = [step[at] / 1000 for step in recording.timed_us]
            traced.append(median(steps))
            own_steps.append(median(step[at] / 1000 for step in recording.untraced_us))
            if clock == "cpu":  # what was taken off in all threads
                own = trace.attributes["recorded_micros"]
                taken = int((own.values - trace.duration_micros.astype(np.int64)[own.rows]).sum())
            else:
                ends = [trace.metadata_int(f"{of}_end_micros") or 0 for of in ("recorded", "measured")]
                taken = ends[0] - ends[1]
            graphs.append(traced[-1] - taken / 1000 / len(steps))
            observed.append(recording.step_us[recording.structure_step][at] / 1000)
    truth = mean(median(step[at] * 1000 for step in steps) for steps in plain)
    return truth, mean(graphs), mean(traced), mean(observed), mean(own_steps)


Times = dict[str, float]


def measure_modules(name: str, size: int) -> tuple[Times, Times, Times, float]:
    """ms per step in the forward calls of each class of module on rank 0: by the clock of an untraced
    process, in the graph, and by the clock in the timed steps that it is from; and the untraced step. Medians
    over the steps."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import convert_sets
    from chakra_et.et import file as et_file
    from chakra_et.job.operators import inside
    from chakra_et.traces.sets import find

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(name, size, folder, False, by_module=True)
        step = median(wall for wall, _ in json.loads((folder / "plain0.json").read_text())) * 1000
        run(name, size, folder, True, by_module=True)
        (result,) = convert_sets(find(folder), PairOptions())
        trace = et_file.read(result.traces.et_file(0))
        truth, timed = (_medians(json.loads((folder / f"modules0_{n}.json").read_text())) for n in (0, 1))
    names = np.array([text.decode() for text in trace.names.table])[trace.names.index]
    own = np.char.startswith(names, PREFIX) & (trace.column("segment") == 0)
    anchors = np.flatnonzero(own)
    start = trace.start_micros.astype(np.int64)
    end = start + trace.duration_micros.astype(np.int64)
    marks = np.flatnonzero(np.char.startswith(names, "ProfilerStep#") & (trace.column("segment") == 0))
    graph = {}
    for of in truth:
        sums = np.zeros(len(marks))
        rows = anchors[names[anchors] == PREFIX + of]
        call = inside(trace, rows.tolist())
        held = np.flatnonzero(call >= 0)
        held = held[trace.column("lane")[held] == trace.column("lane")[rows[call[held]]]]
        last = start[rows]
        np.maximum.at(last, call[held], end[held])
        step_of = np.searchsorted(start[marks], start[rows], side="right") - 1
        np.add.at(sums, step_of, (last - start[rows]) / 1000)
        graph[of] = float(np.median(sums))
    return truth, graph, timed, step


def _medians(steps: list[Times]) -> Times:
    return {of: median(each.get(of, 0.0) for each in steps) * 1000 for of in steps[0]}


def modules_main(scripts: list[str], sizes: list[int], turns: int) -> None:
    errors = []
    print(
        f"{'script':26} size  module                    share %  truth ms  timed ms  graph ms  error %",
        flush=True,
    )
    for name in scripts:
        for size in sizes:
            found = [measure_modules(name, size) for _ in range(turns)]
            step = median(each[3] for each in found)
            for of in found[0][0]:
                truth = median(each[0][of] for each in found)
                graph, timed = (median(each[at][of] for each in found) for at in (1, 2))
                if truth < step / 20:
                    continue
                errors.append(100 * (graph / truth - 1))
                print(
                    f"{name:26} {size:4}  {of:24}  {100 * truth / step:7.0f}  {truth:8.2f}  {timed:8.2f}"
                    f"  {graph:8.2f}  {errors[-1]:+7.1f}",
                    flush=True,
                )
    absolute = [abs(error) for error in errors]
    print(f"error: mean {mean(absolute):.1f}%, worst {max(absolute):.1f}% of {len(absolute)}")


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
        modules_main(config.scripts.split(","), list(map(int, config.sizes.split(","))), config.turns)
        return 0
    errors = []
    print(
        f"{'script':26} size  truth ms  graph ms  error %  again %  own %  traced/truth  observed/truth",
        flush=True,
    )
    again = []
    for name in config.scripts.split(","):
        for size in map(int, config.sizes.split(",")):
            turns = [measure(name, size, config.clock) for _ in range(config.turns)]
            truth, graph, traced, observed, own = (median(column) for column in zip(*turns, strict=True))
            errors.append(100 * (graph / truth - 1))
            again.append(100 * mean(abs(turn[0] / truth - 1) for turn in turns))
            print(
                f"{name:26} {size:4}  {truth:8.2f}  {graph:8.2f}  {errors[-1]:+7.1f}  {again[-1]:7.1f}"
                f"  {100 * (own / truth - 1):+5.1f}  {traced / truth:12.2f}  {observed / truth:14.2f}",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    print(
        f"error: mean {mean(sizes):.1f}%, worst {max(sizes):.1f}% of {len(sizes)}; again {mean(again):.1f}%"
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1", sys.argv[6] == "1")
    else:
        sys.exit(main())
