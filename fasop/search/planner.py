"""One shape's best placement and partition: bounded, searched and simulated, and made into a plan."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np

from fasop.exact.communication import Communication
from fasop.exact.gradients_and_optimizer import step_end, synchronized
from fasop.exact.passes import Passes
from fasop.exact.stage_costs import StageCosts
from fasop.exact.unit_times import Compute
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.options import Options
from fasop.plans.plan import Plan
from fasop.plans.shapes import MOST_BLOCKS, Block, Shape, blocks, left_out, stage_seats
from fasop.schedule import one_f_one_b
from fasop.search.bounds import Bounds
from fasop.search.improve import Simulated, best_of_all, improve
from fasop.search.make_plan import made_plan
from fasop.search.node_counts import NodeCounts
from fasop.search.partition import Assignment, Search

LARGE = 256  # GPUs from which tables take so much memory that few are kept, else
MANY = 24


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
        max_tp: float = math.inf,
    ) -> None:
        """``idle``: plans may leave nodes out; max_tp: of stages that choose their own tp."""
        self.model, self.cluster, self.options = model, cluster, options
        self.iterations, self.idle = iterations, idle
        self.compute = Compute(cost_files, model, options)
        self.passes = Passes(model, self.compute, Communication(cluster), options, max_tp)
        self._tables: OrderedDict[tuple[object, ...], StageCosts] = OrderedDict()  # the last used last
        self.bounds = Bounds(self.passes, self.tables)

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

    def counts(self, shape: Shape) -> NodeCounts:
        return self._node_counts(shape.group, shape.pp)

    @memo
    def _node_counts(self, gpus_per_stage: int, stages: int) -> NodeCounts:
        return NodeCounts(self.cluster, self._blocks(gpus_per_stage), stages, self.idle)

    @memo
    def _blocks(self, gpus_per_stage: int) -> list[Block]:
        return blocks(self.cluster, gpus_per_stage)

    def is_deepest(self, shape: Shape) -> bool:
        """Whether the GPUs, or the layers, are not enough for one stage more."""
        return shape.pp == min(self.cluster.gpu_count // shape.group, self.model.layers)

    def best(
        self, shape: Shape, fit: bool = True, limit: float = math.inf
    ) -> tuple[Assignment, Simulated, float] | None:
        """The best placement and partition of a shape, and the seconds that none can beat.

        None where none fits into memory, or where none can take less than ``limit`` seconds; ``fit``
        False: as if memory had no end.
        """
        tables, counts = self.tables(shape), self.counts(shape)
        if not counts.possible:
            return None
        if fit and (found := best_of_all(tables, counts)) is not False:
            if found is None:
                return None
            simulated = self.simulate(tables, found)
            return found, simulated, simulated.step
        guess = self.bounds.busiest(shape)
        assignment = Search(tables, counts, fit, guess=guess).best(limit)
        if assignment is None:
            return None
        bound, simulated = assignment.objective, self.simulate(tables, assignment, fit)
        return assignment, simulated, bound

    def refine(self, plan: Plan) -> Plan:
        """The plan, which fits into memory, or a better one of the same shape near it."""
        shape = plan.shape
        tables, counts = self.tables(shape), self.counts(shape)
        seats = stage_seats(self.cluster, plan.placement, shape)
        assignment = Assignment(plan.placement, seats, plan.partition, plan.lower_bound)
        better = improve(tables, [assignment, *Search(tables, counts).near(assignment)])
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
        step = step_end(synced, holders, embedding, update)
        return Simulated(
            *(forward, backward, p2p, reduction, update, tuple(int(index) for index in chosen)),
            *(embedding, float(line.pipeline_time), float(step)),
        )

    def plan(self, shape: Shape, assignment: Assignment, simulated: Simulated, bound: float) -> Plan:
        """A plan, with the memory that it needs; ``bound``: seconds that no plan of the shape can beat."""
        plan = made_plan(self.tables(shape), assignment, simulated, bound, self.iterations)
        if not self._left_out(shape.group):
            return plan
        left = (
            f"stages of {shape.group} GPUs end inside nodes: of the orders of nodes up to where both end, "
            f"the {MOST_BLOCKS} of the fewest GPU types were tried."
        )
        return replace(plan, notes=(*plan.notes, left))

    @memo
    def _left_out(self, gpus_per_stage: int) -> bool:
        return left_out(self.cluster, gpus_per_stage)
