"""One step of a plan as events: what every pipeline stage does when, and what each event waits for.

Computations and messages are those of the plan's schedule, ``one_f_one_b``, interleaved or zero-bubble. After
them come the reduction of gradients, the sum of the embedding's copies, and the optimizer; the last of them
ends at the plan's step time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fasop.plans.plan import Plan
from fasop.schedule import one_f_one_b
from fasop.schedule.one_f_one_b import Task

Kind = Literal[
    "forward", "backward", "wgrad", "send", "receive", "reduction", "embedding", "update", "gather"
]
Seconds = Sequence[float]


@dataclass(frozen=True)
class Event:
    """What a stage does from ``start`` to ``end``, in seconds.

    kind: wgrad: gradients of weights, where these are put off, and ``backward`` is of the input alone.
    after: places in the list of the events of the same stage that must have ended. ``micro_batch`` and
    ``chunk`` count from 0, -1 for what belongs to none. ``peer``: the stage at the other end of a message.
    ``up``: the message holds activations, else gradients. A reduction that runs beside the last backward
    is a ``bucket``, and waits for no more of that backward than the layers down to ``layer``, counted from
    the first of the chunk; else these are -1.
    """

    stage: int
    kind: Kind
    start: float
    end: float
    after: tuple[int, ...] = ()
    micro_batch: int = -1
    chunk: int = 0
    peer: int = -1
    up: bool = True
    bucket: int = -1
    layer: int = -1


def of_plan(plan: Plan) -> list[Event]:
    """All events of one step by stage and start, of a plan."""
    if plan.weight_gradients:
        passes = plan.stage_forward, plan.stage_backward, plan.weight_gradients
        found = _pipeline(*zero_bubble(*passes, plan.p2p, plan.micro_batches))
    else:
        if plan.virtual_stages > 1:
            tasks = interleaved_tasks(plan.pp, plan.micro_batches, plan.virtual_stages)
        else:
            tasks = one_f_one_b.tasks(plan.pp, plan.micro_batches)
        found = _pipeline(tasks, task_ends(tasks, *chunk_seconds(plan), [*plan.p2p, plan.wrap]))
    for stage in range(plan.pp):
        found += _reduction(plan, found, stage)
    found += _updates(plan, found)
    # ``after`` is at the new places.
    order = sorted(range(len(found)), key=lambda at: (found[at].stage, found[at].start, found[at].end))
    place = {at: new for new, at in enumerate(order)}
    return [replace(found[at], after=tuple(sorted(place[one] for one in found[at].after))) for at in order]


def rescheduled(plan: Plan, chunks: int = 1, weight_gradients: tuple[float, ...] = ()) -> Plan:
    """The plan with other chunks per stage, or with these seconds of its backwards put off, newly timed."""
    other = replace(plan, virtual_stages=chunks, weight_gradients=weight_gradients)
    found = of_plan(other)
    ends, buckets = [0.0] * plan.pp, [0.0] * plan.pp
    for event in found:
        if event.kind in ("backward", "wgrad"):
            ends[event.stage] = max(ends[event.stage], event.end)
        elif event.bucket >= 0:
            buckets[event.stage] = max(buckets[event.stage], event.end)
    if plan.options.overlap and plan.parts:
        exposed = [until - end if until else 0.0 for until, end in zip(buckets, ends, strict=True)]
        other = replace(other, dp_allreduce=tuple(exposed))
    return replace(other, pipeline_time=max(ends), step_time=step_time(found), lower_bound=0.0)


def layer_seconds(plan: Plan, stage: int) -> tuple[float, float]:
    """Forward and backward seconds of one layer; without ``parts``, a stage's time spread over its units."""
    if plan.parts:
        return plan.parts[stage].layer_forward, plan.parts[stage].layer_backward
    units = plan.partition[stage]
    return plan.stage_forward[stage] / units, plan.stage_backward[stage] / units


def chunk_layers(plan: Plan, stage: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage, as even as whole layers allow."""
    each, more = divmod(plan.layers[stage], plan.virtual_stages)
    return tuple(each + (chunk < more) for chunk in range(plan.virtual_stages))


def chunk_seconds(plan: Plan) -> tuple[list[list[float]], list[list[float]]]:
    """Forward and backward seconds [stage][chunk]; the first chunk of all has the embedding, the last the
    head.
    """
    passes: tuple[list[list[float]], list[list[float]]] = ([], [])
    if plan.virtual_stages == 1:
        return [[each] for each in plan.stage_forward], [[each] for each in plan.stage_backward]
    for stage, totals in enumerate(zip(plan.stage_forward, plan.stage_backward, strict=True)):
        for found, each, whole in zip(passes, layer_seconds(plan, stage), totals, strict=True):
            seconds = [each * count for count in chunk_layers(plan, stage)]
            seconds[0 if stage == 0 else -1] += whole - sum(seconds)
            found.append(seconds)
    return passes


def _pipeline(tasks: Sequence[Task], ends: Sequence[float]) -> list[Event]:
    places: dict[tuple[int, int], int] = {}  # of each task, on each of its stages
    found: list[Event] = []
    for index, (task, end) in enumerate(zip(tasks, ends, strict=True)):
        start = max((ends[wait] for wait in task.waits), default=0.0)
        for stage, peer in ((task.stage, task.peer), (task.peer, task.stage)):
            if stage < 0:
                continue
            kind: Kind = "forward" if task.is_forward else "backward"
            if task.chunk < 0:
                kind = "wgrad"
            elif task.is_message:
                kind = "send" if stage == task.stage else "receive"
            after = tuple(places[wait, stage] for wait in task.waits if (wait, stage) in places)
            places[index, stage] = len(found)
            at = (task.micro_batch, task.chunk, peer, task.is_forward)
            found.append(Event(stage, kind, start, end, after, *at))
    return found


def _reduction(plan: Plan, found: list[Event], stage: int) -> list[Event]:
    if plan.dp == 1 or not plan.dp_allreduce[stage]:
        return []
    if not (plan.options.overlap and plan.parts):
        after = _open(found, stage)
        start = max(found[place].end for place in after)
        return [Event(stage, "reduction", start, start + plan.dp_allreduce[stage], after, chunk=-1)]
    layers = chunk_layers(plan, stage)
    each, layer = plan.parts[stage].reduction / (sum(layers) or 1), plan.parts[stage].layer_backward
    last: Kind = "backward"
    if plan.weight_gradients:
        last = "wgrad"
        layer *= plan.weight_gradients[stage] / plan.stage_backward[stage]
    events: list[Event] = []
    free = 0.0
    before: tuple[int, ...] = ()
    for place, event in enumerate(found):
        if (event.stage, event.kind, event.micro_batch) != (stage, last, plan.micro_batches - 1):
            continue
        # A stage without layers has a bucket all the same.
        for index in reversed(range(layers[event.chunk] or 1)):
            start = max(event.end - index * layer, free)
            free = start + each
            after = (place, *before)
            before = (len(found) + len(events),)
            at = (plan.micro_batches - 1, event.chunk)
            events.append(Event(stage, "reduction", start, free, after, *at, bucket=len(events), layer=index))
    return events


def _updates(plan: Plan, found: list[Event]) -> list[Event]:
    """What comes after the reduction: the embedding's copies, the optimizer, the gathering of parameters."""
    last = [_open(found, stage) for stage in range(plan.pp)]
    ends = [max(found[place].end for place in places) for places in last]
    events: list[Event] = []

    def add(stage: int, kind: Kind, start: float, seconds: float) -> None:
        events.append(Event(stage, kind, start, start + seconds, last[stage], chunk=-1))
        ends[stage], last[stage] = start + seconds, (len(found) + len(events) - 1,)

    holders = plan.model.embedding_stages(plan.partition)
    begin = max(ends[stage] for stage in holders)
    for stage in holders if plan.embedding_allreduce and len(holders) > 1 else ():
        add(stage, "embedding", begin, plan.embedding_allreduce)
    for stage in range(plan.pp):
        gather = plan.parts[stage].gather if plan.parts else 0.0
        update = (plan.update[stage] if plan.update else 0.0) - gather
        if update > 0:
            add(stage, "update", ends[stage], update)
        if gather > 0:
            add(stage, "gather", ends[stage], gather)
    return events


def _open(found: list[Event], stage: int) -> tuple[int, ...]:
    """The events of a stage that no other event of it waits for."""
    own = {place for place, event in enumerate(found) if event.stage == stage}
    return tuple(sorted(own.difference(*(found[place].after for place in own))))


def step_time(events: list[Event]) -> float:
    """Seconds until the last event ends."""
    return max(event.end for event in events)


def bubbles(plan: Plan, events: list[Event]) -> list[float]:
    """The part of the step in which each stage neither computes nor communicates, 0 to 1."""
    of_stages: list[list[tuple[float, float]]] = [[] for _ in range(plan.pp)]
    for event in events:
        of_stages[event.stage].append((event.start, event.end))
    whole = step_time(events)
    return [1 - covered(each) / whole for each in of_stages]


def covered(intervals: list[tuple[float, float]], first: float = 0.0, last: float = math.inf) -> float:
    """Length of the union of the intervals within [first, last]."""
    total, reached = 0.0, first
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, last)
        if end > start:
            total += end - start
            reached = end
    return total


def task_ends(
    tasks: Sequence[Task], forward: list[list[float]], backward: list[list[float]], links: Sequence[float]
) -> list[float]:
    """When each task ends, in seconds.

    forward, backward: seconds [stage][chunk] per micro-batch; links: per message from each stage to the next,
    the last one's to the first.
    """
    ends: list[float] = []
    for task in tasks:
        if task.is_message:
            # Gradients go over the link of the stage that they come to.
            seconds = links[task.stage if task.is_forward else task.peer]
        else:
            seconds = (forward if task.is_forward else backward)[task.stage][task.chunk]
        ends.append(max((ends[wait] for wait in task.waits), default=0.0) + seconds)
    return ends


@functools.lru_cache(maxsize=16)
def interleaved_tasks(stages: int, m: int, chunks: int) -> list[Task]:
    """All tasks of a step, each after all that it waits for, in Megatron-LM's interleaved schedule (Narayanan
    et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2.2).

    Messages are sent beside computation; those from one stage to another follow each other over the link.
    """
    return _tasks([_program(stage, stages, m, chunks) for stage in range(stages)], chunks)


def zero_bubble(
    forward: Seconds, backward: Seconds, weights: Seconds, links: Seconds, m: int
) -> tuple[list[Task], list[float]]:
    """All tasks of a step with split backward passes (ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism", 2.1), and when each ends; weights: the part of each stage's ``backward`` that is put off.
    Stages put nothing off if that is sooner, so that a step never takes longer than with 1F1B.
    """
    inputs = [[whole - part, part] for whole, part in zip(backward, weights, strict=True)]
    ways = [zero_bubble_tasks(len(forward), m, most) for most in (len(forward), 0)]
    done = [(tasks, task_ends(tasks, [[one] for one in forward], inputs, links)) for tasks in ways]
    return min(done, key=lambda way: max(way[1]))


@functools.lru_cache(maxsize=16)
def zero_bubble_tasks(stages: int, m: int, most: int) -> list[Task]:
    """1F1B in which a stage sends back the gradient of a micro-batch's input first. Stage i computes those of
    the weights i micro-batches later, at most ``most``, and so keeps as many micro-batches as the first one.
    """
    programs = []
    for stage in range(stages):
        ahead, later = min(stages - 1 - stage, m), min(stage, most, m)
        order = [(True, 0, j) for j in range(ahead)]
        for j in range(m):
            order += [(True, 0, ahead + j)] * (ahead + j < m) + [(False, 0, j)]
            order += [(False, -1, j - later)] * (j >= later)
        programs.append(order + [(False, -1, j) for j in range(m - later, m)])
    return _tasks(programs, 1)


def _tasks(programs: list[list[tuple[bool, int, int]]], chunks: int) -> list[Task]:
    """programs: what each stage computes in order (``_program``)."""
    stages, found = len(programs), list[Task]()
    at = [0] * stages
    last: dict[int | tuple[int, int], int] = {}  # the last task of each stage, and over each link
    came: dict[tuple[int, bool, int, int], int] = {}  # the message with a computation's input
    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                is_forward, chunk, j = programs[stage][at[stage]]
                here = (stage, is_forward, chunk, j)
                # The first computation of all, and the first to go back, wait for no message.
                source = (0, 0) if is_forward else (stages - 1, chunks - 1)
                if chunk >= 0 and here not in came and (stage, chunk) != source:
                    break
                waits = tuple(known for known in (last.get(stage), came.get(here)) if known is not None)
                last[stage] = len(found)
                found.append(Task(stage, -1, j, is_forward, waits, chunk))
                at[stage] += 1
                # The output goes to the next stage, or to the next chunk on the first one.
                onward, peer = divmod(chunk * stages + stage + (1 if is_forward else -1), stages)
                if 0 <= onward < chunks:
                    link = last.get((stage, peer))
                    waits = (len(found) - 1, *(() if link is None else (link,)))
                    last[stage, peer] = came[peer, is_forward, onward, j] = len(found)
                    found.append(Task(stage, peer, j, is_forward, waits, chunk))
        assert at != before, "the schedule waits for itself"
    return found


def warm_up(stage: int, stages: int, chunks: int) -> int:
    """Chunks that a stage computes forwards before its first backward."""
    return (stages - stage - 1) * 2 + (chunks - 1) * stages


def in_flight(stage: int, stages: int, m: int, chunks: int) -> float:
    """Micro-batches, or parts of them, whose activations a stage keeps at once (zero-bubble: as stage 0)."""
    ahead = warm_up(stage, stages, chunks) if chunks > 1 else stages - stage - 1
    return min((ahead + 1) / chunks, m)


def _program(stage: int, stages: int, m: int, chunks: int) -> list[tuple[bool, int, int]]:
    """(is forward, chunk, micro-batch) in the order in which a stage computes them."""
    total = m * chunks
    warm = min(warm_up(stage, stages, chunks), total)

    def forward(k: int) -> tuple[bool, int, int]:
        return True, k % (stages * chunks) // stages, k // (stages * chunks) * stages + k % stages

    def backward(k: int) -> tuple[bool, int, int]:
        _, chunk, j = forward(k)
        return False, chunks - 1 - chunk, j

    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]
