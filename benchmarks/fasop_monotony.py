#!/usr/bin/env python3
"""Whether better hardware ever gives the planner's best plan a longer step.

    python benchmarks/fasop_monotony.py
    python benchmarks/fasop_monotony.py --update         (writes the figures into fasop/README.md)

Plans random clusters of A100 and A10 nodes (4 or 8 GPUs per node, up to 48 GPUs) with GPT-2 XL, BERT and T5;
then again with one type's, or both types', bandwidth between nodes, bandwidth within a node or speed 1.05,
1.3, 2 and 4 times as high. No step may be longer than one of the same cluster with slower hardware. Each
seed is a cluster; nothing depends on the machine. About two seconds per cluster.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.text import plural
from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import CostFile, read_costs
from fasop.inputs.models import find_model
from fasop.plans.options import Options
from fasop.plans.plan import Goal
from fasop.search.search import search

README = ROOT / "fasop" / "README.md"
FACTORS = (1.0, 1.05, 1.3, 2.0, 4.0)


@dataclass
class Config:
    """Which clusters are planned."""

    clusters: int = field(default=300, metadata={"help": "how many"})
    first: int = field(default=0, metadata={"help": "seed of the first"})
    update: bool = field(default=False, metadata={"help": "write the figures into fasop/README.md"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    seeds = range(config.first, config.first + config.clusters)
    compared, slower, worst = 0, [], 1.0
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        bar = tqdm(pool.imap(steps, seeds), total=len(seeds), unit=" clusters", disable=None)
        for seed, found in zip(seeds, bar, strict=True):
            ratio = longest_ratio(found)
            compared += max(len(found) - 1, 0)
            if ratio > 1 + 1e-9:
                slower.append(seed)
                worst = max(worst, ratio)
    line = (
        f"{config.clusters} random clusters, {compared} comparisons: {plural(len(slower), 'cluster')} where "
        "better hardware gave a longer step"
    )
    if slower:
        line += f", by up to {worst - 1:.2%} (seed {', '.join(map(str, slower))})"
    print(f"{line}.")
    if config.update:
        put("monotony", [f"{line}."], README)
    return 0


def steps(seed: int) -> list[float]:
    """Seconds per step of the best plan of one cluster, by ``FACTORS``; empty where nothing fits."""
    dice = random.Random(seed)
    name = dice.choice(["gpt2-xl", "gpt2-xl", "bert-large", "t5"])
    cluster = random_cluster(dice)
    setting = dice.choice(["inter_bandwidth", "intra_bandwidth", "speed"])
    who = dice.choice(["A100", "A10", "both"])
    found = []
    for factor in FACTORS:
        gpus = tuple(
            replace(gpu, **{setting: getattr(gpu, setting) * factor}) if who in (gpu.name, "both") else gpu
            for gpu in cluster.gpus
        )
        options, better = [Options(recompute="selective")], replace(cluster, gpus=gpus)
        plans = search(find_model(name), [better], [costs()], options, Goal(top=1, workers=1))
        found += [plan.step_time for plan in plans]
    return found


@functools.cache
def costs() -> CostFile:
    return read_costs()


def random_cluster(dice: random.Random) -> Cluster:
    size, counts = dice.choice([4, 4, 8]), (dice.randint(0, 3), dice.randint(1, 6))
    if sum(counts) * size > 48:
        size = 4
    a100 = Gpu("A100", 39.59, 32.77, dice.choice([40e9, 100e9, 400e9]), 1840e9)
    between, within = dice.choice([25e9, 40e9, 100e9]), dice.choice([128e9, 252e9])
    a10 = Gpu("A10", 22.2, 8.144, between, within, shared_bus=True)
    present = [(gpu, count) for gpu, count in zip((a100, a10), counts, strict=True) if count]
    return Cluster("random", size, tuple(gpu for gpu, _ in present), tuple(count for _, count in present))


def longest_ratio(found: list[float]) -> float:
    """The longest step relative to the shortest of slower hardware."""
    return max((found[k] / min(found[:k]) for k in range(1, len(found))), default=1.0)


if __name__ == "__main__":
    sys.exit(main())
