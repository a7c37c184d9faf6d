"""Another GPU: a roofline from each kernel's operations and bytes, with the efficiency that it had in the
run.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.network import presets
from chakra_et.predict.run import Run, Setting
from chakra_et.replay.shares import KINDS

FILE = Path(__file__).with_name("gpus.json")
# The operator that launched a kernel decides its class, as kernels have other names on each vendor's GPUs.
_CLASSES = (
    ("attention", r"attention|flash"),
    ("convolution", r"conv"),
    ("matrix product", r"::(_scaled_)?(addmm|mm|bmm|baddbmm|matmul|linear)|^_?gemm"),
    ("softmax", r"softmax"),
    ("normalization", r"norm"),
    ("copy", r"copy_|contiguous|clone|::cat$|::to$"),
    ("gather", r"index|gather|embedding|scatter"),
    ("reduction", r"::(sum|mean|amax|amin|max|min|any|all|arg\w+|linalg_\w+)$"),
)
CLASSES = (*(name for name, _ in _CLASSES), "elementwise", "memory copy", "memset")
_LARGEST_DOUBT = 0.5


@dataclass(frozen=True)
class Rates:
    """What a GPU sustains: operations per second and bytes per second."""

    compute: float
    memory: float


@dataclass(frozen=True)
class Gpu:
    """The kernels of a run on GPU ``source`` take what they would take on GPU ``target``.

    A kernel's time above the shortest kernel's changes as max(operations / arithmetic rate, bytes / memory
    bandwidth) does: it keeps its efficiency (Williams, Waterman and Patterson, Roofline, CACM 2009). Kernels
    whose work isn't known change as their class does on average, or as the memory bandwidth. Copies between
    host and GPU, the CPU's work and communication stay as they are.
    """

    source: str
    target: str

    def apply(self, run: Run, setting: Setting) -> Setting:
        kernels = device_work(run)
        if not len(kernels):
            raise TraceError(f"--gpu {self.source}→{self.target}: the run has no kernels")
        before, after, note = _rates(self.source, self.target)
        operations = run.graph.attribute("num_ops", 0)[kernels].astype(float)
        moved = run.graph.attribute("tensor_size", 0)[kernels].astype(float)
        classes = kernel_classes(run)[kernels]
        ratio, known = _ratios(classes, operations, moved, before, after)
        ratio[classes == CLASSES.index("memory copy")] = 1.0
        taken = setting.own_ns[kernels].astype(float)
        floor = min(float(taken[taken > 0].min(initial=np.inf)), 2_000.0)
        changed = np.where(taken > floor, floor + (taken - floor) * ratio, taken)
        own = setting.own_ns.copy()
        own[kernels] = np.rint(changed)
        doubt = np.zeros(len(run.graph))
        doubt[kernels] = changed * _spread(classes, operations, moved, taken, before)
        unknown = ~known & (classes < CLASSES.index("memory copy"))
        setting = replace(setting, own_ns=own).noting(
            f"--gpu {self.source}→{self.target}: {len(kernels):,} kernels and copies, "
            f"{taken.sum() / 1e6:,.3f} ms, take {changed.sum() / 1e6:,.3f} ms; the rest stays as it was"
        )
        if unknown.any():
            setting = setting.noting(
                f"{int(unknown.sum()):,} kernels ({taken[unknown].sum() / 1e6:,.3f} ms) have no recorded "
                "operations or bytes: they change as their class, or as the memory bandwidth"
            )
        if note:
            setting = setting.noting(note)
        return setting.doubting("efficiency within a class of kernels", own_ns=doubt)


def parse_gpu(text: str) -> Gpu:
    """``H100→MI300X``, also with ``->`` or ``:``. Raises ``ValueError``."""
    parts = [part.strip() for part in re.split(r"→|->|:", text)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--gpu {text!r}: write FROM→TO or FROM:TO, as H100:MI300X")
    return Gpu(*parts)


def device_work(run: Run) -> np.ndarray:
    """The nodes that are kernels, copies or memsets and not communication."""
    kinds = [KINDS.index("kernel"), KINDS.index("copy")]
    return np.flatnonzero(np.isin(run.kind, kinds) & ~run.is_communication)


def kernel_classes(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each kernel, by the operator that launched it or else its own name;
    int64[N].
    """
    own = np.array([_class(name) for name in run.names])[run.name_of]
    found: np.ndarray = own.copy()
    parents = run.graph.attribute("parent", -1)
    for at, trace in enumerate(run.graph.traces):
        first, last = run.graph.first[at], run.graph.first[at + 1]
        order = np.argsort(trace.ids, kind="stable")
        ids = trace.ids[order].astype(np.int64)
        place = np.minimum(np.searchsorted(ids, parents[first:last]), len(ids) - 1)
        known = ids[place] == parents[first:last]
        found[first:last] = np.where(known, own[first + place], own[first:last])
    is_copy = run.kind == KINDS.index("copy")
    to_host = np.array(["memset" not in name.lower() for name in run.names])[run.name_of]
    within = np.array([bool(re.search("DtoD|Device -> Device", name)) for name in run.names])[run.name_of]
    found[is_copy] = CLASSES.index("memory copy")
    found[is_copy & (~to_host | within)] = CLASSES.index("memset")
    return found


def _class(name: str) -> int:
    short = name.lower()
    for at, (_, pattern) in enumerate(_CLASSES):
        if re.search(pattern, short):
            return at
    return CLASSES.index("elementwise")


def _ratios(
    classes: np.ndarray, operations: np.ndarray, moved: np.ndarray, before: Rates, after: Rates
) -> tuple[np.ndarray, np.ndarray]:
    """The ratio of times after to before for each kernel, and whether its work is known."""
    known = (operations > 0) | (moved > 0)
    old, new = (np.maximum(operations / each.compute, moved / each.memory) for each in (before, after))
    ratio = np.divide(new, old, out=np.full(len(old), before.memory / after.memory), where=known)
    for at in np.unique(classes[~known]).tolist():
        alike = known & (classes == at)
        if alike.any():
            ratio[~known & (classes == at)] = new[alike].sum() / old[alike].sum()
    return ratio, known


def _spread(
    classes: np.ndarray, operations: np.ndarray, moved: np.ndarray, taken: np.ndarray, rates: Rates
) -> np.ndarray:
    """How much the efficiency of each kernel's class varies, as a part of the time."""
    ideal = np.maximum(operations / rates.compute, moved / rates.memory) * 1e9
    spread = np.full(len(taken), _LARGEST_DOUBT)
    for at in np.unique(classes).tolist():
        alike = np.flatnonzero((classes == at) & (ideal > 0) & (taken > 0))
        if len(alike) > 1:
            efficiency = ideal[alike] / taken[alike]
            mean = np.average(efficiency, weights=taken[alike])
            off = np.sqrt(np.average((efficiency - mean) ** 2, weights=taken[alike])) / mean
            spread[classes == at] = min(float(off), _LARGEST_DOUBT)
    spread[classes == CLASSES.index("memory copy")] = 0.0
    return spread


def _rates(source: str, target: str) -> tuple[Rates, Rates, str]:
    """What both GPUs sustain, or where that isn't known for one of them, what both are specified for."""
    gpus = [presets.gpu(name) for name in (source, target)]
    parts = [_sustained().get(gpu.name) for gpu in gpus]
    missing = [gpu.name for gpu, part in zip(gpus, parts, strict=True) if part is None]
    if missing:
        note = f"specified rates are used, as sustained rates of {' and '.join(missing)} aren't in the table"
        before, after = (Rates(gpu.peak, gpu.memory) for gpu in gpus)
        return before, after, note
    before, after = (
        Rates(gpu.peak * part["compute"], gpu.memory * part["memory"])
        for gpu, part in zip(gpus, parts, strict=True)
        if part is not None
    )
    return before, after, ""


@functools.cache
def _sustained() -> dict[str, dict[str, Any]]:
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    loaded.pop("about")
    return loaded
