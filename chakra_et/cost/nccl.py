"""The time that NCCL takes for collectives and messages: measured within a node, by its tuning between nodes.

Within a node a collective takes L · f(bytes / (L · B)). L is the time of a small collective (a launch and the
steps around the ring, ``first_bytes``), B the bus bandwidth of a large all-reduce. The curve f, one for each
collective and number of GPUs, holds what NCCL chooses by size: protocol (LL, LL128, Simple), channels, and
ring, tree or NVLS. ``networks.json`` has the curves of measured nodes. Other nodes use the geometric mean of
the curves of measured nodes with the same kind of link.

Between nodes nothing was measured. There a collective takes what the best algorithm and protocol would by the
latencies and bandwidths of NCCL's own tuning (src/graph/tuning.cc), over the slower of the node's links and
its adapters. Bytes are counted as nccl-tests count them: the whole buffer, also of an all-gather.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, harmonic_mean
from typing import Any

import numpy as np

from chakra_et.cost import networks
from chakra_et.cost.topology import Dimension
from chakra_et.et.columns import CollectiveType

SMALL = 4096
"""Up to so many bytes an all-reduce takes its latency."""
_OPERATIONS = {
    CollectiveType.ALL_REDUCE: "all_reduce",
    CollectiveType.ALL_GATHER: "all_gather",
    CollectiveType.REDUCE_SCATTER: "reduce_scatter",
    CollectiveType.ALL_TO_ALL: "alltoall",
}
_LIKE = {
    CollectiveType.REDUCE_SCATTER_BLOCK: CollectiveType.REDUCE_SCATTER,
    CollectiveType.BROADCAST: CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE: CollectiveType.REDUCE_SCATTER,
    CollectiveType.GATHER: CollectiveType.ALL_TO_ALL,
    CollectiveType.SCATTER: CollectiveType.ALL_TO_ALL,
    CollectiveType.BARRIER: CollectiveType.ALL_REDUCE,
}
"""Collectives without a curve, and the one that moves as many bytes over each link."""

Curve = tuple[np.ndarray, np.ndarray]
"""Bytes over latency · bus bandwidth, and time over latency, both rising."""


def whole_bytes(kind: CollectiveType, size: float, ranks: int) -> float:
    """Bytes as nccl-tests count them, from those that one rank contributes (``comm_size``)."""
    return size * ranks if kind in (CollectiveType.ALL_GATHER, CollectiveType.GATHER) else size


def bus_factor(kind: CollectiveType, ranks: int) -> float:
    """Bytes over the busiest link per byte of the whole buffer; bus bandwidth is this · bytes / time.

    Source: NVIDIA's nccl-tests, doc/PERFORMANCE.md; gather and scatter from src/gather.cu and scatter.cu.
    """
    if kind in (CollectiveType.BROADCAST, CollectiveType.REDUCE):
        return 1.0
    return (2 if kind is CollectiveType.ALL_REDUCE else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class NcclNode:
    """NCCL among the GPUs of one node.

    ``latency_ns`` and ``bus`` (bytes per second): of a small and of a large all-reduce, by number of GPUs.
    ``link``: its kind. ``nvls``: whether the switch reduces. ``error``: mean relative error where sizes were
    left out, None where nothing of this node was measured. ``curves``: by collective and number of GPUs.
    """

    name: str
    link: str
    nvls: bool
    latency_ns: Mapping[int, float]
    bus: Mapping[int, float]
    curves: Mapping[tuple[CollectiveType, int], Curve]
    error: float | None = None

    def scaled(self, ranks: int, latency_ns: float, bus: float) -> NcclNode:
        """This node with another latency and bus bandwidth of an all-reduce among ``ranks`` GPUs; those among
        fewer change in proportion."""
        slower, faster = latency_ns / self.latency(ranks), bus / self.bus_of(ranks)
        return replace(
            self,
            latency_ns={count: each * slower for count, each in self.latency_ns.items()},
            bus={count: each * faster for count, each in self.bus.items()},
        )

    def bus_of(self, ranks: int) -> float:
        """Bus bandwidth of a large all-reduce, bytes per second."""
        return float(np.interp(ranks, sorted(self.bus), [self.bus[count] for count in sorted(self.bus)]))

    def time(self, kind: CollectiveType, size: Any, ranks: int) -> Any:
        """ns of a collective of ``size`` bytes (a number or an array of them) among ``ranks`` GPUs.

        Between the numbers of GPUs that were measured, by the logarithms; beyond, each further rank adds its
        steps.
        """
        chosen = _LIKE.get(kind, kind)
        size = np.asarray(size, dtype=float) * (bus_factor(kind, ranks) / bus_factor(chosen, ranks))
        if kind is CollectiveType.BARRIER:
            size = np.zeros_like(size)
        counts = sorted(count for of, count in self.curves if of is chosen)
        at = min(max(ranks, counts[0]), counts[-1])
        size = size * (bus_factor(chosen, ranks) / bus_factor(chosen, at))
        below, above = max(c for c in counts if c <= at), min(c for c in counts if c >= at)
        share = math.log(at / below) / math.log(above / below) if above > below else 0.0
        more = (self.latency(max(ranks, at)) / self.latency(at) - 1) * self._at(chosen, 0.0, above)
        return self._at(chosen, size, below) ** (1 - share) * self._at(chosen, size, above) ** share + more

    def message(self, size: float, outer: Dimension | None = None) -> float:
        """ns of a message between two GPUs of a node, as many as an all-to-all of twice its bytes takes."""
        within = CollectiveType.ALL_TO_ALL, 2 * size, 2
        return message_between(size, outer) if outer else float(self.time(*within))

    def latency(self, ranks: int) -> float:
        """ns of a small all-reduce."""
        counts = sorted(self.latency_ns)
        measured = float(np.interp(ranks, counts, [self.latency_ns[count] for count in counts]))
        return measured + 2 * max(ranks - counts[-1], 0) * launch_and_step(self.latency_ns)[1]

    def _at(self, kind: CollectiveType, size: Any, ranks: int) -> Any:
        x, y = self.curves[kind, ranks]
        latency = first_bytes(kind, ranks, self.latency_ns)
        at = np.asarray(size) / (latency * self.bus[ranks] / 1e9)
        return latency * np.interp(at, x, y) * np.maximum(at / x[-1], 1.0)


def first_bytes(kind: CollectiveType, ranks: int, latency_ns: Mapping[int, float]) -> float:
    """ns of a small collective, by those of all-reduces among several numbers of GPUs: a launch, and 2(p−1)
    steps among p GPUs; once around a ring is half of them, and an all-to-all sends and receives."""
    around = ranks - 1
    fewer = {CollectiveType.ALL_REDUCE: 0, CollectiveType.ALL_TO_ALL: 2 * around - 2}.get(kind, around)
    return max(latency_ns[ranks] - fewer * launch_and_step(latency_ns)[1], min(latency_ns.values()) / 2)


def launch_and_step(latency_ns: Mapping[int, float]) -> tuple[float, float]:
    """ns of both in small all-reduces among several numbers of GPUs."""
    few, many = min(latency_ns), max(latency_ns)
    step = max(latency_ns[many] - latency_ns[few], 0.0) / (2 * max(many - few, 1))
    return max(latency_ns[few] - 2 * (few - 1) * step, latency_ns[few] / 2), step


def measured_node(name: str, entry: Mapping[str, Any]) -> NcclNode:
    """The node that a table of ``networks.json`` describes: µs by collective, number of GPUs and bytes."""
    latency, bus, curves = {}, {}, {}
    sizes = np.array(entry["bytes"], dtype=float)
    for count, times in entry["all_reduce"].items():
        ranks, ns = int(count), np.array(times) * 1000
        latency[ranks] = float(np.median(ns[sizes <= SMALL]))
        bus[ranks] = bus_factor(CollectiveType.ALL_REDUCE, ranks) * float(sizes[-1] / ns[-1]) * 1e9
    for kind, operation in _OPERATIONS.items():
        for count, times in entry[operation].items():
            first = first_bytes(kind, int(count), latency)
            scale = first * bus[int(count)] / 1e9
            curves[kind, int(count)] = sizes / scale, np.array(times) * 1000 / first
    return NcclNode(name, entry["link"], bool(entry["nvls"]), latency, bus, curves, entry.get("error"))


def unmeasured_node(name: str, link: str, bandwidth: float, known: Mapping[str, NcclNode]) -> NcclNode:
    """A node that wasn't measured, from the ``known`` ones by GPU and their links' bandwidths.

    A step, and bus bandwidth as a share of the link's, are the geometric means over the known nodes with the
    same kind of link, PCIe or not; so are the curves. A launch is the host's work and knows no link: launches
    per second are the mean over all known nodes. One box with PCIe tells little of others: their curve
    is the mean of its own and that of ``_by_protocols``.
    """
    groups: dict[bool, list[tuple[NcclNode, float]]] = {}
    for each in known.values():
        groups.setdefault(each.link == "PCIe", []).append((each, networks.gpu(*each.name.split()).bandwidth))
    same = groups.get(link == "PCIe") or [each for group in groups.values() for each in group]
    counts = sorted(set.intersection(*(set(node.bus) for node, _ in same)))
    launch = harmonic_mean([launch_and_step(node.latency_ns)[0] for node in known.values()])
    step = geometric_mean([launch_and_step(node.latency_ns)[1] for node, _ in same])
    latency = {count: launch + 2 * (count - 1) * step for count in counts}
    bus = {count: bandwidth * geometric_mean([node.bus[count] / of for node, of in same]) for count in counts}
    curves = _mean_curves([node.curves for node, _ in same])
    if link == "PCIe" and False in groups:
        simple = _by_protocols(_mean_curves([node.curves for node, _ in groups[False]]))
        curves = _mean_curves([curves, simple]) if True in groups else simple
    return NcclNode(name, link, all(node.nvls for node, _ in same), latency, bus, curves)


def _mean_curves(each: Sequence[Mapping[tuple[CollectiveType, int], Curve]]) -> dict[Any, Curve]:
    found = {}
    for key in each[0]:
        least = min(curves[key][0][0] for curves in each)
        most = max(curves[key][0][-1] for curves in each)
        x = np.geomspace(least, most, round(2 * math.log2(most / least)) + 1)
        y = [np.interp(x, *curves[key]) * np.maximum(x / curves[key][0][-1], 1) for curves in each]
        found[key] = x, np.exp(np.mean(np.log(y), axis=0))
    return found


def _by_protocols(curves: Mapping[tuple[CollectiveType, int], Curve]) -> dict[Any, Curve]:
    """Curves that begin like these, of a link that bytes fill early: NCCL's LL sends a flag with each word,
    so half of the bandwidth, and Simple all of it at twice the latency (``tuning``)."""
    found = {}
    for key, (x, y) in curves.items():
        sent = bus_factor(*key) * x
        found[key] = x, np.minimum(y[0] + 2 * sent, 2 * y[0] + sent)
    return found


@functools.cache
def node(gpu: str, link: str) -> NcclNode:
    """NCCL among GPUs by name and link, as in ``networks.gpu``. Raises ``TraceError``."""
    of, tables = networks.gpu(gpu, link), networks.table()["measured"]
    name = f"{of.name} {of.link}"
    if of.measured:
        found = measured_node(of.measured, tables[of.measured])
        return found if of.measured == name else replace(found, name=name, error=None)
    known = {each: measured_node(each, entry) for each, entry in tables.items()}
    return unmeasured_node(name, of.link, of.bandwidth, known)


def between_nodes(
    kind: CollectiveType, size: float, per_node: int, nodes: int, of: NcclNode, outer: Dimension
) -> float:
    """ns of a collective of ``size`` bytes among ``per_node`` GPUs of each of ``nodes``. Not measured.

    ``outer``: the network between nodes, as each GPU has it (bytes per second, ns).
    """
    if kind is CollectiveType.BARRIER:
        kind, size = CollectiveType.ALL_REDUCE, 0
    ranks, tuning = per_node * nodes, networks.table()["tuning"]
    inside = float(of.time(kind, size, per_node)) if per_node > 1 else 0.0
    if _LIKE.get(kind, kind) is CollectiveType.ALL_TO_ALL:
        return max(inside, message_between(size * (nodes - 1) / nodes, outer))
    bus = min(of.bus_of(per_node) if per_node > 1 else math.inf, per_node * outer.bandwidth)
    possible = ["ring"]
    if kind is CollectiveType.ALL_REDUCE:
        possible += ["tree", "nvls tree"] if of.nvls and per_node > 1 else ["tree"]
    found = []
    for algorithm in possible:
        for protocol, cost in tuning["algorithms"][algorithm].items():
            hop = max(cost["network"] * 1000, outer.latency_ns)
            step = cost["PCIe" if of.link == "PCIe" else "NVLink"] * 1000
            moved, hops, steps = 2.0, 2 * math.log2(nodes), 2 * (per_node - 1) if algorithm == "tree" else 1
            if algorithm == "ring":
                reduces = kind is CollectiveType.ALL_REDUCE
                hops = 2 * nodes if reduces else nodes - 1
                steps = (2 if reduces else 1) * (ranks - 1) - hops
                moved = bus_factor(kind, ranks)
                step = max(step, tuning["overhead_us"][protocol] * 1000)
            rate = min(cost["share"] * bus, tuning["most"].get(protocol, math.inf))
            found.append(cost["base"] * 1000 + max(steps, 0) * step + hops * hop + size * moved / rate * 1e9)
    return max(inside, float(min(found)))


def message_between(size: float, link: Dimension) -> float:
    """ns of a message of ``size`` bytes between two nodes, by the best of NCCL's protocols. Not measured."""
    found = []
    for each in networks.table()["tuning"]["algorithms"]["ring"].values():
        latency_ns = each["base"] * 1e3 + max(each["network"] * 1e3, link.latency_ns)
        found.append(latency_ns + size / (each["share"] * link.bandwidth) * 1e9)
    return min(found)
