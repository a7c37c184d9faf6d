"""Cluster files: ``data/clusters.yaml``, or a file of the same shape given by the user."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from fasop.errors import PlanError, nearest
from fasop.inputs.clusters import Cluster, Gpu, Link
from fasop.inputs.settings import flag, number, read_mapping, read_yaml, whole

PRESETS = Path(__file__).parents[1] / "data" / "clusters.yaml"
MOST_CLUSTERS = 10_000  # of one grid


def load_clusters(name_or_path: str) -> list[Cluster]:
    """The clusters of a preset or of a YAML file; more than one where node counts are ranges.

    A file holds ``clusters: {name: {gpus_per_node: 4, gpus: {A100: {nodes: 1, …}}, links: […]}}``; ``nodes:
    0-8`` stands for each count from 0 to 8, and the clusters are all combinations but the empty one; ``base:
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
    entry = read_mapping(where, entries[name], ["gpus_per_node", "gpus", "links", "base"])
    base: dict[str, Any] = {}
    if "base" in entry:
        if entry["base"] not in entries or "base" in (entries[entry["base"]] or {}):
            raise PlanError(f"{where}: base {entry['base']!r} is no entry of its own in this file.")
        base = read_mapping(
            f"{file}: cluster {entry['base']}", entries[entry["base"]], ["gpus_per_node", "gpus", "links"]
        )
    settings = entry.get("gpus", {})
    if not isinstance(settings, dict) or not (settings or base):
        raise PlanError(f"{where}: no GPU types under 'gpus'.")
    size = entry.get("gpus_per_node", base.get("gpus_per_node", 0))
    if whole(f"{where}: gpus_per_node", size) < 0:
        raise PlanError(f"{where}: gpus_per_node is {size}: give at least 1.")
    gpus, counts = [], []
    for gpu_name, own in settings.items():
        at = f"{where}: GPU {gpu_name}"
        merged = {
            **(base.get("gpus", {}).get(gpu_name) or {}),
            **(own if isinstance(own, dict) else {"nodes": own}),
        }
        gpus.append(_gpu(at, str(gpu_name), merged, size))
        counts.append(_counts(at, merged.get("nodes")))
        if gpus[-1].hosts and len(gpus[-1].hosts) != counts[-1][-1]:
            raise PlanError(f"{at}: {len(gpus[-1].hosts)} hosts for {counts[-1][-1]} nodes.")
    links = _links(where, entry.get("links", base.get("links", [])), gpus)
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
            Cluster(label, size, tuple(gpu for gpu, _ in used), tuple(count for _, count in used), links)
        )
    if not clusters:
        raise PlanError(f"{where}: no nodes: give at least 1 node of some GPU type.")
    return clusters


_QUANTITY = {
    "memory_gib": "memory_gib",
    "reserved_gib": "reserved_gib",
    "price_per_hour": "price_per_hour",
    "inter_bandwidth": "bandwidth",
    "intra_bandwidth": "bandwidth",
    "gpu_bandwidth": "bandwidth",
    "inter_latency": "latency",
    "intra_latency": "latency",
    "speed": "speed",
}


def _gpu(where: str, name: str, merged: dict[str, Any], cluster_size: int) -> Gpu:
    known = [field.name for field in fields(Gpu) if field.name != "name"]
    values = read_mapping(where, merged, [*known, "nodes"])
    values.pop("nodes", None)
    for key in ("memory_gib", "price_per_hour", "inter_bandwidth", "intra_bandwidth"):
        if key not in values:
            raise PlanError(f"{where}: lacks {key}.")
    for key, value in values.items():
        if key in _QUANTITY:
            values[key] = number(f"{where}: {key}", value, _QUANTITY[key])
        elif key == "shared_bus":
            values[key] = flag(f"{where}: shared_bus", value)
        elif key == "gpus_per_node":
            values[key] = whole(f"{where}: gpus_per_node", value)
        elif key == "hosts":
            if not isinstance(value, list) or len(set(map(str, value))) != len(value):
                raise PlanError(f"{where}: hosts: give a list of different names.")
            values[key] = tuple(map(str, value))
        else:
            values[key] = str(value)
    gpu = Gpu(name=name, **values)
    if (gpu.gpus_per_node or cluster_size) < 1:
        raise PlanError(f"{where}: gpus_per_node is {gpu.gpus_per_node or cluster_size}: give at least 1.")
    return gpu


def _counts(where: str, value: Any) -> range:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip())):
        low, high = int(match[1]), int(match[2])
        if low <= high:
            return range(low, high + 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"{where}: nodes: {value!r}: give a count such as 4, or a range such as 0-8.")
    return range(value, value + 1)


def _links(where: str, entries: Any, gpus: list[Gpu]) -> tuple[Link, ...]:
    if not isinstance(entries, list):
        raise PlanError(f"{where}: links: give a list of links, each with 'between' and 'bandwidth'.")
    known = sorted({gpu.name for gpu in gpus} | {gpu.zone for gpu in gpus if gpu.zone})
    found = []
    for index, entry in enumerate(entries):
        at = f"{where}: link {index}"
        values = read_mapping(at, entry, ["between", "bandwidth", "latency", "price_per_gb", "points"])
        ends = values.get("between")
        if not isinstance(ends, list) or len(ends) != 2:
            raise PlanError(f"{at}: between: give two GPU types or two zones, as [{known[0]}, {known[-1]}].")
        for end in ends:
            if str(end) not in known:
                raise PlanError(f"{at}: between: no GPU type or zone {end!r}: {nearest(str(end), known)}")
        points = values.get("points") or {}
        if not isinstance(points, dict) or not (points or "bandwidth" in values):
            raise PlanError(f"{at}: give its bandwidth, or points as {{message bytes: bit/s}}.")
        curve = sorted(
            (number(f"{at}: points", size, "bytes"), number(f"{at}: points", rate, "bandwidth"))
            for size, rate in points.items()
        )
        bandwidth = values.get("bandwidth", max((rate for _, rate in curve), default=0))
        found.append(
            Link(
                (str(ends[0]), str(ends[1])),
                number(f"{at}: bandwidth", bandwidth, "bandwidth"),
                number(f"{at}: latency", values.get("latency", 0), "latency"),
                number(f"{at}: price_per_gb", values.get("price_per_gb", 0), "per_gb"),
                tuple(curve),
            )
        )
    return tuple(found)
