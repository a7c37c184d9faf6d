#!/usr/bin/env python3
"""Training speed and memory against Hugging Face's Trainer, and the overhead of tracing.

    python benchmarks/train_benchmark.py [--dataset FILE] [--model-name gpt2] [--bf16] [--rounds 3]

Runs of GPT-2 alternate, each in a process of its own (benchmarks/train_runs.py): ours and Hugging Face's
Trainer. Batches are padded to their longest sample, and only tokens that are not padding count. A step lasts
until the next one begins; the first three are left out, and the figures are medians over the rounds. The
overhead of tracing is measured on equal steps, in turns within one process. Targets are judged by the time on
GPUs, and on CPUs, where other programs slow a run down, by the CPU time of the training process.

Peak memory is the GPU's, or on a CPU that of processes of their own in which malloc returns large blocks at
once (MALLOC_MMAP_THRESHOLD_): by default the peak holds gaps between blocks, up to 2 GB of them, which
depend on the order of allocations more than on what a program needs. The exit status is 1 if a target is
missed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et.cli import parse

RUNS = Path(__file__).with_name("train_runs.py")
SKIPPED = 3  # steps until caches and memory have settled
MEMORY_STEPS, ACTIVE = 8, 3  # of a run that measures memory; its traced steps
SPEED, UNTRACED, TRACED, MEMORY_MB, PAIR_MB = 1.0, 1.02, 1.10, 300.0, 30.0
NAMES = {"ours": "ours", "hf": "Hugging Face Trainer"}
PARTS = ("speed", "memory", "tracing")
Figures = dict[str, Any]


@dataclass
class Config:
    """What is measured."""

    dataset: str = field(default="sample", metadata={"help": "as for gpt2/train.py"})
    model_name: str = field(default="gpt2", metadata={"help": "as for gpt2/train.py"})
    batch_size: int = field(default=4, metadata={"help": "samples per step"})
    max_seq_length: int = field(default=384, metadata={"help": "tokens per sample"})
    bf16: bool = field(default=False, metadata={"help": "compute in bfloat16"})
    steps: int = field(default=12, metadata={"help": "steps per run"})
    rounds: int = field(default=3, metadata={"help": "runs of each kind"})
    parts: tuple[str, ...] = field(default=PARTS, metadata={"help": "what to measure"})

    def __post_init__(self) -> None:
        if self.steps < 12 or self.rounds < 1:
            raise ValueError("--steps must be at least 12, --rounds at least 1")
        for part in set(self.parts) - set(PARTS):
            raise ValueError(f"--parts {part}: use {', '.join(PARTS)}")


def main() -> int:
    config = parse(Config, description=(__doc__ or "").splitlines()[0])
    parts = {"speed": compare_speed, "memory": compare_memory, "tracing": compare_tracing}
    targets: dict[str, bool] = {}
    for part in config.parts:
        targets |= parts[part](config)
    for target, met in targets.items():
        print(f"{'met' if met else 'MISSED'}: {target}")
    return 0 if all(targets.values()) else 1


def compare_speed(config: Config) -> dict[str, bool]:
    """Print tokens per second beside Hugging Face's; returns the targets, and whether they are met."""
    runs: dict[str, list[Figures]] = {name: [] for name in NAMES}
    for number in range(config.rounds):
        for name, results in runs.items():
            print(f"round {number + 1} of {config.rounds}: {name}", file=sys.stderr, flush=True)
            results.append(measure(config, name, config.steps))
    head(config, "tokens/s | ratio | ratio by CPU time")
    ratios = {}
    for name, title in NAMES.items():
        pairs = list(zip(runs[name], runs["hf"], strict=True))
        wall, cpu = (
            median(speed(own, clock) / speed(other, clock) for own, other in pairs)
            for clock in ("wall", "cpu")
        )
        ratios[name] = wall if on_gpu(runs["ours"][0]) else cpu
        tokens = median(speed(run, "wall") for run in runs[name])
        print(f"| {title} | {tokens:,.0f} | {wall:.2f} | {cpu:.2f} |")
    print()
    return {f"tokens/s at least {SPEED} × Hugging Face's": ratios["ours"] >= SPEED}


def compare_memory(config: Config) -> dict[str, bool]:
    """Print peak memory, also of a run with a trace; returns the targets, and whether they are met."""
    runs = {}
    for name in (*NAMES, "traced"):
        print(f"memory: {name}", file=sys.stderr, flush=True)
        runs[name] = measure(config, name, MEMORY_STEPS, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)})
    counter = "gpu_mb" if on_gpu(runs["ours"]) else "rss_mb"
    head(config, "peak memory, MB")
    for name, title in NAMES.items():
        print(f"| {title} | {runs[name][counter]:,.0f} |")
    extra = runs["traced"]["rss_mb"] - runs["ours"]["rss_mb"]
    pair = runs["traced"]["pair_mb"]
    print(f"\nextra memory of a trace: {extra:.0f} MB for a pair of {pair:.1f} MB\n")
    limit = MEMORY_MB * max(1.0, pair / PAIR_MB)
    return {
        "peak memory no higher": runs["ours"][counter] <= runs["hf"][counter],
        f"extra memory at most {MEMORY_MB:.0f} MB for {PAIR_MB:.0f} MB": extra <= limit,
    }


def compare_tracing(config: Config) -> dict[str, bool]:
    """Print the overhead of tracing on equal steps; returns the targets, and whether they are met."""
    print("overhead of tracing", file=sys.stderr, flush=True)
    run = measure(config, "tracing", config.steps)
    head(config, "× the time of the same step without a tracer | × its CPU time")
    overhead = {}
    for name, title in {"before": "steps before the trace", "traced": "traced steps"}.items():
        wall, cpu = (slowdown(run[name], run["plain"], clock) for clock in (0, 1))
        overhead[name] = wall if run["gpu"] else cpu
        print(f"| {title} | {wall:.3f} | {cpu:.3f} |")
    print()
    return {
        f"untraced steps at most {UNTRACED} ×": overhead["before"] <= UNTRACED,
        f"traced steps at most {TRACED} ×": overhead["traced"] <= TRACED,
    }


def head(config: Config, columns: str) -> None:
    """Print the head of a table."""
    precision = ", bfloat16" if config.bf16 else ""
    what = f"{config.model_name}, {config.batch_size} × {config.max_seq_length} tokens{precision}"
    print(f"| {what} | {columns} |\n|" + "---|" * (columns.count("|") + 2))


def on_gpu(run: Figures) -> bool:
    """Whether the run used a GPU."""
    return float(run["gpu_mb"]) > 0


def measure(config: Config, name: str, steps: int, variables: dict[str, str] | None = None) -> Figures:
    """One run in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="train_benchmark-"))
    flags = ["--model-name", config.model_name, "--dataset", config.dataset, "--skip-eval", "--save-steps", 0]
    flags += ["--batch-size", config.batch_size, "--max-seq-length", config.max_seq_length]
    flags += ["--max-steps", steps, "--save-dir", folder / "model", "--trace-output-dir", folder]
    flags += ["--bf16"] if config.bf16 else []
    if name == "traced":
        flags += ["--enable-tracing", "--no-convert", "--trace-name", "trace", "--trace-active-steps", ACTIVE]
    kind = name if name in ("hf", "tracing") else "ours"
    command = [sys.executable, str(RUNS), kind, *map(str, flags)]
    try:
        # Threads that spin while they wait would count as work.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(variables or {})}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures
    finally:
        shutil.rmtree(folder)


def seconds(run: Figures, clock: str) -> list[float]:
    """From the beginning of each step to that of the next, by the clock "wall" or "cpu"."""
    return [after - before for before, after in itertools.pairwise(run[clock])]


def speed(run: Figures, clock: str) -> float:
    """Tokens per second."""
    timed = seconds(run, clock)
    return float(sum(run["tokens"][SKIPPED : len(timed)]) / sum(timed[SKIPPED:]))


def slowdown(steps: list[Any], plain: list[Any], clock: int) -> float:
    """The median over the turns of the time of the steps over that of plain ones in the same turn."""
    ratios: list[float] = [
        mean(step[clock] for step in own) / mean(step[clock] for step in other)
        for own, other in zip(steps, plain, strict=True)
    ]
    return median(ratios)


if __name__ == "__main__":
    sys.exit(main())
