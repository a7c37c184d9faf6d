"""The forward and backward passes of a rank, where each begins and ends, and their order in a pipeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.job.blocks import Blocks
from chakra_et.job.operators import Operators

_ONCE = re.compile(r"ProfilerStep#|c10d::(?!send|recv)")
"""What happens once per step, before its first pass."""


@dataclass(frozen=True)
class Segment:
    """A pass on its lane: rows ``begin`` to ``end``, of which ``first`` to ``last`` are in blocks."""

    begin: int
    first: int
    last: int
    end: int
    is_backward: bool
    micro_batch: int
    step: int


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """(is backward, micro-batch) of the passes of a stage in order: as many forward passes ahead as stages
    follow, then one of each in turn."""
    ahead = min(stages - stage - 1, micro_batches)
    order = [(False, at) for at in range(ahead)]
    for at in range(micro_batches - ahead):
        order += [(False, ahead + at), (True, at)]
    return order + [(True, at) for at in range(micro_batches - ahead, micro_batches)]


def segments_of(operators: Operators, blocks: Blocks, where: str) -> list[Segment]:
    """The passes of a rank, in the order in which they ran. Raises ``TraceError`` where they lie on several
    lanes or don't pair up."""
    rows = np.flatnonzero((blocks.group >= 0) & np.isin(operators.lane, list(operators.tops)))
    lanes = set(operators.lane[rows].tolist())
    if len(lanes) != 1:
        raise TraceError(
            f"{where}: its passes run on {len(lanes)} threads: --pp needs forward and backward passes of "
            "one thread"
        )
    lane = lanes.pop()
    spans: dict[int, tuple[int, int]] = {}
    for row in rows.tolist():
        group = int(blocks.group[row])
        begin, _ = spans.get(group, (row, row))
        spans[group] = begin, row
    order = sorted(spans, key=lambda group: spans[group][0])
    on_lane = np.flatnonzero(operators.lane == lane)
    found: list[Segment] = []
    step = 0
    counts: Counter[tuple[int, bool]] = Counter()
    cuts = [
        _cut(operators, on_lane, spans[a][1], spans[b][0]) for a, b in zip(order, order[1:], strict=False)
    ]
    for at, group in enumerate(order):
        first, last = spans[group]
        flag = blocks.is_backward[group]
        begin = cuts[at - 1][1] if at else first
        end = cuts[at][0] if at < len(cuts) else last + 1
        found.append(Segment(begin, first, last, end, flag, counts[step, flag], step))
        counts[step, flag] += 1
        if at < len(cuts) and cuts[at][2]:
            step += 1
    for number in range(step + 1):
        if counts[number, False] != counts[number, True]:
            raise TraceError(
                f"{where}: step {number} has {counts[number, False]} forward and {counts[number, True]} "
                "backward passes: --pp needs whole steps"
            )
    return found


def _cut(operators: Operators, on_lane: np.ndarray, last: int, first: int) -> tuple[int, int, bool]:
    """(end of the pass before, begin of the pass after, whether a step ends between): rows between two
    passes."""
    between = on_lane[(on_lane > last) & (on_lane < first)].tolist()
    phases = [operators.phase[row] for row in between]
    if "optimizer" in phases:
        marks = [
            row
            for row, phase in zip(between, phases, strict=True)
            if phase == "optimizer" or _ONCE.match(operators.name[row])
        ]
        return _before_messages(operators, between, last), marks[-1] + 1, True
    for row in between:
        if operators.name[row].startswith(("c10d::send", "c10d::recv")):
            return row, row, False
    for row, phase in zip(between, phases, strict=True):
        if phase == "backward" and operators.top[row] == row:
            return row, row, False
    return first, first, False


def _before_messages(operators: Operators, between: Sequence[int], last: int) -> int:
    """The end of a step's last pass: before its first collective or message, or the optimizer."""
    for row in between:
        if operators.name[row].startswith("c10d::") or operators.phase[row] == "optimizer":
            return row
    return last + 1
