"""Simulate a pipeline-parallel job, all steps and data-parallel ranks at once.

They share one dependency graph, so each operation of it is an array of steps × data-parallel ranks.
"""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.edges import topological_order
from chakra_et.stragglers.dependencies import StepDependencies
from chakra_et.stragglers.operations import JobMeta, JobOperations, TimedJob
from chakra_et.stragglers.parquet import (
    ALL_GATHER,
    CLIP,
    COMPUTE,
    EMBEDDING,
    FORWARD,
    GC,
    MESSAGES,
    OPTIMIZER,
    OPTYPES,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
    PipelineTrace,
)

# What ends this long before its peers start, or starts this long before its dependencies end, was recorded by
# clocks that differ.
WRONG_CLOCK_S = 1e-2
BY_MEAN = (*COMPUTE.values(), GC, OPTIMIZER)
# Communication of which the data-parallel ranks are peers.
ACROSS_DP = (ALL_GATHER, REDUCE_SCATTER, SEPARATE_ALL_REDUCE, CLIP)
# Layer norm's gradients are reduced by each worker's own kernel in these traces: no communication.
COMMUNICATION = (*MESSAGES, *ACROSS_DP, EMBEDDING)
FIRST_FORWARD, FIRST_RECV = OPTYPES.index(COMPUTE[FORWARD]), OPTYPES.index(f"{FORWARD}-recv")

_Event = tuple[list[int], bool]
"""Operations that end together, after the last of them has started; whether on all data-parallel ranks."""


def pipeline_job(trace: PipelineTrace, meta: JobMeta) -> TimedJob:
    """The job of a trace.

    Raises ``TraceError`` where the trace and ``meta`` contradict each other, and where workers or steps
    differ in their operations.
    """
    notes = _check_layout(trace, meta)
    found = StepDependencies(trace)
    place = _place(trace, found)
    events = _events(found)
    start, end = trace.start_s[place], trace.end_s[place]
    began = start.min(axis=(0, 2))
    # What each operation takes by itself: communication from the last peer's start on.
    work = end - start
    for members, across_dp in events:
        if found.operations[members[0]].optype in COMMUNICATION:
            transfer = end[members] - _latest(start[members], across_dp)
            work[members] = np.where(transfer <= -WRONG_CLOCK_S, 0.0, transfer)
    # From the end of an operation's dependencies, or the start of the step, to its own start.
    delay = np.empty_like(start)
    for operation, before in enumerate(found.before):
        delay[operation] = start[operation] - (end[before].max(axis=0) if before else began[:, None])
    delay[delay <= -WRONG_CLOCK_S] = 0
    launched = np.array(found.launched)
    work[~launched] = delay[~launched] = 0
    of_row = np.empty(place.size, dtype=np.int64)  # the place of each row
    of_row[place] = np.arange(place.size).reshape(place.shape)
    optimizers = [each.number for each in found.operations if each.optype == OPTIMIZER]
    ends_step = optimizers or list(range(len(found.operations)))
    is_launched = np.repeat(launched, place[0].size)[of_row]
    operations = JobOperations(
        optypes=list(OPTYPES),
        optype=trace.optype,
        dp_rank=trace.dp_rank,
        stage=trace.stage,
        rank=trace.rank,
        step=trace.step,
        group=trace.optype + np.where(is_launched, 0, len(OPTYPES)),
        by_median=~np.isin(trace.optype, [OPTYPES.index(name) for name in BY_MEAN]),
        work_s=work.ravel()[of_row],
        delay_s=delay.ravel()[of_row],
        is_first=(trace.seq_id == 0)
        & (trace.optype == np.where(trace.stage == 0, FIRST_FORWARD, FIRST_RECV)),
    )
    step_s = partial(_step_s, place, found.before, events, ends_step)
    measured = end.max(axis=(0, 2)) - began
    return TimedJob(meta, operations, np.unique(trace.step).tolist(), measured, notes, step_s)


def _step_s(
    place: np.ndarray,
    before: list[list[int]],
    events: list[_Event],
    ends_step: list[int],
    work_s: np.ndarray,
    delay_s: np.ndarray | None,
) -> np.ndarray:
    """``TimedJob.step_s``. ``place`` int64[O, S, D]: the row of each of the graph's O operations, in each
    step and data-parallel rank; ``ends_step``: the operations that end a step."""
    work = work_s[place]
    delay = None if delay_s is None else delay_s[place]
    end = np.zeros((len(place) + 1, *place.shape[1:]))  # the last one stays 0: the start of the step
    for members, across_dp in events:
        starts = []
        for member in members:
            start = reduce(np.maximum, [end[earlier] for earlier in before[member] or [-1]])
            starts.append(start if delay is None else start + delay[member])
        latest = reduce(np.maximum, starts)
        if across_dp:
            latest = latest.max(axis=1, keepdims=True)
        for member in members:
            np.add(latest, work[member], out=end[member])
    times: np.ndarray = end[ends_step].max(axis=(0, 2))
    return times


def _latest(start: np.ndarray, across_dp: bool) -> np.ndarray:
    latest: np.ndarray = start.max(axis=0)
    return latest.max(axis=1, keepdims=True) if across_dp else latest


def _check_layout(trace: PipelineTrace, meta: JobMeta) -> list[str]:
    for name, column, field, size in (
        ("dp_rank", trace.dp_rank, "dp_size", meta.dp_size),
        ("stage", trace.stage, "pp_size", meta.pp_size),
    ):
        numbers = np.unique(column)
        if not np.array_equal(numbers, np.arange(size)):
            few = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
            raise TraceError(
                f"{trace.path}: {name} is {few} in the trace, but {field} of the job is {size}: give the "
                "YAML file of this trace"
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


def _place(trace: PipelineTrace, found: StepDependencies) -> np.ndarray:
    """The row of each operation in each step and data-parallel rank, which have each operation once."""
    key = np.stack([trace.optype, trace.stage, trace.seq_id, trace.step, trace.dp_rank])
    order = np.lexsort(key[::-1])
    steps, dp_ranks = np.unique(trace.step), np.unique(trace.dp_rank)
    same = (np.diff(key[:, order], axis=1) == 0).all(axis=0)
    if same.any():
        row = order[np.flatnonzero(same)[0]]
        raise TraceError(f"{trace.path}: {trace.describe(row)} is there twice: write the trace anew")
    # Of each step and data-parallel rank, in the order of type, stage and seq_id, the same operations.
    first = np.array([each.row for each in found.operations])
    by_type = np.lexsort(key[2::-1, first])
    shape = len(first), len(steps), len(dp_ranks)
    when_and_who = np.stack(np.meshgrid(steps, dp_ranks, indexing="ij")).reshape(2, -1)
    wanted = np.repeat(key[:3, first[by_type]], when_and_who.shape[1], axis=1)
    expected = np.concatenate([wanted, np.tile(when_and_who, len(first))])
    if not np.array_equal(key[:, order], expected):
        have, want = (set(map(tuple, each.T.tolist())) for each in (key, expected))
        optype, stage, seq_id, step, dp_rank = min(have ^ want)
        lacks = (optype, stage, seq_id, step, dp_rank) in want
        raise TraceError(
            f"{trace.path}: {OPTYPES[optype]} {seq_id} of step {step}, dp_rank {dp_rank}, stage {stage} "
            f"{'is missing' if lacks else 'has no peers'}: all steps and data-parallel ranks need the "
            "operations of the first"
        )
    place = np.empty(shape, dtype=np.int64)
    place[by_type] = order.reshape(shape)
    return place


def _events(found: StepDependencies) -> list[_Event]:
    """The events in an order in which dependencies come first."""
    paired = {index for members in found.peers for index in members}
    together = found.peers + [[index] for index in range(len(found.operations)) if index not in paired]
    event_of = {member: number for number, members in enumerate(together) for member in members}
    edges = [
        (event_of[earlier], event_of[operation])
        for operation, before in enumerate(found.before)
        for earlier in before
    ]
    source, target = np.array(edges).T
    order = topological_order(len(together), source, target)
    if len(order) < len(together):
        stuck = min(set(range(len(together))) - set(order))
        row = found.operations[together[stuck][0]].row
        raise TraceError(
            f"{found.trace.path}: {found.trace.describe(row)} waits for itself: its dependencies contradict "
            "the order of starts, write the trace anew"
        )
    return [(together[number], found.operations[together[number][0]].optype in ACROSS_DP) for number in order]
