"""What-ifs about the network: each transfer takes what NCCL or an α–β–γ model would, and shares its links.

    from chakra_et.predict.predict import predict
    print(predict(chakra_et.load("outputs/gpt2_2gpu_quick_trace").run, [Network(bandwidth=1.25e9)]).after_ms)

Bandwidths are bytes per second and latencies nanoseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.arrays import medians
from chakra_et.cost.collectives import collective_time, message_time
from chakra_et.cost.network_fit import NetworkModel, Sample, fit_model, read_model
from chakra_et.cost.topology import Dimension, Topology
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.simulate.run import Run, Setting

TCP_PAYLOAD = 1448 / 1514
"""Bytes of payload per byte on Ethernet with an MTU of 1500: IPv4 and TCP with time stamps take 52 of 1500,
Ethernet's header 14 more (IEEE 802.3, RFC 791, RFC 7323)."""


@dataclass(frozen=True)
class Network:
    """Another network. What is None stays as it was fitted to the run, or as ``model`` has it.

    ``bandwidth``: bytes per second of one rank's link, per direction; ``latency_ns``: of one message.
    ``topology``, text for ``read_topology``, takes the place of both. With neither, every transfer changes
    by the ratio of the model's times. With a bandwidth, a transfer takes the model's time. ``contention``:
    whether transfers at the same time share their links.

    gloo cuts what a rank sends on into segments and sums one while another is on the link, so that its own
    work on the last of each phase adds to the time on the link and the rest passes beside it. That work is
    what the transfer took in the run, less the time on the link of then if its bandwidth is given
    (``present``). Without, ranks of one host had none; between hosts it isn't known which part was the
    link's, and a transfer takes the larger of both.

    Where the topology names GPUs, other backends take what NCCL does, the fitted costs of the run aside.
    """

    bandwidth: float | None = None
    latency_ns: float | None = None
    topology: str = ""
    model: NetworkModel | None = None
    contention: bool = True
    present: float | None = None

    def apply(self, run: Run, setting: Setting) -> Setting:
        found = find_communication(run)
        if not found:
            raise TraceError(
                "the network can't be changed: the files hold no communication between known ranks"
            )
        # Without collectives a message counts as a broadcast between two ranks, α + nβ.
        messages = [replace(each, kind=CollectiveType.BROADCAST) for each in found if each.kind is None]
        samples = collective_samples(found) or collective_samples(messages)
        fitted = self.model or fit_model(samples, "the run")
        setting = setting.noting(f"network of the run: {fitted.describe()}")
        if self.bandwidth is None and not self.topology:
            return self._by_ratio(run, setting, found, fitted)
        return self._by_model(run, setting, found, fitted)

    def _by_ratio(self, run: Run, setting: Setting, found: list[Transfer], fitted: NetworkModel) -> Setting:
        count = max(run.graph.ranks) + 1
        changed = fitted if self.latency_ns is None else replace(fitted, latency_ns=self.latency_ns)
        before, after = fitted.topology(count), changed.topology(count)
        taken = []
        for each in found:
            old = _time(each, before)
            ratio = _time(each, after) / old if old else 1.0
            taken.append(np.rint(each.transfer_ns * ratio).astype(np.int64))
        return _lasting(setting, found, taken)

    def _by_model(self, run: Run, setting: Setting, found: list[Transfer], fitted: NetworkModel) -> Setting:
        count = max([*run.graph.ranks, *(rank for each in found for rank in each.ranks)]) + 1
        latency_ns = fitted.latency_ns if self.latency_ns is None else self.latency_ns
        topology = Topology((Dimension(count, self.bandwidth or 0.0, latency_ns),))
        if self.topology:
            from chakra_et.cost.topology_text import read_topology

            topology = read_topology(self.topology, count)
        setting = replace(setting, notes=(*setting.notes, *topology.notes))
        if any(each.gloo for each in found):
            payload = (replace(d, bandwidth=d.bandwidth * TCP_PAYLOAD) for d in topology.dimensions)
            topology = replace(topology, dimensions=tuple(payload), nccl=None)
            but = "" if self.present else "; no transfer gets faster without the run's: --bandwidth FROM:TO"
            setting = setting.noting(
                f"gloo sends over TCP: {TCP_PAYLOAD:.1%} of the bandwidth is payload{but}"
            )
        no_wire = Dimension(topology.ranks, float("inf"), 0.0)
        extra = Topology((no_wire,), fitted.reduce_bandwidth, fitted.call_ns)
        no_latency = tuple(replace(d, latency_ns=0.0) for d in topology.dimensions)
        free = replace(topology, dimensions=no_latency, nccl=None)
        only_wire = replace(free, reduce_bandwidth=float("inf"), call_ns=0.0)
        domains = {trace.metadata.get("clock_domain") for trace in run.graph.traces}
        # With one clock no link between hosts was in the ranks' way.
        one_host = len(domains) == 1 and not domains & {None, ""}
        wire, fixed, least = (np.zeros(len(run.members)) for _ in range(3))
        of_size: dict[tuple[CollectiveType | None, int], list[float]] = {}
        known: dict[tuple[object, ...], tuple[float, float, float]] = {}

        def parts(each: Transfer) -> tuple[float, float, float]:
            """What it takes on the wire, its latency, and what the ranks do beside; ns."""
            on_wire = _time(each, only_wire)
            if topology.nccl is not None:
                whole = _time(each, topology)
                return min(on_wire, whole), max(whole - on_wire, 0.0), 0.0
            latency = _time(each, topology) - _time(each, free)
            return on_wire, latency, _time(each, extra)

        taken = []
        for each in found:
            key = (each.kind, each.size, *each.ranks)
            known[key] = known.get(key) or parts(each)
            (on_wire, latency, beside), at_least = known[key], 0.0
            measured = each.median_ns
            of_size.setdefault((each.kind, each.size), []).append(measured)
            if each.gloo:
                beside, at_least = self._own_work(each, measured, one_host)
            taken.append(np.array(round(max(on_wire + beside + latency, at_least))))
            if each.matched:
                number = run.operation[each.nodes[0]]
                wire[number], fixed[number], least[number] = on_wire, beside + latency, at_least
        scatter, spread = np.zeros(len(run.graph)), {size: np.std(ns) for size, ns in of_size.items()}
        for each in found:
            scatter[each.nodes] = spread[each.kind, each.size]
        setting = _lasting(setting, found, taken)
        setting = setting.doubting(lasting_ns=scatter)
        return replace(setting, demand=(wire, fixed, least)) if self.contention else setting

    def _own_work(self, each: Transfer, taken: float, one_host: bool) -> tuple[float, float]:
        """What the ranks' own work adds to a gloo transfer, and what the transfer takes at least; ns."""
        if self.present is not None:
            link = Topology((Dimension(max(each.ranks) + 1, self.present * TCP_PAYLOAD, 0.0),))
            taken = max(taken - _time(each, link), 0.0)
        elif not one_host:
            return 0.0, taken
        return taken / gloo_segments(each.size, len(each.ranks)), taken


def read_network(text: str) -> NetworkModel:
    """The network of a file of ``chakra-et measure-network``, or of a line as ``10 Gbit/s, 30 us``. Raises
    ``TraceError``."""
    if text.lower().endswith(".json") or os.path.isfile(text):
        return read_model(text)
    from chakra_et.cost.topology_text import read_topology

    link = read_topology(text, 2).dimensions[0]
    return NetworkModel(0.0, link.latency_ns, link.bandwidth, math.inf, 0.0, 0, repr(text))


_GLOO_REDUCE = "gloo:all_reduce"
"""How gloo reduces, whatever was called: it has no reduce-scatter, and all-reduces a copy of the whole
(ProcessGroupGloo.cpp)."""


def gloo_segments(size: int, ranks: int) -> int:
    """Into how many segments gloo's ring cuts each rank's part of ``size`` bytes: of 1 MiB at most, and two
    at least (gloo/allreduce.cc, gloo/allreduce.h)."""
    segments = max(-(-size // 2**20), 2 * ranks)
    return -(-segments // ranks)


@dataclass(frozen=True)
class Transfer:
    """One operation: ``nodes`` of its members (unmatched: one), with the ``transfer_ns`` of each and their
    median; ``kind`` is None for a message; ``ranks`` of its group, or sender and receiver."""

    nodes: np.ndarray
    transfer_ns: np.ndarray
    median_ns: float
    kind: CollectiveType | None
    size: int
    ranks: list[int]
    matched: bool
    gloo: bool


def find_communication(run: Run) -> list[Transfer]:
    """All operations whose kind, size and members are known."""
    graph, known = run.graph, {int(kind): kind for kind in CollectiveType}
    alone = np.flatnonzero((graph.types == NodeType.COMM_COLL) & (run.operation < 0))
    operations = [*run.members, *alone.reshape(-1, 1)]
    if not operations:
        return []
    count = np.array([len(nodes) for nodes in operations])
    first, every = np.cumsum(count) - count, np.concatenate(operations)
    wait = np.minimum(graph.attribute("wait_micros", 0) * 1000, run.measured.own_ns)
    taken = np.where(run.operation >= 0, run.measured.lasting_ns, run.measured.own_ns - wait)[every]
    median = medians(taken, np.repeat(np.arange(len(count)), count))
    sizes = np.maximum.reduceat(graph.attribute("comm_size", -1)[every], first).clip(0)
    head = every[first]
    is_message = graph.types[head] != NodeType.COMM_COLL
    kinds = np.where(is_message, -1, graph.attribute("comm_type", -1)[head])
    kinds[run.named(_GLOO_REDUCE.__eq__)[head]] = CollectiveType.ALL_REDUCE
    gloo = run.named(lambda name: name.startswith("gloo:"))[head]
    columns = (each.tolist() for each in (median, sizes, kinds, is_message, run.operation[head] >= 0, gloo))
    rows = zip(operations, np.split(taken.astype(float), first[1:]), *columns, strict=True)
    found = []
    for nodes, own, middle, size, kind, message, matched, by_gloo in rows:
        if message:  # the sender first
            nodes, own = (each[np.argsort(run.matching.side[nodes], kind="stable")] for each in (nodes, own))
        senders = [graph.ranks[trace] for trace in graph.trace_of[nodes].tolist()]
        ranks = senders if matched else _group_of(run, int(nodes[0]))
        if len(ranks) > 1 and (message or kind in known):
            found.append(Transfer(nodes, own, middle, known.get(kind), size, ranks, matched, by_gloo))
    return found


def collective_samples(found: Sequence[Transfer]) -> list[Sample]:
    """The collectives to fit a model to: the median time of each kind and size."""
    groups: dict[tuple[CollectiveType, int, int], list[float]] = {}
    for each in found:
        if each.kind is not None:
            key = (each.kind, each.size, len(each.ranks))
            groups.setdefault(key, []).append(each.median_ns)
    return [Sample(*key, float(np.median(times))) for key, times in groups.items()]


def _lasting(setting: Setting, found: Sequence[Transfer], taken: Sequence[np.ndarray]) -> Setting:
    """The setting in which each transfer takes so many ns."""
    own, lasting = setting.own_ns.copy(), setting.lasting_ns.copy()
    for each, ns in zip(found, taken, strict=True):
        if each.matched:
            lasting[each.nodes] = ns
        else:
            own[each.nodes] += ns - np.rint(each.transfer_ns).astype(np.int64)
    return replace(setting, own_ns=own, lasting_ns=lasting)


def _time(each: Transfer, topology: Topology) -> float:
    if each.kind is None:
        return message_time(each.size, each.ranks[0], each.ranks[1], topology)
    return collective_time(each.kind, each.size, each.ranks, topology)


def _group_of(run: Run, node: int) -> list[int]:
    """The ranks of an unmatched collective's group, empty where they aren't known."""
    name = run.graph.groups[run.graph.group[node]]
    if name in run.comm_groups:
        return list(run.comm_groups[name])
    size = run.graph.traces[run.graph.trace_of[node]].metadata.get("world_size")
    return list(range(size)) if type(size) is int and 1 < size < 1 << 20 else []
