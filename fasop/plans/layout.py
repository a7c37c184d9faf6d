"""A layout: which GPUs run what, in full. Every plan is one, and so is a run that somebody measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.options import Recompute
from fasop.plans.plan import Plan, StageChoice
from fasop.plans.shapes import Group, Part, group_size


@dataclass(frozen=True)
class Replica:
    """A tensor-parallel group of one stage. mbs: sequences of its micro-batch; ep: ranks that share its
    experts.
    """

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


@dataclass(frozen=True)
class Layout:
    """Stages in order; micro_batches: that pass through each per step; virtual_stages: chunks of each."""

    model: Model
    cluster: Cluster
    stages: tuple[LayoutStage, ...]
    micro_batches: int
    virtual_stages: int = 1

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(stage.units for stage in self.stages)


def uniform(
    model: Model,
    cluster: Cluster,
    placement: tuple[str, ...],
    degrees: tuple[int, int],
    partition: tuple[int, ...],
    mbs: int,
    recompute: Recompute = "none",
    ep: int = 1,
) -> Layout:
    """The layout of one tp and dp for all stages, with rank t + tp·d + tp·dp·stage on the nodes in order."""
    tp, dp = degrees
    shares = tuple((gpu.name, mbs) for gpu in cluster.gpus)
    choices = [StageChoice(tp, recompute, shares)] * len(partition)
    return _layout(model, cluster, placement, tp * dp, partition, choices, ep)


def of_plan(plan: Plan) -> Layout:
    """The layout of a plan. Raises ``PlanError`` for one that a layout can't hold."""
    if plan.virtual_stages > 1:
        raise PlanError("the plan is interleaved, which evaluate can't take: see its step with simulate.")
    shares = tuple((gpu.name, plan.mbs) for gpu in plan.cluster.gpus)
    choices = list(plan.choices) or [StageChoice(plan.tp, plan.options.recompute, shares)] * plan.pp
    of = plan.model, plan.cluster, plan.placement, plan.tp * plan.dp
    return _layout(*of, plan.partition, choices, plan.ep)


def _layout(
    model: Model,
    cluster: Cluster,
    placement: tuple[str, ...],
    each: int,
    partition: tuple[int, ...],
    choices: list[StageChoice],
    ep: int,
) -> Layout:
    """``each``: GPUs of a stage."""
    seats = [
        (node, name) for node, name in enumerate(placement) for _ in range(cluster.size(cluster.gpu(name)))
    ]
    stages = []
    for stage, (units, choice) in enumerate(zip(partition, choices, strict=True)):
        shares, replicas = dict(choice.shares), []
        for first in range(stage * each, (stage + 1) * each, choice.tp):
            counts = Counter(seats[first : first + choice.tp])
            group = tuple(Part(node, name, count) for (node, name), count in counts.items())
            replicas.append(Replica(group, shares[group[0].gpu], ep))
        stages.append(LayoutStage(units, tuple(replicas), choice.recompute))
    batch = sum(replica.mbs for replica in stages[0].replicas)
    return Layout(model, cluster, tuple(stages), model.global_batch // batch)
