"""Plans in an interleaved schedule: several chunks of layers per stage, where that shortens the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fasop.errors import PlanError
from fasop.exact.estimate import Estimate, StageEstimate
from fasop.inputs.costs import CostFile
from fasop.plans.plan import Plan
from fasop.schedule import interleaved
from fasop.schedule.events import of_plan, with_chunks
from fasop.search.planner import Planner, memory_with, with_price

WIDER = 3  # times as many plans as are asked for are tried: the best with chunks need not be so without
MOST_CHUNKS = 8  # of a stage


def interleave(plans: Sequence[Plan], cost_files: list[CostFile], iterations: int) -> list[Plan]:
    """Each plan with the chunks that make its step shortest, the fastest first; those that gain nothing, or
    would not fit into memory, stay as they are.
    """
    found: list[Plan] = []
    wanted = len(plans) // WIDER
    for plan in plans:
        limit = found[wanted - 1].step_time if len(found) >= wanted > 0 else math.inf
        made = _best(plan, cost_files, iterations) if _least(plan) < limit else plan
        found = sorted([*found, made], key=lambda plan: plan.step_time)
    return found


def estimate_chunks(plan: Plan, cost_files: list[CostFile]) -> Estimate:
    """What an interleaved plan takes on its cluster with these costs. Raises ``PlanError`` for a GPU without
    costs, and where its stages would now be divided or recomputed otherwise.
    """
    planner = Planner(plan.model, plan.cluster, cost_files, plan.options, 1)
    plain = planner.estimate(plan.shape, plan.placement, plan.partition)
    if plain.choices != plan.choices:
        raise PlanError(
            "with these costs and this cluster, the interleaved plan's stages would be divided or recomputed "
            "otherwise: evaluate it with those that it was planned with, or plan again."
        )
    made = _with_memory(with_chunks(plain, plan.virtual_stages), 1)
    last = {event.stage: event.end for event in of_plan(made) if event.kind == "backward"}
    stages = zip(
        *(made.stage_forward, made.stage_backward, made.dp_allreduce, made.update),
        *([last[stage] for stage in range(made.pp)], made.stage_memory),
        strict=True,
    )
    return Estimate(
        *(made.step_time, max(last.values()), made.embedding_allreduce, made.p2p),
        tuple(StageEstimate(*stage) for stage in stages),
        made.notes,
    )


def _best(plan: Plan, cost_files: list[CostFile], iterations: int) -> Plan:
    best, starts = plan, [plan]
    if _least(plan) >= plan.step_time:
        return plan
    each, rest = divmod(plan.model.layers, plan.pp)
    even = (each + 1, *[each] * (plan.pp - 2), each + 1)
    if not rest and plan.pp > 1 and not plan.choices and plan.model.encoder_layers is None:
        # Uneven stages may be left with fewer layers than chunks.
        planner = Planner(plan.model, plan.cluster, cost_files, plan.options, iterations)
        starts += [planner.estimate(plan.shape, plan.placement, even)] if even != plan.partition else []
    for start in starts:
        before = start.step_time
        for chunks in range(2, min(*start.layers, MOST_CHUNKS) + 1):
            try:
                other = with_chunks(start, chunks)
            except PlanError:
                break  # this number of micro-batches, or kind of model, can't be interleaved
            if other.step_time >= before:
                break  # more chunks only add messages
            before = other.step_time
            if other.step_time < best.step_time and not (fitted := _with_memory(other, iterations)).is_oom:
                best = fitted
    return best


def _least(plan: Plan) -> float:
    """Seconds that the plan takes with all its micro-batches on evenly loaded stages and no bubble."""
    work = sum(plan.stage_forward) + sum(plan.stage_backward)
    return plan.micro_batches * work / plan.pp + plan.embedding_allreduce


def _with_memory(plan: Plan, iterations: int) -> Plan:
    """The plan with the memory and price of its schedule."""
    chunks = plan.virtual_stages
    in_flight = [
        interleaved.in_flight(stage, plan.pp, plan.micro_batches, chunks) / chunks for stage in range(plan.pp)
    ]
    memory = memory_with(plan, plan.options, in_flight)
    is_oom = any(size > cap for size, cap in zip(memory, plan.stage_cap, strict=True))
    return with_price(replace(plan, stage_memory=memory, is_oom=is_oom), iterations)
