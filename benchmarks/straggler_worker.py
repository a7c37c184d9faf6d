#!/usr/bin/env python3
"""A small DDP training run whose ranks do different amounts of work, captured by the tracer.

    torchrun --nproc_per_node=2 benchmarks/straggler_worker.py FOLDER NAME --repeats 1 3
    torchrun --nproc_per_node=2 benchmarks/straggler_worker.py FOLDER NAME --delays-ms 0 200

``--repeats``: how often each rank applies its model's block in each step, to which forward and backward are
in proportion. ``--delays-ms``: how long each rank waits for its input in each step. Rank 0 prints
``{"step_s": [...]}``: the recorded steps' times by its own clock.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("name")
    parser.add_argument("--repeats", type=int, nargs="+")
    parser.add_argument("--delays-ms", type=float, nargs="+")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    repeats, delays = args.repeats or [1] * world, args.delays_ms or [0.0] * world
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model(repeats[rank], args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    values = torch.randn(args.batch, args.width)
    ends = []
    with ChakraTracer(args.folder, args.name, WAIT, WARM_UP, args.steps, rank, world) as tracer:
        for _ in range(WAIT + WARM_UP + args.steps):
            time.sleep(delays[rank] / 1000)
            optimizer.zero_grad()
            model(values).backward()
            optimizer.step()
            dist.barrier()
            ends.append(time.perf_counter())
            tracer.step()
    dist.destroy_process_group()
    if rank == 0:
        recorded = ends[WAIT + WARM_UP - 1 :]
        times = [after - before for before, after in zip(recorded, recorded[1:], strict=False)]
        print(json.dumps({"step_s": times}))


if __name__ == "__main__":
    main()
