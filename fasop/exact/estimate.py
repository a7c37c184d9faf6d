"""What any layout takes: uneven, mixed or measured by somebody, without a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fasop.exact.communication import SEND_BUFFER, Communication
from fasop.exact.memory import activations, held_parameters, stage_gib
from fasop.exact.passes import Passes, exposed_seconds, step_end, synchronized
from fasop.exact.stage_costs import message_bytes
from fasop.exact.unit_times import Compute
from fasop.inputs.costs import CostFile
from fasop.plans.layout import Layout, LayoutStage, Replica
from fasop.plans.options import Options
from fasop.plans.shapes import Group, Part, crowded, group_size, merged
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


class _Replica(NamedTuple):
    """Seconds per micro-batch, then once per step; GiB."""

    forward: float
    backward: float
    reduction: float
    update: float
    memory: float
    notes: tuple[str, ...]


def estimate(layout: Layout, cost_files: list[CostFile], options: Options) -> Estimate:
    """Raises ``PlanError`` for a GPU without costs."""
    model, count = layout.model, len(layout.stages)
    passes = Passes(model, Compute(cost_files, model, options), Communication(layout.cluster), options)
    replicas, begin = [], 0
    for index, stage in enumerate(layout.stages):
        units = slice(begin, begin + stage.units)
        begin = units.stop
        replicas.append(_replicas(passes, stage, units, min(count - index, layout.micro_batches)))
    ends, p2p = _ends(passes, layout, replicas)
    pipeline = max(end for end, _ in ends)
    reduction = [max(one.reduction for one in each) for each in replicas]
    update = [max(one.update for one in each) for each in replicas]
    if options.engine == "deepspeed":
        # A barrier stands before the reduction: all stages begin it together.
        synced = [pipeline + seconds for seconds in reduction]
    else:
        synced = [
            float(synchronized(options, *of, seconds)) for of, seconds in zip(ends, reduction, strict=True)
        ]
    embedding = _embedding(passes, layout)
    stages = tuple(
        StageEstimate(
            max(one.forward for one in each),
            max(one.backward for one in each),
            *(reduction[at], update[at], ends[at][0]),
            max(one.memory for one in each),
        )
        for at, each in enumerate(replicas)
    )
    notes = dict.fromkeys(note for each in replicas for one in each for note in one.notes)
    step = step_end(synced, model.embedding_stages(layout.partition), embedding, update)
    return Estimate(step, pipeline, embedding, p2p, stages, tuple(notes))


def _replicas(passes: Passes, stage: LayoutStage, units: slice, in_flight: int) -> list[_Replica]:
    """What each replica of a stage takes; those that are alike, once."""
    data, known, found = _data(stage.replicas), {}, []
    for at, one in enumerate(stage.replicas):
        experts: Group = ()
        if passes.model.experts:
            first = at // one.ep * one.ep
            experts = _alone(_data(stage.replicas[first : first + one.ep]))
        key = _alone(one.group), one.mbs, one.ep, experts
        if key not in known:
            known[key] = _replica(passes, stage, one, units, in_flight, data, experts)
        found.append(known[key])
    return found


def _replica(
    passes: Passes,
    stage: LayoutStage,
    replica: Replica,
    units: slice,
    in_flight: int,
    data: Group,
    experts: Group,
) -> _Replica:
    """What one replica of a stage takes."""
    model, options = passes.model, passes.options
    group, tp, ep, dp = replica.group, replica.tp, replica.ep, len(stage.replicas)
    gpu = passes.links.cluster.gpu(group[0].gpu)
    each = passes.replica(replica.mbs, stage.recompute, _alone(group), data, experts)
    forward, backward = (seconds[units] for seconds in each)
    is_layer = passes.layers[units]
    sizes = passes.compute.sizes(gpu, tp)
    parameters, of_experts = map(np.array, held_parameters(model, tp, ep, units))
    if sizes is not None:
        parameters = np.array(sizes[0][units].sum())
    # Buckets of gradients go beside the backward of all layers but the first.
    layers = is_layer.sum()
    hidden = backward[is_layer].sum() * (1 - 1 / np.maximum(layers, 1))
    reduction, gather = passes.once(data, tp, parameters, of_experts, ep)
    reduction = exposed_seconds(options, reduction, hidden, layers)
    costs = passes.units(gpu.name, tp, replica.mbs, ep, len(group))
    if costs.update is not None:
        update = costs.update[units].sum() / (dp if options.zero else 1)
    else:
        update = passes.optimizer(gpu, parameters, of_experts, ep, dp)
    kept, once = (each[units] for each in activations(model, tp, replica.mbs, options, stage.recompute))
    if sizes is not None and stage.recompute == "none":
        kept, once = sizes[1][units] * replica.mbs, np.zeros(len(kept))
    needs = np.array((once * ~is_layer).sum()), np.array((once * is_layer).max(initial=0.0))
    memory = stage_gib(model, options, (tp, ep, dp), (parameters, of_experts), kept.sum() * in_flight, needs)
    return _Replica(
        *(float(forward.sum()), float(backward.sum()), float(reduction), float(update + gather)),
        *(float(memory) + gpu.reserved_gib, costs.notes),
    )


def _ends(
    passes: Passes, layout: Layout, replicas: list[list[_Replica]]
) -> tuple[list[tuple[float, float]], tuple[float, ...]]:
    """When each stage, and its last backward, ends; and the slowest message over each boundary.

    Where all stages have as many replicas of the same micro-batch, each column of them is a pipeline of its
    own; else every micro-batch waits for the slowest replica of each stage.
    """
    if len({tuple(one.mbs for one in stage.replicas) for stage in layout.stages}) == 1:
        columns = {
            (tuple(each[at][:2] for each in replicas), _messages(passes, layout, at))
            for at in range(len(replicas[0]))
        }
    else:
        slowest = tuple((max(one[0] for one in each), max(one[1] for one in each)) for each in replicas)
        columns = {(slowest, _messages(passes, layout, None))}
    lines = []
    for times, messages in sorted(columns):
        forward, backward = [f for f, _ in times], [b for _, b in times]
        p2p, holds = [seconds for seconds, _ in messages], [hold for _, hold in messages]
        if passes.options.engine == "deepspeed":
            ends = deepspeed.stage_ends(forward, backward, p2p, holds, layout.micro_batches)
            lines.append((ends, ends))
        else:
            line = one_f_one_b.run(forward, backward, p2p, layout.micro_batches)
            lines.append((line.stage_end, line.backward_end))
    # With several chunks per stage, all but the slowest stage fill the pipeline with a chunk each.
    passes_of = [max(one.forward + one.backward for one in each) for each in replicas]
    saved = (1 - 1 / layout.virtual_stages) * (sum(passes_of) - max(passes_of))
    latest = (np.max(lines, axis=0) - saved).T.tolist()
    longest = [max(messages[at][0] for _, messages in columns) for at in range(len(replicas) - 1)]
    return [(end, backward_end) for end, backward_end in latest], tuple(longest)


def _messages(passes: Passes, layout: Layout, column: int | None) -> tuple[tuple[float, float], ...]:
    """Seconds of a message over each boundary, and for how long it holds its sender; column: of the replicas
    that send them, None for all.
    """
    found = []
    nodes = [{part.node for one in stage.replicas for part in one.group} for stage in layout.stages]
    at = column or 0
    for left, right, is_crowded in zip(layout.stages, layout.stages[1:], crowded(nodes), strict=False):
        if column is None:
            source, target = (merged([one.group for one in stage.replicas]) for stage in (left, right))
            batch, flows = sum(one.mbs for one in left.replicas), 1
        else:
            source, target = left.replicas[at].group, right.replicas[at].group
            batch = left.replicas[at].mbs
            # Replicas that send from, or to, one node at the same time.
            flows = max(
                sum(any(part.node == end.node for part in one.group) for one in stage.replicas)
                for stage, group in ((left, source), (right, target))
                for end in group
            )
        size = batch * message_bytes(layout.model, passes.options, left.replicas[at].tp)
        seconds = passes.links.message(source, target, size, flows * (1 + is_crowded))
        hold = seconds * max(0.0, 1 - SEND_BUFFER / (size / group_size(source)))
        ends = tuple(_alone(stage.replicas[at].group) for stage in (left, right))
        found.append((seconds + passes.output_gather(ends, left.replicas[at].mbs), hold))
    return tuple(found)


def _embedding(passes: Passes, layout: Layout) -> float:
    """Seconds of the all-reduce among the stages that hold a copy of the embedding."""
    holders = [layout.stages[at].replicas for at in layout.model.embedding_stages(layout.partition)]
    if len(holders) < 2:
        return 0.0
    size = layout.model.hidden * layout.model.vocab / holders[0][0].tp * passes.options.gradient_bytes
    rings = max(part.gpus for part in merged([replica.group for replica in holders[0]]))
    # Each replica's copies are summed apart: the slowest sum counts.
    groups = {
        _alone(_data([replicas[at % len(replicas)] for replicas in holders]))
        for at in range(max(map(len, holders)))
    }
    return max(passes.links.collective(group, size, rings) for group in groups)


def _data(replicas: tuple[Replica, ...] | list[Replica]) -> Group:
    """One GPU of each replica."""
    return merged([(replica.group[0]._replace(gpus=1),) for replica in replicas])


def _alone(group: Group) -> Group:
    """A tensor-parallel group with its nodes counted from 0, so that equal ones are computed once."""
    return tuple(Part(index, part.gpu, part.gpus) for index, part in enumerate(group))
