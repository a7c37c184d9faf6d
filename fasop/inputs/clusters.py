"""Clusters: nodes, the GPUs in them, the links between them and what they cost; ``data/clusters.json``, or a
YAML file of the same shape given by the user.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from fasop.errors import PlanError, nearest
from fasop.inputs import kinds
from fasop.inputs.read_files import DATA, checked, kinds_of, read_mapping, read_settings, read_yaml, shown

PRESETS = DATA / "clusters.json"
MOST_CLUSTERS = 10_000  # of one grid


@dataclass(frozen=True)
class Gpu:
    """A type of GPU and the node it sits in.

    memory_gib: what a plan may use of one GPU; price_per_hour: $ of one node; inter_bandwidth: bit/s that a
    node sends to another; intra_bandwidth: bit/s that a GPU sends to the others of its node; latencies:
    seconds per message; shared_bus: the GPUs of a node share that bandwidth (PCIe), else each has it
    (NVSwitch); instance: the node's commercial name; like, speed: costs are those of GPU ``like`` ("": this
    name), divided by ``speed``; gpus_per_node: 0: the cluster's; gpu_bandwidth: bit/s that one GPU sends to
    another node (0: all that its node can); reserved_gib: what the framework and its communicators take of
    one GPU's memory; hosts: names of the nodes; queue, gres: Slurm's names of partition and GPU.
    """

    name: str
    memory_gib: kinds.Memory
    price_per_hour: kinds.HourlyPrice
    inter_bandwidth: kinds.Bandwidth
    intra_bandwidth: kinds.Bandwidth
    inter_latency: kinds.Latency = 0.0
    intra_latency: kinds.Latency = 0.0
    shared_bus: bool = False
    instance: str = ""
    like: str = ""
    speed: kinds.Speed = 1.0
    gpus_per_node: kinds.NodeSize = 0
    gpu_bandwidth: kinds.BandwidthOrZero = 0.0
    reserved_gib: kinds.Reserved = 0.0
    hosts: tuple[kinds.Name, ...] = ()
    queue: str = ""
    gres: str = ""

    @property
    def costs_of(self) -> str:
        """The GPU whose costs this type has."""
        return self.like or self.name


@dataclass(frozen=True)
class Link:
    """What nodes of two GPU types can exchange, where it is not what each can send.

    bandwidth: bit/s between two nodes; latency: seconds per message; points: (bytes
    of a message, bit/s), where the bandwidth depends on the size.
    """

    between: tuple[str, str]
    bandwidth: kinds.Bandwidth
    latency: kinds.Latency = 0.0
    points: tuple[tuple[kinds.MessageSize, kinds.Bandwidth], ...] = ()


@dataclass(frozen=True)
class Cluster:
    """``nodes[i]`` nodes of type ``gpus[i]``, with ``gpus_per_node`` GPUs unless the type has its own."""

    name: str
    gpus_per_node: kinds.NodeSize
    gpus: tuple[Gpu, ...]
    nodes: tuple[kinds.Nodes, ...]
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
        return {gpu.name: gpu for gpu in self.gpus}[name]

    def instances(self, placement: Sequence[str]) -> list[str]:
        """What each node of a placement is called: its instance, else its GPU type."""
        names = {gpu.name: gpu.instance or gpu.name for gpu in self.gpus}
        return [names[node] for node in placement]

    def hosts(self) -> list[tuple[str, str]]:
        """(name, type) of every node; without names of their own, node0, node1 … in the file's order."""
        types = [(gpu, at) for gpu, n in zip(self.gpus, self.nodes, strict=True) for at in range(n)]
        return [
            (gpu.hosts[at] if gpu.hosts else f"node{number}", gpu.name)
            for number, (gpu, at) in enumerate(types)
        ]

    def assigned(self, placement: Sequence[str]) -> list[str]:
        """A host of its own for each node of a placement."""
        hosts = self.hosts()
        left = {gpu.name: iter([host for host, name in hosts if name == gpu.name]) for gpu in self.gpus}
        return [next(left[name]) for name in placement]


def of_gpus(name: str, count: int) -> Cluster:
    """So many GPUs of ``chakra_et``'s table, in nodes as they are sold. Raises ``PlanError``."""
    # Not loaded where clusters are files.
    from chakra_et.cost import gpus, nccl, networks
    from chakra_et.cost.topology import COLLECTIVE_START
    from chakra_et.errors import TraceError

    known = {key.upper(): key for key in gpus.names()}
    if name.upper() not in known:
        raise PlanError(f"{count}x{name}: no GPU {name!r} is known: {nearest(name, known.values())}")
    name = known[name.upper()]
    try:
        of, inside = networks.gpu(name), nccl.node(name, "")
    except TraceError:  # no link of its own: that of a GPU on PCIe
        of, inside = networks.gpu("L40S"), None
    # Racks of 72 are mostly used as 64.
    size = min(of.domain if count % of.domain == 0 else 2 ** int(math.log2(of.domain)), count)
    if count > size and (not of.network or count % size):
        why = f"is no multiple of {size}" if of.network else "need a network, which isn't known for them"
        raise PlanError(f"{count}x{name}: {count} GPUs {why}: give a cluster file.")
    rate = inside.bus_of(min(size, 8) if of.link == "PCIe" else 8) if inside else of.bandwidth
    hop = max((inside.latency(8) / 1e9 - COLLECTIVE_START) / 14, 1e-6) if inside else 0.0
    called = "A100-80GB" if name == "A100" else name  # as cluster files call them
    held, sent = float(gpus.entry(name)["held"].split()[0]), 8 * (of.network or of.bandwidth) * size
    own = (called, held, 0.0, sent, 8 * rate, 0.0, hop, of.link == "PCIe")
    gpu = Gpu(*own, gpu_bandwidth=8 * of.network)
    return Cluster(f"{count}x{name}", size, (gpu,), (count // size,))


def check_gpu(where: str, gpu: Gpu, nodes: int) -> None:
    """Whether the settings of a GPU type fit each other. Raises ``PlanError``."""
    held, kept = gpu.memory_gib, gpu.reserved_gib
    if kept >= held:
        raise PlanError(f"{where}: reserved_gib is {kept:g}, which leaves nothing of memory_gib {held:g}.")
    if len(set(gpu.hosts)) != len(gpu.hosts):
        raise PlanError(f"{where}: hosts: give a list of different names.")
    if gpu.hosts and len(gpu.hosts) != nodes:
        raise PlanError(f"{where}: {len(gpu.hosts)} hosts for {nodes} nodes.")


def check_nodes(where: str, cluster: Cluster, placement: Sequence[str]) -> None:
    """Whether a cluster has these nodes. Raises ``PlanError``."""
    have = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    for name, count in Counter(placement).items():
        if name not in have:
            raise PlanError(f"{where}: no GPU {name!r} in cluster {cluster.name}: {nearest(name, have)}")
        if count > have[name]:
            raise PlanError(f"{where}: {count} nodes of {name}, cluster {cluster.name} has {have[name]}.")


def check_gpus(degrees: str, cluster: Cluster, placement: Sequence[str], needed: int) -> None:
    """Whether the nodes of a placement have as many GPUs as ``degrees`` need. Raises ``PlanError``."""
    held = sum(cluster.size(cluster.gpu(name)) for name in placement)
    if needed > held:
        raise PlanError(f"{degrees} is {needed}, its nodes have {held} GPUs.")


GPU_KINDS = {key: kind for key, kind in kinds_of(Gpu).items() if key != "name"}
GPU_KINDS["gpu_bandwidth"] = kinds.Bandwidth  # 0 is "not given" in ``Gpu``; a file leaves it out instead
LINK_KINDS = {key: kind for key, kind in kinds_of(Link).items() if key != "points"}


def load_clusters(name_or_path: str) -> list[Cluster]:
    """The clusters of a preset, of GPUs (``64xH100``) or of a YAML file; several where counts are ranges.

    A file holds ``clusters: {name: {gpus_per_node: 4, gpus: {A100: {nodes: 1, …}}, links: […]}}``; ``nodes:
    0-8`` stands for each count from 0 to 8, and the clusters are all combinations but the empty one. A path
    may end in ``:name`` to choose one entry. Raises ``PlanError``.
    """
    if not name_or_path:
        raise PlanError("no cluster is named: give a preset or a YAML file.")
    if sold := re.fullmatch(r"(\d{1,6})x([\w-]+)", name_or_path):
        return [of_gpus(sold[2], max(int(sold[1]), 1))]
    presets = read_yaml(PRESETS, "clusters")
    if name_or_path in presets:
        return _expand(str(PRESETS.name), name_or_path, presets)
    path, chosen = Path(name_or_path), None
    if ":" in name_or_path and not path.exists():
        text, _, chosen = name_or_path.rpartition(":")
        path = Path(text)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        near = nearest(name_or_path, presets)
        raise PlanError(f"no cluster {name_or_path!r} (neither a preset nor a file): {near}")
    entries = read_yaml(path, "clusters")
    names = list(entries) if chosen is None else [chosen]
    if names[0] not in entries:
        raise PlanError(f"{path}: no cluster {names[0]!r}: {nearest(names[0], entries)}")
    if len(names) > 1:
        raise PlanError(f"{path}: holds {len(names)} clusters: choose one, as {path}:{names[0]}.")
    return _expand(str(path), names[0], entries)


def _expand(file: str, name: str, entries: dict[str, Any]) -> list[Cluster]:
    where = f"{file}: cluster {name}"
    entry = read_mapping(where, entries[name], ["gpus_per_node", "gpus", "links"])
    if not isinstance(entry.get("gpus"), dict) or not entry["gpus"]:
        raise PlanError(f"{where}: no GPU types under 'gpus': give them as 'A100: {{nodes: 1, …}}'.")
    size = checked(f"{where}: gpus_per_node", entry.get("gpus_per_node", 0), kinds.NodeSize)
    needed = [field.name for field in fields(Gpu) if field.name in GPU_KINDS and field.default is MISSING]
    gpus, counts = [], []
    for gpu_name, own in entry["gpus"].items():
        at = f"{where}: GPU {gpu_name}"
        settings = read_mapping(at, own, [*GPU_KINDS, "nodes"])
        counts.append(_counts(at, settings.pop("nodes", None)))
        read = read_settings(at, settings, GPU_KINDS, needed)
        if read.get("like", "").endswith((".json", ".yaml", ".yml")):
            read["like"] = str(Path(file).absolute().parent / read["like"])  # a datasheet
        gpus.append(Gpu(name=str(gpu_name), **read))
        check_gpu(at, gpus[-1], counts[-1][-1])
        if (gpus[-1].gpus_per_node or size) < 1:
            raise PlanError(f"{at}: gpus_per_node is {gpus[-1].gpus_per_node or size}: give at least 1.")
    links = _links(where, entry.get("links", []), gpus)
    total = math.prod(map(len, counts))
    if total > MOST_CLUSTERS:
        raise PlanError(f"{where}: {total} clusters in the grid: give at most {MOST_CLUSTERS}.")
    clusters = []
    for nodes in itertools.product(*counts):
        if sum(nodes) == 0:
            continue
        used = [(gpu, count) for gpu, count in zip(gpus, nodes, strict=True) if count]
        label = name if total == 1 else f"{name}-" + "-".join(map(str, nodes))
        types, numbers = zip(*used, strict=True)
        clusters.append(Cluster(label, size, types, numbers, links))
    if not clusters:
        raise PlanError(f"{where}: no nodes: give at least 1 node of some GPU type.")
    return clusters


def _counts(where: str, value: Any) -> range:
    low = high = value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,9})\s*-\s*(\d{1,9})", value.strip())):
        low, high = int(match[1]), int(match[2])
    if isinstance(low, bool) or not isinstance(low, int) or not 0 <= low <= high:
        raise PlanError(f"{where}: nodes: {shown(value)}: give a count such as 4, or a range such as 0-8.")
    if high > kinds.MOST_NODES:
        raise PlanError(f"{where}: nodes: {shown(value)}: give at most {kinds.MOST_NODES}.")
    return range(low, high + 1)


def _links(where: str, entries: Any, gpus: list[Gpu]) -> tuple[Link, ...]:
    if not isinstance(entries, list):
        raise PlanError(f"{where}: links: give a list of links, each with 'between' and 'bandwidth'.")
    known = [gpu.name for gpu in gpus]
    found = []
    for index, entry in enumerate(entries):
        at = f"{where}: link {index}"
        link = Link(**read_settings(at, entry, LINK_KINDS, ["between", "bandwidth"]))
        for end in link.between:
            if end not in known:
                raise PlanError(f"{at}: between: no GPU type {end!r}: {nearest(end, known)}")
        found.append(link)
    return tuple(found)
