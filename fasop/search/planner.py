"""One shape's best placement and partition: bounded, searched and simulated, and made into a plan, if
wanted with several chunks of layers per stage.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from fasop.exact.communication import Communication
from fasop.exact.passes import SPLIT_NOTE, Passes, step_end, synchronized
from fasop.exact.stage_costs import StageCosts, data_group, tensor_group
from fasop.exact.unit_times import Compute
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.layout import no_zero_bubble, of_plan
from fasop.plans.options import Options
from fasop.plans.plan import Plan, StageChoice, StageParts
from fasop.plans.shapes import MOST_BLOCKS, Block, Seats, Shape, blocks, gpu_types, stage_seats
from fasop.schedule import one_f_one_b
from fasop.schedule.events import in_flight, rescheduled
from fasop.search.bounds import Bounds
from fasop.search.improve import best_of_all, improve
from fasop.search.node_counts import NodeCounts
from fasop.search.partition import Assignment, Search

LARGE = 256  # GPUs from which tables take so much memory that few are kept, else
MANY = 24
WIDER = 3  # times as many plans as are asked for are tried: the best with chunks need not be so without
MOST_CHUNKS = 8  # of a stage


class Planner:
    """Everything that the shapes of one model on one cluster share."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        cost_files: list[CostFile],
        options: Options,
        idle: bool = False,
        max_tp: float = math.inf,
    ) -> None:
        """``idle``: plans may leave nodes out; max_tp: of stages that choose their own tp."""
        self.model, self.cluster, self.options = model, cluster, options
        self.idle = idle
        self.compute = Compute(cost_files, model, options)
        self.passes = Passes(model, self.compute, Communication(cluster), options, max_tp)
        kept = MANY if cluster.gpu_count <= LARGE else 4
        self._some_stages = functools.lru_cache(kept)(functools.partial(StageCosts, self.passes))
        self.tables = functools.lru_cache(kept)(self._tables)
        self.bounds = Bounds(self.passes, self.tables)

    def _tables(self, shape: Shape) -> StageCosts:
        return StageCosts(self.passes, shape, self._some_stages(replace(shape, pp=min(shape.pp, 2))))

    @memo
    def counts(self, gpus_per_stage: int, stages: int) -> NodeCounts:
        return NodeCounts(self.cluster, self._blocks(gpus_per_stage)[0], stages, self.idle)

    @memo
    def _blocks(self, gpus_per_stage: int) -> tuple[list[Block], bool]:
        """All blocks, and whether there are more."""
        return blocks(self.cluster, gpus_per_stage)

    def is_deepest(self, shape: Shape) -> bool:
        """Whether the GPUs, or the layers, are not enough for one stage more."""
        return shape.pp == min(self.cluster.gpu_count // shape.group, self.model.layers)

    def best(self, shape: Shape, fit: bool = True, limit: float = math.inf) -> Plan | None:
        """The best placement and partition of a shape.

        None where none fits into memory, or where none can take less than ``limit`` seconds; ``fit``
        False: as if memory had no end.
        """
        tables, counts = self.tables(shape), self.counts(shape.group, shape.pp)
        if not counts.possible:
            return None
        if fit and (found := best_of_all(tables, counts)) is not False:
            return self.plan(shape, found, math.inf) if found else None
        assignment = Search(tables, counts, fit).best(limit)
        return self.plan(shape, assignment, assignment.objective, fit) if assignment else None

    def refine(self, plan: Plan) -> Plan:
        """The plan, which fits into memory, or a better one of the same shape near it."""
        shape = plan.shape
        tables, counts = self.tables(shape), self.counts(shape.group, shape.pp)
        seats = stage_seats(self.cluster, plan.placement, shape)
        assignment = Assignment(plan.placement, seats, plan.partition, plan.lower_bound)
        better = improve(tables, [assignment, *Search(tables, counts).near(assignment)])
        return self.plan(shape, better, plan.lower_bound)

    def estimate(self, shape: Shape, placement: tuple[str, ...], partition: tuple[int, ...]) -> Plan:
        """A plan whose placement and partition are given."""
        seats = stage_seats(self.cluster, placement, shape)
        return self.plan(shape, Assignment(placement, seats, partition), 0.0, fit=False)

    def plan(self, shape: Shape, assignment: Assignment, bound: float = 0.0, fit: bool = True) -> Plan:
        """An assignment with what it takes and needs; ``bound``: seconds that no plan of the shape can beat;
        ``fit`` False: stages work as if memory had no end.
        """
        tables, pp, placement, seats = self.tables(shape), shape.pp, assignment.placement, assignment.seats
        m, ends = tables.micro_batches, itertools.accumulate(assignment.partition)
        rows, memory, choices, parts = [], [], [], []
        for i, (own, units, end) in enumerate(zip(seats, assignment.partition, ends, strict=True)):
            at, in_flight = (end - units, end), min(pp - i, m)
            *seconds, chosen = (float(way[at]) for way in tables.table(own, in_flight, fit))
            choice = tables.choices(own)[int(chosen)]
            reserved = max(self.cluster.gpu(name).reserved_gib for name in gpu_types(own))
            rows.append(seconds)
            choices.append(choice)
            memory.append(float(tables.memory(choice, in_flight)[at]) + reserved)
            parts.append(_parts(tables, own, choice, at))
        forward, backward, reduction, update = zip(*rows, strict=True)
        kinds = tables.boundaries(placement)
        pairs = zip(seats[:-1], seats[1:], kinds, strict=True)
        p2p = tuple(tables.p2p(left, right, kind) for left, right, kind in pairs)
        line = one_f_one_b.run(list(forward), list(backward), list(p2p), m)
        each = zip(line.stage_end, line.backward_end, reduction, strict=True)
        synced = [float(synchronized(self.options, *of_stage)) for of_stage in each]
        holders = self.model.embedding_stages(assignment.partition)
        embedding = tables.embedding_sync(tuple(seats[i] for i in holders))
        step = float(step_end(synced, holders, embedding, update))
        caps = tuple(min(self.cluster.gpu(name).memory_gib for name, _ in own) for own in seats)
        units_of = dict.fromkeys((name, choice.tp, mbs) for choice in choices for name, mbs in choice.shares)
        notes = dict.fromkeys(note for of in units_of for note in self.passes.units(*of, shape.ep).notes)
        if self._blocks(shape.group)[1]:
            left = f"stages of {shape.group} GPUs end inside nodes: of the orders of nodes up to where both "
            notes[f"{left}end, the {MOST_BLOCKS} of the fewest GPU types were tried."] = None
        plan = Plan(
            model=self.model,
            cluster=self.cluster,
            cost_model="exact",
            placement=placement,
            **asdict(shape),
            micro_batches=m,
            partition=assignment.partition,
            stage_gpu=tuple("+".join(gpu_types(own)) for own in seats),
            stage_forward=forward,
            stage_backward=backward,
            p2p=p2p,
            dp_allreduce=reduction,
            embedding_allreduce=embedding,
            pipeline_time=float(line.pipeline_time),
            step_time=step,
            stage_memory=tuple(memory),
            stage_cap=caps,
            is_oom=any(size > cap for size, cap in zip(memory, caps, strict=True)),
            price_per_step=0.0,
            train_cost=0.0,
            options=self.options,
            update=update,
            parts=tuple(parts),
            wrap=tables.p2p(seats[-1], seats[0], len(placement) == 1) if pp > 1 else 0.0,
            hosts=tuple(self.cluster.assigned(placement)),
            choices=tuple(choices) if self.options.per_stage else (),
            lower_bound=min(bound, step),
            notes=tuple(notes),
        )
        return with_price(plan)


def _parts(tables: StageCosts, seats: Seats, choice: StageChoice, at: tuple[int, int]) -> StageParts:
    passes, tp, ep = tables.passes, choice.tp, tables.shape.ep
    layers = np.flatnonzero(passes.layers[slice(*at)]) + at[0]
    passes_of = tables.seconds(seats, choice)
    forward, backward = (float(each[layers].mean()) if len(layers) else 0.0 for each in passes_of)
    reduction, gather = (float(seconds[at]) for seconds in tables.once(seats, tp))
    each = max(passes.sum_seconds(tensor_group(seats, name, tp), mbs) for name, mbs in choice.shares)
    sharding = 0.0
    if passes.options.zero >= 2:
        pairs = zip(passes_of, tables.seconds(seats, choice, False), strict=True)
        sharding = float(sum((whole - alone)[slice(*at)].sum() for whole, alone in pairs))
    context = 0.0
    if passes.model.cp > 1:
        of = data_group(seats, tp, passes.model.cp), tp
        units = [(passes.units(name, tp, mbs, ep), mbs) for name, mbs in choice.shares]
        waits = [passes.context_seconds(*of, mbs, seconds.scores) for seconds, mbs in units]
        context = max(float(each[:, slice(*at)].sum()) for each in waits)
    parts = StageParts(forward, backward, each, reduction, gather, sharding=sharding, context=context)
    if ep == 1:
        return parts
    ranks = data_group(seats, tp, ep)
    exchange = max(passes.exchange_seconds(ranks, tp, mbs) for _, mbs in choice.shares)
    held, of_experts = tables.held(tp)
    size = np.array((held - of_experts)[at] * passes.options.gradient_bytes)
    others = float(passes.over_replicas(tables.data_group(seats, tp), tp, size, passes.options.zero == 0))
    share = 1 - others / reduction if reduction else 0.0
    return replace(parts, exchange=exchange, experts=share)


def with_price(plan: Plan) -> Plan:
    """The plan with what a step costs."""
    hourly = sum(plan.cluster.gpu(name).price_per_hour for name in plan.placement)
    return replace(plan, price_per_step=hourly / 3600 * plan.step_time)


def memory_with(plan: Plan, options: Options) -> tuple[float, ...]:
    """GiB of one GPU of each stage of a plan, if it ran with other options."""
    passes = Passes(plan.model, Compute([], plan.model, options), Communication(plan.cluster), options)
    tables = StageCosts(passes, plan.shape)
    sizes = []
    for stage in range(plan.pp):
        units = plan.units(stage)
        at = stage * (not plan.weight_gradients)
        held = in_flight(at, plan.pp, plan.micro_batches, plan.virtual_stages)
        own = float(tables.memory(plan.choice(stage), held)[units.start, units.stop])
        types = plan.stage_gpu[stage].split("+")
        sizes.append(own + max(plan.cluster.gpu(name).reserved_gib for name in types))
    return tuple(sizes)


def reschedule(plans: Sequence[Plan], cost_files: list[CostFile], way: Callable[..., Plan]) -> list[Plan]:
    """Each plan in the schedule that makes its step shortest, the fastest first; those that gain nothing, or
    would not fit into memory, stay as they are.
    """
    found: list[Plan] = []
    wanted = len(plans) // WIDER
    for plan in plans:
        limit = found[wanted - 1].step_time if len(found) >= wanted > 0 else math.inf
        made = way(plan, cost_files) if _least(plan) < limit else plan
        found = sorted([*found, made], key=lambda plan: plan.step_time)
    return found


def interleaved(plan: Plan, cost_files: list[CostFile]) -> Plan:
    """The plan, or one with chunks that is faster."""
    best, starts = plan, [plan]
    # Megatron-LM interleaves decoders or encoders alone, and as many micro-batches as fill all stages.
    possible = plan.pp > 1 and plan.model.encoder_layers is None and plan.micro_batches % plan.pp == 0
    if not possible or _least(plan) >= plan.step_time:
        return plan
    each, rest = divmod(plan.model.layers, plan.pp)
    even = (each + 1, *[each] * (plan.pp - 2), each + 1)
    if not rest and not plan.choices:
        # Uneven stages may be left with fewer layers than chunks.
        planner = Planner(plan.model, plan.cluster, cost_files, plan.options)
        starts += [planner.estimate(plan.shape, plan.placement, even)] if even != plan.partition else []
    for start in starts:
        before = start.step_time
        for chunks in range(2, min(*start.layers, MOST_CHUNKS) + 1):
            other = rescheduled(start, chunks)
            if other.step_time >= before:
                break  # more chunks only add messages
            before = other.step_time
            if other.step_time < best.step_time and not (fitted := _with_memory(other)).is_oom:
                best = fitted
    return best


def zero_bubble(plan: Plan, cost_files: list[CostFile]) -> Plan:
    """The plan, or the same in the zero-bubble schedule where that is faster."""
    if no_zero_bubble(of_plan(plan), plan.options) or _least(plan) >= plan.step_time:
        return plan
    passes = Planner(plan.model, plan.cluster, cost_files, plan.options).passes
    weights = []
    for stage, seats in enumerate(stage_seats(plan.cluster, plan.placement, plan.shape)):
        choice, units = plan.choice(stage), plan.units(stage)
        groups = [(mbs, tensor_group(seats, name, choice.tp)) for name, mbs in choice.shares]
        each = [passes.weight_gradients(mbs, group, plan.ep)[units].sum() for mbs, group in groups]
        weights.append(float(min(each)))
    other = _with_memory(rescheduled(plan, weight_gradients=tuple(weights)))
    is_better = other.step_time < plan.step_time and not other.is_oom
    return replace(other, notes=(*plan.notes, SPLIT_NOTE)) if is_better else plan


def _least(plan: Plan) -> float:
    """Seconds that the plan takes with all its micro-batches on evenly loaded stages and no bubble."""
    work = sum(plan.stage_forward) + sum(plan.stage_backward)
    return plan.micro_batches * work / plan.pp + plan.embedding_allreduce


def _with_memory(plan: Plan) -> Plan:
    memory = memory_with(plan, plan.options)
    is_oom = any(size > cap for size, cap in zip(memory, plan.stage_cap, strict=True))
    return with_price(replace(plan, stage_memory=memory, is_oom=is_oom))
