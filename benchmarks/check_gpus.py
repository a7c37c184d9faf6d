#!/usr/bin/env python3
"""How far the model of each GPU is from what kernels of public traces took there, without any source trace.

    python benchmarks/check_gpus.py

Only operators whose shapes are recorded are counted. A further MI300X trace is judged by a fit without it; no
trace of the other GPUs was used in any fit, and all but the specified rates is taken from H100.

A second table has short kernels of NVIDIA's GPUs: what aligned products (V100: 32 bits) took beyond those of
the tables, which were timed in CUDA graphs, and what elementwise kernels took beyond theirs, medians in µs;
and how far apart kernels are that wait for one another, within 3 µs: no part of any kernel's time.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.fit_gpus import OTHERS, Trace, fit, read, read_all
from chakra_et import cli
from chakra_et.cost.operator_times import GpuModel, gpu_model, number
from chakra_et.text import shortened, table

_OWN = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "gpu"
_TRACES = {
    "B200": ("public/b200_eager_rank0.json.gz", None),
    "A100-40GB": ("public/sampled_rank0_of_128.json.gz", None),
    "V100": ("dlrm_8gpu/dlrm_8gpu_rank0_device.json.gz", "dlrm_8gpu/dlrm_8gpu_rank0_host.json.gz"),
    "H200": (f"{_OWN}/device-bound_device.json.gz", f"{_OWN}/device-bound_host.json.gz"),
}
"""The A100's trace doesn't name its GPU: kernels that move 3 GB reach 1.4 TB/s, and the other A100 traces of
that repository are of a card with 42 GB."""
_PAIRS = ("bert-small-uncased", "owlv2-large-patch14-ensemble", "timesformer-base-finetuned-k400")
_SHORT: dict[str, tuple[str, str, str | None]] = {
    name: ("H100", f"public/pairs/h100_{name}.json.gz", None) for name in _PAIRS
}
_SHORT |= {"vLLM": ("B200", *_TRACES["B200"]), "recommendation": ("V100", *_TRACES["V100"])} | {
    name: ("H200", f"{_OWN}/{name}_device.json.gz", f"{_OWN}/{name}_host.json.gz")
    for name in ("host-bound", "compiled", "gloo", "device-bound", "graphs")
}
_SMALLEST_SHARE = 0.01
_PRODUCT, _KERNEL, _APART = 20.0, 5.0, 3.0
"""µs up to which products and other kernels are short, and neighbours wait for one another."""


@dataclass
class Config:
    """Where the traces are."""

    traces: str = field(
        default="../shared/data/traces", metadata={"help": "folder of public/ and dlrm_8gpu/"}
    )


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    folder = Path(config.traces)
    pairs, others = read_all(folder / "public")
    lines: list[tuple[str, ...]] = [
        ("GPU", "trace", "class", "share of time", "measured, ms", "error", "mean")
    ]
    for name, trace, model in zip(OTHERS, others, others_left_out(pairs, others), strict=True):
        lines += rows("MI300X", name, trace, model)
    for gpu, (device, host) in _TRACES.items():
        lines += rows(gpu, device, read(folder / device, folder / host if host else None), gpu_model(gpu))
    print("\n".join(table(lines, right=(3, 4, 5, 6))))
    lines = [("GPU", "trace", "CUDA", "products", "µs beyond", "elementwise", "µs beyond", "µs between")]
    lines += [(gpu, name, *short(folder, gpu, device, host)) for name, (gpu, device, host) in _SHORT.items()]
    print("\n" + "\n".join(table(lines, right=range(3, 8))))
    return 0


def short(folder: Path, gpu: str, device: str, host: str | None) -> tuple[str, ...]:
    """CUDA's version; short products, and what they took beyond the tables; short elementwise kernels, and
    what they took beyond the model; and what lies between kernels."""
    trace, model = read(folder / device, folder / host if host else None), gpu_model(gpu)
    launch = model.of("matrix product", "launch")
    beyond: list[list[float]] = [[], []]
    for work, micros, _ in trace:
        whole = work.product and min(work.aligned) == 16 and number(work.type) in ("16 bit", "float")
        if work.kind == "matrix product" and whole and micros < _PRODUCT:
            beyond[0].append(micros - model.micros(work) + launch)
        elif work.kind == "elementwise" and work.known and work.tested and micros < _KERNEL:
            beyond[1].append(micros - model.micros(work))
    found = json.loads(gzip.decompress((folder / device).read_bytes()))
    version = found.get("cuda_runtime_version", 0)
    kernels = np.array(
        sorted(
            (each["args"]["stream"], float(each["ts"]), each["dur"])
            for each in found["traceEvents"]
            if each.get("cat") == "kernel"
        )
    )
    apart = kernels[1:, 1] - kernels[:-1, 1] - kernels[:-1, 2]
    apart = apart[(np.diff(kernels[:, 0]) == 0) & (apart >= 0) & (apart < _APART)]
    shown = [part for each in beyond for part in (f"{len(each)}", f"{np.median(each):+.1f}" if each else "")]
    between = f"{np.median(apart):.2f}" if len(apart) > len(kernels) / 10 else ""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "", *shown, between


def others_left_out(pairs: Mapping[str, Mapping[str, Trace]], others: Sequence[Trace]) -> list[GpuModel]:
    """MI300X as the pairs and the further traces but one have it, for each of these."""
    given = [pair["MI300X"] for pair in pairs.values()]
    return [fit("MI300X", [*given, *others[:at], *others[at + 1 :]]) for at in range(len(others))]


def rows(gpu: str, name: str, trace: Trace, model: GpuModel) -> list[tuple[str, ...]]:
    """Of each class, and of products in tensor cores whose rows aren't aligned: its share of the time of all
    kernels, the time with recorded shapes, the error of the sum and the mean error, by time."""
    whole = sum(sample.micros * sample.calls for sample in trace)
    sums: dict[str, list[float]] = {}
    for work, micros, calls in trace:
        if work.known and work.tested:
            odd = min(work.aligned) < 16 and number(work.type) not in ("float", "double")
            for kind in (work.kind, *["  rows not aligned"] * (work.kind == "matrix product" and odd)):
                of_kind = sums.setdefault(kind, [0.0, 0.0, 0.0])
                of_kind[0] += micros * calls
                of_kind[1] += model.micros(work) * calls
                of_kind[2] += abs(model.micros(work) - micros) * calls
    return [
        (
            gpu,
            shortened(Path(name).name.split(".")[0], 24),
            kind,
            f"{taken / whole:.1%}",
            f"{taken / 1e3:,.2f}",
            f"{made / taken - 1:+.0%}",
            f"{off / taken:.0%}",
        )
        for kind, (taken, made, off) in sorted(sums.items(), key=lambda item: -item[1][0])
        if taken >= _SMALLEST_SHARE * whole
    ]


if __name__ == "__main__":
    sys.exit(main())
