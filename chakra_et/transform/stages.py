"""More pipeline stages: each captured stage is cut between its blocks into several.

A new stage has its part of the blocks of every pass, forward and backward; what comes before the first block
of the model (the embedding) stays with the first part, what comes after the last (the head, the loss) with
the last. The passes run in the order of 1F1B for the new number of stages, and between two stages there is a
message of the captured size for each pass.

Assumed, and said in the notes: the schedule 1F1B without chunks; a send doesn't hold its stage up; what
happens once per step (optimizer, collectives of gradients) follows the parameters of the part.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.job.blocks import Blocks, find_blocks
from chakra_et.job.gradients import Retime, elements, grown_reductions, sweeps_of
from chakra_et.job.mesh import Mesh, Place, ScaledGroups
from chakra_et.job.operators import Operators
from chakra_et.transform.changes import RankTraces
from chakra_et.transform.layers import parameter_factors, stage_blocks
from chakra_et.transform.rank_copies import names_in, relabelled
from chakra_et.transform.unroll import Draft, drafted, finished

_MESSAGES = (NodeType.COMM_SEND, NodeType.COMM_RECV)
_OF_MESSAGES = ("c10d::send", "c10d::recv")
_ONCE = re.compile(r"ProfilerStep#|c10d::(?!send|recv)")
"""What happens once per step, before its first pass."""
_BETWEEN = 1 << 30
"""The place in a step's schedule of what lies after all of its passes."""


def with_stages(ranks: RankTraces, stages: int) -> RankTraces:
    """The ranks with every captured stage cut into several. Raises ``TraceError``, naming what was looked
    for, where passes or blocks aren't recognised."""
    old, where = ranks.mesh, ranks.where
    parts, mesh = stages // old.pp, Mesh(old.tp, old.dp, stages)
    of_rank = ranks.operators()
    blocks = find_blocks(of_rank, where)
    held = stage_blocks(blocks, old, where)
    at_ends: set[str] = set()
    for trace in ranks.traces.values():
        table, index = texts(trace, "pg_name")
        at_ends |= {table[at] for at in index[(index >= 0) & _of_embedding(trace)].tolist()}
    groups = ScaledGroups(ranks.groups, old, mesh, at_ends=at_ends)
    traces: dict[int, ExecutionTrace] = {}
    origin: dict[int, int] = {}
    for rank, operators in of_rank.items():
        splitter = _Splitter(operators, blocks[rank], parts, f"{where}.{rank}")
        for at in range(parts):
            place = old.place(rank)._replace(stage=old.place(rank).stage * parts + at)
            own = mesh.rank(place)
            cut = splitter.made(at, place, mesh, ranks.retime)
            traces[own] = relabelled(cut, names_in(cut, groups, place), {}, mesh.ranks)
            origin[own] = ranks.origin[rank]
    note = (
        f"the {old.pp} captured pipeline stages of {', '.join(map(str, held))} repeated blocks became "
        f"{stages} of equal parts, which run 1F1B with a message of the captured size per pass and "
        "boundary; sends hold nobody up"
    )
    traces = dict(sorted(traces.items()))
    return ranks.with_traces(traces, note, mesh=mesh, groups=groups.all(), origin=origin)


def _of_embedding(trace: ExecutionTrace) -> np.ndarray:
    """bool[N]: collectives of the embedding's copies, which only the first and the last stage have."""
    table, index = texts(trace, "pg_description")
    return np.array([*("EMBEDDING" in text.upper() for text in table), False], bool)[index]


class _Splitter:
    """Cuts one captured rank into parts."""

    def __init__(self, operators: Operators, blocks: Blocks, parts: int, where: str):
        self.operators, self.blocks, self.where = operators, blocks, where
        if blocks.held % parts:
            raise TraceError(
                f"{where}: the {blocks.held} repeated blocks of its stage can't be cut into {parts} parts"
            )
        self.segments = segments_of(operators, blocks, where)
        self.main = int(operators.lane[self.segments[0].first])
        self.segment, self.part = self._of_rows(parts)
        self.sweeps = sweeps_of(operators, blocks)
        rows = [np.flatnonzero(operators.trace.types == kind) for kind in _MESSAGES]
        if not all(len(of_kind) for of_kind in rows):
            raise TraceError(f"{where}: has no messages between stages: --pp needs two stages or more")
        self.send, self.receive = (int(of_kind[0]) for of_kind in rows)

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
            of_block = np.where(place >= 0, block[np.maximum(place, 0)] // (self.blocks.held // parts), -1)
            early, late = (parts - 1, 0) if each.is_backward else (0, parts - 1)
            part[inside] = np.where(inside < each.first, early, np.where(inside > each.last, late, of_block))
        elsewhere = np.flatnonzero((operators.lane != self.main) & (operators.parent >= 0))
        segment[elsewhere] = segment[operators.parent[elsewhere]]
        part[elsewhere] = part[operators.parent[elsewhere]]
        tops = [row for rows in operators.tops.values() for row in rows]
        messages = [row for row in tops if operators.name[row].startswith(_OF_MESSAGES)]
        part[np.isin(operators.top, messages) | np.isin(operators.trace.types, _MESSAGES)] = -2
        return segment, part

    def made(self, at: int, place: Place, mesh: Mesh, retime: Retime) -> ExecutionTrace:
        """The rank of part ``at`` at ``place`` of the new mesh."""
        operators, trace, ratio = self.operators, self.operators.trace, 1.0
        if self.sweeps:  # the parameters of the rank and of the part
            whole = max(self.sweeps, key=lambda sweep: len(sweep.gradients)).gradients
            before = Counter(each.shape for each in whole)
            after = Counter(each.shape for each in whole if self.part[each.row] in (at, -1))
            ratio = elements(after) / elements(before)
            factors = parameter_factors(operators, self.blocks, before, after)
            trace = replace(trace, duration_micros=np.rint(trace.duration_micros * factors).astype(np.uint64))
        draft, when = drafted(trace), self._schedule(place.stage, mesh.pp)
        kept = (self.part == at) | (self.part == -1)
        if 0 < place.stage < mesh.pp - 1:
            kept &= ~_of_embedding(trace)
        for lane, rows in draft.lanes.items():
            draft.lanes[lane] = sorted((row for row in rows if kept[row]), key=lambda row: (when[row], row))
        draft.across = [
            (one, two) for one, two in draft.across if kept[one] and kept[two] and when[one] <= when[two]
        ]
        self._put_messages(draft, when, place, mesh)
        reduced = grown_reductions(operators, self.sweeps, lambda _: ratio)
        draft.sizes |= {row: size for row, size in reduced.items() if kept[row]}
        return finished(draft, self.where, retime)

    def _schedule(self, stage: int, stages: int) -> list[tuple[int, int]]:
        """(step, place in the step's new schedule) of each row."""
        of_segment: list[tuple[int, int]] = []
        begins: dict[int, int] = {}
        for each in self.segments:
            passes = sum(other.step == each.step and not other.is_backward for other in self.segments)
            order = one_f_one_b(stage, stages, passes)
            of_segment.append((each.step, order.index((each.is_backward, each.micro_batch))))
            begins[each.step] = min(begins.get(each.step, each.begin), each.begin)
        steps = np.searchsorted(list(begins.values()), np.arange(len(self.segment)), side="right") - 1
        return [
            of_segment[number] if number >= 0 else (step, _BETWEEN)
            for number, step in zip(self.segment.tolist(), steps.tolist(), strict=True)
        ]

    def _put_messages(self, draft: Draft, when: Sequence[tuple[int, int]], place: Place, mesh: Mesh) -> None:
        """Put the sends and receives in, between the ranks of the stages beside it."""
        own = mesh.rank(place)
        before_it, after_it = (
            mesh.rank(place._replace(stage=stage)) if 0 <= stage < mesh.pp else -1
            for stage in (place.stage - 1, place.stage + 1)
        )
        spans = {at: list(nodes) for at, nodes in itertools.groupby(draft.lanes[self.main], when.__getitem__)}
        previous = dict(zip(spans, [-1, *(nodes[-1] for nodes in spans.values())], strict=False))
        # In the order of the schedule, as a lane runs them one by one.
        for each in sorted(self.segments, key=lambda one: when[one.first]):
            nodes, before, backward = spans[when[each.first]], previous[when[each.first]], each.is_backward
            tag = 2 * (each.step << 12 | each.micro_batch) + backward
            source, target = (after_it, before_it) if backward else (before_it, after_it)
            if source >= 0:
                node = self._put(draft, self.receive, (source, own, tag))
                draft.across.append((node, nodes[0]))
                if before >= 0:
                    draft.across.append((before, node))
            if target >= 0:
                node = self._put(draft, self.send, (own, target, tag))
                draft.across.append((nodes[-1], node))

    def _put(self, draft: Draft, like: int, ends: tuple[int, int, int]) -> int:
        node = draft.add(like, len(draft.old))
        draft.lanes[int(self.operators.lane[like])].append(node)
        draft.ends[node] = ends
        return node


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
    groups, begins = np.unique(blocks.group[rows], return_index=True)
    order = groups[np.argsort(begins)].tolist()
    spans = {group: rows[blocks.group[rows] == group][[0, -1]].tolist() for group in order}
    on_lane = np.flatnonzero(operators.lane == lane)
    found: list[Segment] = []
    step = 0
    counts: Counter[tuple[int, bool]] = Counter()
    cuts = [_cut(operators, on_lane, spans[a][1], spans[b][0]) for a, b in itertools.pairwise(order)]
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
    """(end of the pass before, begin of the one after, whether a step ends between): rows between passes."""
    between = on_lane[(on_lane > last) & (on_lane < first)].tolist()
    phase, name = operators.phase, operators.name
    if any(phase[row] == "optimizer" for row in between):
        marks = [row for row in between if phase[row] == "optimizer" or _ONCE.match(name[row])]
        # The last pass ends before its first collective or message, or the optimizer.
        ends = (row for row in between if phase[row] == "optimizer" or name[row].startswith("c10d::"))
        return next(ends, last + 1), marks[-1] + 1, True
    messages = [row for row in between if name[row].startswith(_OF_MESSAGES)]
    backward = [row for row in between if phase[row] == "backward" and operators.top[row] == row]
    begin = [*messages, *backward, first][0]
    return begin, begin, False
