"""The cost model ``exact``: one shape's best placement and partition, simulated.

What it repairs of the published tool is listed in ``README.md``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fasop import schedule
from fasop.clusters import Cluster
from fasop.costs import Costs
from fasop.lattice import Lattice
from fasop.models import Model
from fasop.partition import SLACK, Division, Search
from fasop.plan import Plan
from fasop.shapes import Block, Shape, blocks
from fasop.stage_costs import Kinds, Options, StageCosts

FEW = 1000  # divisions of a shape up to which all of them are simulated


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

    @functools.cache  # noqa: B019 - lives as long as the planner
    def tables(self, shape: Shape) -> StageCosts:
        return StageCosts(self.model, self.cluster, self.costs, shape, self.options)

    @functools.cache  # noqa: B019
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
        if fit and (found := self.every(shape)) is not False:
            return (*found, found[1].step) if found else None
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

    def refine(self, plan: Plan, effort: int) -> Plan:
        """The plan, or a better one that units moved from stage to stage lead to.

        ``effort`` bounds the moves times stages times micro-batches.
        """
        shape = Shape(plan.tp, plan.dp, plan.pp, plan.mbs)
        tables = self.tables(shape)
        kinds = kinds_of(self.cluster, plan.placement, plan.tp * plan.dp)
        inside = inside_node(self.cluster, plan.tp * plan.dp)
        best = np.array(plan.partition)
        step = plan.step_time
        unit = np.eye(plan.pp, dtype=int)
        moves = (unit[:, None] - unit[None]).reshape(-1, plan.pp)
        for _ in range(effort // (plan.pp * tables.micro_batches) if plan.pp > 1 else 0):
            near = best + moves
            near = near[(near > 0).all(axis=1)]
            steps = self.step_times(tables, kinds, inside, near)
            at = int(steps.argmin())
            if not steps[at] < step / SLACK:
                break
            best, step = near[at], float(steps[at])
        if step == plan.step_time:
            return plan
        better = self.estimate(shape, plan.placement, tuple(int(size) for size in best))
        return replace(better, lower_bound=plan.lower_bound)

    def every(self, shape: Shape) -> tuple[Division, Parts] | None | Literal[False]:
        """The best of all divisions by their simulated time; False where they are too many to try.

        None where none fits into memory.
        """
        tables, lattice = self.tables(shape), self.lattice(shape.tp * shape.dp)
        units, pp = len(self.model.units), shape.pp
        count = math.comb(units - 1, pp - 1)
        if count > FEW:
            return False
        sequences = list(itertools.islice(_sequences(self.cluster, lattice), FEW // count + 1))
        if count * len(sequences) > FEW:
            return False
        cuts = np.array(list(itertools.combinations(range(1, units), pp - 1)), dtype=int)
        cuts = cuts.reshape(count, pp - 1)
        partitions = np.diff(cuts, axis=1, prepend=0, append=units)
        best = None
        inside = inside_node(self.cluster, shape.tp * shape.dp)
        for chosen in sequences:
            kinds = tuple(kinds for block in chosen for kinds in block.stages)
            steps = self.step_times(tables, kinds, inside, partitions)
            at = int(steps.argmin())
            if steps[at] < (best[0] if best else np.inf):
                placement = tuple(node for block in chosen for node in block.nodes)
                partition = tuple(int(size) for size in partitions[at])
                best = float(steps[at]), Division(placement, kinds, inside, partition, float(steps[at]), 0.0)
        return (best[1], self.simulate(tables, best[1])) if best else None

    def step_times(
        self, tables: StageCosts, kinds: tuple[Kinds, ...], inside: tuple[bool, ...], partitions: np.ndarray
    ) -> np.ndarray:
        """Simulated seconds a step of many partitions (K, stages) of one placement, inf where none fits."""
        pp, m = tables.shape.pp, tables.micro_batches
        ends = np.cumsum(partitions, axis=1)
        begins = ends - partitions
        forward, backward, all_reduce, fits = [], [], [], np.ones(len(partitions), dtype=bool)
        for i in range(pp):
            a, b = begins[:, i], ends[:, i]
            sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in tables.unit_times(kinds[i])]
            forward.append(sums[0][b] - sums[0][a])
            backward.append(sums[1][b] - sums[1][a])
            all_reduce.append(tables.all_reduce(kinds[i])[a, b])
            fits &= tables.memory(min(pp - i, m))[a, b] <= tables.cap(kinds[i])
            fits &= np.isfinite(tables.compute(kinds[i])[a, b])
        p2p = [tables.p2p(kinds[i], kinds[i + 1], inside[i]) for i in range(pp - 1)]
        line = schedule.run(forward, backward, p2p, m)
        synced = np.array([end + seconds for end, seconds in zip(line.stage_end, all_reduce, strict=True)])
        step = synced.max(axis=0)
        middle = np.zeros(len(partitions), dtype=int)
        if self.model.encoder_layers is not None:
            # The stage of the decoder's embedding.
            middle = (ends <= self.model.encoder_layers + 1).sum(axis=1)
        for stage in np.unique(middle):
            stages = sorted({0, int(stage), pp - 1})
            of = middle == stage
            sync = tables.embedding_sync([kinds[i] for i in stages])
            step[of] = np.maximum(step[of], synced[stages][:, of].max(axis=0) + sync)
        return np.where(fits, step, np.inf)

    def estimate(self, shape: Shape, placement: tuple[str, ...], partition: tuple[int, ...]) -> Plan:
        """A plan whose placement and partition are given."""
        group = shape.tp * shape.dp
        kinds, inside = kinds_of(self.cluster, placement, group), inside_node(self.cluster, group)
        division = Division(placement, kinds, inside, partition, 0.0, 0.0)
        return self.plan(shape, division, self.simulate(self.tables(shape), division), 0.0)

    def simulate(self, tables: StageCosts, division: Division) -> Parts:
        """All times of a division, with the schedule simulated."""
        ends = np.cumsum(division.partition)
        begins = ends - division.partition
        spans = list(zip(division.kinds, begins.tolist(), ends.tolist(), strict=True))
        forward = [float(tables.unit_times(kinds)[0][a:b].sum()) for kinds, a, b in spans]
        backward = [float(tables.unit_times(kinds)[1][a:b].sum()) for kinds, a, b in spans]
        all_reduce = [float(tables.all_reduce(kinds)[a, b]) for kinds, a, b in spans]
        neighbours = zip(division.kinds[:-1], division.kinds[1:], division.inside, strict=True)
        p2p = [tables.p2p(left, right, inside) for left, right, inside in neighbours]
        line = schedule.run(forward, backward, p2p, tables.micro_batches)
        synced = [end + seconds for end, seconds in zip(line.stage_end, all_reduce, strict=True)]
        holders = embedding_holders(self.model, division.partition)
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


def embedding_holders(model: Model, partition: tuple[int, ...]) -> list[int]:
    """Stages that hold a copy of the embedding matrix: first, last, and that of a decoder's embedding."""
    middle = 0
    if model.encoder_layers is not None:
        middle = int((np.cumsum(partition) <= model.encoder_layers + 1).sum())
    return sorted({0, middle, len(partition) - 1})


def inside_node(cluster: Cluster, gpus_per_stage: int) -> tuple[bool, ...]:
    """Of each boundary between stages, whether all its messages stay within one node."""
    size, g = cluster.gpus_per_node, gpus_per_stage
    return tuple(k * g // size == ((k + 2) * g - 1) // size for k in range(cluster.gpu_count // g - 1))


def _sequences(cluster: Cluster, lattice: Lattice) -> Iterator[tuple[Block, ...]]:
    """All orders of blocks that use every node."""

    def extend(prefix: tuple[Block, ...], left: tuple[int, ...]) -> Iterator[tuple[Block, ...]]:
        if len(prefix) == lattice.count:
            yield prefix
            return
        for block, use in zip(lattice.blocks, lattice.uses, strict=True):
            after = tuple(a - b for a, b in zip(left, use, strict=True))
            if min(after) >= 0:
                yield from extend((*prefix, block), after)

    yield from extend((), cluster.nodes)


def kinds_of(cluster: Cluster, placement: tuple[str, ...], gpus_per_stage: int) -> tuple[Kinds, ...]:
    """GPU types of each stage of a placement."""
    size = cluster.gpus_per_node
    stages = cluster.gpu_count // gpus_per_stage
    spans = [(k * gpus_per_stage // size, ((k + 1) * gpus_per_stage - 1) // size) for k in range(stages)]
    return tuple(tuple(sorted(set(placement[a : b + 1]))) for a, b in spans)
