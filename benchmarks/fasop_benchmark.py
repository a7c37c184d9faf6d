#!/usr/bin/env python3
"""How fast the planner searches, how well it predicts a measured step, and what the exact model changes.

    python benchmarks/fasop_benchmark.py
    python benchmarks/fasop_benchmark.py --update        (writes the tables into fasop/README.md)
    python benchmarks/fasop_benchmark.py --table against --against FOLDER      (another checkout)

Search: the time of the search alone, and of the whole command with its start-up, both as wall time and as
CPU time of all its processes; the wall clock also counts what other processes do on the machine. Beside it
what the published FASOP tool took on 2 cores. Prediction: GPT-2 XL on 32 A10 (8 nodes of 4), dp 4, pp 8,
global batch 64, micro-batch 1, layers 0-11-8-8-8-8-5-0, whose iterations took 1.4015, 1.4238, 1.3739 and
1.4098 s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import put
from chakra_et import cli
from fasop.hpdc24 import search as hpdc24
from fasop.hpdc24.search import published_costs
from fasop.inputs.clusters import Cluster, load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan
from fasop.plans.shapes import Shape
from fasop.schedule import one_f_one_b as schedule
from fasop.search.planner import Planner
from fasop.search.search import search

README = ROOT / "fasop" / "README.md"
MEASURED = (1.4015, 1.4238, 1.3739, 1.4098)  # seconds per iteration
POINT = (Shape(tp=1, dp=4, pp=8, mbs=1), (1, 11, 8, 8, 8, 8, 5, 1))
PUBLISHED_ERROR = 0.087

# Three GPU types, 1,024 GPUs; the H100's costs are the A100's by ratio.
LARGE = """
clusters:
  large:
    gpus_per_node: 8
    gpus:
      H100: {nodes: 40, memory_gib: 76, price_per_hour: 98.3, inter_bandwidth: 3200e9,
             intra_bandwidth: 3600e9, like: A100, speed: 2.2}
      A100: {nodes: 44, memory_gib: 39.59, price_per_hour: 32.77, inter_bandwidth: 400e9,
             intra_bandwidth: 1840e9}
      A10: {nodes: 44, memory_gib: 22.2, price_per_hour: 9.773, inter_bandwidth: 100e9,
            intra_bandwidth: 252e9, shared_bus: true}
"""
# What is searched: title, flags, cost models, the published tool's time, the limit in seconds.
SEARCHES = [
    ("gpt2XL heterogeneous", ["gpt2-xl", "paper-gpt2xl-het"], ("exact", "hpdc24"), "60.8 s", 0.6),
    ("T5 heterogeneous", ["t5", "paper-t5-het"], ("exact", "hpdc24"), "370 s", 4),
    ("pareto grid", ["gpt2-xl", "paper-pareto", "--objective", "pareto"], ("exact", "hpdc24"), "hours", 60),
    ("1,024 GPUs of 3 types", ["gpt2-xl", "LARGE"], ("exact",), "", 60),
]

PRESETS = [
    ("bert-large", "paper-bert"),
    ("bert-large", "paper-bert-het"),
    ("gpt2-xl", "paper-gpt2xl"),
    ("gpt2-xl", "paper-gpt2xl-het"),
    ("t5", "paper-t5"),
    ("t5", "paper-t5-het"),
]

# The whole command, timed by its parent; and inside it the search, without imports and start-up.
TIMED = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(json.loads(sys.argv[1]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
wall = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, wall, used.ru_utime + used.ru_stime, done.stdout, done.stderr[-300:]]))
"""
INSIDE = """
import contextlib, io, json, resource, sys, time
from fasop.search import search
from fasop.hpdc24 import search as hpdc24
from fasop.commands import plan as plan_command
def cpu():
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in use)
before, begin = cpu(), time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    plan_command.main(sys.argv[1:])
print(json.dumps([time.perf_counter() - begin, cpu() - before]))
"""


@dataclass
class Config:
    """What is done with the tables."""

    repeat: int = field(
        default=5,
        metadata={"help": "runs of each search; the fastest counts, against another checkout the median"},
    )
    table: Literal["all", "speed", "accuracy", "models", "against"] = field(
        default="all", metadata={"help": "which table"}
    )
    against: Path = field(default=ROOT, metadata={"help": "the checkout that commands are compared with"})
    quick: bool = field(default=False, metadata={"help": "leave out searches of more than a few seconds"})
    update: bool = field(default=False, metadata={"help": "write the tables into fasop/README.md"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    makers: dict[str, Callable[[], list[str]]] = {
        "speed": lambda: speed(config.repeat, config.quick),
        "accuracy": accuracy,
        "models": cost_models,
        "against": lambda: against(config.against, config.repeat),
    }
    for name in list(makers)[:3] if config.table == "all" else (config.table,):
        lines = makers[name]()
        print("\n".join(lines), end="\n\n", flush=True)
        if config.update:
            put(name, lines, README)
    return 0


def speed(repeat: int, quick: bool) -> list[str]:
    """Search times as a table, each the fastest of some runs; ``quick``: of the first two."""
    lines = [
        "| search | cost model | search, s | its CPU | command, s | its CPU | limit, s | published tool |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch) / "large.yaml"
        large.write_text(LARGE, encoding="utf-8")
        for title, flags, models, published, limit in SEARCHES[: 2 if quick else None]:
            name, cluster, *others = flags
            cluster = str(large) if cluster == "LARGE" else cluster
            for cost_model in models:
                arguments = ["--model", name, "--cluster", cluster, *others, "--cost-model", cost_model]
                inside, whole = [], []
                for _ in range(repeat):
                    whole.append(timed([sys.executable, "-m", "fasop", "plan", *arguments])[:2])
                    output = timed([sys.executable, "-c", INSIDE, *arguments])[2]
                    inside.append(json.loads(output))
                times = [min(values) for runs in (inside, whole) for values in zip(*runs, strict=True)]
                figures = " | ".join(f"{seconds:.2f}" for seconds in times)
                lines.append(f"| {title} | {cost_model} | {figures} | {limit:g} | {published} |")
    return lines


def against(other: Path, repeat: int) -> list[str]:
    """CPU seconds of whole commands here and in another checkout, in turn, each the median of some runs."""
    lines = [f"| command, CPU s | here | {other.name} | ratio |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        large = Path(scratch, "large.yaml")
        large.write_text(LARGE)
        plans = [(f"{name}, {cluster}", (name, cluster), repeat) for name, cluster in PRESETS]
        pareto = "gpt2-xl", "paper-pareto", "--objective", "pareto"
        plans += [("pareto grid", pareto, 1), ("1,024 GPUs of 3 types", ("gpt2-xl", str(large)), 1)]
        for title, (name, cluster, *more), count in plans:
            command = [sys.executable, "-m", "fasop", "plan", "--model", name, "--cluster", cluster, *more]
            runs = [[timed(command, where)[1] for where in (ROOT, other)] for _ in range(count)]
            here, there = map(statistics.median, zip(*runs, strict=True))
            lines.append(f"| {title} | {here:.2f} | {there:.2f} | {here / there:.2f} |")
    return lines


def timed(command: list[str], where: Path = ROOT) -> tuple[float, float, str]:
    """Wall and CPU seconds of a command in a checkout, and what it printed."""
    outer = [sys.executable, "-c", TIMED, json.dumps(command)]
    # A second start of a program finds its modules compiled, unless that is forbidden.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(outer, capture_output=True, text=True, check=True, cwd=where, env=environment)
    status, wall, cpu, output, errors = json.loads(done.stdout)
    if status != 0:
        raise SystemExit(f"error: {' '.join(command[:4])} failed: {errors}")
    return wall, cpu, output


def accuracy() -> list[str]:
    """The measured point by the exact model, with other networks and without any."""
    measured = sum(MEASURED) / len(MEASURED)
    (cluster,) = load_clusters("paper-gpt2xl")
    shape, partition = POINT
    placement = ("A10",) * cluster.node_count
    found = []
    for speed in (40, 100, 1000):
        faster = replace(cluster, gpus=(replace(cluster.gpus[0], inter_bandwidth=speed * 1e9),))
        # Megatron-LM reduced gradients of 16 bits then.
        plan = estimate(faster, shape, placement, partition, gradient_bytes=2)
        found.append((f"exact, {speed} Gbit/s between nodes", plan.step_time))
    plan = estimate(cluster, shape, placement, partition, gradient_bytes=2)
    free = [0.0] * (plan.pp - 1)
    line = schedule.run(list(plan.stage_forward), list(plan.stage_backward), free, plan.micro_batches)
    found.append(("exact, computing alone: no messages, no all-reduce", line.pipeline_time))
    lines = [
        f"| GPT-2 XL, 32 A10, 0-11-8-8-8-8-5-0: measured {measured:.4f} s | predicted, s | error |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {step:.4f} | {step / measured - 1:+.1%} |" for name, step in found]
    parts = (
        f"pipeline {plan.pipeline_time:.4f} s, of which messages "
        f"{plan.pipeline_time - line.pipeline_time:.4f} s; embedding all-reduce "
        f"{plan.embedding_allreduce:.4f} s; the first stage's gradients {plan.dp_allreduce[0]:.4f} s"
    )
    return [*lines, "", f"At 40 Gbit/s, exact: {parts}. The published mean error is {PUBLISHED_ERROR:.1%}."]


def cost_models() -> list[str]:
    """The first plan of each model, both estimated by the exact one."""
    lines = [
        "| cluster | hpdc24's first plan, by hpdc24 | the same by exact | exact's first plan | gain |",
        "|---|---|---|---|---|",
    ]
    for name, preset in PRESETS:
        model, clusters = find_model(name), load_clusters(preset)
        rows = hpdc24.search(model, clusters, published_costs([read_costs()], model))
        first = next(row for row in rows if not row.plain[0])
        shape = Shape(first.tp, first.dp, first.pp, first.mbs)
        same = estimate(clusters[0], shape, first.placement, first.partition, name)
        best = search(model, clusters, [read_costs()], [Options()], Goal(top=1))[0]
        gain = same.step_time / best.step_time
        times = f"{first.step_time:.4f} | {same.step_time:.4f} | {best.step_time:.4f}"
        lines.append(f"| {preset} | {times} | {gain:.3f}× |")
    return lines


def estimate(
    cluster: Cluster,
    shape: Shape,
    placement: tuple[str, ...],
    partition: tuple[int, ...],
    name: str = "gpt2-xl",
    gradient_bytes: int = 4,
) -> Plan:
    options = Options(gradient_bytes=gradient_bytes)
    return Planner(find_model(name), cluster, [read_costs()], options).estimate(shape, placement, partition)


if __name__ == "__main__":
    sys.exit(main())
