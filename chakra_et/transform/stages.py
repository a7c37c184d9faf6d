"""More pipeline stages: each captured stage is cut between its blocks into several.

A new stage has its part of the blocks of every pass, forward and backward; what comes before the first block
of the model (the embedding) stays with the first part, what comes after the last (the head, the loss) with
the last. The passes run in the order of 1F1B for the new number of stages, and between two stages there is a
message of the captured size for each pass.

Assumed, and said in the notes: the schedule 1F1B without chunks; a send doesn't hold its stage up; what
happens once per step (optimizer, collectives of gradients) follows the parameters of the part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import has, set_integers, texts
from chakra_et.job.blocks import Blocks
from chakra_et.job.gradients import Retime, elements, sweeps_of, whole_collectives
from chakra_et.job.operators import Operators, Shape
from chakra_et.job.passes import one_f_one_b, segments_of
from chakra_et.transform.layers import parameter_factors
from chakra_et.transform.unroll import Draft, Unrolled, drafted, finished

_MESSAGES = (NodeType.COMM_SEND, NodeType.COMM_RECV)
_BETWEEN = 1 << 30
"""The place in a step's schedule of what lies after all of its passes."""


@dataclass(frozen=True)
class Part:
    """Part ``at`` of ``parts`` of a captured stage, which is stage ``stage`` of ``stages``; ``before``,
    ``after``:
    the ranks of the stages beside it, ``own`` its own."""

    at: int
    parts: int
    stage: int
    stages: int
    own: int
    before: int
    after: int

    @property
    def is_edge(self) -> bool:
        return self.stage in (0, self.stages - 1)


class Splitter:
    """Cuts one captured rank into parts."""

    def __init__(self, operators: Operators, blocks: Blocks, parts: int, where: str):
        self.operators, self.blocks, self.where = operators, blocks, where
        if blocks.held % parts:
            raise TraceError(
                f"{where}: its stage has {blocks.held} repeated blocks, which {parts} parts can't share"
            )
        self.each = blocks.held // parts
        self.segments = segments_of(operators, blocks, where)
        self.main = int(operators.lane[self.segments[0].first])
        self.segment, self.part = self._of_rows(parts)
        trace = operators.trace
        self.template = {
            kind: next(iter(np.flatnonzero(trace.types == kind).tolist()), -1) for kind in _MESSAGES
        }
        if min(self.template.values()) < 0:
            raise TraceError(
                f"{where}: has no sends and receives between stages: --pp needs two stages or more"
            )

    def _of_rows(self, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each row its segment, -1 for none, and the part that it belongs to, -1 for all, -2 for none."""
        operators, count = self.operators, len(self.operators.trace)
        segment, part = np.full(count, -1), np.full(count, -1)
        rows = np.flatnonzero(operators.lane == self.main)
        for number, each in enumerate(self.segments):
            inside = rows[(rows >= each.begin) & (rows < each.end)]
            segment[inside] = number
            block = self.blocks.block[inside]
            place = np.maximum.accumulate(np.where(block >= 0, np.arange(len(inside)), -1))
            of_block = np.where(place >= 0, block[np.maximum(place, 0)] // self.each, -1)
            early, late = (parts - 1, 0) if each.is_backward else (0, parts - 1)
            part[inside] = np.where(inside < each.first, early, np.where(inside > each.last, late, of_block))
        elsewhere = np.flatnonzero((operators.lane != self.main) & (operators.parent >= 0))
        segment[elsewhere] = segment[operators.parent[elsewhere]]
        part[elsewhere] = part[operators.parent[elsewhere]]
        name = operators.name
        messages = {
            row
            for rows in operators.tops.values()
            for row in rows
            if name[row].startswith(("c10d::send", "c10d::recv"))
        }
        part[np.isin(operators.top, list(messages)) | np.isin(operators.trace.types, _MESSAGES)] = -2
        return segment, part

    def made(self, part: Part, retime: Retime) -> Unrolled:
        """The rank of the part."""
        operators, trace = self.operators, self.operators.trace
        before, after, ratio = self._parameters(part)
        factors = parameter_factors(operators, self.blocks, before, after) if before else np.ones(len(trace))
        trace = replace(trace, duration_micros=np.rint(trace.duration_micros * factors).astype(np.uint64))
        nothing = np.full(len(trace), -1)
        blocks = Blocks(nothing, nothing, [], 0, "")
        draft = drafted(trace, blocks, [])
        place = self._places(part)
        kept = ((self.part == part.at) | (self.part == -1)) & ~self._foreign(part)
        for lane, rows in draft.lanes.items():
            draft.lanes[lane] = sorted((row for row in rows if kept[row]), key=lambda row: (place[row], row))
        draft.across = [
            (one, two) for one, two in draft.across if kept[one] and kept[two] and place[one] <= place[two]
        ]
        ends = self._messages(draft, part, place)
        self._resize(draft, ratio, retime, kept)
        return self._named(finished(draft, trace, blocks, self.where), ends)

    def _parameters(self, part: Part) -> tuple[Counter[Shape], Counter[Shape], float]:
        """Shapes of the parameters of the rank and of the part, and the part's share of elements."""
        sweeps = sweeps_of(self.operators, self.blocks)
        if not sweeps:
            return Counter(), Counter(), 1.0
        whole = max(sweeps, key=lambda sweep: len(sweep.gradients)).gradients
        before = Counter(each.shape for each in whole)
        after = Counter(each.shape for each in whole if self.part[each.row] in (part.at, -1))
        return before, after, elements(after) / elements(before)

    def _places(self, part: Part) -> list[tuple[int, int]]:
        """(step, place in the step's new schedule) of each row."""
        steps = 1 + max(each.step for each in self.segments)
        of_segment: list[tuple[int, int]] = []
        for each in self.segments:
            passes = sum(other.step == each.step and not other.is_backward for other in self.segments)
            order = one_f_one_b(part.stage, part.stages, passes)
            of_segment.append((each.step, order.index((each.is_backward, each.micro_batch))))
        begins = np.array(
            [min(each.begin for each in self.segments if each.step == step) for step in range(steps)]
        )
        found = []
        for row, number in enumerate(self.segment.tolist()):
            if number >= 0:
                found.append(of_segment[number])
            else:
                found.append((int(np.searchsorted(begins, row, side="right")) - 1, _BETWEEN))
        return found

    def _foreign(self, part: Part) -> np.ndarray:
        """Collectives of the embedding's copies, which only the first and the last stage have."""
        table, index = texts(self.operators.trace, "pg_description")
        embedding: np.ndarray = np.array(
            [*("EMBEDDING" in text.upper() for text in table), False], dtype=bool
        )[index]
        return np.zeros(len(embedding), dtype=bool) if part.is_edge else embedding

    def _messages(
        self, draft: Draft, part: Part, place: Sequence[tuple[int, int]]
    ) -> dict[int, tuple[int, int, int]]:
        """Put the sends and receives in; returns node → (source, target, tag)."""
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        previous: dict[tuple[int, int], int] = {}
        before = -1
        for node in draft.lanes[self.main]:
            key = place[node]
            if key not in first:
                first[key], previous[key] = node, before
            last[key] = before = node
        ends: dict[int, tuple[int, int, int]] = {}
        # In the order of the schedule, as a lane runs them one by one.
        for each in sorted(self.segments, key=lambda one: place[one.first]):
            key, backward = place[each.first], each.is_backward
            tag = 2 * (each.step << 12 | each.micro_batch) + backward
            source, target = (part.after, part.before) if backward else (part.before, part.after)
            if source >= 0:
                node = self._add(draft, NodeType.COMM_RECV)
                ends[node] = source, part.own, tag
                draft.across.append((node, first[key]))
                if previous[key] >= 0:
                    draft.across.append((previous[key], node))
            if target >= 0:
                node = self._add(draft, NodeType.COMM_SEND)
                ends[node] = part.own, target, tag
                draft.across.append((last[key], node))
        return ends

    def _add(self, draft: Draft, kind: NodeType) -> int:
        row, node = self.template[kind], len(draft.old)
        draft.old.append(row)
        draft.copy.append(node)
        draft.lanes[int(self.operators.lane[row])].append(node)
        return node

    def _resize(self, draft: Draft, ratio: float, retime: Retime, kept: np.ndarray) -> None:
        """Collectives of gradients follow the elements."""
        operators, trace = self.operators, self.operators.trace
        sweeps = sweeps_of(operators, self.blocks)
        if not sweeps or ratio == 1:
            return
        rows = {collective for sweep in sweeps for collective, _ in sweep.launches}
        held = max(sum(each.bytes for each in sweep.gradients) for sweep in sweeps) // 4
        rows |= set(whole_collectives(operators, rows, held))
        sizes, kinds = trace.column("comm_size"), trace.column("comm_type", -1)
        table, index = texts(trace, "pg_name")
        for row in rows:
            if kept[row]:
                size = max(round(int(sizes[row]) * ratio), 1)
                group = table[index[row]] if index[row] >= 0 else ""
                micros = retime(
                    CollectiveType(int(kinds[row])),
                    int(sizes[row]),
                    size,
                    group,
                    float(trace.duration_micros[row]),
                )
                draft.sizes[row], draft.micros[row] = size, max(round(micros), 1)

    def _named(self, made: Unrolled, ends: Mapping[int, tuple[int, int, int]]) -> Unrolled:
        """The trace with the ends and tags of its new messages."""
        trace = made.trace
        place = {int(node): at for at, node in enumerate(made.node.tolist())}
        for at, name in enumerate(("comm_src", "comm_dst", "comm_tag")):
            values, present = trace.column(name, -1), has(trace, name)
            for node, end in ends.items():
                values[place[node]], present[place[node]] = end[at], True
            trace = set_integers(trace, name, "int32", values, present)
        return replace(made, trace=trace)
