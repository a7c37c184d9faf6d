"""Time by name and by module: which operators, kernels and layers a run spends it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.cost.gpus import by_driver, gpu
from chakra_et.report.columns import (
    ANNOTATION,
    NODE_KINDS,
    PHASES,
    name_codes,
    page_kinds,
    shared_codes,
)
from chakra_et.report.run import ReportRun

OPERATOR, KERNEL, COPY = (NODE_KINDS.index(kind) for kind in ("operator", "kernel", "copy"))
DEVICE = (KERNEL, COPY)


@dataclass(frozen=True)
class Entry:
    """All nodes of one kind and name.

    ``count``: calls, all ranks. ``self_ns``: their own time, without operators inside; waiting for other
    ranks counts for communication. ``longest_ns``: of the longest node. ``device_ns``: time of the device
    work that an operator launched itself. ``rank_ns``: ``self_ns`` by rank. ``per_second``: operations per
    second (FLOP/s), over the nodes whose operations are known; ``bytes_per_second`` likewise; None for none.
    ``above_peak``: one of both is above the GPU's own, so that it comes from a cache or is counted too high.
    """

    kind: str
    name: str
    count: int
    self_ns: int
    longest_ns: int
    device_ns: int
    rank_ns: tuple[int, ...]
    per_second: float | None
    bytes_per_second: float | None
    above_peak: bool


@dataclass(frozen=True)
class Module:
    """Time of the nodes that belong to a module itself, without the modules in it; all ranks, ns.

    ``phases_ns``: device time by ``PHASES``, or host time in a run without device work.
    """

    path: str
    count: int
    host_ns: int
    device_ns: int
    communication_ns: int
    phases_ns: tuple[int, ...]


def by_name(run: ReportRun) -> list[Entry]:
    """One entry for each kind and name, the most time first. Annotations are left out."""
    graph = run.graph
    code, names = name_codes(run)
    kind = page_kinds(run)
    length = run.end_ns - run.start_ns
    keys, of_node = np.unique(kind * len(names) + code, return_inverse=True)
    of_node = of_node.reshape(-1)
    count, ranks = len(keys), len(run.ranks)
    first = graph.attribute("segment", 0) == 0
    calls = np.bincount(of_node, first, count).astype(np.int64)
    self_ns = _sum(of_node, length, count)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, of_node, length)
    by_rank = _sum(of_node * ranks + graph.trace_of, length, count * ranks).reshape(count, ranks)
    launched = _sum(of_node, _launched(run, kind, length), count)
    rates = []
    for attribute in ("num_ops", "tensor_size"):
        amount = graph.attribute(attribute, 0)
        known = (amount > 0) & (kind == KERNEL)
        total = np.bincount(of_node[known], amount[known].astype(np.float64), count)
        rates.append((total, _sum(of_node[known], length[known], count)))
    (operations, operations_ns), (size, size_ns) = rates
    above = _above_peak(run, *(total / np.maximum(ns, 1) * 1e9 for total, ns in rates))
    order = np.argsort(-self_ns, kind="stable")
    return [
        Entry(
            kind=NODE_KINDS[keys[at] // len(names)],
            name=names[keys[at] % len(names)],
            count=int(calls[at]),
            self_ns=int(self_ns[at]),
            longest_ns=int(longest[at]),
            device_ns=int(launched[at]),
            rank_ns=tuple(by_rank[at].tolist()),
            per_second=float(operations[at] / operations_ns[at] * 1e9) if operations_ns[at] else None,
            bytes_per_second=float(size[at] / size_ns[at] * 1e9) if size_ns[at] else None,
            above_peak=bool(above[at]),
        )
        for at in order.tolist()
        if keys[at] // len(names) != ANNOTATION
    ]


def _above_peak(run: ReportRun, operations: np.ndarray, size: np.ndarray) -> np.ndarray:
    """bool: which rates (operations and bytes per second) no GPU of the run has; none if it isn't known."""
    drivers = {trace.metadata_str("device_name") for trace in run.traces}
    known = [gpu(name) for driver in drivers if (name := by_driver(driver))]
    if not known:
        return np.zeros(len(size), dtype=bool)
    most = max(max(each.peaks.values()) for each in known)
    above: np.ndarray = (operations > most) | (size > max(each.memory for each in known))
    return above


def _launched(run: ReportRun, kind: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int64[N]: the time of the device work whose enclosing operator each node is."""
    parent = run.parent
    work = np.flatnonzero(np.isin(kind, DEVICE) & (parent >= 0))
    return _sum(parent[work], length[work], len(run.graph))


def by_module(run: ReportRun) -> list[Module]:
    """The modules in the order of their paths; empty where none are recorded."""
    module, paths = shared_codes(run, "module")
    phase, _ = shared_codes(run, "phase", PHASES)
    known = np.flatnonzero(module >= 0)
    kind = page_kinds(run)[known]
    module, phase = module[known], phase[known]
    length = (run.end_ns - run.start_ns)[known]
    device, communicates = np.isin(kind, DEVICE), kind == NODE_KINDS.index("transfer")
    host = ~device & ~communicates
    count = len(paths)
    shown = device if device.any() else host
    phases = [_sum(module, np.where(shown & (phase == at), length, 0), count) for at in range(len(PHASES))]
    first = run.graph.attribute("segment", 0)[known] == 0
    calls = np.bincount(module, first & (kind == OPERATOR), count).astype(np.int64)
    host_ns, device_ns, communication_ns = (
        _sum(module, np.where(which, length, 0), count) for which in (host, device, communicates)
    )
    return sorted(
        (
            Module(
                paths[at],
                int(calls[at]),
                host_ns=int(host_ns[at]),
                device_ns=int(device_ns[at]),
                communication_ns=int(communication_ns[at]),
                phases_ns=tuple(int(each[at]) for each in phases),
            )
            for at in range(count)
        ),
        key=lambda module: module.path,
    )


def _sum(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """int64[count]: the sum of the values of each index, exact up to 2^53 ns (104 days)."""
    return np.rint(np.bincount(index, values, count)).astype(np.int64)
