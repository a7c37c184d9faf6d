"""A plan: one way to run a model on a cluster, with what it is expected to take; and the file of plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chakra_et import files
from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.options import Options, Recompute
from fasop.plans.shapes import Shape

FORMAT = 2  # of the JSON; raised when a field changes its meaning


@dataclass(frozen=True)
class StageChoice:
    """How one stage works, where stages differ: its tp, recomputation, and the sequences of each micro-batch
    that a replica takes, by GPU type.
    """

    tp: int
    recompute: Recompute
    shares: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class StageParts:
    """What the times of a stage are made of, in seconds, each as long as it takes alone.

    layer_forward, layer_backward: of one layer; tensor_sum: one sum of activations over the tensor-parallel
    ranks, of which the passes hold several; exchange: of tokens among the ranks that a layer's experts are
    spread over, there or back. Once per step: reduction: of gradients; gather: of parameters, after the
    optimizer has updated a share of them on each rank; experts: the share of both that experts' parameters
    take.
    """

    layer_forward: float
    layer_backward: float
    tensor_sum: float = 0.0
    reduction: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One configuration and its estimate. Times in seconds, memory in GiB, prices in $.

    placement: GPU type of every node that is used, in rank order (rank = t + tp·d + tp·dp·stage, on the nodes
    in order); hosts: their names. partition: units per stage, the embedding E and the post-process P counted;
    virtual_stages: chunks of each stage in an interleaved schedule. stage_gpu: the type that sets the pace of
    each stage ("A100+A10" where a stage has both). stage_forward, stage_backward: one micro-batch; p2p: one
    message over each of the pp−1 boundaries, wrap: from the last stage to the first, which an interleaved
    schedule needs. Once per step: dp_allreduce: each stage's gradient reduction as far as no computation
    hides it; embedding_allreduce: the sum of the embedding's copies; update: each stage's optimizer, and
    the gathering of what it updated. parts: what these are made of. pipeline_time: until the first stage's
    last backward; step_time: the whole. stage_memory against stage_cap; is_oom: some stage does not fit.
    price_per_step holds the nodes that are used and the traffic that is charged; train_cost: all iterations.
    lower_bound: no plan of the same degrees and micro-batch can take less than this (0: not computed).
    choices: of each stage, where stages differ (empty: all have tp, dp and mbs). notes: what was not
    measured.
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
    options: Options = Options()
    ep: int = 1
    virtual_stages: int = 1
    update: tuple[float, ...] = ()
    parts: tuple[StageParts, ...] = ()
    wrap: float = 0.0
    hosts: tuple[str, ...] = ()
    choices: tuple[StageChoice, ...] = ()
    lower_bound: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        return Shape(self.tp, self.dp, self.pp, self.mbs, self.ep)

    @property
    def layers(self) -> tuple[int, ...]:
        """Transformer layers of each stage, as Megatron counts them."""
        return self.model.launch_layers(self.partition)

    @property
    def idle_nodes(self) -> int:
        return self.cluster.node_count - len(self.placement)

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
    """``{"format": 2, "plans": […]}``, indented."""
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
    for name in ("update", "parts", "choices"):
        if len(getattr(plan, name)) not in (0, plan.pp):
            raise PlanError(f"{where}: {name} has {len(getattr(plan, name))} values for {plan.pp} stages.")
    if len(plan.p2p) != plan.pp - 1:
        raise PlanError(f"{where}: p2p has {len(plan.p2p)} values for {plan.pp - 1} boundaries.")
    least = (plan.tp, plan.dp, plan.pp, plan.mbs, plan.micro_batches, plan.ep, plan.virtual_stages)
    if min(*least, *plan.partition) < 1:
        raise PlanError(
            f"{where}: tp, dp, pp, mbs, ep, micro_batches, virtual_stages and each part must be at least 1."
        )
    if sum(plan.partition) != len(plan.model.units):
        units = len(plan.model.units)
        raise PlanError(f"{where}: partition has {sum(plan.partition)} units, {plan.model.name} has {units}.")
    counts = {gpu.name: count for gpu, count in zip(plan.cluster.gpus, plan.cluster.nodes, strict=True)}
    for name in dict.fromkeys(plan.placement):
        if plan.placement.count(name) > counts.get(name, 0):
            raise PlanError(
                f"{where}: placement has {plan.placement.count(name)} nodes of {name}, {plan.cluster.name} "
                f"has {counts.get(name, 0)}."
            )
    gpus = sum(plan.cluster.size(plan.cluster.gpu(name)) for name in plan.placement)
    if plan.tp * plan.dp * plan.pp > gpus:
        raise PlanError(
            f"{where}: tp × dp × pp is {plan.tp * plan.dp * plan.pp}, its nodes have {gpus} GPUs."
        )
