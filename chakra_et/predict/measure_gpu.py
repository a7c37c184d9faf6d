"""``chakra-et measure-gpu``: time products and copies on this GPU, and fit the models of kernels to them.

    chakra-et measure-gpu --output my.json
    chakra-et predict NAME --gpu H100:my.json

Takes about five minutes; the GPU must do nothing else. Products are timed as the published tables were that
the models come from: CUDA graphs of calls whose operands take turns. A GPU that ``gpus.json`` doesn't know
gets its peaks and bandwidth from what was measured, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et import text
from chakra_et.cli import option, parse
from chakra_et.cost import gpus
from chakra_et.cost.kernel_times import calibrated, kernel_times
from chakra_et.errors import TraceError
from chakra_et.files import write_json

SETS = 6
"""Sets of operands that take turns."""
_LARGEST_N = 14
_COPY = 1 << 28
_KINDS = {"16 bit": "bfloat16", "float": "float32"}
_BEST = 0.85
"""The share of a peak or bandwidth that the best product or copy reaches."""


@dataclass
class MeasureGpuConfig:
    output: str = option("JSON file to write", "gpu.json", short="-o")
    device: str = option("PyTorch device; cpu only to try the command", "cuda")
    shapes: int = option("shapes per data type", 100, least=1)
    largest: float = option("floating-point operations of the largest product", 4e12, least=1e6)
    repeats: int = option("measurements of each shape", 6, least=1)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(MeasureGpuConfig, argv, description="Time products and copies, and fit a model to them.")
    import torch

    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise TraceError("measure-gpu: PyTorch sees no GPU here: run it on the machine that has one")
    sizes = product_shapes(config.shapes, config.largest)
    points = np.column_stack([np.ones(len(sizes)), sizes, np.full(len(sizes), SETS)])
    taken = {kind: measured_products(config, sizes, dtype) for kind, dtype in _KINDS.items()}
    bandwidth = _copy_bandwidth(config)
    entry = _datasheet(config, sizes, taken, bandwidth)
    times = kernel_times(gpus.read("", entry))
    rows = [("products", "shapes", "mean error before", "after the fit")]
    for kind, micros in taken.items():
        before = times.micros(kind, points)
        times = calibrated(times, kind, points, micros)
        first, last = (f"{np.abs(of / micros - 1).mean():.1%}" for of in (before, times.micros(kind, points)))
        rows.append((_KINDS[kind], f"{len(sizes)}", first, last))
    measured: dict[str, Any] = {kind: dict(times.parameters[kind]) for kind in _KINDS}
    measured["operators"] = {"elementwise.memory": min(bandwidth / times.gpu.memory, 1.0)}
    measured["nearby"] = {
        kind: np.column_stack([each.places, each.weights]).tolist() for kind, each in times.nearby.items()
    }
    # m, n, k and µs of all products
    shown = {kind: np.column_stack([sizes, np.round(of, 2)]).tolist() for kind, of in taken.items()}
    write_json(Path(config.output), {**entry, "measured": measured, "shapes": shown})
    print("\n".join(text.table(rows, right=range(1, 4))))
    print(f"copies reach {bandwidth / 1e9:,.0f} GB/s; wrote {config.output}")
    return 0


def product_shapes(count: int, largest: float) -> np.ndarray:
    """m, n, k of products of up to ``largest`` operations, evenly spread in their logarithms; [count, 3]."""
    found: list[tuple[int, int, int]] = []
    at = 0
    while len(found) < count:
        at += 1
        part = [(at * step) % 1 for step in (0.8191725, 0.6710436, 0.5497004)]  # of the plastic number
        m = round(2 ** (part[0] * _LARGEST_N))
        n, k = (round(2 ** (5 + each * (_LARGEST_N - 5)) / 32) * 32 for each in part[1:])
        if 2.0 * m * n * k <= largest:
            found.append((m, n, k))
    return np.array(found, float)


def measured_products(config: MeasureGpuConfig, sizes: np.ndarray, dtype: str) -> np.ndarray:
    """µs of products m, n, k ``sizes[S, 3]``, calls of different operands behind one another."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    of = {"device": config.device, "dtype": getattr(torch, dtype)}
    found = []
    for m, n, k in sizes.astype(int).tolist():
        pairs = [(torch.randn(m, k, **of), torch.randn(n, k, **of)) for _ in range(SETS)]

        def call(pairs: list[Any] = pairs) -> None:
            for a, b in pairs:
                torch.nn.functional.linear(a, b)

        found.append(call_micros(call, config.device, config.repeats) / SETS)
    return np.array(found)


def _copy_bandwidth(config: MeasureGpuConfig) -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    size = _COPY if config.device != "cpu" else _COPY >> 4
    source = torch.empty(size, dtype=torch.uint8, device=config.device)
    target = torch.empty_like(source)
    taken = call_micros(lambda: target.copy_(source), config.device, config.repeats)
    return 2 * size / taken * 1e6


def call_micros(call: Callable[[], object], device: str, repeats: int) -> float:
    """µs of a call: the mean of repeats in a CUDA graph, after three; on a shared CPU the fastest."""
    import torch

    if device == "cpu":
        call()
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return min(found) * 1e6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    for _ in range(repeats):
        graph.replay()
    end_event.record()
    torch.cuda.synchronize()
    return float(begin_event.elapsed_time(end_event)) / repeats * 1e3


def _datasheet(
    config: MeasureGpuConfig, sizes: np.ndarray, taken: dict[str, np.ndarray], bandwidth: float
) -> dict[str, Any]:
    """What the table knows of this GPU, or what PyTorch tells and was measured."""
    import torch

    on_gpu = config.device != "cpu"
    name = torch.cuda.get_device_name(config.device) if on_gpu else "CPU"
    if known := gpus.by_driver(name):
        return {"name": f"{known} here", **gpus.entry(known), "like": known}
    properties = torch.cuda.get_device_properties(config.device) if on_gpu else None
    rates = {kind: (2 * sizes.prod(axis=1) / micros).max() * 1e6 for kind, micros in taken.items()}
    return {
        "name": name,
        "vendor": "amd" if torch.version.hip else "nvidia",
        "units": getattr(properties, "multi_processor_count", None) or os.cpu_count() or 1,
        "clock": f"{getattr(properties, 'clock_rate', 1_500_000) / 1000:g} MHz",
        "watts": 300,
        "cache": f"{(getattr(properties, 'L2_cache_size', 0) or 32e6) / 1e6:g} MB",
        "memory": f"{bandwidth / _BEST / 1e9:.4g} GB/s",
        "kind": "HBM",
        "peaks": {kind: f"{rate / _BEST / 1e12:.4g} TFLOP/s" for kind, rate in rates.items()},
        "source": "measured by chakra-et measure-gpu; watts and kind of memory are assumed",
    }
