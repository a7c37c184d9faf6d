"""One step of a plan as events: what every pipeline stage does when.

``one_forward_one_backward`` is the schedule that the ``exact`` cost model simulates, so its end is the
plan's step time; ``interleaved`` is Megatron-LM's with virtual stages (Narayanan et al. 2021, section 2.2),
where a stage holds several chunks of layers, each with its part of the stage's time, and messages are sent
beside computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasop.errors import PlanError
from fasop.plans.plan import Plan
from fasop.schedule import one_f_one_b as schedule

Kind = Literal["forward", "backward", "send", "receive", "all-reduce", "embedding"]


@dataclass(frozen=True)
class Event:
    """What a stage does from ``start`` to ``end``, in seconds.

    ``micro_batch`` and ``chunk`` count from 0, -1 for what belongs to none. ``peer``: the stage at the other
    end of a message. ``up``: the message holds activations, else gradients.
    """

    stage: int
    kind: Kind
    start: float
    end: float
    micro_batch: int = -1
    chunk: int = 0
    peer: int = -1
    up: bool = True


def one_forward_one_backward(plan: Plan) -> list[Event]:
    """All events of one step, by stage and start."""
    line = schedule.run(
        list(plan.stage_forward), list(plan.stage_backward), list(plan.p2p), plan.micro_batches
    )
    found = []
    for stage in range(plan.pp):
        for j in range(plan.micro_batches):
            end = line.forward_end[stage][j]
            found.append(Event(stage, "forward", end - plan.stage_forward[stage], end, j))
            end = line.backward_end[stage][j]
            found.append(Event(stage, "backward", end - plan.stage_backward[stage], end, j))
    for boundary, seconds in enumerate(plan.p2p):
        for j in range(plan.micro_batches):
            up, down = line.up_end[boundary][j], line.down_end[boundary][j]
            found += _message(boundary, boundary + 1, up - seconds, up, j, up=True)
            found += _message(boundary + 1, boundary, down - seconds, down, j, up=False)
    return _with_reductions(plan, found, line.stage_end)


def interleaved(plan: Plan, chunks: int) -> list[Event]:
    """The same with ``chunks`` virtual stages a stage. Raises ``PlanError`` where that can't be run."""
    stages, m = plan.pp, plan.micro_batches
    if chunks < 2 or stages < 2:
        raise PlanError(
            f"--virtual-stages {chunks} on {stages} pipeline stages: interleaving needs at least 2 of both."
        )
    if m % stages:
        raise PlanError(
            f"{m} micro-batches on {stages} pipeline stages: an interleaved schedule needs a multiple of "
            f"{stages}; plan with another micro-batch or global batch."
        )
    least = min(plan.layers[1:-1] or plan.layers)
    if least < chunks:
        raise PlanError(f"--virtual-stages {chunks}: a stage has {least} layers; give at most as many.")
    slowest = max(plan.p2p)  # the last stage's chunks go on at the first stage
    steps = [_interleaved_order(stage, stages, m, chunks) for stage in range(stages)]
    ends: dict[tuple[bool, int, int, int], float] = {}
    free, at, found = [0.0] * stages, [0] * stages, []
    while any(at[stage] < len(steps[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(steps[stage]):
                forward, chunk, j = steps[stage][at[stage]]
                source = _source(forward, chunk, stage, stages, chunks)
                ready = 0.0
                if source is not None:
                    came = ends.get((source[0], source[1], source[2], j))
                    if came is None:
                        break
                    other = source[2]
                    if other != stage:
                        wait = plan.p2p[min(stage, other)] if abs(other - stage) == 1 else slowest
                        ready = came + wait
                        found += _message(other, stage, came, ready, j, forward, chunk)
                    else:
                        ready = came
                seconds = (plan.stage_forward if forward else plan.stage_backward)[stage] / chunks
                start = max(free[stage], ready)
                free[stage] = ends[forward, chunk, stage, j] = start + seconds
                found.append(Event(stage, "forward" if forward else "backward", start, free[stage], j, chunk))
                at[stage] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return _with_reductions(plan, found, free)


def _interleaved_order(stage: int, stages: int, m: int, chunks: int) -> list[tuple[bool, int, int]]:
    """(is forward, chunk, micro-batch) in the order in which a stage runs them."""
    total = m * chunks
    warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def forward(k: int) -> tuple[bool, int, int]:
        return True, k % (stages * chunks) // stages, k // (stages * chunks) * stages + k % stages

    def backward(k: int) -> tuple[bool, int, int]:
        _, chunk, j = forward(k)
        return False, chunks - 1 - chunk, j

    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]


def _source(forward: bool, chunk: int, stage: int, stages: int, chunks: int) -> tuple[bool, int, int] | None:
    """(is forward, chunk, stage) of what a computation waits for, None for nothing."""
    if forward:
        if stage:
            return True, chunk, stage - 1
        return (True, chunk - 1, stages - 1) if chunk else None
    if stage < stages - 1:
        return False, chunk, stage + 1
    return (False, chunk + 1, 0) if chunk < chunks - 1 else (True, chunk, stage)


def _message(
    source: int, target: int, start: float, end: float, j: int, up: bool, chunk: int = 0
) -> list[Event]:
    return [
        Event(source, "send", start, end, j, chunk, target, up),
        Event(target, "receive", start, end, j, chunk, source, up),
    ]


def _with_reductions(plan: Plan, found: list[Event], stage_end: list[float]) -> list[Event]:
    synced = [end + seconds for end, seconds in zip(stage_end, plan.dp_allreduce, strict=True)]
    if plan.dp > 1:
        found += [
            Event(stage, "all-reduce", stage_end[stage], synced[stage])
            for stage in range(plan.pp)
            if synced[stage] > stage_end[stage]
        ]
    if plan.embedding_allreduce and plan.pp > 1:
        holders = plan.model.embedding_stages(plan.partition)
        begin = max(synced[stage] for stage in holders)
        found += [Event(stage, "embedding", begin, begin + plan.embedding_allreduce) for stage in holders]
    return sorted(found, key=lambda event: (event.stage, event.start, event.end))


def step_time(events: list[Event]) -> float:
    """Seconds until the last event ends."""
    return max(event.end for event in events)


def bubbles(plan: Plan, events: list[Event]) -> list[float]:
    """The part of the step in which each stage neither computes nor communicates, 0 to 1."""
    whole = step_time(events)
    idle = []
    for stage in range(plan.pp):
        busy = until = 0.0
        for event in events:
            if event.stage == stage:
                busy += max(0.0, event.end - max(until, event.start))
                until = max(until, event.end)
        idle.append(1 - busy / whole)
    return idle
