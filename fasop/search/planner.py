"""One shape's best placement and partition: bounded, searched and simulated, and made into a plan."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np

from fasop.exact.compute import Compute
from fasop.exact.links import Links
from fasop.exact.once_per_step import synchronized
from fasop.exact.passes import Passes
from fasop.exact.stage_costs import StageCosts
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.options import Options
from fasop.plans.plan import Plan
from fasop.plans.shapes import BETWEEN, CROWDED, INSIDE, Block, Seats, Shape, blocks, stage_seats
from fasop.schedule import one_f_one_b
from fasop.search.assembled import made_plan
from fasop.search.lattice import Lattice
from fasop.search.partition import Assignment, Search
from fasop.search.simulated import Simulated, best_of_all, improve

LARGE = 256  # GPUs from which tables take so much memory that few are kept, else
MANY = 24
WORTH = 1.02  # of a step, by which another stage's gradients must prolong it to be worth another search


class Planner:
    """Everything that the shapes of one model on one cluster share."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        cost_files: list[CostFile],
        options: Options,
        iterations: int = 0,
        idle: bool = False,
    ) -> None:
        """``idle``: plans may leave nodes out."""
        self.model, self.cluster, self.options = model, cluster, options
        self.iterations, self.idle = iterations, idle
        self.compute = Compute(cost_files, model, options)
        self.passes = Passes(model, self.compute, Links(cluster), options)
        self._tables: OrderedDict[tuple[object, ...], StageCosts] = OrderedDict()  # the last used last
        self._known_speeds: dict[tuple[int, ...], tuple[float, list[tuple[float, int, float]]]] = {}

    def tables(self, shape: Shape) -> StageCosts:
        """The tables of a shape, in part those of shapes with other numbers of stages."""
        key = shape.tp, shape.dp, shape.mbs, shape.ep, shape.pp > 1
        if key in self._tables:
            self._tables.move_to_end(key)
        else:
            self._tables[key] = StageCosts(self.passes, shape)
            while len(self._tables) > (MANY if self.cluster.gpu_count <= LARGE else 4):
                self._tables.popitem(last=False)
        found = self._tables[key]
        return found if found.shape == shape else found.of(shape)

    def lattice(self, shape: Shape) -> Lattice:
        return self._lattice(shape.group, shape.pp)

    @memo
    def _lattice(self, gpus_per_stage: int, stages: int) -> Lattice:
        return Lattice(self.cluster, self._blocks(gpus_per_stage), stages, self.idle)

    @memo
    def _blocks(self, gpus_per_stage: int) -> list[Block]:
        return blocks(self.cluster, gpus_per_stage)

    def is_deepest(self, shape: Shape) -> bool:
        """Whether the GPUs, or the layers, are not enough for one stage more."""
        return shape.pp == min(self.cluster.gpu_count // shape.group, self.model.layers)

    def rough_bound(self, shape: Shape) -> float:
        """Seconds that no placement and partition of a shape can beat, at once: the work of all micro-batches
        on the fastest GPUs there are, as if it could be cut anywhere.
        """
        m = self.model.global_batch // shape.batch
        slowest, work, order = self._least_stage(shape)
        if not math.isfinite(work):
            return math.inf
        even = work / sum(count / slow for slow, count in order)
        return max(m * slowest, (m + shape.pp - 1) * even)

    def _least_stage(self, shape: Shape) -> tuple[float, float, list[tuple[float, float]]]:
        """The least seconds of the slowest stage per micro-batch, those of all units on the fastest GPUs, and
        (seconds per second on the fastest, stages) of each GPU type, fastest first.
        """
        ranks = shape.dp if self.options.zero >= 2 or shape.ep > 1 else 1
        key = (shape.group, shape.batch) if self.options.per_stage else (shape.tp, shape.mbs)
        work, types = self._speeds((*key, shape.ep, ranks), shape)
        order, layers, left = [], [], float(shape.pp)
        for slow, gpus, layer in types:
            count = min(gpus / shape.group, left)
            left -= count
            order.append((slow, count))
            layers.append((layer, count))
        speed = sum(count / slow for slow, count in order)
        if not math.isfinite(work) or left > 1e-9:
            return math.inf, math.inf, order
        return max(work / speed, _whole_layers(self.model.layers, layers)), work, order

    def _speeds(self, key: tuple[int, ...], shape: Shape) -> tuple[float, list[tuple[float, int, float]]]:
        """Seconds of all units on the fastest GPUs, and of each GPU type, fastest first: the seconds that it
        takes for a second on the fastest, at the unit that suits it best, its GPUs, and the seconds of a
        layer.

        key: what of the shape that depends on.
        """
        if key not in self._known_speeds:
            variants = StageCosts(self.passes, shape).variants
            totals = [np.sum(variants.fastest(gpu.name), axis=0) for gpu in self.cluster.gpus]
            fastest = np.min(totals, axis=0)
            some = fastest > 0
            types = [
                (
                    float((total[some] / fastest[some]).min()),
                    self.cluster.size(gpu) * count,
                    float(total[self.passes.layers].min()),
                )
                for total, gpu, count in zip(totals, self.cluster.gpus, self.cluster.nodes, strict=True)
            ]
            self._known_speeds[key] = float(fastest.sum()), sorted(types)
        return self._known_speeds[key]

    def lower_bound(self, shape: Shape) -> float:
        """Seconds that no placement and partition of a shape can beat, without any search.

        Of a step of T seconds, a stage is busy with its m micro-batches and at least as many messages, so
        that no stage computes for more than T/m each. What fast GPUs can't take within that falls to
        slower ones: that gives the least sum over all stages, through which the first micro-batch must
        go there and back; the slowest stage then has m − 1 left, less the forwards it could run ahead.
        Last come the first stage's gradients, of at least the embedding, and the sum of the embedding's
        copies. The least T for which all this holds is the bound.
        """
        tables = self.tables(shape)
        m, pp = tables.micro_batches, shape.pp
        slowest, work, order = self._least_stage(shape)
        if not math.isfinite(work):
            return math.inf
        names = [gpu.name for gpu in self.cluster.gpus]
        passes = [tables.variants.fastest(name) for name in names]
        shares = [forward / np.maximum(forward + backward, 1e-30) for forward, backward in passes]
        ahead = max(float(share.max()) for share in shares)
        rest = max(m - 1 - min(pp - 1, m - 1) * ahead, 0)
        messages, each, embedding = 0.0, 0.0, 0.0
        seats = {name: tables.variants.pure_seats(name) for name in names}
        sizes = [self.cluster.size(gpu) for gpu in self.cluster.gpus]
        # A stage over parts of two nodes shares its messages among more links than one in whole nodes.
        if pp > 1 and all(size % shape.group == 0 or shape.group % size == 0 for size in sizes):
            pairs = [(seats[one], seats[two]) for one in names for two in names]
            several = min(sizes) // shape.group > 1 and -(-pp * shape.group // max(sizes)) > 2
            across = min(tables.p2p(one, two, CROWDED if several else BETWEEN) for one, two in pairs)
            within = min(tables.p2p(seats[name], seats[name], INSIDE) for name in names)
            inside = self._inside(shape)
            messages = inside * within + (pp - 1 - inside) * min(across, within if inside else across)
            each = min(within, across) if inside else across
            if len(self.model.embedding_stages((1,) * pp)) > 1:
                embedding = min(tables.embedding_sync(pair) for pair in pairs)

        def step(limit: float) -> float:
            """Seconds where no stage takes more than ``limit``."""
            left, total = work, 0.0
            for slow, count in order:
                done = min(left, count * limit / slow)
                left, total = left - done, total + done * slow
            total += left * order[-1][0]
            return max(m * (slowest + each), total + 2 * messages + slowest * rest + (m - 1) * each)

        low, high = 0.0, step(0.0)
        for _ in range(20):
            middle = (low + high) / 2
            if step(middle / m) > middle:
                low = middle
            else:
                high = middle
        once = min(self._least_once(tables, seats[name]) for name in names)
        fullest = min(self._fullest_stage(tables, seats[name]) for name in names)
        return max(low + once + embedding, fullest)

    def _fullest_stage(self, tables: StageCosts, seats: Seats) -> float:
        """Seconds of a stage with as many layers as some stage must have: its micro-batches, then its
        gradients
        and their update.
        """
        layers = -(-self.model.layers // tables.shape.pp)
        table = tables.table(seats, 1, fit=False)
        begin = 1 if self.model.layers >= layers else 0
        at = begin, begin + layers
        passes = float(table.forward[at] + table.backward[at])
        if not math.isfinite(passes):
            return 0.0
        return tables.micro_batches * passes + float(table.reduction[at] + table.update[at])

    def _inside(self, shape: Shape) -> int:
        """How many boundaries at most can lie within a node."""
        largest = max(self.cluster.size(gpu) for gpu in self.cluster.gpus) // shape.group
        return 0 if largest < 2 else shape.pp - 1 - (shape.pp - 1) // largest

    def _least_once(self, tables: StageCosts, seats: Seats) -> float:
        """Seconds that the first stage takes at least for its gradients and their update."""
        table = tables.table(seats, 1, fit=False)
        return float((table.reduction + table.update)[0, 1])

    def best(
        self, shape: Shape, fit: bool = True, limit: float = math.inf
    ) -> tuple[Assignment, Simulated, float] | None:
        """The best placement and partition of a shape, and the seconds that none can beat.

        None where none fits into memory, or where none can take less than ``limit`` seconds; ``fit``
        False: as if memory had no end.
        """
        tables, lattice = self.tables(shape), self.lattice(shape)
        if not lattice.possible:
            return None
        if fit and (found := best_of_all(tables, lattice)) is not False:
            if found is None:
                return None
            simulated = self.simulate(tables, found)
            return found, simulated, simulated.step
        assignment = Search(tables, lattice, fit).best(limit)
        if assignment is None:
            return None
        bound, simulated = assignment.objective, self.simulate(tables, assignment, fit)
        # The search counted the first stage's gradients alone: where another ends later, the other
        # objective, which counts all of them, may find better.
        first = simulated.pipeline + simulated.reduction[0] + simulated.update[0] + simulated.embedding
        if simulated.step > WORTH * first:
            other = Search(tables, lattice, fit, paced=True).best()
            assert other is not None
            paced = self.simulate(tables, other, fit)
            if paced.step < simulated.step:
                return other, paced, bound
        return assignment, simulated, bound

    def refine(self, plan: Plan) -> Plan:
        """The plan, which fits into memory, or a better one of the same shape near it."""
        shape = plan.shape
        tables, lattice = self.tables(shape), self.lattice(shape)
        seats = stage_seats(self.cluster, plan.placement, shape)
        assignment = Assignment(plan.placement, seats, plan.partition, plan.lower_bound)
        better = improve(tables, lattice, [assignment, *Search(tables, lattice).near(assignment)])
        return self.plan(shape, better, self.simulate(tables, better), plan.lower_bound)

    def estimate(self, shape: Shape, placement: tuple[str, ...], partition: tuple[int, ...]) -> Plan:
        """A plan whose placement and partition are given."""
        seats = stage_seats(self.cluster, placement, shape)
        assignment = Assignment(placement, seats, partition)
        return self.plan(shape, assignment, self.simulate(self.tables(shape), assignment, False), 0.0)

    def simulate(self, tables: StageCosts, assignment: Assignment, fit: bool = True) -> Simulated:
        """All times of an assignment, with the schedule simulated."""
        pp, m = tables.shape.pp, tables.micro_batches
        upto = np.cumsum(assignment.partition)
        rows = []
        for i, (a, b) in enumerate(zip((upto - assignment.partition).tolist(), upto.tolist(), strict=True)):
            table = tables.table(assignment.seats[i], min(pp - i, m), fit)
            rows.append([float(way[a, b]) for way in table])
        forward, backward, reduction, update, chosen = zip(*rows, strict=True)
        kinds = tables.boundaries(assignment.placement)
        pairs = zip(assignment.seats[:-1], assignment.seats[1:], kinds, strict=True)
        p2p = tuple(tables.p2p(left, right, kind) for left, right, kind in pairs)
        line = one_f_one_b.run(list(forward), list(backward), list(p2p), m)
        ends = zip(line.stage_end, line.backward_end, reduction, strict=True)
        synced = [float(synchronized(self.options, *of_stage)) for of_stage in ends]
        holders = self.model.embedding_stages(assignment.partition)
        embedding = tables.embedding_sync(tuple(assignment.seats[i] for i in holders))
        if len(holders) > 1:
            done = max(synced[i] for i in holders) + embedding
            synced = [done if i in holders else end for i, end in enumerate(synced)]
        step = max(end + seconds for end, seconds in zip(synced, update, strict=True))
        return Simulated(
            *(forward, backward, p2p, reduction, update, tuple(int(index) for index in chosen)),
            *(embedding, float(line.pipeline_time), float(step)),
        )

    def plan(self, shape: Shape, assignment: Assignment, simulated: Simulated, bound: float) -> Plan:
        """A plan, with the memory that it needs; ``bound``: seconds that no plan of the shape can beat."""
        return made_plan(self.tables(shape), assignment, simulated, bound, self.iterations)


def _whole_layers(layers: int, types: list[tuple[float, float]]) -> float:
    """The least seconds in which stages of whole layers can hold all of them.

    types: seconds of a layer, and how many stages. With stages of several types ⌊limit / seconds⌋ layers
    each.
    """
    if len(types) == 1:
        return math.ceil(layers / types[0][1] - 1e-9) * types[0][0]
    low, high = 0.0, layers * max(seconds for seconds, _ in types)
    for _ in range(20):
        middle = (low + high) / 2
        if sum(math.floor(middle / seconds) * math.ceil(count) for seconds, count in types) >= layers:
            high = middle
        else:
            low = middle
    return low
