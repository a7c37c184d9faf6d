"""Seconds of a unit that was not measured: those of its kernels, or of its host where that is slower.

Matrix products take what ``chakra_et.cost`` predicts, which is fitted to public tables of measured ones;
everything else is bound by the GPU's memory. An eager framework's host starts one kernel after the other: a
pass of a unit takes at least what the host needs for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chakra_et.cost import gpus
from chakra_et.cost.gpus import Gpu
from chakra_et.cost.kernel_times import kernel_times
from fasop.exact.kernels import Fused, Kernel, Matmul, unit_work
from fasop.inputs.models import Model
from fasop.plans.options import Options

# GPUs as cluster files call them: the name in chakra_et's table, and bytes per second of another memory. The
# A100 of AWS's p4d has 40 GB, GH-96 is the GH200 with 96 GB.
CALLED = {
    "A100": ("A100", 1.555e12),
    "A100-80GB": ("A100", 2.039e12),
    "A10G": ("A10", 0.6e12),
    "RTX-3090": ("RTX3090", 0.936e12),
    "Titan-RTX": ("RTX2080Ti", 0.672e12),
    "GH-96": ("H200", 4.0e12),
}
# Of the rate of a large product, in the fused attention kernel: Dao 2023, "FlashAttention-2", figures 4 to 6
# (A100, head width 128: about 200 of 312 TFLOPS).
FLASH_SHARE, LARGE = 0.75, (1, 8192, 8192, 4096, 1)
SETS = 6  # of operands that take turns in the cache: a layer's products each have their own
# Of the datasheet's memory bandwidth, in elementwise kernels; and seconds that a host needs for a unit's
# forward pass, twice for a backward pass. Both chosen on vTrain's A100 runs (benchmarks/planner_accuracy.py).
MEMORY_SHARE, HOST = 0.67, 0.8e-3
# Numbers that Adam with fp32 master weights touches per parameter, in bytes: gradient copied, unscaled and
# its norm taken (4 + 8 + 4), gradient, weight and two moments read (16), three written (12), 16-bit weight
# written (2).
UPDATE_BYTES = {"mixed": 46, "fp32": 28}


@functools.cache
def hardware(name: str) -> Gpu | None:
    """The GPU that cluster files call so; None for one that is in no table."""
    called, memory = CALLED.get(name, (name, 0.0))
    if called not in gpus.names():
        return None
    found = gpus.gpu(called)
    return replace(found, memory=memory) if memory else found


def known() -> set[str]:
    return {*gpus.names(), *CALLED}


def unit_seconds(
    gpu: Gpu, model: Model, kind: str, tp: int, mbs: int, options: Options, ep: int = 1
) -> tuple[float, float, float]:
    """Seconds of the kernels of a unit's forward and backward pass, and of the part of the forward that
    selective recomputation runs again; without collectives.
    """
    work = unit_work(model, kind, tp, mbs, options.attention, options.sequence_parallel and tp > 1, ep)
    forward, backward, scores = (
        kernel_seconds(kernels, gpu, options.activation_bytes)
        for kernels in (work.forward, work.backward, work.scores)
    )
    return forward, backward, scores


def host_seconds(kinds: str) -> tuple[np.ndarray, np.ndarray]:
    """What a host needs to start the kernels of each unit, forward and backward."""
    forward = np.array([0.0 if kind == "E" else HOST for kind in kinds])
    return forward, 2 * forward


def update_seconds(gpu: Gpu, options: Options) -> float:
    """Seconds of the optimizer's step for each parameter."""
    return UPDATE_BYTES[options.precision] / (gpu.memory * MEMORY_SHARE)


def kernel_seconds(kernels: Sequence[Kernel], gpu: Gpu, width: int) -> float:
    """Seconds of kernels one after the other; width: bytes per number."""
    shapes = [(k.copies, k.m, k.n, k.k, SETS) for k in kernels if isinstance(k, Matmul)]
    fused = sum(k.operations for k in kernels if isinstance(k, Fused))
    moved = sum(k.numbers for k in kernels if not isinstance(k, Matmul | Fused))
    rate = FLASH_SHARE * 2 * LARGE[1] * LARGE[2] * LARGE[3] / _products(gpu, width, (LARGE,))
    seconds = moved * width / (gpu.memory * MEMORY_SHARE) + fused / rate
    return seconds + (_products(gpu, width, tuple(shapes)) if shapes else 0.0)


@functools.lru_cache(maxsize=65536)
def _products(gpu: Gpu, width: int, shapes: tuple[tuple[int, ...], ...]) -> float:
    """Seconds of matrix products (copies, m, n, k, sets of operands)."""
    # In fp32 PyTorch trains with TF32 where the GPU has it.
    number = "16 bit" if width == 2 else "tf32" if "tf32" in gpu.peaks else "float"
    return float(kernel_times(gpu).micros(number, shapes).sum()) / 1e6
