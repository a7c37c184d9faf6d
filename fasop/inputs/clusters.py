"""Clusters: nodes of equal size, each with one type of GPU; presets in ``clusters.yaml`` or a user's file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fasop.errors import PlanError, nearest
from fasop.inputs.settings import number, read_mapping, read_yaml, whole

PRESETS = Path(__file__).parents[1] / "data" / "clusters.yaml"
MOST_CLUSTERS = 10_000  # of one grid


@dataclass(frozen=True)
class Gpu:
    """A type of GPU and the node it sits in.

    memory_gib: what a plan may use of one GPU; price_per_hour: $ of one node; inter_bandwidth: bit/s
    that a node sends to another; intra_bandwidth: bit/s between two GPUs of a node; latencies: seconds
    a message; shared_bus: the GPUs of a node share that bandwidth (PCIe) instead of having it each
    (NVSwitch); instance: what the node is called; like, speed: costs are those of GPU ``like`` ("":
    this name), divided by ``speed``.
    """

    name: str
    memory_gib: float
    price_per_hour: float
    inter_bandwidth: float
    intra_bandwidth: float
    inter_latency: float = 0.0
    intra_latency: float = 0.0
    shared_bus: bool = False
    instance: str = ""
    like: str = ""
    speed: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """``nodes[i]`` nodes of type ``gpus[i]``, ``gpus_per_node`` GPUs in every node."""

    name: str
    gpus_per_node: int
    gpus: tuple[Gpu, ...]
    nodes: tuple[int, ...]

    @property
    def node_count(self) -> int:
        return sum(self.nodes)

    @property
    def gpu_count(self) -> int:
        return self.gpus_per_node * self.node_count

    @property
    def price_per_hour(self) -> float:
        """$ of all nodes."""
        return sum(gpu.price_per_hour * count for gpu, count in zip(self.gpus, self.nodes, strict=True))

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


def load_clusters(name_or_path: str) -> list[Cluster]:
    """The clusters of a preset or of a YAML file; more than one where node counts are ranges.

    A file holds ``clusters: {name: {gpus_per_node: 4, gpus: {A100: {nodes: 1, …}}}}``; ``nodes: 0-8``
    stands for each count from 0 to 8, and the clusters are all combinations but the empty one; ``base:
    name`` takes over the settings of an earlier entry. A path may end in ``:name`` to choose one entry.
    Raises ``PlanError``.
    """
    presets = read_yaml(PRESETS, "clusters")
    if name_or_path in presets:
        return _expand(str(PRESETS.name), name_or_path, presets)
    text, _, chosen = name_or_path.rpartition(":")
    path = Path(text) if text and not Path(name_or_path).exists() else Path(name_or_path)
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        raise PlanError(
            f"no cluster {name_or_path!r} (neither a preset nor a file): {nearest(name_or_path, presets)}"
        )
    entries = read_yaml(path, "clusters")
    names = [chosen] if path == Path(text) and text else list(entries)
    if names[0] not in entries:
        raise PlanError(f"{path}: no cluster {names[0]!r}: {nearest(names[0], map(str, entries))}")
    if len(names) > 1:
        raise PlanError(f"{path}: holds {len(names)} clusters: choose one, as {path}:{names[0]}.")
    return _expand(str(path), names[0], entries)


def _expand(file: str, name: str, entries: dict[str, Any]) -> list[Cluster]:
    where = f"{file}: cluster {name}"
    entry = read_mapping(where, entries[name], ["gpus_per_node", "gpus", "base"])
    base: dict[str, Any] = {}
    if "base" in entry:
        if entry["base"] not in entries or "base" in (entries[entry["base"]] or {}):
            raise PlanError(f"{where}: base {entry['base']!r} is no entry of its own in this file.")
        base = read_mapping(
            f"{file}: cluster {entry['base']}", entries[entry["base"]], ["gpus_per_node", "gpus"]
        )
    size = whole(f"{where}: gpus_per_node", entry.get("gpus_per_node", base.get("gpus_per_node")))
    if size < 1:
        raise PlanError(f"{where}: gpus_per_node is {size}: give at least 1.")
    settings = entry.get("gpus", {})
    if not isinstance(settings, dict) or not (settings or base):
        raise PlanError(f"{where}: no GPU types under 'gpus'.")
    gpus, counts = [], []
    for gpu_name, own in settings.items():
        at = f"{where}: GPU {gpu_name}"
        merged = {
            **(base.get("gpus", {}).get(gpu_name) or {}),
            **(own if isinstance(own, dict) else {"nodes": own}),
        }
        gpus.append(_gpu(at, str(gpu_name), merged))
        counts.append(_counts(at, merged.get("nodes")))
    total = 1
    for range_ in counts:
        total *= len(range_)
    if total > MOST_CLUSTERS:
        raise PlanError(f"{where}: {total} clusters in the grid: give at most {MOST_CLUSTERS}.")
    clusters = []
    for nodes in itertools.product(*counts):
        if sum(nodes) == 0:
            continue
        used = [(gpu, count) for gpu, count in zip(gpus, nodes, strict=True) if count]
        label = name if total == 1 else f"{name}-" + "-".join(map(str, nodes))
        clusters.append(
            Cluster(label, size, tuple(gpu for gpu, _ in used), tuple(count for _, count in used))
        )
    if not clusters:
        raise PlanError(f"{where}: no nodes: give at least 1 node of some GPU type.")
    return clusters


def _gpu(where: str, name: str, merged: dict[str, Any]) -> Gpu:
    known = [field.name for field in fields(Gpu) if field.name != "name"]
    values = read_mapping(where, merged, [*known, "nodes"])
    values.pop("nodes", None)
    for key in ("memory_gib", "price_per_hour", "inter_bandwidth", "intra_bandwidth"):
        if key not in values:
            raise PlanError(f"{where}: lacks {key}.")
    for key, value in values.items():
        if key in ("instance", "like"):
            values[key] = str(value)
        elif key == "shared_bus":
            if not isinstance(value, bool):
                raise PlanError(f"{where}: shared_bus: {value!r}: give true or false.")
        else:
            may_be_zero = key.endswith("latency") or key == "price_per_hour"
            values[key] = number(f"{where}: {key}", value, positive=not may_be_zero)
    return Gpu(name=name, **values)


def _counts(where: str, value: Any) -> range:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip())):
        low, high = int(match[1]), int(match[2])
        if low <= high:
            return range(low, high + 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"{where}: nodes: {value!r}: give a count such as 4, or a range such as 0-8.")
    return range(value, value + 1)
