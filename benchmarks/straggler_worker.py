#!/usr/bin/env python3
"""A small DDP training run whose ranks do different amounts of work, captured by the tracer.

    torchrun --nproc_per_node=2 benchmarks/straggler_worker.py FOLDER --cases '{"run": {"repeats": [1, 3]}}'

Of each case and rank, ``repeats``: how often the rank applies its model's block in each step, to which
forward and backward are in proportion; ``delays_ms``: how long it waits for its input in each step. The cases
take turns in the same processes, each rank on a core of its own, and are traced as ``CASE_rROUND``. Rank 0
prints ``{"step_s": {TRACE: [...]}}``: the recorded steps' times by its own clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from chakra_et.capture.tracer import ChakraTracer

WAIT, WARM_UP = 2, 1


class Model(torch.nn.Module):
    def __init__(self, repeats: int, width: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.block = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            values = self.block(values)
        return values.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--cases", type=json.loads, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")
    models = {
        name: torch.nn.parallel.DistributedDataParallel(
            Model(case.get("repeats", [1] * world)[rank], args.width)
        )
        for name, case in args.cases.items()
    }
    values = torch.randn(args.batch, args.width)
    times = {}
    for number in range(args.rounds):
        for name, case in args.cases.items():
            delay = case.get("delays_ms", [0.0] * world)[rank] / 1000
            times[f"{name}_r{number}"] = run(models[name], values, delay, args, f"{name}_r{number}")
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"step_s": times}))


def run(
    model: torch.nn.Module, values: torch.Tensor, delay: float, args: argparse.Namespace, name: str
) -> list[float]:
    """Trace some steps; the times of those recorded, s."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ends = []
    with ChakraTracer(args.folder, name, WAIT, WARM_UP, args.steps) as tracer:
        for _ in range(WAIT + WARM_UP + args.steps):
            time.sleep(delay)
            optimizer.zero_grad()
            model(values).backward()
            optimizer.step()
            dist.barrier()
            ends.append(time.perf_counter())
            tracer.step()
    return [after - before for before, after in itertools.pairwise(ends[WAIT + WARM_UP - 1 :])]


if __name__ == "__main__":
    main()
