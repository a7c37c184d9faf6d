"""Layouts: which GPUs run what, in full. Every plan is one, and so is a run that somebody measured. Users
write files of them to have them evaluated: YAML, or JSON of the same shape.

``layouts: {name: {model, cluster, tp, dp, mbs, layers, …}}`` describes a layout of one tp and dp, ``layers``
as Megatron counts them (0-11-8-8-8-8-5-0), or ``pp`` stages of equally many; ``cp`` GPUs share each sequence
(``cp_comm: ring`` or ``all-to-all``), and what a recipe sets (``precision: fp8``, ``zero: 3``, ``cuda_graphs:
layer`` or ``true``) is called as in ``fasop/plans/options.py``; ``schedule: zero-bubble`` splits the backward
pass; what isn't set is as in ``plan``, by whether the model has measured costs on these GPUs. Stages that
differ are listed instead: ``stages: [{layers: 12, replicas: [{gpu: A100, gpus: 8, mbs: 2}, …]}, …]``; each
replica is a tensor-parallel group. It has a node to itself unless ``node`` names one. ``measured``: seconds
that a step of a run took, for comparison.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fasop.errors import PlanError
from fasop.inputs import kinds
from fasop.inputs.clusters import Cluster, check_gpus, check_nodes, load_clusters
from fasop.inputs.costs import CostFile, is_measured
from fasop.inputs.models import CpComm, Model, find_model
from fasop.inputs.read_files import checked, kinds_of, read_settings, read_yaml, shown
from fasop.plans.options import MODERN, Options, Recompute
from fasop.plans.plan import Plan, StageChoice, check_heads, wrong_degrees
from fasop.plans.shapes import Group, Part, Shape, group_size, node_of_each_gpu

EVEN = {
    **dict.fromkeys(("tp", "dp", "pp", "mbs", "ep", "virtual_stages"), kinds.Count),
    **{"layers": Any, "nodes": tuple[kinds.Name, ...]},
}
Schedule = Literal["1f1b", "zero-bubble"]
OPTIONS = {key: kind for key, kind in kinds_of(Options).items() if key != "per_stage"}
KINDS = {
    **{"model": kinds.Name, "cluster": kinds.Name, "stages": list, "global_batch": kinds.Sequences},
    **{"seq": kinds.Count, "cp": kinds.Count, "cp_comm": CpComm, "measured": kinds.StepSeconds},
    **{"fsdp": bool, "schedule": Schedule},
    **EVEN,
    **OPTIONS,
}
STAGE = {"layers": kinds.CountOrZero, "replicas": list, "recompute": Recompute}
REPLICA = {"gpu": kinds.Name, "gpus": kinds.Count, "mbs": kinds.Count, "node": kinds.Name}


@dataclass(frozen=True)
class Replica:
    """A tensor-parallel group of one stage. mbs: sequences per micro-batch; ep: ranks sharing its experts."""

    group: Group
    mbs: int
    ep: int = 1

    @property
    def tp(self) -> int:
        return group_size(self.group)


@dataclass(frozen=True)
class LayoutStage:
    """units: how many of the model's; replicas: all work on every micro-batch, each on its own sequences."""

    units: int
    replicas: tuple[Replica, ...]
    recompute: Recompute = "none"


def working_gpus(stages: Sequence[LayoutStage]) -> dict[str, int]:
    """How many GPUs of each type work."""
    parts = [part for stage in stages for replica in stage.replicas for part in replica.group]
    return {name: sum(part.gpus for part in parts if part.gpu == name) for _, name, _ in parts}


@dataclass(frozen=True)
class Layout:
    """Stages in order; micro_batches: that pass through each per step; virtual_stages: chunks of each."""

    model: Model
    cluster: Cluster
    stages: tuple[LayoutStage, ...]
    micro_batches: int
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(stage.units for stage in self.stages)


def uniform(
    model: Model, cluster: Cluster, placement: Sequence[str], shape: Shape, partition: tuple[int, ...],
    recompute: Recompute = "none",
) -> Layout:  # fmt: skip
    """The layout of one tp and dp for all stages, with rank t + tp·d + tp·dp·stage on the nodes in order."""
    shares = tuple((gpu.name, shape.mbs) for gpu in cluster.gpus)
    choices = [StageChoice(shape.tp, recompute, shares)] * shape.pp
    return _layout(model, cluster, placement, shape, partition, choices)


def of_plan(plan: Plan) -> Layout:
    """The layout of a plan: of each stage its layers, choices and replicas."""
    choices = [plan.choice(stage) for stage in range(plan.pp)]
    layout = _layout(plan.model, plan.cluster, plan.placement, plan.shape, plan.partition, choices)
    schedule: Schedule = "zero-bubble" if plan.weight_gradients else "1f1b"
    return replace(layout, virtual_stages=plan.virtual_stages, schedule=schedule)


def _layout(
    model: Model, cluster: Cluster, placement: Sequence[str], shape: Shape, partition: tuple[int, ...],
    choices: list[StageChoice],
) -> Layout:  # fmt: skip
    seats = [(node, placement[node]) for node in node_of_each_gpu(cluster, placement)]
    stages = []
    for stage, (units, choice) in enumerate(zip(partition, choices, strict=True)):
        shares, replicas = dict(choice.shares), []
        for first in range(stage * shape.group, (stage + 1) * shape.group, choice.tp):
            counts = Counter(seats[first : first + choice.tp])
            group = tuple(Part(node, name, count) for (node, name), count in counts.items())
            replicas.append(Replica(group, shares[group[0].gpu], shape.ep))
        stages.append(LayoutStage(units, tuple(replicas), choice.recompute))
    batch = sum(replica.mbs for replica in stages[0].replicas)
    return Layout(model, cluster, tuple(stages), model.global_batch // batch)


@dataclass(frozen=True)
class Described:
    """A layout of a file. measured: seconds per step, 0 where not given."""

    name: str
    layout: Layout
    options: Options
    measured: float = 0.0


def read_layouts(
    path: str, cost_files: Sequence[CostFile], models_file: str = ""
) -> Iterator[Described | PlanError]:
    """The layouts of a file; for each that can't be, why. Raises ``PlanError`` for an unreadable file.

    A layout whose model has no costs in ``cost_files`` on its GPUs is ``MODERN`` where it doesn't say
    otherwise, as plans are.
    """
    for name, entry in read_yaml(Path(path), "layouts").items():
        try:
            yield _described(f"{path}: layout {name}", name, entry, cost_files, models_file)
        except PlanError as error:
            yield error


def _described(
    where: str, name: str, entry: Any, cost_files: Sequence[CostFile], models_file: str
) -> Described:
    values = read_settings(where, entry, KINDS, ["model", "cluster"])
    try:
        model = find_model(values["model"], models_file)
        clusters = load_clusters(values["cluster"])
        sizes = {key: values.get(key, getattr(model, key)) for key in ("global_batch", "seq")}
        model = replace(model, **sizes).split_sequences(values.get("cp", 1), values.get("cp_comm", "ring"))
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    if len(clusters) > 1:
        raise PlanError(f"{where}: {values['cluster']} is a grid of clusters: give one.")
    given = {"zero": 3, "overlap": True} if values.get("fsdp") else {}
    given |= {key: value for key, value in values.items() if key in OPTIONS}
    options = Options(**({} if is_measured(cost_files, model, clusters) else MODERN) | given)
    if "stages" in values and (both := [key for key in EVEN if key in values]):
        raise PlanError(f"{where}: {both[0]} and stages exclude each other: give it to each replica.")
    layout = (_stages if "stages" in values else _even)(where, values, model, clusters[0], options)
    layout = replace(layout, schedule=values.get("schedule", "1f1b"))
    if layout.schedule != "1f1b" and (why := no_zero_bubble(layout, options)):
        raise PlanError(f"{where}: schedule zero-bubble {why}.")
    return Described(name, layout, options, values.get("measured", 0.0))


def no_zero_bubble(layout: Layout, options: Options) -> str:
    """Why a layout can't run in the zero-bubble schedule, or nothing."""
    reasons = {
        "is for one chunk per stage: leave out virtual_stages": layout.virtual_stages > 1,
        "is not DeepSpeed's: choose another engine": options.engine == "deepspeed",
        # Its layers' inputs are kept until the gradients of weights are computed.
        "excludes recomputation full": "full" in {stage.recompute for stage in layout.stages},
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _even(where: str, values: dict[str, Any], model: Model, cluster: Cluster, options: Options) -> Layout:
    if missing := [key for key in ("tp", "dp", "mbs") if key not in values]:
        raise PlanError(f"{where}: lacks {missing[0]}, or stages.")
    if ("layers" in values) == ("pp" in values):
        raise PlanError(f"{where}: give either layers of each stage, as 8-8-8-8, or pp, or stages.")
    tp, mbs, ep, pp = values["tp"], values["mbs"], values.get("ep", 1), values.get("pp", 0)
    dp, chunks = values["dp"] * model.cp, values.get("virtual_stages", 1)
    check_heads(where, model, tp)
    even = [(model.layers + stage) // pp for stage in reversed(range(pp))]  # of a pp that is given
    layers = even or _numbers(where, values["layers"])
    partition = _partition(where, model, layers)
    if model.global_batch % (dp * mbs):
        raise PlanError(f"{where}: global batch {model.global_batch} is no multiple of dp {dp} × mbs {mbs}.")
    degrees = dp, ep, layers, model.global_batch // (dp * mbs), chunks, False
    for is_wrong, words in wrong_degrees(model, *degrees):
        if is_wrong:
            raise PlanError(f"{where}: {words}.")
    placement = values.get("nodes") or tuple(name for _, name in cluster.hosts())
    check_nodes(where, cluster, placement)
    shape = Shape(tp, dp, len(partition), mbs, ep)
    needed = f"{where}: tp {tp} × dp {dp} × {shape.pp} stages"
    check_gpus(needed, cluster, placement, shape.group * shape.pp)
    layout = uniform(model, cluster, placement, shape, partition, options.recompute)
    return replace(layout, virtual_stages=chunks)


def _stages(where: str, values: dict[str, Any], model: Model, cluster: Cluster, options: Options) -> Layout:
    if not values["stages"]:
        raise PlanError(f"{where}: stages: give a list of stages, each with layers and replicas.")
    nodes: dict[object, str] = {}  # type of each node
    used: dict[object, int] = {}  # GPUs of each node
    stages, layers = [], []
    for index, entry in enumerate(values["stages"]):
        at = f"{where}: stage {index}"
        stage = read_settings(at, entry, STAGE, ["layers", "replicas"])
        if not stage["replicas"]:
            raise PlanError(f"{at}: replicas: give a list, each with gpu, gpus and mbs.")
        layers.append(stage["layers"])
        replicas = []
        for number, each in enumerate(stage["replicas"]):
            here = f"{at}, replica {number}"
            replica = read_settings(here, each, REPLICA, ["gpu", "gpus", "mbs"])
            name, gpus = replica["gpu"], replica["gpus"]
            check_nodes(here, cluster, [name])
            check_heads(here, model, gpus)
            # A replica that names no node has one of its own, whatever the others are called.
            node = replica.get("node", (index, number))
            if nodes.setdefault(node, name) != name:
                raise PlanError(f"{here}: node {node} has {nodes[node]}, not {name}.")
            used[node] = used.get(node, 0) + gpus
            if used[node] > (size := cluster.size(cluster.gpu(name))):
                raise PlanError(f"{here}: {used[node]} GPUs on a node that has {size}: name another one.")
            replicas.append(Replica((Part(list(nodes).index(node), name, gpus),), replica["mbs"]))
        stages.append(LayoutStage(0, tuple(replicas), stage.get("recompute", options.recompute)))
    check_nodes(where, cluster, list(nodes.values()))
    partition = _partition(where, model, layers)
    batches = {sum(replica.mbs for replica in stage.replicas) for stage in stages}
    if len(batches) > 1 or model.global_batch % (batch := batches.pop()):
        rule = f"must be the same in each stage, and divide the global batch {model.global_batch}"
        raise PlanError(f"{where}: the sequences of a micro-batch over all replicas {rule}.")
    whole_stages = tuple(replace(stage, units=units) for stage, units in zip(stages, partition, strict=True))
    return Layout(model, cluster, whole_stages, model.global_batch // batch)


def _partition(where: str, model: Model, layers: list[int]) -> tuple[int, ...]:
    """Units of each stage: E with the first layers, P with the last."""
    if sum(layers) != model.layers or min(layers) < 0:
        raise PlanError(f"{where}: {sum(layers)} layers in all stages, {model.name} has {model.layers}.")
    units, last = list(layers), len(layers) - 1
    units[0] += 1
    if model.encoder_layers is not None:
        # The decoder's embedding is on the stage with its first layer.
        ends = itertools.accumulate(layers)
        last = next(at for at, held in enumerate(ends) if held > model.encoder_layers or last == 0)
    units[last] += 1
    if min(units) < 1:
        raise PlanError(f"{where}: stage {units.index(min(units))} holds nothing: give it a layer.")
    return tuple(units)


def _numbers(where: str, value: Any) -> list[int]:
    parts = value if isinstance(value, list) else str(value).split("-")
    try:
        numbers = [int(part) if isinstance(part, str) else part for part in parts]
    except ValueError:
        raise PlanError(f"{where}: layers: {shown(value)}: give as 0-11-8-8-8-8-5-0.") from None
    return [checked(f"{where}: layers", number, kinds.CountOrZero) for number in numbers]
