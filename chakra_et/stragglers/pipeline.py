"""Simulate a pipeline-parallel job, all steps and data-parallel ranks at once.

They share one dependency graph, so each operation of it is an array of steps × data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.stragglers.dependencies import ACROSS_DP, Operation, PipelineEdges, find_dependencies
from chakra_et.stragglers.operations import JobMeta, JobOperations, WhatIf
from chakra_et.stragglers.parquet import (
    COMPUTE,
    EMBEDDING,
    FORWARD,
    GC,
    MESSAGES,
    OPTIMIZER,
    OPTYPES,
    PipelineTrace,
)

# What ends this long before its peers start, or starts this long before its dependencies end, was recorded by
# clocks that differ.
WRONG_CLOCK_S = 1e-2
BY_MEAN = (*COMPUTE.values(), GC, OPTIMIZER)
# Layer norm's gradients are reduced by each worker's own kernel in these traces: no communication.
COMMUNICATION = (*MESSAGES, *ACROSS_DP, EMBEDDING)


FIRST_FORWARD, FIRST_RECV = OPTYPES.index(COMPUTE[FORWARD]), OPTYPES.index(f"{FORWARD}-recv")


@dataclass(frozen=True)
class _Event:
    """Operations that end together, after the last of them has started; ``across_dp``: on all data-parallel
    ranks."""

    members: list[int]
    across_dp: bool


@dataclass
class PipelineJob:
    """A ``Job`` from a Parquet trace.

    ``place`` int64[O, S, D]: the row of each of the O operations of the graph, in each step and data-parallel
    rank. ``events``: in an order in which dependencies come first. ``last``: the operations that end the
    step.
    """

    meta: JobMeta
    operations: JobOperations
    steps: list[int]
    measured_s: np.ndarray
    notes: list[str]
    place: np.ndarray
    before: list[list[int]]
    events: list[_Event]
    last: list[int]

    def simulate(self, settings: Sequence[WhatIf]) -> list[np.ndarray]:
        """Step times in s, float64[steps], of each setting; see ``Job``."""
        return [self._step_times(setting) for setting in settings]

    def _step_times(self, setting: WhatIf) -> np.ndarray:
        work = setting.work_s[self.place]
        delay = None if setting.delay_s is None else setting.delay_s[self.place]
        end = np.zeros_like(work)
        for event in self.events:
            latest = self._start(event.members[0], end, delay)
            for member in event.members[1:]:
                latest = np.maximum(latest, self._start(member, end, delay))
            if event.across_dp:
                latest = latest.max(axis=1, keepdims=True)
            for member in event.members:
                np.add(latest, work[member], out=end[member])
        times: np.ndarray = end[self.last].max(axis=(0, 2))
        return times

    def _start(self, operation: int, end: np.ndarray, delay: np.ndarray | None) -> np.ndarray:
        """When the operation starts in each step and data-parallel rank, float64[S, D]."""
        first, *others = self.before[operation] or [-1]
        start = np.zeros(end.shape[1:]) if first < 0 else end[first]
        for other in others:
            start = np.maximum(start, end[other])
        return start if delay is None else start + delay[operation]


def pipeline_job(trace: PipelineTrace, meta: JobMeta) -> PipelineJob:
    """The job of a trace.

    Raises ``TraceError`` where the trace and ``meta`` contradict each other, and where workers or steps
    differ in their operations.
    """
    notes = _check_layout(trace, meta)
    found = find_dependencies(trace)
    place = _place(trace, found.operations)
    events = _in_order(trace, found)
    start, end = trace.start_s[place], trace.end_s[place]
    began = start.min(axis=(0, 2))
    optimizers = [each.index for each in found.operations if each.optype == OPTIMIZER]
    launched = _rows(place, np.broadcast_to(np.array(found.launched)[:, None, None], place.shape))
    operations = JobOperations(
        optypes=list(OPTYPES),
        optype=trace.optype,
        dp_rank=trace.dp_rank,
        stage=trace.stage,
        rank=trace.rank,
        step=trace.step,
        group=trace.optype + np.where(launched, 0, len(OPTYPES)),
        by_median=~np.isin(trace.optype, [OPTYPES.index(name) for name in BY_MEAN]),
        work_s=_rows(place, _work(found, events, start, end)),
        delay_s=_rows(place, _delays(found, start, end, began)),
        is_first=(trace.seq_id == 0)
        & (trace.optype == np.where(trace.stage == 0, FIRST_FORWARD, FIRST_RECV)),
    )
    return PipelineJob(
        meta=meta,
        operations=operations,
        steps=np.unique(trace.step).tolist(),
        measured_s=end.max(axis=(0, 2)) - began,
        notes=notes,
        place=place,
        before=found.before,
        events=events,
        last=optimizers or [each.index for each in found.operations],
    )


def _check_layout(trace: PipelineTrace, meta: JobMeta) -> list[str]:
    for name, column, field, size in (
        ("dp_rank", trace.dp_rank, "dp_size", meta.dp_size),
        ("stage", trace.stage, "pp_size", meta.pp_size),
    ):
        numbers = np.unique(column)
        if not np.array_equal(numbers, np.arange(size)):
            raise TraceError(
                f"{trace.path}: {name} is {_few(numbers)} in the trace, but {field} of the job is {size}: "
                "give the YAML file of this trace"
            )
    workers = np.unique(np.stack([trace.dp_rank, trace.stage, trace.rank]), axis=1)
    twice = np.flatnonzero((np.diff(workers[:2], axis=1) == 0).all(axis=0))
    if len(twice):
        dp_rank, stage, rank = workers[:, twice[0]]
        raise TraceError(
            f"{trace.path}: ranks {rank} and {workers[2, twice[0] + 1]} are both dp_rank {dp_rank}, stage "
            f"{stage}: keep one rank of each"
        )
    chunks = max(int(trace.mc.max()) + 1, 1)
    if chunks == meta.vpp_size:
        return []
    return [
        f"the trace has {chunks} model chunks per stage and vpp_size is {meta.vpp_size}: the trace's are used"
    ]


def _few(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _place(trace: PipelineTrace, operations: list[Operation]) -> np.ndarray:
    """``PipelineJob.place``, where every step and data-parallel rank has each operation once."""
    key = np.stack([trace.optype, trace.stage, trace.seq_id, trace.step, trace.dp_rank])
    order = np.lexsort(key[::-1])
    steps, dp_ranks = np.unique(trace.step), np.unique(trace.dp_rank)
    same = (np.diff(key[:, order], axis=1) == 0).all(axis=0)
    if same.any():
        row = order[np.flatnonzero(same)[0]]
        raise TraceError(f"{trace.path}: {trace.describe(row)} is there twice: write the trace anew")
    # Of each step and data-parallel rank, in the order of type, stage and seq_id, the same operations.
    first = np.array([each.row for each in operations])
    first = first[np.lexsort(key[2::-1, first])]
    wanted = np.repeat(key[:3, first], len(steps) * len(dp_ranks), axis=1)
    when = np.tile(np.repeat(steps, len(dp_ranks)), len(first))
    who = np.tile(dp_ranks, len(first) * len(steps))
    expected = np.concatenate([wanted, [when], [who]])
    length = min(len(order), expected.shape[1])
    wrong = np.flatnonzero((key[:, order[:length]] != expected[:, :length]).any(axis=0))
    if len(wrong) or len(order) != expected.shape[1]:
        raise TraceError(_unequal(trace, key[:, order], expected))
    place = np.empty((len(operations), len(steps), len(dp_ranks)), dtype=np.int64)
    index = np.empty(len(trace), dtype=np.int64)
    index[[each.row for each in operations]] = np.arange(len(operations))
    place[index[first]] = order.reshape(len(operations), len(steps), len(dp_ranks))
    return place


def _unequal(trace: PipelineTrace, found: np.ndarray, expected: np.ndarray) -> str:
    """The error for the first operation that one step or data-parallel rank has and another lacks."""
    have, want = set(map(tuple, found.T.tolist())), set(map(tuple, expected.T.tolist()))
    optype, stage, seq_id, step, dp_rank = min(have ^ want)
    lacks = (optype, stage, seq_id, step, dp_rank) in want
    return (
        f"{trace.path}: {OPTYPES[optype]} {seq_id} of step {step}, dp_rank {dp_rank}, stage {stage} "
        f"{'is missing' if lacks else 'has no peers'}: all steps and data-parallel ranks need the operations "
        "of the first"
    )


def _in_order(trace: PipelineTrace, found: PipelineEdges) -> list[_Event]:
    """The events in an order in which dependencies come first."""
    together = found.peers + [[index] for index in _alone(found)]
    event_of = {member: number for number, members in enumerate(together) for member in members}
    after: list[list[int]] = [[] for _ in together]
    waiting = [0] * len(together)
    for operation, before in enumerate(found.before):
        for earlier in before:
            after[event_of[earlier]].append(event_of[operation])
            waiting[event_of[operation]] += 1
    order = [number for number, count in enumerate(waiting) if not count]
    for number in order:  # grows
        for later in after[number]:
            waiting[later] -= 1
            if not waiting[later]:
                order.append(later)
    if len(order) < len(together):
        stuck = next(number for number, count in enumerate(waiting) if count)
        row = found.operations[together[stuck][0]].row
        raise TraceError(
            f"{trace.path}: {trace.describe(row)} waits for itself: its dependencies contradict the order of "
            "starts, write the trace anew"
        )
    return [
        _Event(together[number], found.operations[together[number][0]].optype in ACROSS_DP)
        for number in order
    ]


def _alone(found: PipelineEdges) -> list[int]:
    paired = {index for together in found.peers for index in together}
    return [each.index for each in found.operations if each.index not in paired]


def _work(found: PipelineEdges, events: list[_Event], start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """What each operation takes by itself, float64[O, S, D]: communication from the last peer's start on."""
    work: np.ndarray = end - start
    for event in events:
        if found.operations[event.members[0]].optype in COMMUNICATION:
            latest = start[event.members].max(axis=0)
            if event.across_dp:
                latest = latest.max(axis=1, keepdims=True)
            transfer = end[event.members] - latest
            work[event.members] = np.where(transfer <= -WRONG_CLOCK_S, 0.0, transfer)
    work[~np.array(found.launched)] = 0
    return work


def _delays(found: PipelineEdges, start: np.ndarray, end: np.ndarray, began: np.ndarray) -> np.ndarray:
    """From the end of an operation's dependencies, or the start of the step, to its own start; float64[O, S,
    D]."""
    delay = np.empty_like(start)
    for operation, before in enumerate(found.before):
        delay[operation] = start[operation] - (end[before].max(axis=0) if before else began[:, None])
    delay[~np.array(found.launched)] = 0
    launch: np.ndarray = np.where(delay <= -WRONG_CLOCK_S, 0.0, delay)
    return launch


def _rows(place: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values of shape ``place`` in the order of the trace's rows."""
    rows = np.empty(place.size, dtype=values.dtype)
    rows[place] = values
    return rows
