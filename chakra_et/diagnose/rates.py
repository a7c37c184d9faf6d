"""How fast kernels are: against what the GPU could do, and against what such work usually takes there.

What an operator works on and what that takes come from ``transform.gpu`` and ``cost.operator_times``, as
for ``chakra-et predict --gpu``; ``docs/HOW_TRUE.md`` says how true these times are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.cost.gpus import by_driver
from chakra_et.cost.operator_times import CLASSES, GpuModel, OperatorCall, gpu_model
from chakra_et.diagnose import node_classes
from chakra_et.diagnose.kernel_names import LONGEST, kernel_name
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import shortened
from chakra_et.transform.gpu import BY_LIBRARIES, kernel_kinds, launched_operators

WORK = ("num_ops", "tensor_size")
KERNEL_KINDS = (*CLASSES, node_classes.BEFORE)
LISTED = 3
_BY_LIBRARIES = [CLASSES.index(kind) for kind in BY_LIBRARIES]
FURTHEST = 20.0
"""Beyond this factor, an operator didn't do what its shapes say."""


@dataclass(frozen=True)
class Rates:
    """Of the N nodes of a run on GPU ``gpu`` ("" where the files don't name one of the table).

    ``kind`` int64[N]: index into ``KERNEL_KINDS``, -1 for all but device work; ``least_ns``: what the peaks
    of the GPU allow, and ``usual_ns``: what such work usually takes, float64[N], 0 where unknown. ``roof``:
    the operations (16 bit) and bytes per second that the GPU does at most.
    """

    gpu: str
    kind: np.ndarray
    least_ns: np.ndarray
    usual_ns: np.ndarray
    roof: tuple[float, float] | None = None

    @property
    def told(self) -> np.ndarray:
        """Whose counts are its work, bool[N]: of products without shapes they are an operator's tensors."""
        return (self.least_ns > 0) | ~np.isin(self.kind, _BY_LIBRARIES) | (self.gpu == "")

    def of(
        self, index: np.ndarray, length: np.ndarray, count: int
    ) -> list[tuple[float | None, float | None]]:
        """(share of the peak, how many times the usual time) of the nodes of each index, by the time of those
        of which it is known; None for none."""
        shares, usual = (
            amount_per_second(known / 1e9, index, length, count) for known in (self.least_ns, self.usual_ns)
        )
        return [(share, part and 1 / part) for share, part in zip(shares, usual, strict=True)]


@dataclass(frozen=True)
class KernelClass:
    """All device work of one kind, all ranks; see ``times.Entry`` for the rates."""

    kind: str
    count: int
    time_ns: int
    share: float
    per_second: float | None
    bytes_per_second: float | None
    of_peak: float | None
    times_usual: float | None


@dataclass(frozen=True)
class Kernel(KernelClass):
    """A kernel, or on ranks without devices an operator, by its name."""

    name: str
    on_cpu: bool

    @property
    def shown(self) -> str:
        """Its name for people."""
        return shortened(self.name, LONGEST) if self.on_cpu else kernel_name(self.name)

    def __str__(self) -> str:
        rate = f", {self.bytes_per_second / 1e9:,.0f} GB/s" if self.bytes_per_second else ""
        if self.per_second and self.kind == node_classes.CLASSES[node_classes.COMPUTE]:
            rate = f", {self.per_second / 1e12:.3g} TFLOP/s"
        if rate and self.of_peak:
            rate += f" ({self.of_peak:.0%} of the peak)"
        if self.times_usual:
            rate += f", {self.times_usual:.1f} × the usual time"
        return f"{self.shown} {self.share:.0%}{rate}"


def find_rates(run: Run) -> Rates:
    """The rates of a run's device work, by its recorded times."""
    graph, nodes = run.graph, np.flatnonzero(run.on_devices)
    kind, least, usual = np.full(len(graph), -1), np.zeros(len(graph)), np.zeros(len(graph))
    kind[nodes] = kernel_kinds(run)[nodes]
    kind[run.named(node_classes.BEFORE.__eq__)] = len(CLASSES)
    named = {by_driver(trace.metadata_str("device_name")) for trace in graph.traces} - {None}
    if len(named) != 1:
        return Rates("", kind, least, usual)
    model = gpu_model(str(named.pop()))
    if all("skeleton" in trace.metadata for trace in graph.traces):  # whose operators aren't known
        operations, moved = (graph.attribute(of, 0)[nodes] for of in WORK)
        possible = np.maximum(operations / model.peak(OperatorCall.type), moved / model.gpu.memory) * 1e9
        unknown = [CLASSES.index(of) for of in ("memory copy", "gather")]
        least[nodes] = np.where(np.isin(kind[nodes], unknown), 0, possible)
        return Rates(model.name, kind, least, usual, (model.peak(""), model.gpu.memory))
    found = launched_operators(run)
    length = graph.duration_ns[found.nodes].astype(float)
    total = np.bincount(found.of, length, len(found.work))
    moved = np.bincount(found.of, graph.attribute("tensor_size", 0)[found.nodes], len(found.work))
    calls = zip(found.work, moved.tolist(), total.tolist(), strict=True)
    each = np.array([_times(model, *call) for call in calls])
    part = np.divide(length, total[found.of], out=np.zeros(len(length)), where=total[found.of] > 0)
    least[found.nodes], usual[found.nodes] = each.reshape(-1, 2)[found.of].T * part
    return Rates(model.name, kind, least, usual, (model.peak(""), model.gpu.memory))


def _times(model: GpuModel, work: OperatorCall, moved: float, taken_ns: float) -> tuple[float, float]:
    """ns that the GPU's peaks allow for an operator, and that it usually takes; 0 for unknown.

    ``moved``: bytes by the recorded results; a reduction's model takes them to be as large as its operands.
    """
    if not work.known or work.kind == "memory copy":
        return 0.0, 0.0
    moved = moved if work.kind == "reduction" and moved else work.moved
    least = max(work.operations / model.peak(work.type), moved / model.gpu.memory) * 1e9
    if not work.tested:
        return least, 0.0
    usual = model.micros(work) * 1e3
    return least, usual if usual / FURTHEST < taken_ns < usual * FURTHEST else 0.0


def kernel_classes(run: Run, found: Rates) -> list[KernelClass]:
    """Device work by ``KERNEL_KINDS``, the most time first."""
    grouped = _grouped(run, found, found.kind, found.kind >= 0)
    return [KernelClass(KERNEL_KINDS[at], *figures) for at, *figures in grouped]


def top_kernels(run: Run, classes: np.ndarray, device: np.ndarray) -> list[Kernel]:
    """The ``LISTED`` names with the most time, of devices or else of the operators of the CPU. ``kind``: the
    class of most of its nodes. Of work before the recording no name is known."""
    chosen = device if device.any() else run.kind == KINDS.index("operator")
    names, name_of = run.names, run.name_of
    if "planned_step_micros" in run.graph.traces[0].metadata:
        names, plain = without_numbers(names)
        name_of = plain[name_of]
    rows = _grouped(run, find_rates(run), name_of, chosen)
    found = []
    for name, *figures in [row for row in rows if names[row[0]] != node_classes.BEFORE][:LISTED]:
        kind = node_classes.CLASSES[int(np.bincount(classes[(name_of == name) & chosen]).argmax())]
        found.append(Kernel(*(kind, *figures, names[name], not device.any())))
    return found


def without_numbers(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """A planned set's names without the numbers of micro-batches and layers, and the index of each given name
    among them, int64."""
    plain = [re.sub(r" \d+", "", name) for name in names]
    known = {name: at for at, name in enumerate(dict.fromkeys(plain))}
    return list(known), np.array([known[name] for name in plain])


def _grouped(run: Run, found: Rates, index: np.ndarray, chosen: np.ndarray) -> list[tuple[Any, ...]]:
    """(index, *figures of ``KernelClass``) of ``chosen`` bool[N] by ``index`` int64[N], most time first."""
    node = np.flatnonzero(chosen)
    index, length = index[node], run.graph.duration_ns[node]
    counts, time = np.bincount(index), np.bincount(index, length)
    told = found.told[node]
    amounts = [
        amount_per_second(run.graph.attribute(of, 0)[node] * told, index, length, len(counts)) for of in WORK
    ]
    rates = Rates(found.gpu, found.kind, found.least_ns[node], found.usual_ns[node])
    shares = (time / max(time.sum(), 1)).tolist()
    figures = counts.tolist(), time.astype(np.int64).tolist(), shares, *amounts
    rows = zip(*figures, rates.of(index, length, len(counts)), strict=True)
    found_rows = [(at, *row[:-1], *row[-1]) for at, row in enumerate(rows) if time[at]]
    return sorted(found_rows, key=lambda row: -time[row[0]])


def amount_per_second(
    amount: np.ndarray, index: np.ndarray, length: np.ndarray, count: int
) -> list[float | None]:
    """What the nodes of each index do per second, by those whose amount is known; None for none."""
    known = amount > 0
    total = np.bincount(index[known], amount[known].astype(float), count)
    lasts = np.bincount(index[known], length[known], count)
    rate = np.divide(total * 1e9, lasts, out=np.zeros(count), where=lasts > 0)
    return [each or None for each in rate.tolist()]
