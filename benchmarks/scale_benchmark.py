#!/usr/bin/env python3
"""How well scaled sets predict runs of more ranks: each prediction is checked against a run that it never
saw.

    python benchmarks/scale_benchmark.py                      all comparisons python
    benchmarks/scale_benchmark.py --only machine       one of gloo, machine, planned, size, models, one,
                                                              megatron

gloo: GPT-2 (tiny) on 2 processes, scaled to 4 and compared with 4 processes that run at the same time, so
that each process has as much of the machine; medians over --repeats. machine: the simulated machine of
tests/generator, 8 ranks scaled to 64 and compared with 64. planned: a plan of the planner on 8 GPUs scaled to
64 and compared with the plan on 64. models, one, megatron: other layers, batch and sequence, one rank scaled
to two, and more tensor-parallel ranks or stages (``scale_models.py``). size: 1,024 ranks of the gloo capture,
seconds and files. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.scale_models import from_one, megatron, models
from chakra_et import cli
from chakra_et.__main__ import main as chakra_et
from chakra_et.et import file as et_file
from chakra_et.et.sets import read_comm_groups
from chakra_et.names import run_at
from chakra_et.simulate.replay_report import report
from chakra_et.simulate.run import make_run
from tests.generator import generate, run
from tests.generator.layouts import PID
from tests.generator.program import AwaitComm, Busy, Comm, Group, Instruction, Op, Post, Program, Tensor

TARGETS = {"gloo": 10.0, "machine": 2.0, "planned": 2.0}
MODELS = {"models": models, "one": from_one, "megatron": megatron}
OF_MODELS = 10.0
"""Percent, for what changes the model or begins with one rank."""
SECONDS_FOR_1024 = 60.0
STEPS, LAYERS, BUCKET = 6, 8, 2
ELEMENTS = (1 << 17, 1 << 20, 1 << 20, 1 << 19)
"""Gradients in each bucket of the simulated machine: the first is small, as DDP's."""


@dataclass
class Config:
    """What is compared."""

    only: Literal["all", "gloo", "machine", "planned", "size", "models", "one", "megatron"] = field(
        default="all", metadata={"help": "one comparison"}
    )
    repeats: int = field(default=3, metadata={"help": "captures of each gloo run"})
    seed: int = field(default=1, metadata={"help": "of the simulated machine and of scaling"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        everything = ("machine", "planned", "gloo", "size", *MODELS)
        for name in everything if config.only == "all" else (config.only,):
            if name == "size":
                missed |= size(folder, config)
                continue
            if name in MODELS:
                made = MODELS[name](folder / name, config.repeats, step_ms, quietly)
                missed |= any([tell(case, OF_MODELS, *times) for case, times in made.items()])
                continue
            compare = {"gloo": gloo, "machine": machine, "planned": planned}[name]
            predicted, real, base = compare(folder, config)
            missed |= tell(name, TARGETS[name], predicted, real, base)
    return int(missed)


def tell(name: str, target: float, predicted: float, real: float, base: float) -> bool:
    """Print a comparison, and return whether it misses its target."""
    error = 100 * (predicted / real - 1)
    print(
        f"{name}: predicted {predicted:,.3f} ms per step, real {real:,.3f} ms ({error:+.2f}%, target "
        f"{target:g}%); the captured set has {base:,.3f} ms ({100 * (base / real - 1):+.2f}%)",
        flush=True,
    )
    return abs(error) > target


def step_ms(name: str, measured: bool = False, first: int = 0) -> float:
    """The mean over steps (from ``first`` on) of the slowest rank's time, replayed or measured."""
    set_of = run_at(name)
    files = set_of.et_files()
    traces = [et_file.read(path) for _, path in files]
    ranks = [rank for rank, _ in files]
    run = make_run("", traces, ranks, read_comm_groups(set_of.groups_file))
    answer = report(run, run.start_ns, run.end_ns)
    steps = [rank["steps"][first:] or [rank] for rank in answer]
    which = "measured_us" if measured else "simulated_us"
    times = [max(step[which] or 0 for step in of_ranks) for of_ranks in zip(*steps, strict=True)]
    return statistics.mean(times) / 1e3


def quietly(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status = chakra_et(arguments)
    if status:
        raise SystemExit(f"error: chakra-et {' '.join(arguments)} ended with {status}")


def scaled(name: Path, dp: int, seed: int, *flags: str) -> str:
    target = f"{name}-scaled"
    quietly(
        "scale", str(name), "--dp", str(dp), "-o", target, "--seed", str(seed), "--variants", "64", *flags
    )
    return target


# ---- the simulated machine ----


def ring_ns(size: int, ranks: int) -> int:
    """20 µs a message, 5 GB/s: what the machine's network takes for an all-reduce."""
    return round(2 * (ranks - 1) * 20_000 + 2 * (ranks - 1) / ranks * size / 5)


def program(rank: int, ranks: int, seed: int, lasting: dict[str, int]) -> Program:
    """Steps of forward, backward and update; every second layer's gradients are reduced beside the
    backward."""
    generator = random.Random(f"{seed}/{ranks}/{rank}")
    steps: list[Instruction] = []
    storage = 0
    for step in range(STEPS):
        slow = generator.lognormvariate(0, 0.04)

        def busy(ns: float, slow: float = slow) -> Busy:
            return Busy(round(ns * slow * generator.lognormvariate(0, 0.02)))

        body: list[Instruction] = [busy(20_000)]
        body += [Op("aten::linear", [busy(900_000)]) for _ in range(LAYERS)]
        waits: list[Instruction] = []
        for layer in range(LAYERS):
            body.append(Op("aten::linear_backward", [busy(1_800_000)]))
            if layer % BUCKET == BUCKET - 1:
                storage += 1
                count = ELEMENTS[layer // BUCKET]
                comm = Comm("allreduce", "0", count, count, asynchronous=True, storage=storage)
                key = f"{step}/{layer}"
                post = Post("gloo:all_reduce", lasting.get(key, 0), comm, key)
                body.append(Op("c10d::allreduce_", [Busy(3_000), post], comm=comm))
                used = Tensor(storage, comm.elements, device="cpu")
                waits += [AwaitComm(key), Op("aten::mul_", [Busy(2_000)], tensors=[used])]
        body += [*waits, Op("Optimizer.step#AdamW.step", [busy(700_000)], "user_annotation")]
        steps.append(Op(f"ProfilerStep#{step}", body, "user_annotation"))
    return Program({"main": steps}, [Group("0", tuple(range(ranks)), "default_pg")], rank, ranks)


def machine_run(folder: Path, name: str, ranks: int, seed: int) -> float:
    """Write the traces of ``ranks`` ranks that wait for each other, and return ms per step."""
    lasting: list[dict[str, int]] = [{} for _ in range(ranks)]
    while True:
        runs = [run(program(rank, ranks, seed, lasting[rank])) for rank in range(ranks)]
        events = [happened.by_key() for happened in runs]
        ready = {key: [of_rank[key].end - of_rank[key].busy for of_rank in events] for key in events[0]}
        after = [
            {
                key: max(times) + ring_ns(4 * ELEMENTS[int(key.split("/")[1]) // BUCKET], ranks) - times[rank]
                for key, times in ready.items()
            }
            for rank in range(ranks)
        ]
        if after == lasting:
            break
        lasting = after
    folder.mkdir()
    for rank in range(ranks):
        for path in generate(program(rank, ranks, seed, lasting[rank])).write(folder, name):
            # Every rank is a process of its own.
            path.write_text(re.sub(rf"(?<![\d.]){PID}(?![\d.])", str(PID + 1000 * rank), path.read_text()))
    return max(happened.end for happened in runs) / STEPS / 1e6


def machine(folder: Path, config: Config) -> tuple[float, float, float]:
    """The mean of --repeats runs of 8, each scaled with a seed of its own, against the mean of as many runs
    of 64."""
    real, base, guess = [], [], []
    for number in range(config.repeats):
        small = folder / f"machine8-{number}"
        base.append(machine_run(small, "run", 8, 100 * config.seed + number))
        real.append(machine_run(folder / f"machine64-{number}", "run", 64, 100 * config.seed + number))
        quietly("convert", "--dir", str(small))
        guess.append(step_ms(scaled(small / "run", 64, config.seed + number)))
        print(
            f"  machine {number + 1}: 8 ranks {base[-1]:.3f}, scaled to 64 {guess[-1]:.3f}, 64 ranks "
            f"{real[-1]:.3f} ms"
        )
    return statistics.mean(guess), statistics.mean(real), statistics.mean(base)


# ---- a plan ----


def planned(folder: Path, config: Config) -> tuple[float, float, float]:
    """GPT-2 XL in two stages on nodes of one GPU: 4 data-parallel ranks, scaled to 32."""
    gpu = {"memory_gib": 80, "price_per_hour": 8, "inter_bandwidth": 40e9, "intra_bandwidth": 128e9}
    clusters = {
        f"gpus{count}": {"gpus_per_node": 1, "gpus": {"A10": {"nodes": count, **gpu}}} for count in (8, 64)
    }
    (folder / "clusters.yaml").write_text(json.dumps({"clusters": clusters}))
    for count in (8, 64):
        fasop = [sys.executable, "-m", "fasop"]
        plan = [*fasop, "plan", "--model", "gpt2-xl", "--cluster", f"{folder / 'clusters.yaml'}:gpus{count}"]
        plan += ["--tp", "1", "--pp", "2", "--mbs", "1", "--global-batch", str(4 * count), "--oom", "--json"]
        done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True)
        (folder / f"plan{count}.json").write_text(done.stdout)
        simulate = [*fasop, "simulate", str(folder / f"plan{count}.json"), "--et"]
        subprocess.run(
            [*simulate, "--output", str(folder), "--name", f"plan{count}"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    real, base = step_ms(str(folder / "plan64"), True), step_ms(str(folder / "plan8"), True)
    return step_ms(scaled(folder / "plan8", 32, config.seed)), real, base


# ---- gloo ----


def begin_capture(folder: Path, name: str, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    flags = ["--model-name", "tiny", "--dataset", "sample", "--max-seq-length", "64", "--batch-size", "4"]
    flags += [
        "--max-steps",
        "16",
        "--skip-eval",
        "--save-steps",
        "0",
        "--save-dir",
        str(folder / f"{name}-save"),
    ]
    flags += ["--enable-tracing", "--trace-output-dir", str(folder), "--trace-name", name]
    flags += ["--trace-wait-steps", "2", "--trace-warmup-steps", "2", "--trace-active-steps", "10"]
    return subprocess.Popen(
        [*command, str(ROOT / "gpt2" / "train.py"), *flags],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def captures(folder: Path, **ranks: int) -> list[str]:
    """Capture runs of so many ranks at the same time, so that they meet the same load, and convert them."""
    folder.mkdir()
    running = [begin_capture(folder, name, count) for name, count in ranks.items()]
    for one in running:
        _, said = one.communicate(timeout=900)
        if one.returncode:
            raise SystemExit(f"error: a capture failed: {said[-800:]}")
    quietly("convert", "--dir", str(folder))
    return [str(folder / name) for name in ranks]


def gloo(folder: Path, config: Config) -> tuple[float, float, float]:
    """The first step is left out: the ranks don't begin it together."""
    two, four, guess = [], [], []
    for number in range(config.repeats):
        small, large = captures(folder / f"gloo{number}", two=2, four=4)
        two.append(step_ms(small, True, 1))
        four.append(step_ms(large, True, 1))
        guess.append(step_ms(scaled(Path(small), 4, config.seed + number), first=1))
        print(
            f"  gloo {number + 1}: 2 ranks {two[-1]:.1f}, scaled to 4 {guess[-1]:.1f}, "
            f"4 ranks {four[-1]:.1f} ms",
            flush=True,
        )
    return statistics.median(guess), statistics.median(four), statistics.median(two)


def size(folder: Path, config: Config) -> bool:
    where = folder / "gloo0"
    if not where.is_dir():
        captures(where, two=2)
    begin = time.monotonic()
    quietly(
        "scale", str(where / "two"), "--dp", "1024", "-o", str(where / "many"), "--seed", str(config.seed)
    )
    seconds = time.monotonic() - begin
    files = [path for _, path in run_at(str(where / "many")).et_files()]
    different = {path.stat().st_ino: path.stat().st_size for path in files}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"size: {len(files):,} ranks in {seconds:.1f} s (target {SECONDS_FOR_1024:g} s), {len(different)} "
        "different files, "
        f"{sum(different.values()) / 1e6:.1f} MB on disk, {memory:.0f} MiB of memory at most"
    )
    return seconds > SECONDS_FOR_1024 or len(files) != 1024


if __name__ == "__main__":
    sys.exit(main())
