#!/usr/bin/env python3
"""Pretrain GPT-2 with tensor, data and uneven pipeline parallelism, on megatron-core.

    MODEL=tiny megatron_lm/_03_submit.sh --local

trains the tiny model on two ranks of this machine in about a minute; the loss falls from 8.0. By hand, with
every setting in the environment (_00_conf.sh sets and checks them):

    (. megatron_lm/_00_conf.sh && torchrun --nproc-per-node "$NPROC_PER_NODE" megatron_lm/_00_pretrain_gpt.py)

Runs as it is on GPUs with NCCL, and on the CPU with gloo.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# megatron-core says on every rank which accelerators of it are not installed.
warnings.filterwarnings("ignore", module=r"megatron\.core")

import torch
import torch.distributed as dist

from megatron_lm.settings import Settings
from utils import distributed
from utils.distributed import World
from utils.training.watch import Watch

DIST_TIMEOUT = 600.0


def main(world: World, watch: Watch) -> int:
    from megatron.core import parallel_state

    from megatron_lm.engine import shim, training

    settings = Settings.from_environment()
    if not torch.cuda.is_available():
        shim.apply()
        settings = dataclasses.replace(settings, precision="fp32")
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(settings.tensor_mp_size, settings.pipeline_mp_size)
    training.train(settings)
    return 0


if __name__ == "__main__":
    distributed.run(main, DIST_TIMEOUT)
