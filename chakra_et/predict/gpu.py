"""Another GPU: the kernels of each operator take what the operator takes there.

Per operator, not per kernel, since libraries choose other kernels on each GPU. ``cost/operator_times``
models what an operator takes on the source and on the target. Where both run the same code, as PyTorch's own
kernels and GPUs of one vendor do, an operator keeps its efficiency: its time changes as the modelled ones do
(Williams, Waterman and Patterson, Roofline, CACM 2009). Matrix products, convolutions and attention come
from each vendor's libraries, and how well they suit a shape on one GPU tells nothing of the other: there the
modelled time of the target stands alone. How far off it is, on GPUs and models that it wasn't fitted to:
``benchmarks/cost_accuracy.py`` and ``benchmarks/fit_gpus.py``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost import gpus, operator_times
from chakra_et.cost.operator_times import GpuModel, OperatorCall, gpu_model, item_bytes
from chakra_et.errors import TraceError
from chakra_et.predict.gpu_work import launched_operators
from chakra_et.simulate.run import Run, Setting

_BY_LIBRARIES = ("attention", "convolution", "matrix product")
"""Classes whose kernels come from each vendor's own libraries."""
_FURTHEST = 8.0
"""Beyond this factor between measured and modelled time, the operator is not what its shapes say."""
_SAME_VENDOR_ERROR, _UNTESTED_ERROR = 0.13, 0.3
"""One standard deviation: of products on a GPU that was left out (cost_accuracy.py), and, guessed, of what no
pair of traces has tested."""
# Of the names that CUDA and HIP report: "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2", "AMD Radeon Graphics".
_BRANDS = {
    "nvidia": re.compile(r"nvidia|tesla|geforce|quadro", re.I),
    "amd": re.compile(r"\bamd\b|radeon", re.I),
}


@dataclass(frozen=True)
class OtherGpu:
    """The kernels of a run on GPU ``source`` take what they would take on GPU ``target``.

    Copies between host and GPU, the CPU's work and communication stay as they are.
    """

    source: str
    target: str

    def apply(self, run: Run, setting: Setting) -> Setting:
        source, target = gpu_model(self.source), gpu_model(self.target)
        flag, found = f"--gpu {self.source}→{self.target}", launched_operators(run)
        if not len(found.nodes):
            raise TraceError(f"{flag}: the run has no kernels")
        notes = _check_source(run, source.gpu, flag)
        taken = setting.own_ns[found.nodes].astype(float)
        total = np.bincount(found.of, taken, len(found.work)) / 1e3
        calls = list(zip(found.work, total.tolist(), strict=True))
        changed = taken * np.array([ratio(*call, source, target) for call in calls])[found.of]
        own, doubt = setting.own_ns.copy(), np.zeros(len(run.graph))
        own[found.nodes] = np.rint(changed)
        doubt[found.nodes] = changed * np.array([_error(*call, source, target) for call in calls])[found.of]
        notes.append(
            f"{flag}: {len(found.nodes):,} kernels and copies, {taken.sum() / 1e6:,.3f} ms, take "
            f"{changed.sum() / 1e6:,.3f} ms; the rest, the host's CPU too, stays as it was"
        )
        guesses = [_guess(*call, source) for call in calls]
        for guess in sorted(set(guesses) - {""}):
            such = np.array([each == guess for each in guesses])[found.of]
            notes.append(f"{int(such.sum()):,} kernels ({taken[such].sum() / 1e6:,.3f} ms) {guess}")
        for gpu in (source, target):
            like = operator_times.LIKE[gpu.vendor]
            if like != gpu.name:
                notes.append(
                    f"kernels on {gpu.name} but matrix products are taken to reach the parts of its rates "
                    f"that {like}'s do"
                )
        setting = replace(setting, own_ns=own, notes=(*setting.notes, *notes))
        return setting.doubting("efficiency of kernels on the other GPU", own_ns=doubt)


def parse_gpu(text: str) -> OtherGpu:
    """``H100→MI300X``, also with ``->`` or ``:``. Raises ``ValueError``."""
    parts = [part.strip() for part in re.split(r"→|->|:", text)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--gpu {text!r}: write FROM→TO or FROM:TO, as H100:MI300X")
    return OtherGpu(*parts)


def _check_source(run: Run, of: gpus.Gpu, flag: str) -> list[str]:
    """A note where the files don't confirm that the run is ``of`` this GPU. Raises ``TraceError`` where
    they name another GPU."""
    source, names = of.name, gpus.names()
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        name = str(trace.metadata.get("device_name") or run.devices.get(rank, ""))
        vendor = next((each for each, brand in _BRANDS.items() if brand.search(name)), of.vendor)
        named = gpus.by_driver(name)
        other = named if source in names and named not in (None, source) else None
        if other or vendor != of.vendor:
            known = f": write --gpu {other}:TO" if other else f", which is not among {', '.join(names)}"
            raise TraceError(f"{flag}: rank {rank} ran on {name!r}, not on {source}{known}")
        if named != source:
            called = f"the run's GPU is called {name!r}" if name else "the files don't name the run's GPU"
            return [f"{called}: that it is {source} is taken from --gpu"]
    return []


def ratio(work: OperatorCall, micros: float, source: GpuModel, target: GpuModel) -> float:
    """The ratio of an operator's times on ``target`` to those on ``source``, where it took ``micros``."""
    if work.kind == "memory copy" or micros <= 0:
        return 1.0
    (least, rate), (new_least, new_rate) = source.limits(work), target.limits(work)
    if not work.known or _far(work, micros, source):
        # Beyond what the smallest kernel takes, it changes as its class's rate does.
        if micros <= least:
            return new_least / least
        return (new_least + (micros - least) * rate / new_rate) / micros
    before, after = source.micros(work), target.micros(work)
    if work.kind in _BY_LIBRARIES and work.shaped and source.vendor != target.vendor:
        return after / micros
    # What the source took beyond or below its model the target takes too: as much if little but the launch
    # takes time, as with latencies, else in proportion to the work.
    launch = source.of(work.kind, "launch")
    share = (max(after - new_least, 0.0) + launch) / (max(before - least, 0.0) + launch)
    return max(after + (micros - before) * share, after / _FURTHEST) / micros


def _far(work: OperatorCall, micros: float, source: GpuModel) -> bool:
    """Whether a call of known work took much longer or shorter than its shapes say."""
    before = source.micros(work)
    return not before / _FURTHEST < micros < before * _FURTHEST


def _untested(work: OperatorCall) -> bool:
    """Whether it is of an operator, or products of a type of number, that no pair of traces has tested."""
    return not work.tested or (work.kind in _BY_LIBRARIES and item_bytes(work.type) != 2)


def _error(work: OperatorCall, micros: float, source: GpuModel, target: GpuModel) -> float:
    """One standard deviation of the predicted time, as a part of it. Of a kernel without recorded work, or
    that doesn't fit it, nothing tells whether arithmetic or bytes bound it: half of what lies between these.
    """
    if work.kind == "memory copy":
        return 0.0
    known = operator_times.errors() if source.vendor != target.vendor else {}
    error: float = known.get(work.kind, _SAME_VENDOR_ERROR)
    if not work.known or _far(work, micros, source):
        product, stream = (
            target.limits(OperatorCall(kind))[1] / source.limits(OperatorCall(kind))[1]
            for kind in ("matrix product", "elementwise")
        )
        return max(error, abs(math.log(product / stream)) / 2)
    return max(error, _UNTESTED_ERROR) if _untested(work) else error


def _guess(work: OperatorCall, micros: float, source: GpuModel) -> str:
    """What was guessed of a call, as the end of a sentence; empty for nothing."""
    if work.kind == "memory copy" or micros <= 0:
        return ""
    as_class = "they change as kernels of their class do"
    if not work.known:
        return f"have no recorded operations or bytes: {as_class}"
    if _far(work, micros, source):
        return f"took over {_FURTHEST:g} times longer or shorter than their shapes say: {as_class}"
    if _untested(work):
        return (
            "are of operators or types of number that no pair of traces has tested: their uncertainty, "
            f"±{_UNTESTED_ERROR:.0%}, is a guess"
        )
    return ""
