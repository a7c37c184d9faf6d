#!/usr/bin/env python3
"""Fit what chakra_et/cost/operator_times.json says of H100 and MI300X, and judge it by models left out.

    python benchmarks/fit_gpus.py             print parameters and the errors of each model when left out
    python benchmarks/fit_gpus.py --write     also write them there
    python benchmarks/fit_gpus.py --operators each operator beside what the fit makes of it

The data: operators of pairs of traces, h100_MODEL.json.gz and mi300_MODEL.json.gz , and of further MI300X
traces. Every parameter starts from ``PRIORS``, a value with a standard deviation of its
logarithm, and moves as far as the data ask for: maximum a posteriori, least squares of the logarithms of
times, each operator weighted by its share of its class's time in its trace. So a parameter of which the data
say nothing keeps its prior. Leaving out a model leaves out both of its traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.cost_fits import write_parameters
from benchmarks.gpu_priors import GPUS, PRIORS
from chakra_et import cli
from chakra_et.convert.pair import convert_pair
from chakra_et.cost import kernel_times
from chakra_et.cost.fit import fit as fit_model
from chakra_et.cost.operator_times import CLASSES, FILE, SETS, GpuModel, OperatorCall, gpu_model, item_bytes
from chakra_et.errors import TraceError
from chakra_et.files import write_text
from chakra_et.simulate.run import make_run
from chakra_et.text import table
from chakra_et.traces.sets import Pair
from chakra_et.transform.gpu import launched_operators, on_target

_STANDS = {("H100", "queue.more"), ("MI300X", "cache.speedup"), ("MI300X", "matrix product.launch")}
_STANDS |= {("MI300X", "normalization.row")}
"""No such effect shows in any trace: these keep their values."""
_SCATTER = 0.15
"""Standard deviation of the logarithm of an operator's time, for the weight of the priors."""
_FITTED_SCATTER = 0.12
"""That of ``chakra_et.cost.fit``."""
_LEAST_SHARE = 0.02
_WIDER = 3.0
"""How much further AMD's parameters of products may be from the prior, which is NVIDIA's."""
_SMALLEST_SHARE = 0.01
_LEAST_ERROR, _UNTESTED_ERROR = 0.1, 0.3

_PREFIXES = {"H100": "h100_", "MI300X": "mi300_"}
OTHERS = (
    "mi300_resnet_rank0.json.gz",
    "sglang_qwen3_prefilldecode.json.gz",
    "torch_compile_triton.json.gz",
    "vllm_decode_full/graph_execution.json.gz",
)


class Sample(NamedTuple):
    """Calls of an operator that are alike, µs of one."""

    work: OperatorCall
    micros: float
    calls: int


class Row(NamedTuple):
    """A class of kernels of a model that was left out: its share of the target's time, and the error."""

    model: str
    direction: str
    kind: str
    share: float
    error: float


Trace = list[Sample]


@dataclass
class Config:
    """What is fitted."""

    public: str = field(
        default="../shared/data/traces/public",
        metadata={"help": "folder of further MI300X traces, and pairs/{h100,mi300}_MODEL.json.gz"},
    )
    operators: bool = field(default=False, metadata={"help": "also print operators, measured and fitted"})
    write: bool = field(default=False, metadata={"help": "write the parameters"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    pairs, others = read_all(Path(config.public))
    rows = left_out(pairs, others)
    fits = fit_all(pairs, others)
    show(rows, fits)
    if config.operators:
        for gpu in GPUS:
            traces = {model: pair[gpu] for model, pair in pairs.items()}
            if gpu == "MI300X":
                traces |= dict(zip(OTHERS, others, strict=True))
            show_operators(traces, fits[gpu])
    if config.write:
        write(fits, rows)
    return 0


def read_all(public: Path) -> tuple[dict[str, dict[str, Trace]], list[Trace]]:
    """Of each model its trace on both GPUs, and further traces of an MI300X."""
    folder = public / "pairs"
    models = sorted(path.name.removeprefix("h100_") for path in folder.glob("h100_*.json*"))
    if len(models) < 2:
        raise TraceError(f"{folder}: two pairs of traces at least are needed")
    pairs = {
        model.split(".")[0]: {gpu: read(folder / f"{_PREFIXES[gpu]}{model}") for gpu in GPUS}
        for model in models
    }
    return pairs, [read(public / name) for name in OTHERS]


def left_out(pairs: Mapping[str, Mapping[str, Trace]], others: Sequence[Trace]) -> list[Row]:
    """How far off each model is, in both directions, by parameters that were fitted without it."""
    rows = []
    for left in pairs:
        fits = fit_all({model: pair for model, pair in pairs.items() if model != left}, others)
        for source, target in (GPUS, GPUS[::-1]):
            for kind, share, error in class_errors(pairs[left], fits, source, target):
                rows.append(Row(left, f"{source}→{target}", kind, share, error))
    return rows


def read(path: Path, host: Path | None = None) -> Trace:
    """The operators of a trace, alike ones together."""
    run = make_run(path.name, [convert_pair(Pair(-1, host, path)).trace], [0])
    found = launched_operators(run)
    total = np.bincount(found.of, run.graph.own_ns[found.nodes] / 1e3, len(found.work))
    together: dict[OperatorCall, list[float]] = {}
    for work, micros in zip(found.work, total.tolist(), strict=True):
        if work.kind != "memory copy" and micros > 0:
            together.setdefault(work, []).append(micros)
    return [Sample(work, float(np.mean(times)), len(times)) for work, times in together.items()]


def fit_all(pairs: Mapping[str, Mapping[str, Trace]], others: Sequence[Trace]) -> dict[str, GpuModel]:
    """Both GPUs from these traces alone."""
    return {
        gpu: fit(gpu, [pair[gpu] for pair in pairs.values()] + (list(others) if gpu == "MI300X" else []))
        for gpu in GPUS
    }


def class_errors(
    pair: Mapping[str, Trace],
    fits: Mapping[str, GpuModel],
    source: str,
    target: str,
) -> list[tuple[str, float, float]]:
    """Of each class: its share of the target's time, and the error of the predicted time."""
    sums = {kind: [0.0, 0.0] for kind in CLASSES}
    for work, micros, calls in pair[source]:
        sums[work.kind][0] += calls * micros * on_target(work, micros, fits[source], fits[target])[0]
    for work, micros, calls in pair[target]:
        sums[work.kind][1] += calls * micros
    whole = sum(measured for _, measured in sums.values())
    return [(kind, real / whole, made / real - 1) for kind, (made, real) in sums.items() if made and real]


def fit(gpu: str, traces: Sequence[Trace]) -> GpuModel:
    """The parameters of ``gpu`` by which its operators take what they took; of AMD's also the products'."""
    prior = {name: PRIORS[name][GPUS.index(gpu)] for name in PRIORS}
    widths = {name: 0.02 if (gpu, name) in _STANDS else PRIORS[name][2] for name in PRIORS}
    samples, weights = [], []
    for trace in traces:
        sums: dict[str, float] = {}
        known = [sample for sample in trace if sample.work.known and sample.work.tested]
        for work, each, calls in known:
            sums[work.kind] = sums.get(work.kind, 0.0) + each * calls
        samples += known
        weights += [max(each * calls / sums[work.kind], _LEAST_SHARE) for work, each, calls in known]
    first = gpu_model(gpu, prior)
    weight = np.array(weights) / _SCATTER**2 * _FITTED_SCATTER**2
    product = np.array([sample.work.kind == "matrix product" for sample in samples])
    if first.vendor == "amd":
        first = with_products(first, _products(first, samples, weight, product))
    rest = [sample for sample, is_product in zip(samples, product, strict=True) if not is_product]
    if not rest:
        return first

    def micros(values: Mapping[str, float]) -> np.ndarray:
        model = replace(first, parameters=values, seen={})
        return np.array([model.micros(sample.work) for sample in rest])

    found = fit_model(micros, np.array([sample.micros for sample in rest]), prior, widths, weight[~product])
    return replace(first, parameters=found, seen={})


def _products(
    model: GpuModel, samples: Sequence[Sample], weight: np.ndarray, product: np.ndarray
) -> dict[str, float]:
    """The parameters of products of 16 bits with aligned rows."""
    of = kernel_times.MODELS["16 bit"]
    chosen = [
        at
        for at, (work, *_) in enumerate(samples)
        if product[at] and work.product and min(work.aligned) >= 16 and item_bytes(work.type) == 2
    ]
    if not chosen:
        return of.start(model.gpu)
    points = np.array([[*(samples[at].work.product or ()), SETS] for at in chosen], float)
    return fit_model(
        lambda values: of.micros(model.gpu, values, points),
        np.array([samples[at].micros for at in chosen]),
        of.start(model.gpu),
        {name: _WIDER * width for name, width in of.widths.items()},
        weight[chosen],
    )


def with_products(model: GpuModel, values: Mapping[str, float]) -> GpuModel:
    """With other parameters of matrix products, and without a grid."""
    kernels = replace(model.kernels, parameters=dict(model.kernels.parameters) | {"16 bit": values}, grids={})
    return replace(model, kernels=kernels, seen={})


def show(rows: Sequence[Row], fits: Mapping[str, GpuModel]) -> None:
    print("Each model left out of the fit:\n")
    lines = [("model", "direction", "class", "share of time", "error")]
    lines += [(a[:20], b, c, f"{share:.1%}", f"{error:+.1%}") for a, b, c, share, error in rows]
    print("\n".join(table(lines, right=(3, 4))))
    print("\nMean of the errors' sizes, weighted by the shares of time:\n")
    lines = [("class", "mean error", "worst with 2% or more")]
    for kind in CLASSES:
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            large = [abs(row.error) for row in of_kind if row.share >= _LEAST_SHARE]
            lines.append((kind, f"{_weighted(of_kind):.1%}", f"{max(large):.1%}" if large else ""))
    lines.append(("all", f"{_weighted(rows):.1%}", ""))
    print("\n".join(table(lines, right=(1, 2))))
    print("\nParameters, fitted to all:\n")
    lines = [("parameter", *GPUS, "prior", "prior")]
    for name, (first, second, _) in PRIORS.items():
        made = [f"{fits[gpu].parameters[name]:.3g}" for gpu in GPUS]
        lines.append((name, *made, f"{first:g}", f"{second:g}"))
    print("\n".join(table(lines, right=range(1, 5))))


def _weighted(rows: Sequence[Row]) -> float:
    return sum(row.share * abs(row.error) for row in rows) / sum(row.share for row in rows)


def show_operators(traces: Mapping[str, Trace], fitted: GpuModel) -> None:
    """The operators that took a good part of their class's time, µs per call."""
    lines = [(fitted.name, "class", "shape", "calls", "measured", "fitted", "error")]
    for name, trace in traces.items():
        known = [sample for sample in trace if sample.work.tested and sample.work.known]
        for work, micros, calls in known:
            whole = sum(each.micros * each.calls for each in known if each.work.kind == work.kind)
            if micros * calls >= _SMALLEST_SHARE * whole:
                shape = work.product or (work.batch, work.queries, work.keys) if work.shaped else ""
                made = fitted.micros(work)
                row = (f"{calls}", f"{micros:,.1f}", f"{made:,.1f}", f"{made / micros - 1:+.0%}")
                lines.append((name[:20], work.kind, f"{shape or f'{work.moved / 1e6:,.2f} MB'}", *row))
    print("\n" + "\n".join(table(lines, right=range(3, 7))))


def write(fits: Mapping[str, GpuModel], rows: Sequence[Row]) -> None:
    """``operator_times.json`` with these; the errors are those of the models left out, one deviation."""
    errors: dict[str, list[float]] = {kind: [] for kind in CLASSES if kind != "memory copy"}
    for row in rows:
        if row.share >= _SMALLEST_SHARE:
            errors[row.kind].append(row.error)
    content = json.loads(FILE.read_text(encoding="utf-8"))
    for gpu in GPUS:
        content[gpu] = {name: float(f"{fits[gpu].parameters[name]:.3g}") for name in PRIORS}
    content["errors"] = {kind: _deviation(each) for kind, each in errors.items()}
    write_text(FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    products = fits["MI300X"].kernels.parameters["16 bit"]
    write_parameters({"MI300X": {"16 bit": products}, "amd HBM": {"16 bit": products}})
    print(f"\nwrote {FILE} and {kernel_times.FILE}")


def _deviation(errors: Sequence[float]) -> float:
    """Root mean square, or half of the worst, where there are two models at least."""
    if len(errors) < 3:
        return round(max(_UNTESTED_ERROR, *map(abs, errors), 0.0), 2)
    off = np.log1p(errors)
    return round(max(float(np.sqrt(np.mean(off**2))), float(np.abs(off).max()) / 2, _LEAST_ERROR), 2)


if __name__ == "__main__":
    sys.exit(main())
