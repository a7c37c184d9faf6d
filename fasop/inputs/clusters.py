"""Clusters: nodes, the GPUs in them, the links between them and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fasop.errors import PlanError, nearest
from fasop.inputs.value_types import (
    Bandwidth,
    BandwidthOrZero,
    HourlyPrice,
    Latency,
    Memory,
    MessageSize,
    Name,
    Nodes,
    NodeSize,
    Reserved,
    Speed,
    TrafficPrice,
)


@dataclass(frozen=True)
class Gpu:
    """A type of GPU and the node it sits in.

    memory_gib: what a plan may use of one GPU; price_per_hour: $ of one node; inter_bandwidth: bit/s
    that a node sends to another; intra_bandwidth: bit/s that a GPU sends to the others of its node;
    latencies: seconds per message; shared_bus: the GPUs of a node share that bandwidth (PCIe) instead of
    having it each (NVSwitch); instance: the node's commercial name; like, speed: costs are those of GPU
    ``like`` ("": this name), divided by ``speed``; gpus_per_node: 0: the cluster's; gpu_bandwidth: bit/s
    that one GPU sends to another node (0: all that its node can); zone: where the node is; reserved_gib: what
    the framework and its communicators take of one GPU's memory; hosts: names of the nodes; queue, gres: what
    Slurm calls their partition and this type of GPU.
    """

    name: str
    memory_gib: Memory
    price_per_hour: HourlyPrice
    inter_bandwidth: Bandwidth
    intra_bandwidth: Bandwidth
    inter_latency: Latency = 0.0
    intra_latency: Latency = 0.0
    shared_bus: bool = False
    instance: str = ""
    like: str = ""
    speed: Speed = 1.0
    gpus_per_node: NodeSize = 0
    gpu_bandwidth: BandwidthOrZero = 0.0
    zone: str = ""
    reserved_gib: Reserved = 0.0
    hosts: tuple[Name, ...] = ()
    queue: str = ""
    gres: str = ""

    @property
    def costs_of(self) -> str:
        """The GPU whose costs this type has."""
        return self.like or self.name


@dataclass(frozen=True)
class Link:
    """What nodes of two GPU types, or in two zones, can exchange, where it is not what each can send.

    bandwidth: bit/s between two nodes; latency: seconds per message; price_per_gb: $ per 10⁹ bytes;
    points: (bytes of a message, bit/s), where the bandwidth depends on the size.
    """

    between: tuple[str, str]
    bandwidth: Bandwidth
    latency: Latency = 0.0
    price_per_gb: TrafficPrice = 0.0
    points: tuple[tuple[MessageSize, Bandwidth], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """``nodes[i]`` nodes of type ``gpus[i]``, with ``gpus_per_node`` GPUs unless the type has its own."""

    name: str
    gpus_per_node: NodeSize
    gpus: tuple[Gpu, ...]
    nodes: tuple[Nodes, ...]
    links: tuple[Link, ...] = ()

    @property
    def node_count(self) -> int:
        return sum(self.nodes)

    @property
    def gpu_count(self) -> int:
        return sum(self.size(gpu) * count for gpu, count in zip(self.gpus, self.nodes, strict=True))

    @property
    def price_per_hour(self) -> float:
        """$ of all nodes."""
        return sum(gpu.price_per_hour * count for gpu, count in zip(self.gpus, self.nodes, strict=True))

    def size(self, gpu: Gpu) -> int:
        """GPUs in a node of a type."""
        return gpu.gpus_per_node or self.gpus_per_node

    def gpu(self, name: str) -> Gpu:
        """The type of that name. Raises ``KeyError``."""
        for gpu in self.gpus:
            if gpu.name == name:
                return gpu
        raise KeyError(name)

    def instances(self, placement: Sequence[str]) -> list[str]:
        """What each node of a placement is called: its instance, else its GPU type."""
        names = {gpu.name: gpu.instance or gpu.name for gpu in self.gpus}
        return [names[node] for node in placement]

    def price_of(self, placement: Sequence[str]) -> float:
        """$ per hour of the nodes of a placement."""
        return sum(self.gpu(name).price_per_hour for name in placement)

    def hosts(self) -> list[tuple[str, str]]:
        """(name, type) of every node; without names of their own, node0, node1 … in the file's order."""
        found: list[tuple[str, str]] = []
        for gpu, count in zip(self.gpus, self.nodes, strict=True):
            for index in range(count):
                found.append((gpu.hosts[index] if gpu.hosts else f"node{len(found)}", gpu.name))
        return found

    def assigned(self, placement: Sequence[str]) -> list[str]:
        """A host of its own for each node of a placement."""
        left: dict[str, list[str]] = {}
        for host, name in self.hosts():
            left.setdefault(name, []).append(host)
        return [left[name].pop(0) for name in placement]

    def without(self, lost: Iterable[str]) -> Cluster:
        """The cluster without some nodes. Raises ``PlanError`` for a name that it doesn't have."""
        hosts = self.hosts()
        gone = set(lost)
        if unknown := sorted(gone - {host for host, _ in hosts}):
            raise PlanError(
                f"cluster {self.name}: no node {unknown[0]!r}: {_some(host for host, _ in hosts)}"
            )
        kept = [(host, name) for host, name in hosts if host not in gone]
        if not kept:
            raise PlanError(f"cluster {self.name}: every node is lost.")
        gpus, counts = [], []
        for gpu in self.gpus:
            names = tuple(host for host, name in kept if name == gpu.name)
            if names:
                gpus.append(replace(gpu, hosts=names))
                counts.append(len(names))
        return replace(self, gpus=tuple(gpus), nodes=tuple(counts))


def check_gpu(where: str, gpu: Gpu, nodes: int) -> None:
    """What the settings of one type of GPU must be to each other. Raises ``PlanError``."""
    if gpu.reserved_gib >= gpu.memory_gib:
        raise PlanError(
            f"{where}: reserved_gib is {gpu.reserved_gib:g}, which leaves nothing of memory_gib "
            f"{gpu.memory_gib:g}: give less."
        )
    if len(set(gpu.hosts)) != len(gpu.hosts):
        raise PlanError(f"{where}: hosts: give a list of different names.")
    if gpu.hosts and len(gpu.hosts) != nodes:
        raise PlanError(f"{where}: {len(gpu.hosts)} hosts for {nodes} nodes.")


def check_nodes(where: str, cluster: Cluster, placement: Sequence[str]) -> None:
    """Whether a cluster has these nodes. Raises ``PlanError``."""
    have = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    for name in dict.fromkeys(placement):
        if name not in have:
            raise PlanError(f"{where}: no GPU {name!r} in cluster {cluster.name}: {nearest(name, have)}")
        if placement.count(name) > have[name]:
            raise PlanError(
                f"{where}: {placement.count(name)} nodes of {name}, cluster {cluster.name} has {have[name]}."
            )


def check_gpus(degrees: str, cluster: Cluster, placement: Sequence[str], needed: int) -> None:
    """Whether the nodes of a placement have as many GPUs as ``degrees`` need. Raises ``PlanError``."""
    held = sum(cluster.size(cluster.gpu(name)) for name in placement)
    if needed > held:
        raise PlanError(f"{degrees} is {needed}, its nodes have {held} GPUs.")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    first = ", ".join(listed[: 3 if len(listed) > 4 else None])
    return f"use {first} … {listed[-1]}." if len(listed) > 4 else f"use {first}."
