"""A layout: which GPUs run what, in full. Every plan is one, and so is a run that somebody measured."""

from __future__ import annotations

from dataclasses import dataclass

from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.groups import Group, group_size, ranks_of
from fasop.plans.options import Recompute
from fasop.plans.plan import Plan


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
    """Stages in order; micro_batches: that pass through each per step."""

    model: Model
    cluster: Cluster
    stages: tuple[LayoutStage, ...]
    micro_batches: int

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
    sizes = [cluster.size(cluster.gpu(name)) for name in placement]
    stages = []
    for stage, units in enumerate(partition):
        first = stage * tp * dp
        replicas = tuple(
            Replica(ranks_of(placement, sizes, first + replica * tp, tp), mbs, ep) for replica in range(dp)
        )
        stages.append(LayoutStage(units, replicas, recompute))
    return Layout(model, cluster, tuple(stages), model.global_batch // (dp * mbs))


def of_plan(plan: Plan) -> Layout:
    """The layout of a plan. Raises ``PlanError`` for one that a layout can't hold."""
    if plan.virtual_stages > 1:
        raise PlanError("the plan is interleaved, which a layout can't say: call estimate_chunks().")
    made = uniform(
        *(plan.model, plan.cluster, plan.placement, (plan.tp, plan.dp), plan.partition, plan.mbs),
        *(plan.options.recompute, plan.ep),
    )
    if not plan.choices:
        return made
    sizes = [plan.cluster.size(plan.cluster.gpu(name)) for name in plan.placement]
    stages = []
    for index, (units, choice) in enumerate(zip(plan.partition, plan.choices, strict=True)):
        first, each = index * plan.tp * plan.dp, plan.tp * plan.dp // choice.tp
        groups = [ranks_of(plan.placement, sizes, first + at * choice.tp, choice.tp) for at in range(each)]
        shares = dict(choice.shares)
        replicas = tuple(Replica(group, shares[group[0].gpu], plan.ep) for group in groups)
        stages.append(LayoutStage(units, replicas, choice.recompute))
    return Layout(plan.model, plan.cluster, tuple(stages), plan.micro_batches)
