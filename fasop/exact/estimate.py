"""What any layout takes: uneven, mixed or measured by somebody, without a search."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from fasop.exact.communication import SEND_BUFFER, Communication
from fasop.exact.memory import activations, held_parameters, stage_gib
from fasop.exact.passes import SPLIT_NOTE, Passes, step_end, synchronized
from fasop.exact.stage_costs import message_bytes
from fasop.exact.unit_times import Compute
from fasop.inputs.costs import CostFile
from fasop.plans.layout import Layout, LayoutStage, Replica
from fasop.plans.options import Options
from fasop.plans.shapes import Group, Part, crowded, group_size, merged
from fasop.schedule import deepspeed, one_f_one_b
from fasop.schedule.events import in_flight, zero_bubble


@dataclass(frozen=True)
class StageEstimate:
    """Seconds: forward and backward per micro-batch of the slowest replica, gradient reduction and optimizer
    once per step; memory: GiB of the fullest GPU, with the margin; end: when its last backward has ended.
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
    model, count = layout.model, len(layout.stages)
    passes = Passes(model, Compute(cost_files, model, options), Communication(layout.cluster), options)
    replicas: list[np.ndarray] = []
    is_split = layout.schedule == "zero-bubble"
    notes: dict[str, None] = {SPLIT_NOTE: None} if is_split else {}
    ends = list(itertools.accumulate(layout.partition))
    for index, (stage, behind) in enumerate(zip(layout.stages, ends, strict=True)):
        units = slice(behind - stage.units, behind)
        held = in_flight(index * (not is_split), count, layout.micro_batches, layout.virtual_stages)
        replicas.append(_replicas(passes, stage, units, held, is_split, notes))
    slowest = [each[:, :5].max(axis=0).tolist() for each in replicas]
    ended, p2p = _ends(passes, layout, [each[:, [0, 1, 5]] for each in replicas])
    pipeline = max(end for end, _ in ended)
    embedding = _embedding(passes, layout)
    stages, synced = [], []
    for (forward, backward, reduction, update, memory), (end, last) in zip(slowest, ended, strict=True):
        stages.append(StageEstimate(forward, backward, reduction, update, end, memory))
        alone = float(synchronized(options, end, last, reduction))
        # DeepSpeed has a barrier before the reduction: all stages begin it together.
        synced.append(pipeline + reduction if options.engine == "deepspeed" else alone)
    updates = [stage.update for stage in stages]
    step = step_end(synced, model.embedding_stages(layout.partition), embedding, updates)
    return Estimate(step, pipeline, embedding, p2p, tuple(stages), tuple(notes))


def _replicas(
    passes: Passes, stage: LayoutStage, units: slice, ahead: float, is_split: bool, notes: dict[str, None]
) -> np.ndarray:
    """Seconds of forward and backward per micro-batch, of reduction and update once per step, GiB, and of
    a backward's last part, if it ``is_split`` [replica, these]; those that are alike are computed once.
    notes: gets what was not measured.
    """
    model, options = passes.model, passes.options
    data, dp = _data(stage.replicas), len(stage.replicas)
    is_layer = passes.layers[units]

    def total(values: np.ndarray) -> np.ndarray:
        return np.array(values[units].sum())

    @functools.cache
    def row(group: Group, mbs: int, ep: int, experts: Group, context: Group) -> list[float]:
        gpu, tp = passes.links.cluster.gpu(group[0].gpu), group_size(group)
        costs = passes.units(gpu.name, tp, mbs, ep, len(group))
        notes.update(dict.fromkeys(costs.notes))
        each = passes.replica(mbs, stage.recompute, group, data, experts, context)
        sizes = passes.compute.sizes(gpu, tp)
        held = held_parameters(model, tp, ep, total)
        if sizes is not None:
            held = total(sizes[0]), held[1]
        last = passes.weight_gradients(mbs, group, ep) if is_split else each[1]
        reduction, gather = passes.once(data, tp, *held, ep)
        reduction = passes.exposed(reduction, last, total)
        update = passes.update(costs.update, gpu, held, ep, dp, total)
        kept, once = (each[units] for each in activations(model, tp, mbs, options, stage.recompute))
        if sizes is not None and stage.recompute == "none":
            kept, once = sizes[1][units] * mbs, np.zeros(len(kept))
        needs = np.array((once * ~is_layer).sum()), np.array((once * is_layer).max(initial=0.0))
        memory = stage_gib(model, options, (tp, ep, dp), held, kept.sum() * ahead, needs)
        rows = *map(total, each), reduction, update + gather, memory + gpu.reserved_gib, total(last)
        return [float(value) for value in rows]

    found = []
    for at, one in enumerate(stage.replicas):
        starts = [(at // ranks * ranks, ranks) for ranks in (one.ep, model.cp)]
        experts, context = (_alone(_data(stage.replicas[first : first + n])) for first, n in starts)
        found.append(row(_alone(one.group), one.mbs, one.ep, experts, context))
    return np.array(found)


def _ends(
    passes: Passes, layout: Layout, seconds: list[np.ndarray]
) -> tuple[list[tuple[float, float]], tuple[float, ...]]:
    """When each stage, and its last backward, ends; and the slowest message over each boundary.

    seconds: of each stage [replica, forward, backward and its last part]. Where all stages have as
    many replicas of the same micro-batch, each column of them is a pipeline of its own; else every
    micro-batch waits for the slowest replica of each stage.
    """
    if len({tuple(one.mbs for one in stage.replicas) for stage in layout.stages}) == 1:
        rows = zip(*(map(tuple, each.tolist()) for each in seconds), strict=True)
        columns = {(times, _messages(passes, layout, at)) for at, times in enumerate(rows)}
    else:
        slowest = tuple(tuple(each.max(axis=0).tolist()) for each in seconds)
        columns = {(slowest, _messages(passes, layout, None))}
    lines = []
    for times, messages in sorted(columns):
        forward, backward, weights = zip(*times, strict=True)
        p2p, holds = [seconds for seconds, _ in messages], [hold for _, hold in messages]
        if passes.options.engine == "deepspeed":
            ends = deepspeed.stage_ends(forward, backward, p2p, holds, layout.micro_batches)
            lines.append((ends, ends))
        elif layout.schedule == "zero-bubble":
            done = list(zip(*zero_bubble(forward, backward, weights, p2p, layout.micro_batches), strict=True))
            ends = [max(end for task, end in done if task.stage == at) for at in range(len(forward))]
            lines.append((ends, ends))
        else:
            line = one_f_one_b.run(forward, backward, p2p, layout.micro_batches)
            lines.append((line.stage_end, line.backward_end))
    # With several chunks per stage, all but the slowest stage fill the pipeline with a chunk each.
    whole = [float(each[:, :2].sum(axis=1).max()) for each in seconds]
    saved = (1 - 1 / layout.virtual_stages) * (sum(whole) - max(whole))
    latest = (np.max(lines, axis=0) - saved).T.tolist()
    longest = [max(messages[at][0] for _, messages in columns) for at in range(len(seconds) - 1)]
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
