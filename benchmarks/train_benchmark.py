#!/usr/bin/env python3
"""Training speed and memory against Hugging Face's Trainer, and the overhead of tracing.

    python benchmarks/train_benchmark.py [--dataset FILE] [--model-name gpt2] [--bf16] [--rounds 3]

Runs of GPT-2 alternate, each in a process of its own (benchmarks/train_runs.py): ours, Hugging Face's
Trainer, ours with --pack, ours with a trace. Batches are padded to their longest sample in all but the
packed runs, and only tokens that are not padding count. A step is timed from its beginning to the next
one's, without the first three; the figures are medians over the rounds. Targets are judged by the time
on GPUs, and on CPUs, where other programs slow a run down, by the CPU time of the training process. The
exit status is 1 if a target is missed.
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
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et.cli import parse

RUNS = Path(__file__).with_name("train_runs.py")
SKIPPED = 3  # steps until caches and memory have settled
ACTIVE = 3  # traced steps; when the last one ends the trace is written
SPEED, PACKED, UNTRACED, TRACED, MEMORY_MB, PAIR_MB = 1.0, 1.3, 1.02, 1.10, 300.0, 30.0
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

    def __post_init__(self) -> None:
        if self.steps < 12 or self.rounds < 1:
            raise ValueError("--steps must be at least 12, --rounds at least 1")


def main() -> int:
    config = parse(Config, description=(__doc__ or "").splitlines()[0])
    runs: dict[str, list[Figures]] = {"ours": [], "hf": [], "packed": [], "traced": []}
    for number in range(config.rounds):
        for name, results in runs.items():
            print(f"round {number + 1} of {config.rounds}: {name}", file=sys.stderr, flush=True)
            results.append(measure(config, name))
    return report(config, runs)


def measure(config: Config, name: str) -> Figures:
    """One run in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="train_benchmark-"))
    flags = ["--model-name", config.model_name, "--dataset", config.dataset, "--skip-eval", "--save-steps", 0]
    flags += ["--batch-size", config.batch_size, "--max-seq-length", config.max_seq_length]
    flags += [
        "--max-steps",
        config.steps,
        "--save-dir",
        folder / "model",
        *(["--bf16"] if config.bf16 else []),
    ]
    flags += ["--pack"] if name == "packed" else []
    if name == "traced":
        flags += ["--enable-tracing", "--no-convert", "--trace-output-dir", folder, "--trace-name", "trace"]
        flags += ["--trace-wait-steps", wait(config), "--trace-active-steps", ACTIVE]
    kind = "hf" if name == "hf" else "ours"
    command = [sys.executable, str(RUNS), kind, *map(str, flags)]
    try:
        # Threads that spin while they wait would count as work.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures
    finally:
        shutil.rmtree(folder)


def wait(config: Config) -> int:
    """The steps before the warm-up of the traced runs: about half."""
    return config.steps // 2


def seconds(run: Figures, clock: str) -> list[float]:
    """From the beginning of each step to that of the next, by the clock "wall" or "cpu"."""
    return [after - before for before, after in itertools.pairwise(run[clock])]


def speed(run: Figures, clock: str) -> float:
    """Tokens per second."""
    timed = seconds(run, clock)
    return float(sum(run["tokens"][SKIPPED : len(timed)]) / sum(timed[SKIPPED:]))


def report(config: Config, runs: dict[str, list[Figures]]) -> int:
    """Print the tables; returns 1 if a target is missed."""
    on_gpu = runs["ours"][0]["gpu_mb"] > 0
    memory, judge = ("gpu_mb", "wall") if on_gpu else ("rss_mb", "cpu")
    names = {"ours": "ours", "hf": "Hugging Face Trainer", "packed": "ours, --pack"}
    precision = ", bfloat16" if config.bf16 else ""
    print(
        f"| {config.model_name}, {config.batch_size} × {config.max_seq_length} tokens{precision} "
        "| tokens/s | ratio | ratio by CPU time | peak memory, MB |\n|---|---|---|---|---|"
    )
    ratios, peaks = {}, {}
    for name, title in names.items():
        by = {
            clock: median(
                speed(own, clock) / speed(other, clock)
                for own, other in zip(runs[name], runs["hf"], strict=True)
            )
            for clock in ("wall", "cpu")
        }
        ratios[name] = by[judge]
        peaks[name] = median(run[memory] for run in runs[name])
        tokens = median(speed(run, "wall") for run in runs[name])
        print(f"| {title} | {tokens:,.0f} | {by['wall']:.2f} | {by['cpu']:.2f} | {peaks[name]:,.0f} |")

    print("\n| tracing | × the time of the same step without a tracer | × its CPU time |\n|---|---|---|")
    first = wait(config) + 1
    spans = {
        "steps before the trace": range(SKIPPED, wait(config)),
        "traced steps": range(first, first + ACTIVE - 1),
    }
    overhead = {}
    for title, span in spans.items():
        by = {clock: slowdown(runs["traced"], runs["ours"], span, clock) for clock in ("wall", "cpu")}
        overhead[title] = by[judge]
        print(f"| {title} | {by['wall']:.3f} | {by['cpu']:.3f} |")
    extra = median(run["rss_mb"] for run in runs["traced"]) - median(run["rss_mb"] for run in runs["ours"])
    pair = median(run["pair_mb"] for run in runs["traced"])
    print(f"\nextra memory: {extra:.0f} MB for a pair of {pair:.1f} MB")

    targets = {
        f"tokens/s at least {SPEED} × Hugging Face's": ratios["ours"] >= SPEED,
        f"with --pack at least {PACKED} ×": ratios["packed"] >= PACKED,
        "peak memory no higher": peaks["ours"] <= peaks["hf"],
        f"untraced steps at most {UNTRACED} ×": overhead["steps before the trace"] <= UNTRACED,
        f"traced steps at most {TRACED} ×": overhead["traced steps"] <= TRACED,
        f"extra memory at most {MEMORY_MB:.0f} MB for {PAIR_MB:.0f} MB": extra
        <= MEMORY_MB * max(1.0, pair / PAIR_MB),
    }
    print()
    for target, met in targets.items():
        print(f"{'met' if met else 'MISSED'}: {target}")
    return 0 if all(targets.values()) else 1


def slowdown(traced: list[Figures], plain: list[Figures], span: range, clock: str) -> float:
    """The median ratio of the time of the same step, which has the same batch, in traced and plain runs."""
    return median(
        seconds(run, clock)[index] / seconds(other, clock)[index]
        for run, other in zip(traced, plain, strict=True)
        for index in span
    )


if __name__ == "__main__":
    sys.exit(main())
