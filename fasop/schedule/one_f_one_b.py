"""The 1F1B schedule with every message simulated: when each stage computes, sends and ends.

Stage i runs w = min(stages − 1 − i, m) forwards ahead, then pairs of a forward and a backward, then the
remaining backwards, as in Megatron-LM's schedule without interleaving. A message starts once its sender has
the data and its receiver waits for it, takes the boundary's time, and holds both until it ends; where a stage
sends and receives at once (a forward out and a gradient in, or a gradient out and a forward in) it goes on
when both have ended. The order on each stage is fixed, so every end is a longest path and never grows when a
duration shrinks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Time = Any  # a float, or an array with one value for each candidate
Numbers = Any  # an integer, or an array of them


class Task(NamedTuple):
    """A computation of a stage, or with ``peer`` a message from ``stage`` to ``peer``.

    is_forward: of activations, else of gradients. waits: the tasks, by their place in the list, that must
    have ended. chunk: of the stage that computes or sends, in an interleaved schedule; -1: gradients of
    weights, which a zero-bubble schedule puts off.
    """

    stage: int
    peer: int
    micro_batch: int
    is_forward: bool
    waits: tuple[int, ...]
    chunk: int = 0

    @property
    def is_message(self) -> bool:
        return self.peer >= 0


class Timeline(NamedTuple):
    """When each stage's last task ends, and its last backward, in seconds."""

    stage_end: list[Time]
    backward_end: list[Time]

    @property
    def pipeline_time(self) -> Time:
        """When the first stage's last backward ends, which is the last of all."""
        return self.stage_end[0]


def run(
    forward: Sequence[Time], backward: Sequence[Time], p2p: Sequence[Time], micro_batches: int
) -> Timeline:
    """The schedule of one pipeline (floats), or of many of one depth at once (arrays of one length).

    forward, backward: seconds of each stage per micro-batch; p2p: seconds per message over each boundary.
    """
    program = _program(len(forward), micro_batches)
    durations = np.array([*forward, *backward, *p2p], dtype=float)
    ends = np.zeros((program.waves[-1][1], *durations.shape[1:]))  # of each task, after the beginning
    for begin, end, duration, waits in program.waves:
        before = ends.take(waits, axis=0)
        count = end - begin
        later = np.maximum(before[:count], before[count:])
        np.add(later, durations.take(duration, axis=0), out=ends[begin:end])
    return Timeline(list(ends[program.last]), list(ends[program.last_backward]))


class _Program(NamedTuple):
    """waves: tasks that wait for earlier waves alone: their places (after the beginning at 0) from … to, the
    index of each one's duration, and the places of what they wait for, all first tasks before all second
    ones; last, last_backward: places of each stage's last task and last backward.
    """

    waves: list[tuple[int, int, np.ndarray, np.ndarray]]
    last: np.ndarray
    last_backward: np.ndarray


@functools.lru_cache(maxsize=64)
def _program(stages: int, m: int) -> _Program:
    names = _Names(stages, m)
    order, number = _order(names)
    # Of each task in order, after the beginning.
    waits = (number[_waits(names)[order]] + 1) % (len(order) + 1)
    waves = [-1]
    for one, two in waits.tolist():
        first, second = waves[one], waves[two]
        waves.append(1 + (first if first > second else second))  # faster than max
    wave = np.array(waves[1:])
    by_wave = wave.argsort(kind="stable")
    place = np.zeros(len(order) + 1, dtype=int)
    place[1 + by_wave] = np.arange(1, len(order) + 1)
    # Forwards, backwards, messages up and messages down, the stages of each one after the other.
    durations = np.array([*range(2 * stages), *2 * list(range(2 * stages, 3 * stages - 1))])
    duration, ahead = durations.repeat(m)[order][by_wave], place[waits[by_wave]].T
    cuts = [0, *np.bincount(wave).cumsum().tolist()]
    found = [(a + 1, b + 1, duration[a:b], ahead[:, a:b].ravel()) for a, b in itertools.pairwise(cuts)]
    last = [names.backward(0, m - 1), *(names.down(i, m - 1) for i in range(stages - 1))]
    last_backward = [names.backward(i, m - 1) for i in range(stages)]
    return _Program(found, place[1 + number[last]], place[1 + number[last_backward]])


@functools.lru_cache(maxsize=64)
def tasks(stages: int, m: int) -> list[Task]:
    """All tasks of a step, each after all that it waits for."""
    names = _Names(stages, m)
    order, place = _order(names)
    waits = place[_waits(names)[order]].tolist()
    found = []
    for index, of in zip(order.tolist(), waits, strict=True):
        row, j = divmod(index, m)
        own = tuple(wait for wait in of if wait < len(order))
        if row < 2 * stages:
            found.append(Task(row % stages, -1, j, row < stages, own))
            continue
        is_down, at = divmod(row - 2 * stages, stages - 1)
        found.append(Task(at + is_down, at + 1 - is_down, j, not is_down, own))
    return found


class _Names(NamedTuple):
    """A number for each task: computations by stage and micro-batch, messages by their boundary."""

    stages: int
    m: int

    def forward(self, stage: Numbers, j: Numbers) -> Numbers:
        return stage * self.m + j

    def backward(self, stage: Numbers, j: Numbers) -> Numbers:
        return (self.stages + stage) * self.m + j

    def up(self, boundary: Numbers, j: Numbers) -> Numbers:
        return (2 * self.stages + boundary) * self.m + j

    def down(self, boundary: Numbers, j: Numbers) -> Numbers:
        return (3 * self.stages - 1 + boundary) * self.m + j


def _waits(names: _Names) -> np.ndarray:
    """The two tasks that each one waits for [task, 2]; the second is the beginning where there is but one."""
    stages, m = names.stages, names.m
    i, j = np.arange(stages)[:, None], np.arange(m)[None]
    w = np.minimum(stages - 1 - i, m)
    none = np.full((stages, m), (4 * stages - 2) * m)  # the beginning
    later = np.where(j > w, names.backward(0, j - 1 - w), np.where(j > 0, names.up(0, j - 1), none))
    forward = (
        np.where(i > 0, names.up(i - 1, j), later),
        np.where((i > 0) & (j > w), names.down(i - 1, j - 1 - w), none),
    )
    is_last, steady = i == stages - 1, w + j < m
    received = np.where(steady, names.up(i, w + j), names.down(i, j))
    backward = (
        np.where(is_last, names.forward(i, j), received),
        np.where(~is_last & steady, names.down(i, j), none),
    )
    # A message waits for its sender's result, and for what its receiver was busy with.
    i, ahead, none, steady = i[:-1], w[1:], none[:-1], steady[:-1]
    busy = np.where(j > 0, names.up(i + 1, j - 1), none)
    up = names.forward(i, j), np.where(j > ahead, names.backward(i + 1, j - 1 - ahead), busy)
    before = np.where(i > 0, names.down(i - 1, j - 1), names.backward(0, j - 1))
    busy = np.where(j > 0, before, names.up(i, m - 1))
    down = names.backward(i + 1, j), np.where(steady, names.forward(i, w[:-1] + j), busy)
    pairs = [np.stack([one.ravel(), two.ravel()], axis=1) for one, two in (forward, backward, up, down)]
    return np.concatenate(pairs)


def _order(names: _Names) -> tuple[np.ndarray, np.ndarray]:
    """All tasks, each after all that it waits for; and the place of each, and of the beginning, in it.

    The key is the time at which each would happen if every computation took 1 and every message nothing;
    among the messages of one moment, those further down the pipeline free the ones before them.
    """
    stages, m = names.stages, names.m
    i, j = (each.ravel() for each in np.indices((stages, m)))
    w = np.minimum(stages - 1 - i, m)  # forwards before the first pair of a forward and a backward
    forward = np.where(j < w, i + j, 2 * stages - i + 2 * (j - w) - 2)
    backward = 2 * stages - 1 - i + 2 * j
    within = (stages - 1) * m  # of messages
    moment = np.concatenate([forward, backward, forward[:within], backward[:within] - 1])
    computes = np.arange(len(moment)) < 2 * stages * m
    at, micro_batch = (np.concatenate([each, each, each[:within], each[:within]]) for each in (i, j))
    is_forward = np.repeat([1, 0, 1, 0], [stages * m, stages * m, within, within])
    order = np.lexsort((is_forward, micro_batch, -at, ~computes, moment))
    place = np.empty(len(order) + 1, dtype=int)
    place[order], place[-1] = np.arange(len(order)), len(order)
    return order, place
