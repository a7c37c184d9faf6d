"""A plan: one way to run a model on a cluster, with what it is expected to take; and the file of plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chakra_et.text import plural
from fasop.errors import PlanError
from fasop.inputs import kinds
from fasop.inputs.clusters import Cluster, check_gpu, check_gpus, check_nodes
from fasop.inputs.models import Model
from fasop.inputs.read_files import read_json
from fasop.plans.options import Options, Recompute
from fasop.plans.shapes import Shape

Of = TypeVar("Of")
FORMAT = 2  # of the JSON; raised when a field changes its meaning


@dataclass(frozen=True)
class StageChoice:
    """How one stage works, where stages differ: its tp, recomputation, and the sequences of each micro-batch
    that a replica takes, by GPU type.
    """

    tp: kinds.Count
    recompute: Recompute
    shares: tuple[tuple[str, kinds.Count], ...]


@dataclass(frozen=True)
class StageParts:
    """What the times of a stage are made of, in seconds, each as long as it takes alone.

    layer_forward, layer_backward: of one layer; tensor_sum: one sum of activations over the tensor-parallel
    ranks, of which the passes hold several; exchange: of tokens among the ranks that a layer's experts are
    spread over, there or back. Once per step: reduction: of gradients; gather: of parameters, after the
    optimizer has updated a share of them on each rank; experts: the share of both that experts' parameters
    take. sharding: what the collectives of ZeRO-2, ZeRO-3 or FSDP add to the passes of a micro-batch;
    context: how long GPUs that share sequences wait for each other in them.
    """

    layer_forward: kinds.Seconds
    layer_backward: kinds.Seconds
    tensor_sum: kinds.Seconds = 0.0
    reduction: kinds.Seconds = 0.0
    gather: kinds.Seconds = 0.0
    exchange: kinds.Seconds = 0.0
    experts: kinds.Seconds = 0.0
    sharding: kinds.Seconds = 0.0
    context: kinds.Seconds = 0.0


@dataclass(frozen=True)
class Plan:
    """One configuration and its estimate. Times in seconds, memory in GiB, prices in $.

    placement: GPU type of every node that is used, in rank order (rank = t + tp·d + tp·dp·stage, on the nodes
    in order); hosts: their names. partition: units per stage, the embedding E and the post-process P counted;
    virtual_stages: chunks of each stage in an interleaved schedule; weight_gradients: seconds of each stage's
    backward that a zero-bubble schedule puts off (else empty). stage_gpu: the type that sets the pace of each
    stage ("A100+A10" where a stage has both). stage_forward, stage_backward: one micro-batch; p2p: one
    message over each of the pp−1 boundaries, wrap: from the last stage to the first, which an interleaved
    schedule needs. Once per step: dp_allreduce: each stage's gradient reduction as far as no computation
    hides it; embedding_allreduce: the sum of the embedding's copies; update: each stage's optimizer, and the
    gathering of what it updated. parts: what these are made of. pipeline_time: until the last backward;
    step_time: the whole. stage_memory against stage_cap; is_oom: some stage does not fit. price_per_step: of
    the nodes that are used; train_cost: all iterations.
    lower_bound: no plan of the same degrees and micro-batch can take less than this (0: not computed).
    choices: of each stage, where stages differ (empty: all have tp, dp and mbs). notes: what was not
    measured.
    """

    model: Model
    cluster: Cluster
    cost_model: str
    placement: tuple[str, ...]
    tp: kinds.Count
    dp: kinds.Count
    pp: kinds.Count
    mbs: kinds.Count
    micro_batches: kinds.Count
    partition: tuple[kinds.Count, ...]
    stage_gpu: tuple[str, ...]
    stage_forward: tuple[kinds.SomeSeconds, ...]
    stage_backward: tuple[kinds.SomeSeconds, ...]
    p2p: tuple[kinds.Seconds, ...]
    dp_allreduce: tuple[kinds.Seconds, ...]
    embedding_allreduce: kinds.Seconds
    pipeline_time: kinds.SomeSeconds
    step_time: kinds.SomeSeconds
    stage_memory: tuple[kinds.Gib, ...]
    stage_cap: tuple[kinds.Gib, ...]
    is_oom: bool
    price_per_step: kinds.Price
    train_cost: kinds.Price
    options: Options = Options()
    ep: kinds.Count = 1
    virtual_stages: kinds.Count = 1
    update: tuple[kinds.Seconds, ...] = ()
    parts: tuple[StageParts, ...] = ()
    wrap: kinds.Seconds = 0.0
    hosts: tuple[str, ...] = ()
    choices: tuple[StageChoice, ...] = ()
    lower_bound: kinds.Seconds = 0.0
    notes: tuple[str, ...] = ()
    weight_gradients: tuple[kinds.Seconds, ...] = ()

    @property
    def schedule(self) -> str:
        chunks = f"interleaved, {self.virtual_stages} chunks per stage" if self.virtual_stages > 1 else "1f1b"
        return "zero-bubble" if self.weight_gradients else chunks

    @property
    def shape(self) -> Shape:
        return Shape(self.tp, self.dp, self.pp, self.mbs, self.ep)

    @property
    def layers(self) -> tuple[int, ...]:
        """Transformer layers of each stage, as Megatron counts them: ``partition`` without E and P."""
        pairs = zip(self.partition, itertools.accumulate(self.partition), strict=True)
        return tuple(self.model.units[end - size : end].count("T") for size, end in pairs)

    def units(self, stage: int) -> slice:
        """Those of the model's units that a stage holds."""
        begin = sum(self.partition[:stage])
        return slice(begin, begin + self.partition[stage])

    def choice(self, stage: int) -> StageChoice:
        """How a stage works, also where all work alike."""
        if self.choices:
            return self.choices[stage]
        names = self.stage_gpu[stage].split("+")
        return StageChoice(self.tp, self.options.recompute, tuple((name, self.mbs) for name in names))

    @property
    def title(self) -> str:
        """Model, cluster and degrees."""
        cp = f", cp {self.model.cp}" * (self.model.cp > 1)
        degrees = f"tp {self.tp}, dp {self.dp // self.model.cp}{cp}, pp {self.pp}"
        batches = f"{self.micro_batches} micro-batches of {self.mbs}"
        return f"{self.model.name} on {self.cluster.name}: {degrees}, {batches}"

    @property
    def fullest(self) -> float:
        """Memory of the fullest stage, over its cap."""
        return max(size / cap for size, cap in zip(self.stage_memory, self.stage_cap, strict=True))

    @property
    def split_stage(self) -> int | None:
        """The first stage of an encoder-decoder model's decoder; None without one, or on a single stage."""
        if self.model.encoder_layers is None or self.pp == 1:
            return None
        ends = itertools.accumulate(self.partition)
        return sum(end <= self.model.encoder_layers + 1 for end in ends)


class _Version(msgspec.Struct):
    format: object = None


class _File(msgspec.Struct):
    format: int
    plans: list[Plan]


def plans_json(plans: Sequence[Plan]) -> str:
    """``{"format": 2, "plans": […]}``, indented."""
    file = msgspec.to_builtins(_File(FORMAT, list(plans)))
    for plan in file["plans"]:
        if not plan.get("weight_gradients"):  # of zero-bubble schedules alone
            plan.pop("weight_gradients", None)
    return msgspec.json.format(msgspec.json.encode(file), indent=1).decode()


def read_plans(path: str | Path) -> list[Plan]:
    """Plans as ``plan --json`` gives them. Raises ``PlanError``."""
    remedy = "make one with 'plan --json'"
    version = read_json(path, _Version, "a file of plans", remedy).format
    if version != FORMAT:
        raise PlanError(f"{path}: plans of format {version!r}: this program reads format {FORMAT}.")
    plans = read_json(path, _File, "a file of plans", remedy).plans
    for index, plan in enumerate(plans):  # a file edited by hand must still hold plans
        where = f"{path}: plans[{index}]"
        if sentence := next((words for is_wrong, words in _mistakes(where, plan) if is_wrong), ""):
            raise PlanError(f"{where}: {sentence}.")
    return plans


def pick_plan(path: str, rank: int) -> Plan:
    """The ``rank``-th plan of the file, from 1. Raises ``PlanError``."""
    plans = read_plans(path)
    if 1 <= rank <= len(plans):
        return plans[rank - 1]
    raise PlanError(f"{path}: holds {plural(len(plans), 'plan')}: --rank {rank} is none of them.")


def _mistakes(where: str, plan: Plan) -> Iterator[tuple[object, str]]:
    """Whether something is wrong, and what; what comes later needs all before it to be right."""
    pp, cluster, model = plan.pp, plan.cluster, plan.model
    optional = ("update", "parts", "choices", "weight_gradients")
    needed = ("partition", "stage_gpu", "stage_forward", "stage_backward", "dp_allreduce", "stage_memory")
    for name in (*needed, "stage_cap", *optional):
        count = len(getattr(plan, name))
        yield count != pp and (count or name not in optional), f"{name} has {count} values for {pp} stages"
    yield len(plan.p2p) != pp - 1, f"p2p has {len(plan.p2p)} values for {pp - 1} boundaries"
    held, units = sum(plan.partition), len(model.units)
    yield held != units, f"partition has {held} units, {model.name} has {units}"
    types, counts = len(cluster.gpus), len(cluster.nodes)
    yield counts != types, f"cluster: {counts} counts of nodes for {types} GPU types"
    names = {gpu.name for gpu in cluster.gpus}
    yield len(names) != types, "cluster: a GPU type is there twice: give each once"
    for gpu, nodes in zip(cluster.gpus, cluster.nodes, strict=True):
        check_gpu(f"{where}: cluster: GPU {gpu.name}", gpu, nodes)
    check_nodes(f"{where}: placement", cluster, plan.placement)
    check_gpus(f"{where}: tp × dp × pp", cluster, plan.placement, plan.tp * plan.dp * pp)
    pairs = set(zip(plan.hosts, plan.placement, strict=False))
    is_whole = len(set(plan.hosts)) == len(plan.placement) and pairs <= set(cluster.hosts())
    yield plan.hosts and not is_whole, "hosts: give one node of the cluster for each, or leave them out"
    used = set(plan.placement)
    for name in plan.stage_gpu:
        yield not set(name.split("+")) <= used, f"stage_gpu: no {name!r} in the placement"
    product = f"dp {plan.dp} × mbs {plan.mbs} × micro_batches {plan.micro_batches}"
    is_wrong = plan.micro_batches * plan.dp * plan.mbs != model.global_batch
    yield is_wrong, f"{product} is not the global batch, {model.global_batch}"
    for tp in (plan.tp, *(choice.tp for choice in plan.choices)):
        check_heads(where, model, tp)
    degrees = plan.dp, plan.ep, plan.layers, plan.micro_batches, plan.virtual_stages
    yield from wrong_degrees(model, *degrees, bool(plan.weight_gradients))
    pairs_of = zip(plan.weight_gradients, plan.stage_backward, strict=False)
    yield any(part > whole for part, whole in pairs_of), "weight_gradients: give parts of stage_backward"
    gpus, sequences = plan.tp * plan.dp, plan.dp * plan.mbs
    for choice in plan.choices:
        own, tp = {name for name, _ in choice.shares}, choice.tp
        yield not own or not own <= used, "choices: shares: give sequences of each GPU type of the stage"
        is_wrong = len(choice.shares) == 1 and choice.shares[0][1] * (gpus // tp) != sequences
        stage = f"the {gpus} GPUs of a stage and its {sequences} sequences"
        yield gpus % tp or is_wrong, f"choices: tp {tp} and its shares don't divide {stage}"


def wrong_degrees(
    model: Model, ranks: int, ep: int, layers: Sequence[int], micro_batches: int, chunks: int, split: bool
) -> Iterator[tuple[object, str]]:
    """As ``_mistakes``. ranks: data-parallel; layers: of each stage; split: whether backward passes are."""
    experts = f"a divisor of dp {ranks} and of the {model.experts} experts"
    remedy = experts if model.experts else f"1, as {model.name} has no experts"
    yield math.gcd(model.experts or 1, ranks) % ep, f"ep is {ep}: give {remedy}"
    most = 1 if len(layers) == 1 or micro_batches % len(layers) or split else max(1, min(layers))
    why = "a layer for each, and 1 without a pipeline, with zero-bubble, or if the micro-batches are no"
    yield chunks > most, f"virtual_stages is {chunks}: give at most {most}: {why} multiple of pp"


def check_heads(where: str, model: Model, tp: int) -> None:
    """Whether tensor parallelism can split the attention heads. Raises ``PlanError``."""
    if model.most_tp % tp:
        more = f" and {model.kv_heads} kv_heads" if model.kv_heads else ""
        more += f" over cp {model.cp}" if model.by_heads else ""
        raise PlanError(f"{where}: tp is {tp}: give a divisor of the {model.heads} heads{more}.")


@dataclass(frozen=True)
class Goal:
    """objective: time, cost ($ per step) or pareto (whatever no plan beats in both); top: plans wanted;
    everything: every shape, those that do not fit into memory too; tp, dp, pp, mbs: only these degrees;
    time_limit: seconds after which shapes that are left aren't tried (0: none); max_tp: largest
    tensor-parallel degree; idle: plans may leave nodes out; workers: processes (0: as many as there are
    cores, where there is enough to do).
    """

    objective: str = "time"
    top: int = 10
    max_step_time: float | None = None
    everything: bool = False
    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    mbs: int | None = None
    time_limit: float = 0.0
    max_tp: int = 4
    idle: bool = False
    workers: int = 0

    def fits(self, shape: Any) -> bool:
        """Whether a shape has the degrees that are asked for."""
        return all(getattr(self, key) in (None, getattr(shape, key)) for key in ("tp", "dp", "pp", "mbs"))

    def no_plan(self, model: str, clusters: Sequence[str], flags: Sequence[str]) -> str:
        """Why a search found nothing, and what may find something; flags: of it, what saves memory."""
        what = f"no plan of {model} on {clusters[0] if len(clusters) == 1 else 'any cluster'}"
        if (most := self.max_step_time) is not None:
            return f"{what} takes at most {most:g} s per step: raise --max-step-time or add GPUs."
        return f"{what} fits into memory: give {', '.join([*flags, 'a larger --max-tp'])}, or more GPUs."

    @property
    def no_shape(self) -> str:
        """Why there is no plan of the degrees that are asked for."""
        asked = [(key, getattr(self, key)) for key in ("tp", "dp", "pp", "mbs")]
        wanted = ", ".join(f"{key} {value}" for key, value in asked if value is not None)
        return (
            f"no plan has {wanted}: tp × dp × pp must fit on the GPUs, tp divide the heads and a node, "
            "dp × mbs the global batch: leave out one of them."
        )


def by_time_and_price(plan: Plan) -> tuple[float, float]:
    return plan.step_time, plan.price_per_step


def pareto_front(plans: Sequence[Of], key: Callable[[Of], tuple[float, float]]) -> list[Of]:
    """The plans than which no other is both as fast and as cheap per step, fastest first; key: of one."""
    front: list[Of] = []
    for plan in sorted(plans, key=key):
        if not front or key(plan)[1] < key(front[-1])[1]:
            front.append(plan)
    return front
