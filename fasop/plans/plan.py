"""A plan: one way to run a model on a cluster, with what it is expected to take; and the file of plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from chakra_et import files
from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model

Recompute = Literal["none", "selective", "full"]  # activations computed again in the backward pass
FORMAT = 1  # of the JSON; raised when a field changes its meaning


@dataclass(frozen=True)
class Plan:
    """One configuration and its estimate. Times in seconds, memory in GiB, prices in $.

    placement: GPU type of every node, in rank order (rank = t + tp·d + tp·dp·stage, node = rank // GPUs
    a node). partition: units a stage, the embedding E and the post-process P counted. stage_gpu: the type
    that sets the pace of each stage ("A100+A10" where a stage has both). stage_forward, stage_backward:
    one micro-batch; p2p: one message over each of the pp−1 boundaries; dp_allreduce: each stage's, once a
    step. pipeline_time: until the first stage's last backward; step_time: the whole. stage_memory
    against stage_cap; is_oom says that some stage does not fit. train_cost: all iterations.
    lower_bound: no plan of the same degrees and micro-batch can take less than this (0: not computed).
    """

    model: Model
    cluster: Cluster
    cost_model: str
    placement: tuple[str, ...]
    tp: int
    dp: int
    pp: int
    mbs: int
    micro_batches: int
    partition: tuple[int, ...]
    stage_gpu: tuple[str, ...]
    stage_forward: tuple[float, ...]
    stage_backward: tuple[float, ...]
    p2p: tuple[float, ...]
    dp_allreduce: tuple[float, ...]
    embedding_allreduce: float
    pipeline_time: float
    step_time: float
    stage_memory: tuple[float, ...]
    stage_cap: tuple[float, ...]
    is_oom: bool
    price_per_step: float
    train_cost: float
    recompute: Recompute = "none"
    sharded_optimizer: bool = False
    lower_bound: float = 0.0

    @property
    def layers(self) -> tuple[int, ...]:
        """Transformer layers a stage, as Megatron counts them."""
        return self.model.launch_layers(self.partition)

    @property
    def split_stage(self) -> int | None:
        """The first stage of an encoder-decoder model's decoder; None without one, or on a single stage."""
        if self.model.encoder_layers is None or self.pp == 1:
            return None
        ends = itertools.accumulate(self.partition)
        return sum(end <= self.model.encoder_layers + 1 for end in ends)


class _File(msgspec.Struct):
    format: int
    plans: list[Plan]


def plans_json(plans: Sequence[Plan]) -> str:
    """``{"format": 1, "plans": […]}``, indented."""
    return msgspec.json.format(msgspec.json.encode(_File(FORMAT, list(plans))), indent=1).decode()


def write_plans(path: str | Path, plans: Sequence[Plan]) -> None:
    """Write plans so that a reader sees either the whole file or none. Raises ``OSError``."""
    files.write_text(Path(path), plans_json(plans) + "\n")


def read_plans(path: str | Path) -> list[Plan]:
    """Plans as ``write_plans`` and ``plan --json`` give them. Raises ``PlanError``."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror or error}.") from None
    try:
        version = msgspec.json.decode(data, type=dict).get("format")
        if version != FORMAT:
            raise PlanError(f"{path}: plans of format {version!r}: this program reads format {FORMAT}.")
        plans = msgspec.json.decode(data, type=_File).plans
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not a file of plans ({error}): make one with 'plan --json'.") from None
    for index, plan in enumerate(plans):
        _check(f"{path}: plan {index}", plan)
    return plans


def pick_plan(path: str, rank: int) -> Plan:
    """The ``rank``-th plan of the file, from 1. Raises ``PlanError``."""
    plans = read_plans(path)
    if not 1 <= rank <= len(plans):
        held = f"{len(plans)} plans" if len(plans) != 1 else "one plan"
        raise PlanError(f"{path}: holds {held}: --rank {rank} is none of them.")
    return plans[rank - 1]


def _check(where: str, plan: Plan) -> None:
    """A file edited by hand must still be one plan. Raises ``PlanError``."""
    per_stage = ("partition", "stage_gpu", "stage_forward", "stage_backward", "dp_allreduce")
    for name in (*per_stage, "stage_memory", "stage_cap"):
        if len(getattr(plan, name)) != plan.pp:
            raise PlanError(f"{where}: {name} has {len(getattr(plan, name))} values for {plan.pp} stages.")
    if len(plan.p2p) != plan.pp - 1:
        raise PlanError(f"{where}: p2p has {len(plan.p2p)} values for {plan.pp - 1} boundaries.")
    if min(plan.tp, plan.dp, plan.pp, plan.mbs, plan.micro_batches, *plan.partition) < 1:
        raise PlanError(f"{where}: tp, dp, pp, mbs, micro_batches and each part must be at least 1.")
    if sum(plan.partition) != len(plan.model.units):
        units = len(plan.model.units)
        raise PlanError(f"{where}: partition has {sum(plan.partition)} units, {plan.model.name} has {units}.")
    if len(plan.placement) != plan.cluster.node_count:
        raise PlanError(f"{where}: placement names {len(plan.placement)} of {plan.cluster.node_count} nodes.")
    if plan.tp * plan.dp * plan.pp != plan.cluster.gpu_count:
        raise PlanError(
            f"{where}: tp × dp × pp is {plan.tp * plan.dp * plan.pp}, not {plan.cluster.gpu_count} GPUs."
        )
