"""Files of layouts that users write, to have them evaluated: YAML, or JSON of the same shape.

``layouts: {name: {model, cluster, tp, dp, mbs, layers, …}}`` describes a layout of one tp and dp, ``layers``
as Megatron counts them (0-11-8-8-8-8-5-0). Stages that differ are listed instead: ``stages: [{layers: 12,
replicas: [{gpu: A100, gpus: 8, mbs: 2}, …]}, …]``; each replica is a tensor-parallel group, on a node of its
own unless ``node`` names one. ``measured`` and ``measured_gib`` hold what a run took, for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from fasop.errors import PlanError, nearest
from fasop.inputs.cluster_files import load_clusters
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model, find_model
from fasop.inputs.settings import flag, number, read_mapping, read_yaml, whole
from fasop.plans.groups import Part
from fasop.plans.layout import Layout, LayoutStage, Replica, uniform
from fasop.plans.options import Attention, Engine, Options, Precision, Recompute

CHOICES = {"recompute": Recompute, "attention": Attention, "precision": Precision, "engine": Engine}
FLAGS = ("overlap", "sequence_parallel", "scatter_gather")
NUMBERS = ("zero", "gradient_bytes")
EVEN = ("tp", "dp", "mbs", "layers", "nodes")
KNOWN = ["model", "cluster", "stages", "global_batch", "measured", "measured_gib"]


@dataclass(frozen=True)
class Described:
    """A layout of a file. measured: seconds per step, measured_gib: of the fullest GPU; 0 where not given."""

    name: str
    layout: Layout
    options: Options
    measured: float = 0.0
    measured_gib: float = 0.0


def read_layouts(path: str, cluster: str = "", models_file: str = "") -> list[Described]:
    """The layouts of a file. cluster: preset or file to use instead of theirs. Raises ``PlanError``."""
    entries = read_yaml(Path(path), "layouts")
    return [
        _described(f"{path}: layout {name}", str(name), entry, cluster, models_file)
        for name, entry in entries.items()
    ]


def _described(where: str, name: str, entry: Any, cluster_name: str, models_file: str) -> Described:
    values = read_mapping(where, entry, [*KNOWN, *EVEN, *CHOICES, *FLAGS, *NUMBERS])
    for key in ("model", "cluster"):
        if key not in values and not (key == "cluster" and cluster_name):
            raise PlanError(f"{where}: lacks {key}.")
    model = find_model(str(values["model"]), models_file)
    if "global_batch" in values:
        model = replace(model, global_batch=_count(where, values, "global_batch"))
    clusters = load_clusters(cluster_name or str(values["cluster"]))
    if len(clusters) > 1:
        raise PlanError(f"{where}: {values.get('cluster', cluster_name)} is a grid of clusters: give one.")
    options = _options(where, values)
    made = _stages if "stages" in values else _even
    if made is _stages and (both := [key for key in EVEN if key in values]):
        raise PlanError(f"{where}: {both[0]} and stages exclude each other: give it to each replica.")
    measured, gib = (
        number(f"{where}: {key}", values[key], quantity) if key in values else 0.0
        for key, quantity in (("measured", "seconds"), ("measured_gib", "memory_gib"))
    )
    return Described(name, made(where, values, model, clusters[0], options), options, measured, gib)


def _options(where: str, values: dict[str, Any]) -> Options:
    found: dict[str, Any] = {}
    for key, choices in CHOICES.items():
        known = get_args(choices)
        if values.get(key, known[0]) not in known:
            raise PlanError(f"{where}: {key} is {values[key]!r}: {nearest(str(values[key]), known)}")
    for field in fields(Options):
        if field.name in values:
            at, value = f"{where}: {field.name}", values[field.name]
            check = flag if field.name in FLAGS else whole if field.name in NUMBERS else lambda _, text: text
            found[field.name] = check(at, value)
    options = Options(**found)
    if options.zero not in range(4):
        raise PlanError(f"{where}: zero is {options.zero}: give 0, 1, 2 or 3.")
    if options.gradient_bytes not in (2, 4):
        raise PlanError(f"{where}: gradient_bytes is {options.gradient_bytes}: give 2 or 4.")
    return options


def _even(where: str, values: dict[str, Any], model: Model, cluster: Cluster, options: Options) -> Layout:
    for key in ("tp", "dp", "mbs", "layers"):
        if key not in values:
            raise PlanError(f"{where}: lacks {key}, or stages.")
    tp, dp, mbs = (_count(where, values, key) for key in ("tp", "dp", "mbs"))
    partition = _partition(where, model, _numbers(where, values["layers"]))
    if model.global_batch % (dp * mbs):
        raise PlanError(f"{where}: global batch {model.global_batch} is no multiple of dp {dp} × mbs {mbs}.")
    placement = values.get("nodes") or [
        gpu.name for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True) for _ in range(count)
    ]
    if not isinstance(placement, list):
        raise PlanError(f"{where}: nodes: give the GPU type of each node, as [{cluster.gpus[0].name}, …].")
    _check_nodes(where, cluster, placement)
    held = sum(cluster.size(cluster.gpu(name)) for name in placement)
    if tp * dp * len(partition) > held:
        raise PlanError(
            f"{where}: tp {tp} × dp {dp} × {len(partition)} stages need {tp * dp * len(partition)} GPUs, "
            f"its nodes have {held}."
        )
    return uniform(model, cluster, tuple(placement), (tp, dp), partition, mbs, options.recompute)


def _stages(where: str, values: dict[str, Any], model: Model, cluster: Cluster, options: Options) -> Layout:
    """A layout whose stages or replicas differ."""
    if not isinstance(values["stages"], list) or not values["stages"]:
        raise PlanError(f"{where}: stages: give a list of stages, each with layers and replicas.")
    nodes: dict[str, str] = {}  # type of each node
    stages, layers = [], []
    for index, entry in enumerate(values["stages"]):
        at = f"{where}: stage {index}"
        stage = read_mapping(at, entry, ["layers", "replicas", "recompute"])
        if not isinstance(stage.get("replicas"), list) or not stage["replicas"]:
            raise PlanError(f"{at}: replicas: give a list, each with gpu, gpus and mbs.")
        layers.append(whole(f"{at}: layers", stage.get("layers")))
        replicas = []
        for number_, each in enumerate(stage["replicas"]):
            here = f"{at}, replica {number_}"
            replica = read_mapping(here, each, ["gpu", "gpus", "mbs", "node"])
            name = str(replica.get("gpu"))
            node = str(replica.get("node", f"node{len(nodes)}"))
            if nodes.setdefault(node, name) != name:
                raise PlanError(f"{here}: node {node} has {nodes[node]}, not {name}.")
            gpus, mbs = _count(here, replica, "gpus"), _count(here, replica, "mbs")
            if name in {gpu.name for gpu in cluster.gpus} and gpus > cluster.size(cluster.gpu(name)):
                raise PlanError(f"{here}: {gpus} GPUs of a node of {cluster.size(cluster.gpu(name))}.")
            replicas.append(Replica((Part(list(nodes).index(node), name, gpus),), mbs))
        recompute = stage.get("recompute", options.recompute)
        if recompute not in get_args(Recompute):
            raise PlanError(
                f"{at}: recompute is {recompute!r}: {nearest(str(recompute), get_args(Recompute))}"
            )
        stages.append(LayoutStage(0, tuple(replicas), recompute))
    _check_nodes(where, cluster, list(nodes.values()))
    partition = _partition(where, model, layers)
    batches = {sum(replica.mbs for replica in stage.replicas) for stage in stages}
    if len(batches) > 1 or model.global_batch % (batch := batches.pop()):
        raise PlanError(
            f"{where}: the sequences of a micro-batch over all replicas must be the same in each stage, and "
            f"divide the global batch {model.global_batch}."
        )
    whole_stages = tuple(replace(stage, units=units) for stage, units in zip(stages, partition, strict=True))
    return Layout(model, cluster, whole_stages, model.global_batch // batch)


def _check_nodes(where: str, cluster: Cluster, names: list[str]) -> None:
    have = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    for name in dict.fromkeys(map(str, names)):
        if name not in have:
            raise PlanError(f"{where}: no GPU {name!r} in cluster {cluster.name}: {nearest(name, have)}")
        if names.count(name) > have[name]:
            raise PlanError(
                f"{where}: {names.count(name)} nodes of {name}, cluster {cluster.name} has {have[name]}."
            )


def _partition(where: str, model: Model, layers: list[int]) -> tuple[int, ...]:
    """Units of each stage: E with the first layers, P with the last."""
    if sum(layers) != model.layers or min(layers) < 0:
        raise PlanError(f"{where}: {sum(layers)} layers in all stages, {model.name} has {model.layers}.")
    units, border = list(layers), model.encoder_layers
    units[0] += 1
    if border is None:
        units[-1] += 1
    else:
        # The decoder's embedding is on the stage with its first layer.
        held = 0
        for index, count in enumerate(layers):
            held += count
            if held > border or len(layers) == 1:
                units[index] += 1
                break
    if min(units) < 1:
        raise PlanError(f"{where}: stage {units.index(min(units))} holds nothing: give it a layer.")
    return tuple(units)


def _numbers(where: str, value: Any) -> list[int]:
    parts = value if isinstance(value, list) else str(value).split("-")
    try:
        return [int(part) for part in parts]
    except (TypeError, ValueError):
        raise PlanError(f"{where}: layers: {value!r}: give as 0-11-8-8-8-8-5-0.") from None


def _count(where: str, values: dict[str, Any], key: str) -> int:
    value = whole(f"{where}: {key}", values.get(key))
    if value < 1:
        raise PlanError(f"{where}: {key} is {value}: give at least 1.")
    return value
