"""Lets megatron-core run without CUDA, on the CPU with gloo. Applied only where there is no CUDA.

megatron-core takes a GPU for granted in some places: where it makes tensors, in the state of random
numbers, where it coalesces collectives, and where its optimizers look at tensor types. Each patch below
stands for one of them; on GPUs nothing is patched.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch


def apply() -> None:
    """Patch torch and megatron-core in this process. Call it before a model is built."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    library: Any = torch
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda device=None: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    tensor.cuda = lambda self, *args, **options: self
    # gloo has no coalesced collectives, and traces lack the group of those that PyTorch puts in their place.
    buffers: Any = param_and_grad_buffer
    buffers._coalescing_manager = lambda *args, **options: contextlib.nullcontext()
    # The schedules count tokens, and the optimizers scale and clip, in tensors with device="cuda".
    for name in ("zeros", "tensor", "empty"):
        setattr(library, name, _on_cpu(getattr(torch, name)))
    # The optimizers only take 'torch.cuda.FloatTensor' and its half-precision relatives.
    tensor.type = _named_cuda(torch.Tensor.type)


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*args, **options)

    return call


def _named_cuda(function: Any) -> Any:
    @functools.wraps(function)
    def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = function(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return call
