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
    nodes = run.graph.scatter(np.arange(len(run.graph)))
    for rank, trace, every in zip(run.ranks, run.traces, nodes, strict=True):
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
            times = np.column_stack((start, end)).ravel()
            allocated = np.column_stack((np.maximum(highest, left), left)).ravel()
            held = np.repeat(reserved, 2) if reserved.any() else None
            found.append(Curve(rank, device, times, allocated, held, np.repeat(node, 2)))
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
        peak, moment, node = (int(each[at]) for each in (curve.allocated, curve.time_ns, curve.node))
        reserved = None if curve.reserved is None else int(curve.reserved.max())
        found.append(Usage(curve.rank, curve.device, peak, moment, node, reserved, *counts))
    return found


def largest_peak(found: list[Usage]) -> Usage | None:
    """The device on which most was allocated; a CPU where no other device is known."""
    on_device = [each for each in found if each.device != "cpu"] or found
    return max(on_device, key=lambda each: each.peak_bytes, default=None)


def device_name(device: str) -> str:
    """As lanes name it: "gpu 0" for gpu0."""
    letters = device.rstrip("0123456789")
    return f"{letters.rstrip('_')} {device[len(letters) :]}".strip()
