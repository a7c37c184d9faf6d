"""Measured kernels against ``cost/``: products, attention, normalization, elementwise, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from chakra_et.cost import gpus
from chakra_et.cost.operator_times import GpuModel, OperatorCall, gpu_model
from chakra_et.doctor.captures import quietly
from chakra_et.doctor.results import Line, at_most, not_run
from chakra_et.files import write_json
from chakra_et.predict.measure_gpu import SETS, MeasureGpuConfig, call_micros, measured_products

SEED, CALLS = 1, 20
MOST = {"16 bit": 0.09, "attention": 0.15, "normalization": 0.2, "elementwise": 0.12, "optimizer": 0.12}
"""The largest good mean error of a GPU that others have measured."""
_OPTIMIZER_BYTES = 28 / 0.84
"""Per parameter of Adam in fp32: weight, gradient and two moments are read, all but the gradient written; at
0.84 of the rate of elementwise kernels, as on an H200: each launch has 320 blocks at most."""


def shapes(each: int, most: int) -> dict[str, np.ndarray]:
    """Shapes of each kind, drawn with a seed: two times ``each`` products and ``each`` of the others.

    16 bit: batch, M, N, K and sets of operands; attention: batch, heads, heads of keys, queries, keys, size
    of a head, causal, layout (both as ``cost.kernel_times`` takes them); normalization: rows and columns; the
    others: elements, so many that a launch doesn't count.
    """
    random = np.random.default_rng(SEED)
    sides = np.ceil(2 ** random.uniform(4, np.log2(most), (2 * each, 3)) / 8).astype(int) * 8
    ones = np.ones((2 * each, 1), int)
    heads = random.choice([4, 8, 16], each)
    lengths = random.choice([n for n in (128, 256, 512, 1024, 2048, 4096) if n <= most], each)
    batch, size = np.maximum(most // lengths // 2, 1), np.full(each, 64)
    none, causal = np.zeros(each, int), random.integers(0, 2, each)
    rows, columns = (2 ** random.uniform(6, np.log2(2 * most), (2, each))).astype(int)
    elements = (most**2 / 2 ** random.uniform(0, 2, (2, each, 1))).astype(int) // 8 * 8
    return {
        "16 bit": np.hstack([ones, sides, SETS * ones]),
        "attention": np.stack([batch, heads, heads, lengths, lengths, size, causal, none], axis=1),
        "normalization": np.stack([rows, columns // 8 * 8], axis=1),
        "elementwise": elements[0],
        "optimizer": elements[1],
    }


def call(kind: str, shape: list[int], device: str) -> Callable[[], object]:
    """One kernel's operator on random operands of 16 bits."""
    of: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    if kind == "attention":
        batch, heads, _, queries, keys, size, causal, _ = shape
        q, k_, v = (torch.randn(batch, heads, length, size, **of) for length in (queries, keys, keys))
        return lambda: functional.scaled_dot_product_attention(q, k_, v, is_causal=bool(causal))
    if kind == "normalization":
        x, weight = torch.randn(*shape, **of), torch.ones(shape[1], **of)
        return lambda: functional.layer_norm(x, shape[1:], weight, weight)
    if kind == "elementwise":
        first, second = torch.randn(2, *shape, **of)
        return lambda: first + second
    parameter = torch.zeros(*shape, device=device, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW([parameter], fused=True, capturable=device == "cuda").step


def told(model: GpuModel, kind: str, rows: np.ndarray) -> np.ndarray:
    """What the model of a GPU says of the shapes, µs [shape]."""
    if kind in ("16 bit", "attention"):
        return model.kernels.micros(kind, rows)
    count = rows.prod(axis=1).astype(float)
    if kind == "normalization":
        calls = [OperatorCall(kind, 5 * n, 4 * n, row=row) for n, row in zip(count, rows[:, 1], strict=True)]
    elif kind == "elementwise":
        calls = [OperatorCall(kind, n, 6 * n) for n in count]
    else:
        calls = [OperatorCall("elementwise", n, _OPTIMIZER_BYTES * n, type="float") for n in count]
    return np.array([model.micros(each) for each in calls])


def behind_one_another(one: Callable[[], object], device: str) -> float:
    """µs of a call among ``CALLS`` in a CUDA graph: a host may take 4 µs to launch a graph."""

    def all_of_them() -> None:
        for _ in range(CALLS):
            one()

    return call_micros(all_of_them, device, 5) / CALLS


def check(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """This GPU's table by ``measure-gpu``, and the mean error of each kind of kernel (data: kernels.json)."""
    device = "cuda" if on_gpu else "cpu"
    points = shapes(30, 8192) if on_gpu else shapes(2, 128)
    config = MeasureGpuConfig(device=device)
    taken = {"16 bit": measured_products(config, points["16 bit"][:, 1:4], "bfloat16")}
    taken |= {
        kind: np.array([behind_one_another(call(kind, row, device), device) for row in rows.tolist()])
        for kind, rows in points.items()
        if kind not in taken
    }
    write_json(
        folder / "kernels.json",
        {kind: np.column_stack([points[kind], times.round(2)]).tolist() for kind, times in taken.items()},
    )
    table = folder / "gpu.json"
    size = ["--shapes", "60", "--largest", "1e12"] if on_gpu else ["--shapes", "6", "--largest", "1e7"]
    quietly(["measure-gpu", "--device", device, "-o", str(table), *size])
    measured = gpu_model(str(table))
    known = gpus.by_driver(torch.cuda.get_device_name(0)) if on_gpu else None
    if known is None:
        yield not_run("mean errors by the table of GPUs", "this GPU isn't in it")
    models = {f"as {known}": gpu_model(known)} if known else {}
    for kind, times in taken.items():
        for way, model in (models | {"by measure-gpu": measured}).items():
            off = float(np.abs(told(model, kind, points[kind]) / times - 1).mean())
            yield at_most(f"{kind}: mean error of {len(times)} shapes, {way}", off, MOST[kind], on_gpu)
