"""The 1F1B schedule with every message simulated: when each stage computes, sends and ends.

Stage i runs w = min(stages − 1 − i, m) forwards ahead, then pairs of a forward and a backward, then the
remaining backwards, as Megatron-LM's schedule without interleaving does. A message starts once its sender
has the data and its receiver waits for it, takes the boundary's time, and holds both until it ends; where
a stage sends and receives at once (a forward out and a gradient in, or a gradient out and a forward in)
it goes on when both have ended. The order on each stage is fixed, so every end is a longest path and
never grows when a duration shrinks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasop.schedule.task import Task

Time = Any  # a float, or an array with one value for each candidate


@dataclass
class Timeline:
    """Seconds: ends of the tasks of ``tasks(stages, micro_batches)``, with None for those that were dropped;
    of each stage's last task, and of its last backward.

    A task starts its duration before its end.
    """

    ends: list[Time]
    stage_end: list[Time]
    backward_end: list[Time]

    @property
    def pipeline_time(self) -> Time:
        """When the first stage's last backward ends, which is the last of all."""
        return self.stage_end[0]


def run(forward: list[Time], backward: list[Time], p2p: list[Time], micro_batches: int) -> Timeline:
    """The schedule of one pipeline (floats), or of many of one depth at once (arrays of one length), of
    which only the stages' ends are kept.

    forward, backward: seconds of each stage per micro-batch; p2p: seconds per message over each boundary.
    """
    stages, m = len(forward), micro_batches
    program, frees, last, last_backward = _program(stages, m)
    durations = [*forward, *backward, *p2p]
    ends: list[Time] = [None] * len(program)
    if isinstance(forward[0], np.ndarray):
        for index, (duration, waits) in enumerate(program):
            if not waits:
                end = durations[duration]
            elif len(waits) == 1:
                end = ends[waits[0]] + durations[duration]
            else:
                end = np.maximum(ends[waits[0]], ends[waits[1]])
                end += durations[duration]
            ends[index] = end
            for free in frees[index]:
                # Nobody waits for it any more: memory that is used again is faster memory.
                ends[free] = None
    else:
        for index, (duration, waits) in enumerate(program):
            begin = max([ends[wait] for wait in waits]) if waits else 0.0
            ends[index] = begin + durations[duration]
    return Timeline(ends, *([ends[index] for index in which] for which in (last, last_backward)))


@functools.lru_cache(maxsize=64)
def _program(
    stages: int, m: int
) -> tuple[list[tuple[int, tuple[int, ...]]], list[list[int]], list[int], list[int]]:
    """(index of its duration, what it waits for) of each task; the tasks that no later one waits for, by the
    task after which that is so; each stage's last task, and its last backward.
    """
    found = tasks(stages, m)
    program, last_use = [], list(range(len(found)))
    frees: list[list[int]] = [[] for _ in found]
    for index, task in enumerate(found):
        if task.is_message:
            duration = 2 * stages + min(task.stage, task.peer)
        else:
            duration = task.stage if task.is_forward else stages + task.stage
        program.append((duration, task.waits))
        for wait in task.waits:
            last_use[wait] = index
    last, last_backward = [0] * stages, [0] * stages
    for index, task in enumerate(found):
        if task.micro_batch == m - 1 and not task.is_forward:
            (last if task.is_message else last_backward)[task.stage] = index
    last[0] = last_backward[0]
    kept = {*last, *last_backward}
    for index, use in enumerate(last_use):
        if index not in kept:
            frees[use].append(index)
    return program, frees, last, last_backward


@functools.lru_cache(maxsize=64)
def tasks(stages: int, m: int) -> list[Task]:
    """All tasks of a step, each after all that it waits for."""
    order = _order(stages, m)
    number = {key: index for index, key in enumerate(order)}
    warm = warm_up(stages, m)
    found = []
    for is_message, at, j, is_forward in order:
        waits = (_message_waits if is_message else _compute_waits)(at, j, is_forward, stages, m, warm)
        stage, peer = (at, -1) if not is_message else (at, at + 1) if is_forward else (at + 1, at)
        found.append(Task(stage, peer, j, is_forward, tuple(number[wait] for wait in waits)))
    return found


# Whether it is a message, its stage or boundary, its micro-batch, and whether it is forward.
Name = tuple[bool, int, int, bool]


def _compute_waits(i: int, j: int, is_forward: bool, stages: int, m: int, warm: list[int]) -> list[Name]:
    w = warm[i]

    def up(at: int, k: int) -> Name:
        return True, at, k, True

    def down(at: int, k: int) -> Name:
        return True, at, k, False

    if is_forward:
        if i:
            return [up(i - 1, j), *([down(i - 1, j - 1 - w)] if j > w else [])]
        if j > w:
            return [(False, 0, j - 1 - w, False)]
        return [up(0, j - 1)] if j else []
    if i == stages - 1:
        return [(False, i, j, True)]
    return [*([up(i, w + j)] if w + j < m else []), down(i, j)]


def _message_waits(i: int, j: int, is_forward: bool, stages: int, m: int, warm: list[int]) -> list[Name]:
    """What the sender waits for, then what the receiver was busy with."""
    if is_forward:
        ahead = warm[i + 1]
        sent: list[Name] = [(False, i, j, True)]
        if j > ahead:
            return [*sent, (False, i + 1, j - 1 - ahead, False)]
        return [*sent, (True, i + 1, j - 1, True)] if j else sent
    sent = [(False, i + 1, j, False)]
    w = warm[i]
    if w + j < m:
        return [*sent, (False, i, w + j, True)]
    if j == 0:
        return [*sent, (True, i, m - 1, True)]
    return [*sent, (True, i - 1, j - 1, False) if i else (False, 0, j - 1, False)]


def warm_up(stages: int, micro_batches: int) -> list[int]:
    """Forwards that each stage runs before its first pair of a forward and a backward."""
    return [min(stages - 1 - i, micro_batches) for i in range(stages)]


def _order(stages: int, m: int) -> list[Name]:
    """All tasks, each after all that it waits for.

    The key is the time at which each would happen if every computation took 1 and every message nothing;
    among the messages of one moment, those further down the pipeline free the ones before them.
    """
    items = []
    for i, w in enumerate(warm_up(stages, m)):
        for j in range(m):
            slot = i + j if j < w else 2 * stages - i + 2 * (j - w) - 2
            items.append((slot, False, -i, j, True))
            if i + 1 < stages:
                items.append((slot, True, -i, j, True))
                items.append((2 * stages - 2 - i + 2 * j, True, -i, j, False))
            items.append((2 * stages - 1 - i + 2 * j, False, -i, j, False))
    items.sort()
    return [(is_message, -i, j, is_forward) for _, is_message, i, j, is_forward in items]
