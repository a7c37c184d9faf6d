"""The dependencies of a pipeline-parallel job: what each operation of a trace waits for.

The model is that of the paper's artifact (ByteDance-Seed/StragglerAnalysis, commit 8efcd7f): the operations
of the first step and the first data-parallel rank, in the order in which they started, give the dependencies
of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.stragglers.parquet import (
    ALL_GATHER,
    BACKWARD,
    CLIP,
    COMPUTE,
    EMBEDDING,
    FORWARD,
    GC,
    LAYERNORM,
    MESSAGES,
    OPTIMIZER,
    OPTYPES,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
    PipelineTrace,
)

# Clocks of two workers may differ by this much.
CLOCK_S = 5e-5
# Communication of which the data-parallel ranks are peers.
ACROSS_DP = (ALL_GATHER, REDUCE_SCATTER, SEPARATE_ALL_REDUCE, CLIP)
# (direction, side) → how many stages and model chunks further the peer is.
_STEPS_TO_PEER = {(FORWARD, "send"): 1, (FORWARD, "recv"): -1, (BACKWARD, "send"): -1, (BACKWARD, "recv"): 1}


@dataclass(frozen=True)
class Operation:
    """One operation of the first step and data-parallel rank; ``index``: its place in ``PipelineEdges``."""

    index: int
    row: int
    optype: str
    stage: int
    seq_id: int
    start_s: float
    end_s: float
    mc: int
    gmc: int


@dataclass
class PipelineEdges:
    """``before[i]``: what ends before operation i starts.

    ``peers``: lists of operations that communicate with each other, and so end together; an operation in none
    of them has peers only in other data-parallel ranks, or none. ``launched[i]``: False for a message that
    was recorded though it had no peer, which takes no time and delays nothing.
    """

    operations: list[Operation]
    before: list[list[int]]
    peers: list[list[int]]
    launched: list[bool]

    def add(self, operation: Operation, *earlier: Operation) -> None:
        self.before[operation.index] += [other.index for other in earlier]

    def chain(self, operations: Sequence[Operation], *first: Operation) -> None:
        """Each operation waits for the one before it, and the first one for ``first``."""
        for operation in operations:
            self.add(operation, *first)
            first = (operation,)


@dataclass
class Stage:
    """The operations of one stage by type, each type in the order of start; ``compute`` both directions."""

    number: int
    of_type: dict[str, list[Operation]]
    compute: list[Operation]

    def sorted(self, *optypes: str) -> list[Operation]:
        return sorted((each for name in optypes for each in self.of_type[name]), key=_by_start)


def find_dependencies(trace: PipelineTrace) -> PipelineEdges:
    """The dependencies within one step of one data-parallel rank.

    Raises ``TraceError`` for an operation without its peers, and for stages without computation.
    """
    stages = _stages(trace)
    operations = sorted(
        (each for stage in stages for same in stage.of_type.values() for each in same), key=lambda o: o.index
    )
    found = PipelineEdges(
        operations, [[] for _ in operations], [], [each.optype not in MESSAGES for each in operations]
    )
    launched: dict[tuple[int, str], list[Operation]] = {}
    for stage in stages:
        found.chain(stage.compute)
        for optype in MESSAGES:
            messages = _tie_messages(trace, found, stage, optype, len(stages))
            found.chain(messages)
            launched[stage.number, optype] = messages
            for message in messages:
                found.launched[message.index] = True
        _tie_first_backward(found, stage, launched)
        _tie_data_parallel(found, stage)
        _tie_end_of_step(found, stage)
    found.peers += _message_peers(trace, launched, len(stages))
    for optype in (EMBEDDING, CLIP):
        found.peers += _stage_peers(trace, stages, optype)
    return found


def _by_start(operation: Operation) -> tuple[float, int, str]:
    return operation.start_s, operation.seq_id, operation.optype


def _stages(trace: PipelineTrace) -> list[Stage]:
    rows = np.flatnonzero((trace.dp_rank == trace.dp_rank.min()) & (trace.step == trace.step.min()))
    end_s = trace.end_s
    stages = [Stage(number, defaultdict(list), []) for number in range(int(trace.stage.max()) + 1)]
    for index, row in enumerate(rows.tolist()):
        operation = Operation(
            index,
            row,
            OPTYPES[trace.optype[row]],
            *(int(column[row]) for column in (trace.stage, trace.seq_id)),
            *(float(column[row]) for column in (trace.start_s, end_s)),
            *(int(column[row]) for column in (trace.mc, trace.gmc)),
        )
        stages[operation.stage].of_type[operation.optype].append(operation)
    for stage in stages:
        for same in stage.of_type.values():
            same.sort(key=_by_start)
        stage.compute = stage.sorted(*COMPUTE.values())
        for optype in COMPUTE.values():
            if not stage.of_type[optype]:
                raise TraceError(
                    f"{trace.path}: stage {stage.number} has no {optype} in step {trace.step.min()}: give "
                    "the whole step of every stage"
                )
    return stages


def _tie_messages(
    trace: PipelineTrace, found: PipelineEdges, stage: Stage, optype: str, pp: int
) -> list[Operation]:
    """Tie the launched messages of one stream to the compute that they feed or follow; returns them in order.

    Recorded without being launched are receives that start after the last compute, sends that end before the
    first, and messages to or from outside the model: before its first chunk and after its last.
    """
    direction, side = optype.split("-")
    compute = sorted(stage.of_type[COMPUTE[direction]], key=lambda operation: operation.seq_id)
    if side == "recv":
        last_start = max(each.start_s for each in compute)
        kept = [each for each in stage.of_type[optype] if each.start_s <= last_start + CLOCK_S]
    else:
        first_end = min(each.end_s for each in compute)
        kept = [each for each in stage.of_type[optype] if each.end_s >= first_end - CLOCK_S]
    missing = len(compute) - len(kept)
    at_end = stage.number in (0, pp - 1)
    if missing and not (at_end and (not kept or missing == 1)):
        raise TraceError(
            f"{trace.path}: stage {stage.number} has {len(kept)} {optype} for {len(compute)} "
            f"{COMPUTE[direction]} in step {trace.step.min()}: give the whole step of every stage"
        )
    # The first compute of the model's end stage receives nothing, which may not be recorded at all.
    skipped = 1 if missing == 1 and side == "recv" and kept else 0
    launched = []
    chunks = pp * max(int(trace.mc.max()) + 1, 1)
    for message, at in zip(kept, range(skipped, len(compute)), strict=False):
        if not 0 <= compute[at].gmc + _STEPS_TO_PEER[direction, side] < chunks:
            continue
        launched.append(message)
        if side == "send":
            found.add(message, compute[at])
        else:
            found.add(compute[at], message)
            if at:
                found.add(message, compute[at - 1])
    return launched


def _tie_first_backward(
    found: PipelineEdges, stage: Stage, launched: dict[tuple[int, str], list[Operation]]
) -> None:
    """The first messages of the backward pass wait for the last forward but one before it."""
    directions = [each.optype for each in stage.compute]
    first = directions.index(COMPUTE[BACKWARD])
    if first >= 2:
        for side in ("recv", "send"):
            for message in launched[stage.number, f"{BACKWARD}-{side}"][:1]:
                found.add(message, stage.compute[first - 2])


def _tie_data_parallel(found: PipelineEdges, stage: Stage) -> None:
    """A chunk's first forward waits for its last all-gather; with overlap its first reduce-scatter waits for
    its last backward."""
    found.chain(stage.sorted(ALL_GATHER, REDUCE_SCATTER))
    last_gather = {gather.mc: gather for gather in stage.of_type[ALL_GATHER]}
    for chunk, gather in last_gather.items():
        forward = [each for each in stage.of_type[COMPUTE[FORWARD]] if each.mc == chunk]
        if forward:
            found.add(forward[0], gather)
    if stage.of_type[SEPARATE_ALL_REDUCE]:
        first_scatter = {scatter.mc: scatter for scatter in reversed(stage.of_type[REDUCE_SCATTER])}
        for chunk, scatter in first_scatter.items():
            backward = [each for each in stage.of_type[COMPUTE[BACKWARD]] if each.mc == chunk]
            if backward:
                found.add(scatter, max(backward, key=lambda each: each.end_s))


def _tie_end_of_step(found: PipelineEdges, stage: Stage) -> None:
    """What follows the last compute, one after the other; types that were not recorded are left out."""
    last = max(stage.compute, key=lambda each: each.end_s)
    overlapped = bool(stage.of_type[SEPARATE_ALL_REDUCE])
    reduction = SEPARATE_ALL_REDUCE if overlapped else REDUCE_SCATTER
    order = (GC, LAYERNORM, EMBEDDING, reduction, CLIP, OPTIMIZER)
    found.chain([each for optype in order for each in stage.of_type[optype]], last)


def _message_peers(
    trace: PipelineTrace, launched: dict[tuple[int, str], list[Operation]], pp: int
) -> list[list[int]]:
    """The k-th launched send with the k-th launched receive of the neighbour."""
    peers = []
    for stage in range(pp):
        for direction in (FORWARD, BACKWARD):
            neighbour = (stage + _STEPS_TO_PEER[direction, "send"]) % pp
            sends, receives = launched[stage, f"{direction}-send"], launched[neighbour, f"{direction}-recv"]
            if len(sends) != len(receives):
                raise TraceError(
                    f"{trace.path}: stage {stage} has {len(sends)} {direction}-send for {len(receives)} "
                    f"{direction}-recv of stage {neighbour} in step {trace.step.min()}: give the whole step "
                    "of every stage"
                )
            peers += [[send.index, receive.index] for send, receive in zip(sends, receives, strict=True)]
    return peers


def _stage_peers(trace: PipelineTrace, stages: list[Stage], optype: str) -> list[list[int]]:
    """The operations ``optype`` of all stages that take part, by their order in the stage."""
    members = [stage for stage in stages if stage.of_type[optype]]
    expected = stages if optype == CLIP else [stages[0], *stages[1:][-1:]]
    absent = [stage.number for stage in expected if not stage.of_type[optype]]
    if members and absent:
        raise TraceError(
            f"{trace.path}: stage {absent[0]} has no {optype} in step {trace.step.min()}, but stage "
            f"{members[0].number} has: give the whole step of every stage"
        )
    columns = [stage.of_type[optype] for stage in members]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{len(stage.of_type[optype])} in stage {stage.number}" for stage in members)
        raise TraceError(
            f"{trace.path}: the stages have different numbers of {optype} ({counts}): give the whole step of "
            "every stage"
        )
    return [[each.index for each in together] for together in zip(*columns, strict=True)]
