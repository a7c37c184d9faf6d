#!/usr/bin/env python3
"""Pretrain a GPT with tensor, data and uneven pipeline parallelism, on megatron-core.

    megatron_lm/_03_submit.sh --local MODEL=tiny

trains the tiny model on two ranks of this machine in about a minute; the loss falls from 8.0. By hand, with
the settings in the environment as _00_conf.sh puts them there:

    (. megatron_lm/_00_conf.sh && torchrun --nproc-per-node "$NPROC_PER_NODE" megatron_lm/_00_pretrain_gpt.py)

Runs on GPUs with NCCL, and without them on the CPU with gloo.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# megatron-core warns on every rank about accelerators that are not installed.
warnings.filterwarnings("ignore", module=r"megatron\.core")

import torch
import torch.distributed as dist

from megatron_lm.settings import from_environment
from utils import distributed
from utils.distributed import World
from utils.watch import Watch


def main(world: World, watch: Watch) -> int:
    """Train as one rank of ``world``."""
    from megatron.core import parallel_state

    from megatron_lm.engine import shim, training

    settings = from_environment()
    if not torch.cuda.is_available():
        shim.apply()
        if settings.precision == "fp16":
            # CPUs are slow at fp16.
            settings = dataclasses.replace(settings, precision="fp32")
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    degrees = settings.tensor_mp_size, settings.pipeline_mp_size
    chunks = settings.virtual_stages if settings.virtual_stages > 1 else None
    parallel_state.initialize_model_parallel(*degrees, chunks)
    return training.train(settings, watch)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"no flags: settings come from the environment\n\n{__doc__}")
    distributed.run(main, dist_timeout=600.0)
