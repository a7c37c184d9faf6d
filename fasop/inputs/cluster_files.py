"""Cluster files: ``data/clusters.yaml``, or a file of the same shape given by the user."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from fasop.errors import PlanError, nearest
from fasop.inputs.clusters import Cluster, Gpu, Link, check_gpu
from fasop.inputs.read_files import checked, kinds_of, read_mapping, read_settings, read_yaml, shown
from fasop.inputs.value_types import MOST_NODES, Bandwidth, MessageSize, NodeSize

PRESETS = Path(__file__).parents[1] / "data" / "clusters.yaml"
MOST_CLUSTERS = 10_000  # of one grid
_NEEDED = ("memory_gib", "price_per_hour", "inter_bandwidth", "intra_bandwidth")
# 0 stands for "not given" in ``Gpu``; a file leaves it out instead.
_KINDS = {key: kind for key, kind in kinds_of(Gpu).items() if key != "name"} | {"gpu_bandwidth": Bandwidth}


def load_clusters(name_or_path: str) -> list[Cluster]:
    """The clusters of a preset or of a YAML file; more than one where node counts are ranges.

    A file holds ``clusters: {name: {gpus_per_node: 4, gpus: {A100: {nodes: 1, …}}, links: […]}}``; ``nodes:
    0-8`` stands for each count from 0 to 8, and the clusters are all combinations but the empty one; ``base:
    name`` takes over the settings of an earlier entry. A path may end in ``:name`` to choose one entry.
    Raises ``PlanError``.
    """
    if not name_or_path:
        raise PlanError("no cluster is named: give a preset or a YAML file.")
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
        raise PlanError(f"{path}: no cluster {names[0]!r}: {nearest(names[0], entries)}")
    if len(names) > 1:
        raise PlanError(f"{path}: holds {len(names)} clusters: choose one, as {path}:{names[0]}.")
    return _expand(str(path), names[0], entries)


def _entry(file: str, name: str, entries: dict[str, Any]) -> dict[str, Any]:
    """One entry as it is written, its GPU types as settings."""
    where = f"{file}: cluster {name}"
    entry = read_mapping(where, entries[name], ["gpus_per_node", "gpus", "links", "base"])
    entry["gpus"] = entry.get("gpus") or {}
    if not isinstance(entry["gpus"], dict):
        raise PlanError(f"{where}: no GPU types under 'gpus': give them as 'A100: {{nodes: 1, …}}'.")
    # A count alone stands for the base's settings with as many nodes.
    entry["gpus"] = {
        str(gpu): {"nodes": own} if isinstance(own, int | str) else own for gpu, own in entry["gpus"].items()
    }
    for gpu, own in entry["gpus"].items():
        read_mapping(f"{where}: GPU {gpu}", own, [*_KINDS, "nodes"])
    return entry


def _expand(file: str, name: str, entries: dict[str, Any]) -> list[Cluster]:
    where = f"{file}: cluster {name}"
    entry = _entry(file, name, entries)
    base: dict[str, Any] = {"gpus": {}}
    if "base" in entry:
        if not isinstance(entry["base"], str) or entry["base"] not in entries:
            raise PlanError(f"{where}: base: {shown(entry['base'])}: give the name of another entry.")
        base = _entry(file, entry["base"], entries)
        if "base" in base:
            raise PlanError(f"{where}: base {entry['base']!r} has a base itself: give that one.")
    if not (entry["gpus"] or base["gpus"]):
        raise PlanError(f"{where}: no GPU types under 'gpus'.")
    size = checked(
        f"{where}: gpus_per_node", entry.get("gpus_per_node", base.get("gpus_per_node", 0)), NodeSize
    )
    gpus, counts = [], []
    for gpu_name, own in entry["gpus"].items():
        at = f"{where}: GPU {gpu_name}"
        merged = {**base["gpus"].get(gpu_name, {}), **own}
        counts.append(_counts(at, merged.pop("nodes", None)))
        gpus.append(Gpu(name=gpu_name, **read_settings(at, merged, _KINDS, _NEEDED)))
        check_gpu(at, gpus[-1], counts[-1][-1])
        if (gpus[-1].gpus_per_node or size) < 1:
            raise PlanError(f"{at}: gpus_per_node is {gpus[-1].gpus_per_node or size}: give at least 1.")
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


def _counts(where: str, value: Any) -> range:
    low = high = value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,9})\s*-\s*(\d{1,9})", value.strip())):
        low, high = int(match[1]), int(match[2])
    if isinstance(low, bool) or not isinstance(low, int) or not 0 <= low <= high:
        raise PlanError(f"{where}: nodes: {shown(value)}: give a count such as 4, or a range such as 0-8.")
    if high > MOST_NODES:
        raise PlanError(f"{where}: nodes: {shown(value)}: give at most {MOST_NODES}.")
    return range(low, high + 1)


def _links(where: str, entries: Any, gpus: list[Gpu]) -> tuple[Link, ...]:
    if not isinstance(entries, list):
        raise PlanError(f"{where}: links: give a list of links, each with 'between' and 'bandwidth'.")
    known = sorted({gpu.name for gpu in gpus} | {gpu.zone for gpu in gpus if gpu.zone})
    found = []
    for index, entry in enumerate(entries):
        at = f"{where}: link {index}"
        values = read_mapping(at, entry, kinds_of(Link))
        ends = _named_pair(values.pop("between", None))
        if ends is None:
            raise PlanError(f"{at}: between: give two GPU types or two zones, as [{known[0]}, {known[-1]}].")
        for end in ends:
            if end not in known:
                raise PlanError(f"{at}: between: no GPU type or zone {end!r}: {nearest(end, known)}")
        points = values.pop("points", None) or {}
        if not isinstance(points, dict) or not (points or "bandwidth" in values):
            raise PlanError(f"{at}: give its bandwidth, or points as {{message bytes: bit/s}}.")
        curve = sorted(
            (checked(f"{at}: points", size, MessageSize), checked(f"{at}: points", rate, Bandwidth))
            for size, rate in points.items()
        )
        if len({size for size, _ in curve}) < len(curve):
            raise PlanError(f"{at}: points: a message size is there twice: give each once.")
        values.setdefault("bandwidth", max((rate for _, rate in curve), default=0))
        settings = read_settings(at, values, kinds_of(Link))
        found.append(Link(ends, points=tuple(curve), **settings))
    return tuple(found)


def _named_pair(value: Any) -> tuple[str, str] | None:
    named = isinstance(value, list) and all(isinstance(end, str | int) for end in value)
    return (str(value[0]), str(value[1])) if named and len(value) == 2 else None
