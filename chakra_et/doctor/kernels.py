"""Measured kernels against ``cost/``: matrix products and attention of many shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from chakra_et.cost import gpus
from chakra_et.cost.kernel_times import kernel_times
from chakra_et.doctor.results import Line, at_most, not_run
from chakra_et.files import write_json

SHAPES, SEED, REPEATS = 300, 1, 20
MOST = {"16 bit": 0.09, "attention": 0.15}
"""Mean errors for a GPU that was measured by others; others are told, and not judged."""


def shapes(count: int, most: int) -> dict[str, np.ndarray]:
    """Points of ``cost.kernel_times``: two thirds products, one third attention, drawn with a seed."""
    random = np.random.default_rng(SEED)
    products, attention = 2 * count // 3, count - 2 * count // 3
    sizes = 2 ** random.uniform(4, np.log2(most), (products, 3))
    sides = (np.ceil(sizes / 8) * 8).astype(int)
    ones = np.ones((products, 1), int)
    heads = random.choice([4, 8, 16], attention)
    lengths = random.choice([n for n in (128, 256, 512, 1024, 2048, 4096) if n <= most], attention)
    batch = np.maximum(most // lengths // 2, 1)
    columns = (
        batch,
        heads,
        heads,
        lengths,
        lengths,
        np.full(attention, 64),
        random.integers(0, 2, attention),
    )
    whole = np.stack([*columns, np.zeros(attention, int)], axis=1)
    return {"16 bit": np.hstack([ones, sides, ones]), "attention": whole}


def call(kind: str, point: np.ndarray, device: str) -> Callable[[], torch.Tensor]:
    """One kernel's operator on random operands."""
    number = torch.bfloat16 if device == "cuda" else torch.float32
    if kind == "16 bit":
        _, m, n, k, _ = (int(each) for each in point)
        a = torch.randn(m, k, device=device, dtype=number)
        b = torch.randn(n, k, device=device, dtype=number).t()
        return lambda: a @ b
    batch, heads, _, queries, keys, size, causal, _ = (int(each) for each in point)
    q, k_, v = (
        torch.randn(batch, heads, length, size, device=device, dtype=number)
        for length in (queries, keys, keys)
    )
    return lambda: functional.scaled_dot_product_attention(q, k_, v, is_causal=bool(causal))


def micros(run: Callable[[], torch.Tensor], device: str, repeats: int = REPEATS) -> float:
    """µs of a call, the median of ``repeats``; by events of the device where there is one."""
    for _ in range(3):
        run()
    if device != "cuda":
        import time

        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin_event, end_event in pairs:
        begin_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs)


def check(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """The mean error of each kind of kernel, and the table as kernels.json."""
    device = "cuda" if on_gpu else "cpu"
    points = shapes(SHAPES if on_gpu else 9, 8192 if on_gpu else 128)
    measured = {
        kind: [micros(call(kind, point, device), device, REPEATS if on_gpu else 3) for point in rows]
        for kind, rows in points.items()
    }
    rows = {
        kind: [[*map(int, point), taken] for point, taken in zip(points[kind], times, strict=True)]
        for kind, times in measured.items()
    }
    write_json(folder / "kernels.json", rows)
    name = gpus.by_driver(torch.cuda.get_device_name(0)) if on_gpu else None
    if name is None:
        where = "this GPU" if on_gpu else "the CPU"
        for kind, times in measured.items():
            yield not_run(f"{kind}: {len(times)} shapes measured", f"{where} is not in the table of GPUs")
        return
    model = kernel_times(gpus.gpu(name))
    for kind, times in measured.items():
        told = model.micros(kind, points[kind])
        off = np.abs(told / np.array(times) - 1)
        yield at_most(f"{kind}: mean error of {len(times)} shapes on {name}", float(off.mean()), MOST[kind])
