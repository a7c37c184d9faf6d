"""What any layout takes: uneven, mixed or measured by somebody, without a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasop.exact.communication import SEND_BUFFER, Communication
from fasop.exact.gradients_and_optimizer import (
    exposed_seconds,
    gather_seconds,
    optimizer_seconds,
    reduction_seconds,
    step_end,
    synchronized,
)
from fasop.exact.memory import activations, copies, counted_twice, parameters, stage_gib
from fasop.exact.passes import Passes
from fasop.exact.stage_costs import message_bytes, output_gather
from fasop.exact.unit_times import Compute, UnitSeconds
from fasop.inputs.costs import CostFile
from fasop.plans.groups import Group, Part, group_size, merged
from fasop.plans.layout import Layout, LayoutStage, Replica
from fasop.plans.options import Options
from fasop.plans.shapes import crowded
from fasop.schedule import deepspeed, one_f_one_b


@dataclass(frozen=True)
class StageEstimate:
    """Seconds: forward and backward per micro-batch of the slowest replica, gradient reduction and optimizer
    once per step; end: when its last backward has ended; memory: GiB of the fullest GPU, with the margin.
    """

    forward: float
    backward: float
    reduction: float
    update: float
    end: float
    memory: float


@dataclass(frozen=True)
class Estimate:
    """step: seconds per step; p2p: seconds of the slowest message over each boundary; embedding: of the
    embedding's all-reduce; notes: what was not measured.
    """

    step: float
    pipeline: float
    embedding: float
    p2p: tuple[float, ...]
    stages: tuple[StageEstimate, ...]
    notes: tuple[str, ...]

    @property
    def memory(self) -> float:
        """GiB of the fullest GPU."""
        return max(stage.memory for stage in self.stages)


def estimate(layout: Layout, cost_files: list[CostFile], options: Options) -> Estimate:
    """Raises ``PlanError`` for a GPU without costs."""
    return _Estimator(layout, cost_files, options).run()


class _ReplicaTimes(NamedTuple):
    """Seconds of one micro-batch; ``hidden``: of the backward, beside which buckets of gradients can go."""

    forward: float
    backward: float
    hidden: float


class _Estimator:
    def __init__(self, layout: Layout, cost_files: list[CostFile], options: Options) -> None:
        self.layout, self.options, self.model = layout, options, layout.model
        compute = Compute(cost_files, layout.model, options)
        self.passes = Passes(layout.model, compute, Communication(layout.cluster), options)
        self.links = self.passes.links
        ends = np.cumsum(layout.partition)
        self.spans = list(zip((ends - layout.partition).tolist(), ends.tolist(), strict=True))

    def run(self) -> Estimate:
        layout = self.layout
        stages = range(len(layout.stages))
        times = [self._replicas(index) for index in stages]
        ends, p2p = self._ends(times)
        pipeline = max(end for end, _ in ends)
        once = [self._once(index, times[index]) for index in stages]
        if self.options.engine == "deepspeed":
            # A barrier stands before the reduction: all stages begin it together.
            synced = [pipeline + reduction for reduction, _ in once]
        else:
            synced = [
                float(synchronized(self.options, *end, reduction))
                for end, (reduction, _) in zip(ends, once, strict=True)
            ]
        embedding = self._embedding()
        holders = self.model.embedding_stages(layout.partition)
        step = step_end(synced, holders, embedding, [update for _, update in once])
        estimates = tuple(
            StageEstimate(
                max(replica.forward for replica in times[index]),
                max(replica.backward for replica in times[index]),
                *once[index],
                ends[index][0],
                self._memory(index),
            )
            for index in stages
        )
        return Estimate(step, pipeline, embedding, p2p, estimates, self._notes())

    def _data(self, stage: LayoutStage) -> Group:
        """One GPU of each replica of a stage."""
        return merged([(replica.group[0]._replace(gpus=1),) for replica in stage.replicas])

    def _experts(self, stage: LayoutStage, replica: Replica) -> Group:
        if not self.model.experts:
            return ()
        at = stage.replicas.index(replica) // replica.ep * replica.ep
        return merged([(one.group[0]._replace(gpus=1),) for one in stage.replicas[at : at + replica.ep]])

    def _replicas(self, index: int) -> list[_ReplicaTimes]:
        """What each replica of a stage takes."""
        stage, (begin, end) = self.layout.stages[index], self.spans[index]
        layers = self.passes.layers[begin:end]
        found = []
        for replica in stage.replicas:
            passes = self.passes.replica(
                *(replica.mbs, stage.recompute, _alone(replica.group), self._data(stage)),
                self._experts(stage, replica),
            )
            forward, backward = (seconds[begin:end] for seconds in passes)
            hidden = float(backward[layers].sum()) * (1 - 1 / max(int(layers.sum()), 1))
            found.append(_ReplicaTimes(float(forward.sum()), float(backward.sum()), hidden))
        return found

    def _ends(self, times: list[list[_ReplicaTimes]]) -> tuple[list[tuple[float, float]], tuple[float, ...]]:
        """When each stage, and its last backward, ends; and the slowest message over each boundary.

        Where all stages have as many replicas of the same micro-batch, each column of them is a pipeline of
        its own; else every micro-batch waits for the slowest replica of each stage.
        """
        stages = range(len(self.layout.stages))
        sizes = {tuple(replica.mbs for replica in stage.replicas) for stage in self.layout.stages}
        if len(sizes) == 1:
            columns = [
                (tuple(times[i][r][:2] for i in stages), self._messages(r)) for r in range(len(times[0]))
            ]
        else:
            slowest = tuple((max(r.forward for r in each), max(r.backward for r in each)) for each in times)
            columns = [(slowest, self._messages(None))]
        distinct = set(columns)
        lines = [self._simulated(passes, messages) for passes, messages in sorted(distinct)]
        ends = [(max(line[i][0] for line in lines), max(line[i][1] for line in lines)) for i in stages]
        p2p = tuple(max(messages[i][0] for _, messages in distinct) for i in stages[:-1])
        return ends, p2p

    def _simulated(
        self, passes: tuple[tuple[float, float], ...], messages: tuple[tuple[float, float], ...]
    ) -> list[tuple[float, float]]:
        """When each stage, and its last backward, ends."""
        forward, backward = [f for f, _ in passes], [b for _, b in passes]
        p2p, m = [seconds for seconds, _ in messages], self.layout.micro_batches
        if self.options.engine == "deepspeed":
            ends = deepspeed.stage_ends(forward, backward, p2p, [hold for _, hold in messages], m)
            return [(end, end) for end in ends]
        line = one_f_one_b.run(forward, backward, p2p, m)
        return list(zip(line.stage_end, line.backward_end, strict=True))

    def _messages(self, column: int | None) -> tuple[tuple[float, float], ...]:
        """Seconds of a message over each boundary, and for how long it holds its sender."""
        found = []
        nodes = [{part.node for r in stage.replicas for part in r.group} for stage in self.layout.stages]
        pairs = zip(self.layout.stages, self.layout.stages[1:], crowded(nodes), strict=False)
        for left, right, is_crowded in pairs:
            if column is None:
                source, target = (merged([r.group for r in stage.replicas]) for stage in (left, right))
                batch, flows = sum(replica.mbs for replica in left.replicas), 1
            else:
                source, target = left.replicas[column].group, right.replicas[column].group
                batch = left.replicas[column].mbs
                flows = max(_sharing(left, source), _sharing(right, target))
            size = batch * message_bytes(self.model, self.options, left.replicas[column or 0].tp)
            seconds = self.links.message(source, target, size, flows * (1 + is_crowded))
            each = size / group_size(source)
            hold = seconds * max(0.0, 1 - SEND_BUFFER / each)
            ends = tuple(_alone(stage.replicas[column or 0].group) for stage in (left, right))
            found.append((seconds + output_gather(self.passes, ends, left.replicas[column or 0].mbs), hold))
        return tuple(found)

    def _once(self, index: int, times: list[_ReplicaTimes]) -> tuple[float, float]:
        """Seconds of a stage's gradient reduction that nothing hides, and of its optimizer with the gathering
        of parameters.
        """
        stage, (begin, end) = self.layout.stages[index], self.spans[index]
        data, layers = self._data(stage), np.array(self.passes.layers[begin:end].sum())
        slowest, latest = 0.0, 0.0
        for replica, of_replica in zip(stage.replicas, times, strict=True):
            gpu = self.layout.cluster.gpu(replica.group[0].gpu)
            held = np.array(self._held(index, replica))
            of_experts = np.array(parameters(self.model, replica.tp, replica.ep)[1][begin:end].sum())
            experts = of_experts, replica.ep
            what = (self.passes, data, replica.tp, held, experts)
            hidden = np.array(of_replica.hidden)
            reduction = exposed_seconds(self.options, reduction_seconds(*what), hidden, layers)
            slowest = max(slowest, float(reduction))
            measured = self._units(replica).update
            sharers = group_size(data)
            if measured is not None:
                update = float(measured[begin:end].sum()) / (sharers if self.options.zero else 1)
            else:
                computed = optimizer_seconds(self.passes, gpu, held, experts, sharers)
                update = 0.0 if computed is None else float(computed)
            latest = max(latest, update + float(gather_seconds(*what)))
        return slowest, latest

    def _units(self, replica: Replica) -> UnitSeconds:
        nodes = len(replica.group)
        return self.passes.units(replica.group[0].gpu, replica.tp, replica.mbs, replica.ep, nodes)

    def _held(self, index: int, replica: Replica) -> float:
        """Parameters of one GPU of a stage."""
        begin, end = self.spans[index]
        gpu = self.layout.cluster.gpu(replica.group[0].gpu)
        sizes = self.passes.compute.sizes(gpu, replica.tp)
        if sizes is not None:
            return float(sizes[0][begin:end].sum())
        each = parameters(self.model, replica.tp, replica.ep)[0]
        twice = counted_twice(self.model, replica.tp, copies(self.model)[begin:end].sum())
        return float(each[begin:end].sum() - twice)

    def _memory(self, index: int) -> float:
        stage, (begin, end) = self.layout.stages[index], self.spans[index]
        in_flight = min(len(self.layout.stages) - index, self.layout.micro_batches)
        fullest = 0.0
        for replica in stage.replicas:
            gpu = self.layout.cluster.gpu(replica.group[0].gpu)
            kept, once = activations(self.model, replica.tp, replica.mbs, self.options, stage.recompute)
            sizes = self.passes.compute.sizes(gpu, replica.tp)
            if sizes is not None and stage.recompute == "none":
                kept, once = sizes[1] * replica.mbs, np.zeros(len(kept))
            layers = self.passes.layers[begin:end]
            own = once[begin:end]
            needs = (np.array((own * ~layers).sum()), np.array((own * layers).max(initial=0.0)))
            of_experts = parameters(self.model, replica.tp, replica.ep)[1][begin:end].sum()
            gib = stage_gib(
                *(self.model, self.options, (replica.tp, replica.ep, len(stage.replicas))),
                (np.array(self._held(index, replica)), np.array(of_experts)),
                np.array(kept[begin:end].sum() * in_flight),
                needs,
            )
            fullest = max(fullest, float(gib) + gpu.reserved_gib)
        return fullest

    def _embedding(self) -> float:
        """Seconds of the all-reduce among the stages that hold a copy of the embedding."""
        holders = [self.layout.stages[at] for at in self.model.embedding_stages(self.layout.partition)]
        if len(holders) < 2:
            return 0.0
        tp = holders[0].replicas[0].tp
        size = self.model.hidden * self.model.vocab / tp * self.options.gradient_bytes
        first = merged([replica.group for replica in holders[0].replicas])
        rings = max(part.gpus for part in first)
        # Each replica's copies are summed apart: the slowest sum counts.
        groups = {
            _alone(
                merged(
                    [
                        (stage.replicas[at % len(stage.replicas)].group[0]._replace(gpus=1),)
                        for stage in holders
                    ]
                )
            )
            for at in range(max(len(stage.replicas) for stage in holders))
        }
        return max(self.links.collective(group, size, rings) for group in groups)

    def _notes(self) -> tuple[str, ...]:
        each = [self._units(replica) for stage in self.layout.stages for replica in stage.replicas]
        return tuple(dict.fromkeys(note for units in each for note in units.notes))


def _alone(group: Group) -> Group:
    """A tensor-parallel group with its nodes counted from 0, so that equal ones are computed once."""
    return tuple(Part(index, part.gpu, part.gpus) for index, part in enumerate(group))


def _sharing(stage: LayoutStage, group: Group) -> int:
    """Replicas of a stage that send from one node at the same time."""
    nodes = [part.node for part in group]
    return max(
        sum(any(part.node == node for part in replica.group) for replica in stage.replicas) for node in nodes
    )
