"""Starts the real training on ranks of this machine, for the tests beside this file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_lm.logs import records
from megatron_lm.settings import PREFIX
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "megatron_lm" / "_00_pretrain_gpt.py"
TINY = {
    "MODEL": "tiny", "TRAIN_ITERS": "3", "LOG_INTERVAL": "1", "LR": "1e-2", "LR_DECAY_ITERS": "100",
    "GLOBAL_BATCH_SIZE": "8", "MICRO_BATCH_SIZE": "1", "PRECISION": "fp32",
}  # fmt: skip


def layout(partition: str = "4", tensor: int = 1, data: int = 1) -> dict[str, str]:
    """Settings of a layout; ``partition``: layers of each stage."""
    stages = len(partition.split("-"))
    ranks = str(stages * tensor * data)
    return {
        "PARTITION": partition, "PIPELINE_MP_SIZE": str(stages), "TENSOR_MP_SIZE": str(tensor),
        "DP_SIZE": str(data), "WORLD_SIZE": ranks, "NPROC_PER_NODE": ranks, "NNODES": "1",
    }  # fmt: skip


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings under the names that the training reads."""
    return {PREFIX + name: value for name, value in settings.items()}


def train(script: Path = PRETRAIN, timeout: float = 300, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run to the end under torchrun."""
    settings = TINY | settings
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", settings["NPROC_PER_NODE"]]
    command += ["--master-port", str(free_port()), str(script)]
    env = os.environ | environment(settings) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The rendezvous has a port of its own, and torchrun sets MASTER_PORT for the ranks.
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3_000:]
    return [float(found.loss) for found in records.iterations(done.stdout.encode()) if found.loss is not None]


def norms(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(found.grad_norm or 0) for found in records.iterations(done.stdout.encode())]
