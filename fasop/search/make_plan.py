"""A plan made of what the search found: an assignment, its times, its memory and its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fasop.exact.communication import Communication
from fasop.exact.passes import Passes
from fasop.exact.price import price_per_step
from fasop.exact.stage_costs import StageCosts
from fasop.exact.stage_variants import Variant, data_group, tensor_group
from fasop.exact.unit_times import Compute
from fasop.plans.options import Options
from fasop.plans.plan import Plan, StageChoice, StageParts
from fasop.plans.shapes import Seats, gpu_types
from fasop.search.improve import Simulated
from fasop.search.partition import Assignment


def made_plan(
    tables: StageCosts, assignment: Assignment, simulated: Simulated, bound: float, iterations: int
) -> Plan:
    """``bound``: seconds that no plan of the shape can beat."""
    shape, model, cluster, options = tables.shape, tables.model, tables.cluster, tables.options
    variants = [
        tables.variants.of(seats)[index]
        for seats, index in zip(assignment.seats, simulated.chosen, strict=True)
    ]
    memory = _memory(tables, assignment, variants)
    caps = tuple(tables.cap(seats) for seats in assignment.seats)
    uniform = not options.per_stage
    one_node = len(assignment.placement) == 1
    plan = Plan(
        model=model,
        cluster=cluster,
        cost_model="exact",
        placement=assignment.placement,
        tp=shape.tp,
        dp=shape.dp,
        pp=shape.pp,
        mbs=shape.mbs,
        micro_batches=tables.micro_batches,
        partition=assignment.partition,
        stage_gpu=tuple("+".join(gpu_types(seats)) for seats in assignment.seats),
        stage_forward=simulated.forward,
        stage_backward=simulated.backward,
        p2p=simulated.p2p,
        dp_allreduce=simulated.reduction,
        embedding_allreduce=simulated.embedding,
        pipeline_time=simulated.pipeline,
        step_time=simulated.step,
        stage_memory=memory,
        stage_cap=caps,
        is_oom=any(size > cap for size, cap in zip(memory, caps, strict=True)),
        price_per_step=0.0,
        train_cost=0.0,
        options=options,
        ep=shape.ep,
        update=simulated.update,
        parts=_parts(tables, assignment, variants),
        wrap=tables.p2p(assignment.seats[-1], assignment.seats[0], one_node) if shape.pp > 1 else 0.0,
        hosts=tuple(cluster.assigned(assignment.placement)),
        choices=() if uniform else tuple(StageChoice(v.tp, v.recompute, v.shares) for v in variants),
        lower_bound=min(bound, simulated.step),
        notes=_notes(tables, variants),
    )
    return with_price(plan, iterations)


def with_price(plan: Plan, iterations: int) -> Plan:
    """The plan with what a step, and all of them, cost."""
    price = price_per_step(plan)
    return replace(plan, price_per_step=price, train_cost=price * iterations)


def stage_memory(
    tables: StageCosts, partition: tuple[int, ...], variants: list[Variant]
) -> tuple[float, ...]:
    """GiB of one GPU of each stage, the margin included."""
    sizes, begin = [], 0
    for stage, size in enumerate(partition):
        in_flight = min(len(partition) - stage, tables.micro_batches)
        sizes.append(float(tables.memory(variants[stage], in_flight)[begin, begin + size]))
        begin += size
    return tuple(sizes)


def _memory(tables: StageCosts, assignment: Assignment, variants: list[Variant]) -> tuple[float, ...]:
    sizes = stage_memory(tables, assignment.partition, variants)
    reserved = [
        max(tables.cluster.gpu(name).reserved_gib for name in gpu_types(seats)) for seats in assignment.seats
    ]
    return tuple(size + more for size, more in zip(sizes, reserved, strict=True))


def _parts(tables: StageCosts, assignment: Assignment, variants: list[Variant]) -> tuple[StageParts, ...]:
    found, begin = [], 0
    for units, seats, variant in zip(assignment.partition, assignment.seats, variants, strict=True):
        at = begin, begin + units
        begin += units
        layers = np.flatnonzero(tables.passes.layers[at[0] : at[1]]) + at[0]
        forward, backward = (
            float(seconds[layers].mean()) if len(layers) else 0.0
            for seconds in tables.variants.seconds(seats, variant)
        )
        reduction, gather = (float(seconds[at]) for seconds in tables.once(seats, variant.tp))
        groups = [(tensor_group(seats, name, variant.tp), mbs) for name, mbs in variant.shares]
        each = max(tables.passes.sum_seconds(*group) for group in groups)
        parts = StageParts(forward, backward, each, reduction, gather)
        if tables.shape.ep > 1:
            parts = _with_experts(tables, seats, variant, at, parts)
        found.append(parts)
    return tuple(found)


def _with_experts(
    tables: StageCosts, seats: Seats, variant: Variant, at: tuple[int, int], parts: StageParts
) -> StageParts:
    """The parts with what experts take that are spread over several ranks."""
    tp, passes, options = variant.tp, tables.passes, tables.options
    ranks = data_group(seats, tp, tables.shape.ep)
    exchange = max(passes.exchange_seconds(ranks, tp, mbs) for _, mbs in variant.shares)
    held, of_experts = tables.held(tp)
    size = (held - of_experts)[at] * options.gradient_bytes
    data = data_group(seats, tp, tables.shape.group // tp)
    others = float(passes.over_replicas(data, tp, np.array(size), options.zero == 0))
    share = 1 - others / parts.reduction if parts.reduction else 0.0
    return replace(parts, exchange=exchange, experts=share)


def _notes(tables: StageCosts, variants: list[Variant]) -> tuple[str, ...]:
    shares = dict.fromkeys((name, each.tp, mbs) for each in variants for name, mbs in each.shares)
    units = [tables.passes.units(*share, tables.shape.ep) for share in shares]
    return tuple(dict.fromkeys(note for each in units for note in each.notes))


def sharded_memory(plan: Plan) -> tuple[float, ...]:
    """GiB of one GPU of each stage of a plan, if its replicas shared the optimizer states."""
    options = replace(plan.options, zero=max(plan.options.zero, 1))
    return memory_with(plan, options, [min(plan.pp - i, plan.micro_batches) for i in range(plan.pp)])


def memory_with(plan: Plan, options: Options, in_flight: Sequence[float]) -> tuple[float, ...]:
    """GiB of one GPU of each stage of a plan, if it ran with other options.

    in_flight: micro-batches, or parts of them, whose activations each stage keeps at once.
    """
    passes = Passes(plan.model, Compute([], plan.model, options), Communication(plan.cluster), options)
    tables = StageCosts(passes, plan.shape)
    sizes, begin = [], 0
    for stage, units in enumerate(plan.partition):
        types = plan.stage_gpu[stage].split("+")
        variant = Variant(plan.tp, options.recompute, tuple((name, plan.mbs) for name in types))
        if plan.choices:
            choice = plan.choices[stage]
            variant = Variant(choice.tp, choice.recompute, choice.shares)
        own = float(tables.memory(variant, in_flight[stage])[begin, begin + units])
        sizes.append(own + max(plan.cluster.gpu(name).reserved_gib for name in types))
        begin += units
    return tuple(sizes)
