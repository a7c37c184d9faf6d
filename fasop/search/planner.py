"""The cost model ``exact``: one shape's best placement and partition, simulated.

What it repairs of the published tool is listed in ``README.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fasop.exact.stage_costs import Options, StageCosts
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import Costs
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.plan import Plan
from fasop.plans.shapes import Shape, blocks, inside_node, kinds_of
from fasop.schedule import one_f_one_b as schedule
from fasop.search.lattice import Lattice
from fasop.search.partition import Division, Search
from fasop.search.simulated import best_of_all, improve


@dataclass(frozen=True)
class Parts:
    """What a division of the model takes: seconds a stage, a boundary, and a step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    p2p: tuple[float, ...]
    all_reduce: tuple[float, ...]
    embedding: float
    pipeline: float
    step: float


class Planner:
    """Everything that the shapes of one model on one cluster share."""

    def __init__(
        self, model: Model, cluster: Cluster, costs: Costs, options: Options, iterations: int = 0
    ) -> None:
        self.model, self.cluster, self.costs, self.options = model, cluster, costs, options
        self.iterations = iterations

    def tables(self, shape: Shape) -> StageCosts:
        return StageCosts(self.model, self.cluster, self.costs, shape, self.options)

    @memo
    def lattice(self, gpus_per_stage: int) -> Lattice:
        return Lattice(self.cluster, blocks(self.cluster, gpus_per_stage))

    def lower_bound(self, shape: Shape) -> float:
        """Seconds that no placement and partition of a shape can beat, without any search.

        Of a step of T seconds, a stage is busy with its m micro-batches and at least as many messages, so
        that no stage computes for more than T/m each. What fast GPUs can't take within that falls to
        slower ones: that gives the least sum over all stages, through which the first micro-batch must
        go there and back; the slowest stage then has m − 1 left, less the forwards it could run ahead.
        Last come the first stage's all-reduce, of at least the embedding's gradients, and the
        embedding's own. The least T for which all this holds is the bound.
        """
        tables = self.tables(shape)
        m, pp = tables.micro_batches, shape.pp
        names = [gpu.name for gpu in self.cluster.gpus]
        times = [np.array(tables.unit_times((name,))) for name in names]
        totals = np.array([time.sum(axis=0) for time in times])
        fastest = totals.min(axis=0)
        work, some = float(fastest.sum()), fastest > 0
        # Seconds on a type for a second on the fastest, at the unit that suits the type best.
        slowdown = [float((total[some] / fastest[some]).min()) for total in totals]
        stages = [pp * count / self.cluster.node_count for count in self.cluster.nodes]
        slowest = work / sum(count / slow for count, slow in zip(stages, slowdown, strict=True))
        ahead = max(float((time[0] / total).max()) for time, total in zip(times, totals, strict=True))
        rest = max(m - 1 - min(pp - 1, m - 1) * ahead, 0)
        messages, each, embedding = 0.0, 0.0, 0.0
        if pp > 1:
            pairs = [((one,), (two,)) for one in names for two in names]
            across = min(tables.p2p(one, two, False) for one, two in pairs)
            within = min(tables.p2p((name,), (name,), True) for name in names)
            inside = sum(inside_node(self.cluster, shape.tp * shape.dp))
            messages = inside * within + (pp - 1 - inside) * across
            each = min(within, across) if inside else across
            embedding = min(tables.embedding_sync([one, two]) for one, two in pairs)
        order = sorted(zip(slowdown, stages, strict=True))

        def step(limit: float) -> float:
            """Seconds where no stage takes more than ``limit``."""
            left, total = work, 0.0
            for slow, count in order:
                done = min(left, count * limit / slow)
                left, total = left - done, total + done * slow
            total += left * order[-1][0]
            return max(m * (slowest + each), total + 2 * messages + slowest * rest)

        low, high = 0.0, step(0.0)
        for _ in range(20):
            middle = (low + high) / 2
            if step(middle / m) > middle:
                low = middle
            else:
                high = middle
        first = min(float(tables.all_reduce((name,))[0, 1]) for name in names)
        return low + first + embedding

    def best(
        self, shape: Shape, fit: bool = True, limit: float = math.inf
    ) -> tuple[Division, Parts, float] | None:
        """The best placement and partition of a shape, and the seconds that none can beat.

        None where none fits into memory, or where none can take less than ``limit`` seconds; ``fit``
        False: as if memory had no end.
        """
        tables, lattice = self.tables(shape), self.lattice(shape.tp * shape.dp)
        if not lattice.possible:
            return None
        if fit and (found := best_of_all(tables, lattice)) is not False:
            if found is None:
                return None
            parts = self.simulate(tables, found)
            return found, parts, parts.step
        division = Search(tables, lattice, fit).best(limit)
        if division is None:
            return None
        bound, parts = division.objective, self.simulate(tables, division)
        # The search counted the first stage's all-reduce alone: where another ends later, the other
        # objective, which counts all of them, may find better.
        if parts.step > 1.0001 * (parts.pipeline + parts.all_reduce[0] + parts.embedding):
            other = Search(tables, lattice, fit, paced=True).best()
            assert other is not None
            paced = self.simulate(tables, other)
            if paced.step < parts.step:
                return other, paced, bound
        return division, parts, bound

    def refine(self, plan: Plan) -> Plan:
        """The plan, which fits into memory, or a better one of the same shape near it."""
        shape = Shape(plan.tp, plan.dp, plan.pp, plan.mbs)
        group = shape.tp * shape.dp
        tables, lattice = self.tables(shape), self.lattice(group)
        kinds = kinds_of(self.cluster, plan.placement, group)
        division = Division(plan.placement, kinds, plan.partition, plan.lower_bound)
        better = improve(tables, lattice, [division, *Search(tables, lattice).near(division)])
        return self.plan(shape, better, self.simulate(tables, better), plan.lower_bound)

    def estimate(self, shape: Shape, placement: tuple[str, ...], partition: tuple[int, ...]) -> Plan:
        """A plan whose placement and partition are given."""
        group = shape.tp * shape.dp
        division = Division(placement, kinds_of(self.cluster, placement, group), partition)
        return self.plan(shape, division, self.simulate(self.tables(shape), division), 0.0)

    def simulate(self, tables: StageCosts, division: Division) -> Parts:
        """All times of a division, with the schedule simulated."""
        ends = np.cumsum(division.partition)
        begins = ends - division.partition
        spans = list(zip(division.kinds, begins.tolist(), ends.tolist(), strict=True))
        forward = [float(tables.unit_times(kinds)[0][a:b].sum()) for kinds, a, b in spans]
        backward = [float(tables.unit_times(kinds)[1][a:b].sum()) for kinds, a, b in spans]
        all_reduce = [float(tables.all_reduce(kinds)[a, b]) for kinds, a, b in spans]
        inside = inside_node(self.cluster, tables.shape.tp * tables.shape.dp)
        neighbours = zip(division.kinds[:-1], division.kinds[1:], inside, strict=True)
        p2p = [tables.p2p(left, right, inside) for left, right, inside in neighbours]
        line = schedule.run(forward, backward, p2p, tables.micro_batches)
        synced = [end + seconds for end, seconds in zip(line.stage_end, all_reduce, strict=True)]
        holders = self.model.embedding_stages(division.partition)
        embedding = tables.embedding_sync([division.kinds[i] for i in holders])
        step = max(*synced, max(synced[i] for i in holders) + embedding)
        return Parts(
            *(tuple(forward), tuple(backward), tuple(p2p), tuple(all_reduce)),
            *(embedding, line.pipeline_time, step),
        )

    def plan(self, shape: Shape, division: Division, parts: Parts, bound: float) -> Plan:
        """A plan, with the memory that it needs; ``bound``: seconds that no plan of the shape can beat."""
        tables = self.tables(shape)
        memory = division_memory(tables, division.partition)
        caps = tuple(tables.cap(kinds) for kinds in division.kinds)
        price = self.cluster.price_per_hour / 3600 * parts.step
        return Plan(
            model=self.model,
            cluster=self.cluster,
            cost_model="exact",
            placement=division.placement,
            tp=shape.tp,
            dp=shape.dp,
            pp=shape.pp,
            mbs=shape.mbs,
            micro_batches=tables.micro_batches,
            partition=division.partition,
            stage_gpu=tuple("+".join(kinds) for kinds in division.kinds),
            stage_forward=parts.forward,
            stage_backward=parts.backward,
            p2p=parts.p2p,
            dp_allreduce=parts.all_reduce,
            embedding_allreduce=parts.embedding,
            pipeline_time=parts.pipeline,
            step_time=parts.step,
            stage_memory=memory,
            stage_cap=caps,
            is_oom=any(size > cap for size, cap in zip(memory, caps, strict=True)),
            price_per_step=price,
            train_cost=price * self.iterations,
            recompute=self.options.recompute,
            sharded_optimizer=self.options.sharded_optimizer,
            lower_bound=min(bound, parts.step),
        )


def stage_memory(plan: Plan, sharded_optimizer: bool) -> tuple[float, ...]:
    """GiB of one GPU of each stage of a plan, the margin included."""
    options = Options(plan.recompute, sharded_optimizer)
    shape = Shape(plan.tp, plan.dp, plan.pp, plan.mbs)
    return division_memory(StageCosts(plan.model, plan.cluster, None, shape, options), plan.partition)


def division_memory(tables: StageCosts, partition: tuple[int, ...]) -> tuple[float, ...]:
    """GiB of one GPU of each stage, the margin included."""
    sizes, begin = [], 0
    for stage, size in enumerate(partition):
        in_flight = min(len(partition) - stage, tables.micro_batches)
        sizes.append(float(tables.memory(in_flight)[begin, begin + size]))
        begin += size
    return tuple(sizes)
