"""Seconds of a unit that was not measured: each kernel at the pace of the GPU's arithmetic or memory.

A matrix product is cut into tiles, one per multiprocessor at a time, so that a last wave that is not full
takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave
quantization). Every wave also fetches its first operands and writes its output, while nothing multiplies, so
that short products lose more (the same guide: a larger K is more efficient). That makes efficiency a curve
over the shape. Its height is the rate of the best shape (``data/gpus.json``) times ``SUSTAINED``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from fasop.exact.kernels import Fused, Kernel, Matmul, unit_work
from fasop.inputs.gpus import Hardware
from fasop.inputs.models import Model
from fasop.plans.options import Options

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
# Of the full rate that each tile reaches: smaller ones move more data per operation.
TILE_RATES = (1.0, 1.0, 0.9, 0.7, 0.5)
# Rate over a whole training step, relative to a product alone: makes the median error of the five
# calibration rows of benchmarks/planner_accuracy.py 0.
SUSTAINED = 0.85
FETCH = 1e-6  # seconds until a tile has its first operands: about two trips to the GPU's memory
BEST_K = 2048  # of the best shapes in the table that data/gpus.json cites, which have 1,536 to 2,816
# Of the rate of the best product, in the fused attention kernel: Dao 2023, "FlashAttention-2", figures 4 to 6
# (A100, head width 128: about 200 of 312 TFLOPS).
FLASH_SHARE = 0.75
MEMORY_SHARE = 0.8  # of the datasheet's memory bandwidth, in elementwise kernels
LAUNCH = 1e-5  # seconds per kernel at least: what an eager framework takes to start it
# Numbers that Adam with fp32 master weights touches per parameter, in bytes: gradient copied, unscaled and
# its norm taken (4 + 8 + 4), gradient, weight and two moments read (16), three written (12), 16-bit weight
# written (2).
UPDATE_BYTES = {"mixed": 46, "fp32": 28}


def unit_seconds(
    gpu: Hardware, model: Model, kind: str, tp: int, mbs: int, options: Options, ep: int = 1
) -> tuple[float, float, float]:
    """Seconds of a unit's forward and backward pass, and of the part of the forward that selective
    recomputation runs again; without collectives.
    """
    work = unit_work(model, kind, tp, mbs, options.attention, options.sequence_parallel and tp > 1, ep)
    width = options.activation_bytes
    return (
        _seconds(work.forward, gpu, width),
        _seconds(work.backward, gpu, width),
        _seconds(work.scores, gpu, width),
    )


def update_seconds(gpu: Hardware, parameters: float, options: Options) -> float:
    """Seconds of the optimizer's step over so many parameters."""
    return parameters * UPDATE_BYTES[options.precision] / (gpu.bytes_per_second * MEMORY_SHARE)


def _seconds(kernels: Iterable[Kernel], gpu: Hardware, width: int) -> float:
    return sum(kernel_seconds(kernel, gpu, width) for kernel in kernels)


@functools.lru_cache(maxsize=65536)
def kernel_seconds(kernel: Kernel, gpu: Hardware, width: int) -> float:
    """Seconds of one kernel; width: bytes per number."""
    rate = gpu.matmul_rate(width) * SUSTAINED  # of the best product
    bandwidth = gpu.bytes_per_second * MEMORY_SHARE
    if isinstance(kernel, Matmul):
        m, n, k, copies = kernel
        moved = width * copies * (m * k + k * n + m * n) / bandwidth
        return max(min(_tiled(kernel, gpu, width)), moved, LAUNCH)
    if isinstance(kernel, Fused):
        return max(kernel.operations / (rate * FLASH_SHARE), LAUNCH)
    return max(kernel.numbers * width / bandwidth, LAUNCH)


def _tiled(product: Matmul, gpu: Hardware, width: int) -> Iterable[float]:
    """Seconds with each size of tile."""
    rate = _steady_rate(gpu, width) * SUSTAINED
    for tile, share in zip(TILES, TILE_RATES, strict=True):
        tiles = math.ceil(product.m / tile[0]) * math.ceil(product.n / tile[1]) * product.copies
        waves = math.ceil(tiles / gpu.multiprocessors)
        operations = 2 * tile[0] * tile[1] * product.k * gpu.multiprocessors
        yield waves * (operations / (rate * share) + _idle_seconds(gpu, tile, width))


def _idle_seconds(gpu: Hardware, tile: tuple[int, int], width: int) -> float:
    """Seconds of a wave in which nothing multiplies: all multiprocessors fetch, or write a tile each."""
    written = width * tile[0] * tile[1] * gpu.multiprocessors
    return FETCH + written / (gpu.bytes_per_second * MEMORY_SHARE)


@functools.lru_cache(maxsize=64)
def _steady_rate(gpu: Hardware, width: int) -> float:
    """Operations/s while a wave multiplies: with what it is idle, the best product has its published rate."""
    best, peak = gpu.matmul_rate(width), gpu.peak_rate(width)
    wave = 2 * TILES[0][0] * TILES[0][1] * BEST_K * gpu.multiprocessors / best
    idle = _idle_seconds(gpu, TILES[0], width)
    return min(best * wave / (wave - idle), peak) if wave > idle else peak
