"""Time by name and by module: which operators, kernels and layers a run spends it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.cost.gpus import by_driver, gpu
from chakra_et.report.columns import ANNOTATION, NODE_KINDS, PHASES, name_codes, page_kinds, shared_codes
from chakra_et.report.run import ReportRun

OPERATOR, KERNEL, COPY, TRANSFER = map(NODE_KINDS.index, ("operator", "kernel", "copy", "transfer"))
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
    kind, length = page_kinds(run), run.end_ns - run.start_ns
    keys, of_node = np.unique(kind * len(names) + code, return_inverse=True)
    of_node = of_node.reshape(-1)
    count, ranks = len(keys), len(run.ranks)
    self_ns = _sum(of_node, length, count)
    by_rank = _sum(of_node * ranks + graph.trace_of, length, count * ranks)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, of_node, length)
    work = np.flatnonzero(np.isin(kind, DEVICE) & (run.parent >= 0))
    launched = _sum(run.parent[work], length[work], len(graph))
    rates = []
    for attribute in ("num_ops", "tensor_size"):
        amount = graph.attribute(attribute, 0)
        known = (amount > 0) & (kind == KERNEL)
        total = np.bincount(of_node[known], amount[known].astype(np.float64), count)
        lasts = _sum(of_node[known], length[known], count)
        rates.append(np.where(lasts > 0, total / np.maximum(lasts, 1) * 1e9, 0))
    columns = (
        [NODE_KINDS[at] for at in (keys // len(names)).tolist()],
        [names[at] for at in (keys % len(names)).tolist()],
        _sum(of_node, graph.attribute("segment", 0) == 0, count).tolist(),
        self_ns.tolist(),
        longest.tolist(),
        _sum(of_node, launched, count).tolist(),
        map(tuple, by_rank.reshape(count, ranks).tolist()),
        *([rate or None for rate in each.tolist()] for each in rates),
        _above_peak(run, *rates).tolist(),
    )
    entries = [Entry(*each) for each in zip(*columns, strict=True)]
    order = np.argsort(-self_ns, kind="stable").tolist()
    return [entries[at] for at in order if entries[at].kind != NODE_KINDS[ANNOTATION]]


def _above_peak(run: ReportRun, operations: np.ndarray, size: np.ndarray) -> np.ndarray:
    """bool: which rates (operations and bytes per second) no GPU of the run has; none if it isn't known."""
    drivers = {trace.metadata_str("device_name") for trace in run.traces}
    known = [gpu(name) for driver in drivers if (name := by_driver(driver))]
    if not known:
        return np.zeros(len(size), dtype=bool)
    most = max(max(each.peaks.values()) for each in known)
    above: np.ndarray = (operations > most) | (size > max(each.memory for each in known))
    return above


def by_module(run: ReportRun) -> list[Module]:
    """The modules in the order of their paths; empty where none are recorded."""
    module, paths = shared_codes(run, "module")
    phase, _ = shared_codes(run, "phase", PHASES)
    known = np.flatnonzero(module >= 0)
    kind = page_kinds(run)[known]
    module, phase = module[known], phase[known]
    length = (run.end_ns - run.start_ns)[known]
    device, communicates = np.isin(kind, DEVICE), kind == TRANSFER
    host = ~device & ~communicates
    shown = device if device.any() else host
    calls = (run.graph.attribute("segment", 0)[known] == 0) & (kind == OPERATOR)
    parts = [calls, *(np.where(which, length, 0) for which in (host, device, communicates))]
    parts += [np.where(shown & (phase == at), length, 0) for at in range(len(PHASES))]
    sums = [_sum(module, part, len(paths)) for part in parts]
    rows = []
    for at, path in enumerate(paths):
        count, host_ns, device_ns, communication_ns, *phases = (int(each[at]) for each in sums)
        rows.append(Module(path, count, host_ns, device_ns, communication_ns, tuple(phases)))
    return sorted(rows, key=lambda module: module.path)


def _sum(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """int64[count]: the sum of the values of each index, exact up to 2^53 ns (104 days)."""
    return np.rint(np.bincount(index, values, count)).astype(np.int64)
