"""Memory of each rank's devices over time: curves for timelines and counters, peaks for tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.et import memory as names
from chakra_et.report.run import ReportRun


@dataclass(frozen=True)
class Curve:
    """K moments of one device of one rank, in order of time, int64[K].

    ``time_ns``: as in ``ReportRun.start_ns``; ``allocated``, ``reserved``: bytes from then on (``reserved``
    is None where no allocator reserves any); ``node``: the node that changed it.
    """

    rank: int
    device: str
    time_ns: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray | None
    node: np.ndarray

    def take(self, rows: np.ndarray) -> Curve:
        """The same with only these moments."""
        reserved = None if self.reserved is None else self.reserved[rows]
        columns = (self.time_ns[rows], self.allocated[rows], reserved, self.node[rows])
        return Curve(self.rank, self.device, *columns)


@dataclass(frozen=True)
class Usage:
    """One device of one rank over the whole run. ``peak_ns``: the start of node ``peak_node``, in which most
    was allocated."""

    rank: int
    device: str
    peak_bytes: int
    peak_ns: int
    peak_node: int
    reserved_bytes: int | None
    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int


def curves(run: ReportRun) -> list[Curve]:
    """One curve for each rank and device that has memory, in the order of ranks; empty without any.

    A level changes within a node. The curve has the node's highest level from its start on, and the one that
    it leaves from its end on, or from the start of the next node where another thread allocates sooner.
    """
    found = []
    for number, rank in enumerate(run.ranks):
        trace = run.traces[number]
        every = run.of_trace(np.arange(len(run.graph)), number)
        for device in names.devices(trace):
            rows = trace.attributes[names.attribute(device, names.ALLOCATED)].rows
            rows = rows[np.argsort(run.start_ns[every[rows]], kind="stable")]
            node = every[rows]
            start = run.start_ns[node]
            end = np.minimum(run.end_ns[node], np.append(start[1:], run.end_ns.max()))
            left, highest, reserved = (
                trace.column(names.attribute(device, field))[rows]
                for field in (names.ALLOCATED, names.PEAK, names.RESERVED)
            )
            found.append(
                Curve(
                    rank, device,
                    time_ns=np.column_stack((start, end)).ravel(),
                    allocated=np.column_stack((np.maximum(highest, left), left)).ravel(),
                    reserved=np.repeat(reserved, 2) if reserved.any() else None,
                    node=np.repeat(node, 2),
                )
            )  # fmt: skip
    return found


def usage(run: ReportRun) -> list[Usage]:
    """Peaks and counts, one for each of ``curves``."""
    found = []
    for curve in curves(run):
        trace = run.traces[run.ranks.index(curve.rank)]
        counts = [
            int(trace.column(names.attribute(curve.device, field)).sum())
            for field in (names.ALLOCATIONS, names.FREES, names.ALLOCATED_IN, names.FREED_IN)
        ]
        at = int(curve.allocated.argmax())
        reserved = None if curve.reserved is None else int(curve.reserved.max())
        found.append(
            Usage(
                curve.rank, curve.device, int(curve.allocated[at]), int(curve.time_ns[at]),
                int(curve.node[at]), reserved, *counts,
            )
        )  # fmt: skip
    return found


def memory_sentence(run: ReportRun) -> list[str]:
    """The highest peak of all, as a sentence; none without memory."""
    found = usage(run)
    on_device = [each for each in found if each.device != "cpu"] or found
    if not on_device:
        return []
    most = max(on_device, key=lambda each: each.peak_bytes)
    reserved = f", {size(most.reserved_bytes)} reserved" if most.reserved_bytes else ""
    return [
        f"Peak memory: {size(most.peak_bytes)} allocated{reserved}, on rank {most.rank}, "
        f"{device_name(most.device)}."
    ]


def size(number: float | None) -> str:
    """Bytes in the unit that fits, with three digits: 512 B, 1.23 MB; "-" for None."""
    if number is None:
        return "-"
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor * 0.9995:
            value = number / factor
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{number:.0f} B"


def largest_peak(run: ReportRun) -> int | None:
    """The most bytes that one device of any rank had allocated; of a CPU where no other device is known."""
    found = usage(run)
    accelerators = [each.peak_bytes for each in found if each.device != "cpu"]
    return max(accelerators or [each.peak_bytes for each in found], default=None)


def device_name(device: str) -> str:
    """As lanes name it: "gpu 0" for gpu0."""
    letters = device.rstrip("0123456789")
    return f"{letters.rstrip('_')} {device[len(letters) :]}".strip()
