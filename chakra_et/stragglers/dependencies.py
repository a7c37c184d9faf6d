"""The dependencies of a pipeline-parallel job: what each operation of a trace waits for.

The model is that of the paper's artifact (ByteDance-Seed/StragglerAnalysis, commit 8efcd7f): the operations
of the first step and the first data-parallel rank, in the order in which they started, give the dependencies
of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
# (direction, side) → how many stages and model chunks further the peer is.
_STEPS_TO_PEER = {(FORWARD, "send"): 1, (FORWARD, "recv"): -1, (BACKWARD, "send"): -1, (BACKWARD, "recv"): 1}


class Operation(NamedTuple):
    """One operation of the first step and data-parallel rank. ``number``: its place in the dependencies."""

    start_s: float
    seq_id: int
    optype: str
    end_s: float
    mc: int
    gmc: int
    stage: int
    row: int
    number: int


@dataclass
class Stage:
    """The operations of one stage by type, each type in the order of start; ``compute`` both directions."""

    number: int
    of_type: dict[str, list[Operation]]
    compute: list[Operation]


class StepDependencies:
    """The dependencies within one step of one data-parallel rank. ``before[i]``: what ends before operation i
    starts.

    ``peers``: lists of operations that communicate with each other, and so end together; an operation in none
    of them has peers only in other data-parallel ranks, or none. ``launched[i]``: False for a message that
    was recorded though it had no peer, which takes no time and delays nothing.

    Raises ``TraceError`` for an operation without its peers, and for stages without computation.
    """

    def __init__(self, trace: PipelineTrace) -> None:
        self.trace = trace
        rows = np.flatnonzero((trace.dp_rank == trace.dp_rank.min()) & (trace.step == trace.step.min()))
        names = [OPTYPES[kind] for kind in trace.optype[rows].tolist()]
        columns = (trace.start_s, trace.seq_id, trace.end_s, trace.mc, trace.gmc, trace.stage)
        start, seq_id, *others = (column[rows].tolist() for column in columns)
        values = zip(start, seq_id, names, *others, rows.tolist(), range(len(rows)), strict=True)
        self.operations = [Operation(*each) for each in values]
        self.before: list[list[int]] = [[] for _ in rows]
        self.peers: list[list[int]] = []
        self.launched = [name not in MESSAGES for name in names]
        self.stages = self._stages()
        messages: dict[tuple[int, str], list[Operation]] = {}
        for stage in self.stages:
            self._chain(stage.compute)
            for optype in MESSAGES:
                launched = messages[stage.number, optype] = self._tie_messages(stage, optype)
                self._chain(launched)
                for message in launched:
                    self.launched[message.number] = True
            # The first messages of the backward pass wait for the last forward but one before it.
            first = [each.optype for each in stage.compute].index(COMPUTE[BACKWARD])
            for side in ("recv", "send") if first >= 2 else ():
                for message in messages[stage.number, f"{BACKWARD}-{side}"][:1]:
                    self._add(message, stage.compute[first - 2])
            self._tie_data_parallel(stage)
            # What follows the last compute, one after the other; types that were not recorded are left out.
            overlapped = bool(stage.of_type[SEPARATE_ALL_REDUCE])
            reduction = SEPARATE_ALL_REDUCE if overlapped else REDUCE_SCATTER
            order = (GC, LAYERNORM, EMBEDDING, reduction, CLIP, OPTIMIZER)
            last = max(stage.compute, key=lambda each: each.end_s)
            self._chain([each for optype in order for each in stage.of_type[optype]], last)
        self._pair_messages(messages)
        for optype in (EMBEDDING, CLIP):
            self._join_stages(optype)

    def _error(self, message: str) -> TraceError:
        return TraceError(f"{self.trace.path}: {message}: give the whole step of every stage")

    def _add(self, operation: Operation, *earlier: Operation) -> None:
        self.before[operation.number] += [other.number for other in earlier]

    def _chain(self, operations: Sequence[Operation], *first: Operation) -> None:
        """Each operation waits for the one before it, and the first one for ``first``."""
        for operation in operations:
            self._add(operation, *first)
            first = (operation,)

    def _stages(self) -> list[Stage]:
        stages = [Stage(number, defaultdict(list), []) for number in range(int(self.trace.stage.max()) + 1)]
        for operation in sorted(self.operations):
            stage = stages[operation.stage]
            stage.of_type[operation.optype].append(operation)
            if operation.optype in COMPUTE.values():
                stage.compute.append(operation)
        for stage in stages:
            for optype in COMPUTE.values():
                if not stage.of_type[optype]:
                    raise self._error(f"stage {stage.number} has no {optype} in step {self.trace.step.min()}")
        return stages

    def _tie_messages(self, stage: Stage, optype: str) -> list[Operation]:
        """Tie the launched messages of one stream to the compute that they feed or follow; returns them in
        order.

        Recorded without being launched are receives that start after the last compute, sends that end before
        the first, and messages to or from outside the model: before its first chunk and after its last.
        """
        direction, side = optype.split("-")
        pp = len(self.stages)
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
            raise self._error(
                f"stage {stage.number} has {len(kept)} {optype} for {len(compute)} {COMPUTE[direction]} in "
                f"step {self.trace.step.min()}"
            )
        # The first compute of the model's end stage receives nothing, which may not be recorded at all.
        skipped = 1 if missing == 1 and side == "recv" and kept else 0
        launched = []
        chunks = pp * max(int(self.trace.mc.max()) + 1, 1)
        for message, at in zip(kept, range(skipped, len(compute)), strict=False):
            if not 0 <= compute[at].gmc + _STEPS_TO_PEER[direction, side] < chunks:
                continue
            launched.append(message)
            if side == "send":
                self._add(message, compute[at])
            else:
                self._add(compute[at], message)
                self._add(message, *compute[max(at - 1, 0) : at])
        return launched

    def _tie_data_parallel(self, stage: Stage) -> None:
        """A chunk's first forward waits for its last all-gather; with overlap its first reduce-scatter waits
        for its last backward."""
        gathers, scatters = stage.of_type[ALL_GATHER], stage.of_type[REDUCE_SCATTER]
        self._chain(sorted(gathers + scatters))
        for chunk, gather in {gather.mc: gather for gather in gathers}.items():
            forward = [each for each in stage.of_type[COMPUTE[FORWARD]] if each.mc == chunk]
            for first in forward[:1]:
                self._add(first, gather)
        if stage.of_type[SEPARATE_ALL_REDUCE]:
            for chunk, scatter in {scatter.mc: scatter for scatter in reversed(scatters)}.items():
                backward = [each for each in stage.of_type[COMPUTE[BACKWARD]] if each.mc == chunk]
                if backward:
                    self._add(scatter, max(backward, key=lambda each: each.end_s))

    def _pair_messages(self, launched: dict[tuple[int, str], list[Operation]]) -> None:
        """The k-th launched send meets the k-th launched receive of the neighbour."""
        for stage in range(len(self.stages)):
            for direction in (FORWARD, BACKWARD):
                neighbour = (stage + _STEPS_TO_PEER[direction, "send"]) % len(self.stages)
                sends = launched[stage, f"{direction}-send"]
                receives = launched[neighbour, f"{direction}-recv"]
                if len(sends) != len(receives):
                    raise self._error(
                        f"stage {stage} has {len(sends)} {direction}-send for {len(receives)} "
                        f"{direction}-recv of stage {neighbour} in step {self.trace.step.min()}"
                    )
                self.peers += [
                    [send.number, receive.number] for send, receive in zip(sends, receives, strict=True)
                ]

    def _join_stages(self, optype: str) -> None:
        """The operations ``optype`` of all stages that take part meet, by their order in the stage."""
        members = [stage for stage in self.stages if stage.of_type[optype]]
        expected = self.stages if optype == CLIP else [self.stages[0], *self.stages[1:][-1:]]
        absent = [stage.number for stage in expected if not stage.of_type[optype]]
        if members and absent:
            raise self._error(
                f"stage {absent[0]} has no {optype} in step {self.trace.step.min()}, but stage "
                f"{members[0].number} has"
            )
        columns = [stage.of_type[optype] for stage in members]
        if len({len(column) for column in columns}) > 1:
            counts = ", ".join(f"{len(stage.of_type[optype])} in stage {stage.number}" for stage in members)
            raise self._error(f"the stages have different numbers of {optype} ({counts})")
        self.peers += [[each.number for each in together] for together in zip(*columns, strict=True)]
