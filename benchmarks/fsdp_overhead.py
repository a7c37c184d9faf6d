#!/usr/bin/env python3
"""What ``fully_shard`` itself costs a CPU rank, Python included: for chakra_et.transform.fsdp.py.

    python benchmarks/fsdp_overhead.py

Two gloo ranks train models of small linear layers under DDP and under FSDP2. What the main thread does for
FSDP2, and between operators more than under DDP, is fitted as so much for each collective, and so much for
each parameter in it; in times of an operator that returns a view. Copies hardly count: a parameter has
16 KiB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.predict_processes import free_port
from chakra_et.convert import runs as convert_sets
from chakra_et.convert.pair import PairOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.job.operators import inside
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.traces import sets as trace_sets
from chakra_et.transform.ddp import find_backward
from chakra_et.transform.fsdp import ddp_rows, view_micros

WIDTH, BATCH, STEPS = 64, 8, 6
MODELS = [(blocks, layers) for blocks in (2, 4) for layers in (1, 2, 4, 8, 12)]
"""Blocks, and linear layers in each: two parameters a layer."""


def rank_main(folder: str) -> None:
    """Train all models under both wrappers, and capture."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from chakra_et.capture.tracer import ChakraTracer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for blocks, layers in MODELS:
        for wrapper in ("ddp", "fsdp2"):
            parts = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(blocks)]
            model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts)
            if wrapper == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                for part in parts:
                    fully_shard(part)
                fully_shard(model)
            name = f"{wrapper}_{blocks}_{layers}"
            for _ in range(3):
                model(torch.ones(BATCH, WIDTH)).sum().backward()
                model.zero_grad()
            with ChakraTracer(folder, name, 0, 1, STEPS, rank, dist.get_world_size()) as tracer:
                for _ in range(1 + STEPS):
                    model(torch.ones(BATCH, WIDTH)).sum().backward()
                    model.zero_grad()
                    tracer.step()
    dist.destroy_process_group()


def calls_per_step(path: Path) -> float:
    """What the main thread spends in the median step on ``fully_shard`` and between operators, but for DDP's
    reduction, in times of a view of the same trace.

    Calls of collectives are left out, in which a thread may wait. Raises ``TraceError`` where the bytes of
    DDP's all-reduces weren't recorded.
    """
    trace = et_file.read(path)
    name = np.array(trace.names.table)[trace.names.index]
    tid = trace.column("tid", -1)
    main = tid == np.bincount(tid[tid >= 0]).argmax()
    ours = np.flatnonzero([each.startswith((b"FSDP::", b"RegisterPostBackward")) for each in name])
    counted = (name == b"host-overhead") | (inside(trace, ours.tolist()) >= 0)
    counted &= main & ~np.array([each.startswith((b"c10d::", b"gloo:")) for each in name])
    if not len(ours):
        counted &= ~ddp_rows(trace, find_backward(trace, 0, str(path)))
    taken = np.where(counted, trace.duration_micros.astype(float), 0.0)
    return float(np.median(np.add.reduceat(taken, step_rows(trace)[1]))) / view_micros(trace)


def main() -> int:
    if len(sys.argv) > 1:
        rank_main(sys.argv[1])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, folder]
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        if any([rank.wait(timeout=600) for rank in ranks]):
            print("the runs failed")
            return 1
        convert_sets.convert_sets(trace_sets.find(Path(folder), "*"), PairOptions())
        rows, extra = [], []
        for blocks, layers in MODELS:
            for rank in range(2):
                paths = [Path(folder, f"{name}_{blocks}_{layers}.{rank}.et") for name in ("ddp", "fsdp2")]
                try:
                    ddp, fsdp = map(calls_per_step, paths)
                except TraceError as error:
                    print(f"left out: {error}")
                    continue
                # Each block is gathered twice and reduced once, the root (one layer) once each.
                rows.append((3 * blocks + 2, 2 * (3 * blocks * layers + 2)))
                extra.append(fsdp - ddp)
                print(f"{blocks} blocks of {layers} layers: {extra[-1]:,.0f} calls")
    columns, wanted = np.array(rows, float), np.array(extra)
    found = np.linalg.lstsq(columns / wanted[:, None], np.ones(len(wanted)), rcond=None)[0]
    error = np.sqrt(np.mean((columns @ found / wanted - 1) ** 2))
    print(f"{found[0]:.0f} for each collective, {found[1]:.1f} for each parameter in it; ±{error:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
