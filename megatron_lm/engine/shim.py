"""Lets megatron-core run without CUDA, on the CPU with gloo. Applied only where there is no CUDA.

megatron-core takes the GPU for granted in some places: where it makes tensors, and for the state of random
numbers. Each patch below stands for one of them; on GPUs megatron-core runs as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def apply() -> None:
    """Patch torch and megatron-core in this process. Call it before a model is built."""
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
    # The pipeline schedules count tokens in torch.zeros([], device="cuda").
    torch.zeros = _on_cpu(torch.zeros)
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*args, **options)

    return call
