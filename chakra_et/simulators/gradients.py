"""The gradients of captured backward passes, and the collectives that reduce them, in buckets.

PyTorch's DistributedDataParallel closes a bucket once it holds as many bytes as its limit: 1 MiB for the
first, ``bucket_cap_mb`` (25) for the others, in the order in which gradients become ready (torch,
reducer.cpp: compute_bucket_assignment_by_size).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.simulators.blocks import Blocks
from chakra_et.simulators.edit import texts
from chakra_et.simulators.operators import ENGINE, GRADIENT, Operators, Shape
from chakra_et.simulators.unroll import Draft

FIRST_MIB, MOST_MIB = 1, 1024
NEAR = 0.02
"""Bytes that differ by less than this part are the same gradients."""
Retime = Callable[[CollectiveType, int, int, str, float], float]
"""(kind, bytes before, bytes after, group, µs before) → µs after."""


@dataclass(frozen=True)
class Gradient:
    """``row``: where it is accumulated; ``block``: that of its parameter, -1 for none."""

    row: int
    shape: Shape
    bytes: int
    block: int


@dataclass(frozen=True)
class Sweep:
    """One backward pass on a lane: gradients in order, and ``launches``: (row of the collective, row of its
    launch)."""

    lane: int
    gradients: list[Gradient]
    launches: list[tuple[int, int]]


@dataclass(frozen=True)
class Parameters:
    """How many parameters there are of each shape, outside of blocks and in each block."""

    outside: Counter[Shape]
    of_block: list[Counter[Shape]]

    def count(self, copies: Sequence[int]) -> Counter[Shape]:
        found = Counter(self.outside)
        for block, times in zip(self.of_block, copies, strict=True):
            for shape, number in block.items():
                found[shape] += number * times
        return found


def elements(counted: Counter[Shape]) -> int:
    return sum(number * math.prod(shape) for shape, number in counted.items())


def bucket_sizes(sizes: Sequence[int], limit: int, first: int = FIRST_MIB << 20) -> list[list[int]]:
    """The buckets of gradients of these bytes, in order, as lists of their places."""
    buckets: list[list[int]] = [[]]
    held = 0
    for place, size in enumerate(sizes):
        buckets[-1].append(place)
        held += size
        if held >= (first if len(buckets) == 1 else limit):
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def sweeps_of(operators: Operators, blocks: Blocks | None) -> list[Sweep]:
    """The backward passes of a rank: from each jump of the autograd numbers upwards to the next."""
    launches = _launches(operators)
    # What a stage received is a leaf too, and its gradient is sent back.
    receives = np.flatnonzero(operators.trace.types == NodeType.COMM_RECV).tolist()
    received = {shape for row in receives for shape in operators.shapes(row) if len(shape) > 2}
    gradients = {
        row
        for row in range(len(operators.name))
        if operators.name[row] == GRADIENT and not received.intersection(operators.shapes(row)[:1])
    }
    found: list[Sweep] = []
    for lane, tops in operators.tops.items():
        inside: dict[int, list[int]] = {}
        for row in sorted(gradients | set(launches)):
            top = int(operators.top[row])
            if operators.lane[row] == lane and top >= 0:
                inside.setdefault(top, []).append(row)
        last = -1
        for top in tops:
            if not operators.name[top].startswith(ENGINE):
                continue
            number = operators.sequence.get(top, -1)
            if number >= 0:
                if number > last or last < 0:
                    found.append(Sweep(lane, [], []))
                last = number
            for row in inside.get(top, ()) if found else ():
                if row in gradients and operators.trace.column("segment")[row] == 0:
                    found[-1].gradients.append(_gradient(operators, blocks, row))
                elif row in launches and operators.name[top].endswith(GRADIENT):
                    found[-1].launches.append((launches[row], row))
    return [sweep for sweep in found if sweep.gradients]


def _gradient(operators: Operators, blocks: Blocks | None, row: int) -> Gradient:
    shape = next(iter(operators.shapes(row)), ())
    size = int(np.prod(shape)) * operators.item(row)
    return Gradient(row, shape, size, -1 if blocks is None else int(blocks.block[row]))


def _launches(operators: Operators) -> dict[int, int]:
    """Row of the launching operator → row of the collective, for those that run on a lane of their own."""
    kinds = operators.trace.types == NodeType.COMM_COLL
    return {int(operators.parent[row]): int(row) for row in np.flatnonzero(kinds & (operators.parent >= 0))}


def whole_collectives(operators: Operators, known: Collection[int], held: int) -> Iterator[int]:
    """Rows of collectives, but for those in ``known``, that have the bytes of all ``held`` elements."""
    trace = operators.trace
    sizes = trace.column("comm_size")
    for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
        each = int(sizes[row]) / max(held, 1)
        if row not in known and any(abs(each - item) <= NEAR * item for item in (2, 4)):
            yield row


def parameters_of(sweeps: Sequence[Sweep], held: int) -> Parameters:
    """From the backward pass with the most gradients."""
    whole = max(sweeps, key=lambda sweep: len(sweep.gradients))
    outside: Counter[Shape] = Counter()
    of_block: list[Counter[Shape]] = [Counter() for _ in range(held)]
    for gradient in whole.gradients:
        (outside if gradient.block < 0 else of_block[gradient.block])[gradient.shape] += 1
    return Parameters(outside, of_block)


def launch_tree(operators: Operators, sweep: Sweep) -> list[set[int]]:
    """For each launch its rows: the operator with all in it, and the collective."""
    trees = []
    for collective, launch in sweep.launches:
        rows, last = {launch, collective}, launch
        record = operators.trace.column("rf_id", -1)
        same = record[launch] > 0
        for row in range(launch + 1, min(launch + 64, len(operators.trace))):
            inner = int(operators.parent[row]) in rows and operators.lane[row] == sweep.lane
            further = same and record[row] == record[launch] and operators.lane[row] == sweep.lane
            if (inner or further) and operators.parent[row] >= 0:
                rows.add(row)
                last = row
            elif row > last + 8:
                break
        trees.append(rows)
    return trees


class Buckets:
    """The collectives of gradients in a draft whose blocks run more or fewer times."""

    def __init__(self, operators: Operators, draft: Draft, retime: Retime):
        self.operators, self.draft, self.retime = operators, draft, retime
        trace = operators.trace
        self.sizes = trace.column("comm_size")
        self.kinds = trace.column("comm_type", -1)
        self.groups, self.group_of = texts(trace, "pg_name")
        self.as_ddp = self.as_bytes = 0
        self.made: list[int] = []

    def set_size(self, node: int, size: int) -> None:
        """Give a collective other bytes, and the time that they take."""
        row = self.draft.old[node]
        before, kind = int(self.sizes[row]), int(self.kinds[row])
        if size == before or before <= 0 or kind not in set(CollectiveType):
            return
        group = self.groups[self.group_of[row]] if self.group_of[row] >= 0 else ""
        micros = float(self.operators.trace.duration_micros[row])
        self.draft.sizes[node] = size
        self.draft.micros[node] = max(
            round(self.retime(CollectiveType(kind), before, size, group, micros)), 1
        )

    def reduce(self, sweep: Sweep) -> None:
        """Give the collectives of a sweep the gradients that there are now: more buckets where it was DDP's
        rule that made them, else more bytes."""
        if not sweep.launches:
            return
        rows = {gradient.row: gradient for gradient in sweep.gradients}
        launched = {launch: collective for collective, launch in sweep.launches}
        nodes = self.draft.lanes[sweep.lane]
        events = [
            (place, node)
            for place, node in enumerate(nodes)
            if self.draft.old[node] in rows or self.draft.old[node] in launched
        ]
        before = [int(self.sizes[collective]) for collective, _ in sweep.launches]
        limit = limit_of([gradient.bytes for gradient in sweep.gradients], before)
        alone = all(not self._waits_elsewhere(sweep, collective) for collective, _ in sweep.launches)
        if limit and alone:
            self._as_ddp(sweep, events, rows, limit)
            self.as_ddp += 1
        else:
            self._as_bytes(sweep, events, rows, launched, before)
            self.as_bytes += 1

    def _waits_elsewhere(self, sweep: Sweep, collective: int) -> bool:
        """Whether a collective waits for more than its launch (a GPU's runs after what made its
        gradients)."""
        trace = self.operators.trace
        begin, end = trace.data_deps.offsets[collective : collective + 2]
        return bool(end - begin > 1 + bool(self.draft.chained[collective]))

    def _as_bytes(
        self,
        sweep: Sweep,
        events: Sequence[tuple[int, int]],
        rows: dict[int, Gradient],
        launched: dict[int, int],
        before: Sequence[int],
    ) -> None:
        nodes = {self.draft.old[node]: node for node in self.draft.lanes[self._lane_of(sweep)]}
        captured = list(_since(sweep))
        held, place = 0, 0
        for _, node in events:
            row = self.draft.old[node]
            if row in rows:
                held += rows[row].bytes
            else:
                share = before[place] / captured[place] if captured[place] else 0.0
                collective = nodes.get(launched[row])
                if collective is not None and share:
                    self.set_size(collective, max(round(held * share), 1))
                held, place = 0, place + 1

    def _lane_of(self, sweep: Sweep) -> int:
        return int(self.operators.lane[sweep.launches[0][0]])

    def _as_ddp(
        self,
        sweep: Sweep,
        events: Sequence[tuple[int, int]],
        rows: dict[int, Gradient],
        limit: int,
    ) -> None:
        draft, trees = self.draft, launch_tree(self.operators, sweep)
        order = [(place, rows[draft.old[node]]) for place, node in events if draft.old[node] in rows]
        buckets = bucket_sizes([gradient.bytes for _, gradient in order], limit)
        ends = [order[bucket[-1]][0] for bucket in buckets]
        whole = [sum(order[at][1].bytes for at in bucket) for bucket in buckets]
        nodes = draft.lanes[sweep.lane]
        old_nodes = [{row: node for node, row in self._nodes_of(tree)} for tree in trees]
        after = [self._tree_end(nodes, end) for end in ends]
        fresh: list[dict[int, int]] = []
        for number in range(len(buckets)):
            last = number == len(buckets) - 1
            tree = old_nodes[-1 if last else min(number, len(trees) - 1)]
            fresh.append({node: self._copy(node) for node in sorted(tree.values())})
        removed = {node for tree in old_nodes for node in tree.values()}
        self._place(sweep, fresh, after, removed)
        draft.across = self._copied_edges(fresh, removed)
        for copies, size in zip(fresh, whole, strict=True):
            for node in copies.values():
                if self.operators.trace.types[draft.old[node]] == NodeType.COMM_COLL:
                    self.set_size(node, size)
                    self.made.append(node)

    def _nodes_of(self, tree: set[int]) -> Iterator[tuple[int, int]]:
        lanes = {int(self.operators.lane[row]) for row in tree}
        for lane in lanes:
            for node in self.draft.lanes[lane]:
                if self.draft.old[node] in tree:
                    yield node, self.draft.old[node]

    def _copy(self, node: int) -> int:
        self.draft.old.append(self.draft.old[node])
        self.draft.copy.append(1 + max(self.draft.copy[node], len(self.draft.old)))
        return len(self.draft.old) - 1

    def _tree_end(self, nodes: Sequence[int], place: int) -> int:
        """The place after the operators around the node at ``place``."""
        operators, old = self.operators, self.draft.old
        top = operators.top[old[nodes[place]]]
        copy = self.draft.copy[nodes[place]]
        end = place + 1
        while (
            end < len(nodes) and operators.top[old[nodes[end]]] == top and self.draft.copy[nodes[end]] == copy
        ):
            end += 1
        return end

    def _place(
        self, sweep: Sweep, fresh: Sequence[dict[int, int]], after: Sequence[int], removed: set[int]
    ) -> None:
        draft = self.draft
        for lane in {int(self.operators.lane[draft.old[node]]) for node in removed}:
            nodes = draft.lanes[lane]
            mine = [
                [new for old, new in copies.items() if self.operators.lane[draft.old[old]] == lane]
                for copies in fresh
            ]
            if lane == sweep.lane:
                kept: list[int] = []
                by_place: dict[int, list[int]] = {}
                for at, new in zip(after, mine, strict=True):
                    by_place.setdefault(at, []).extend(new)
                for place, node in enumerate([*nodes, -1]):
                    kept += by_place.get(place, [])
                    if node >= 0 and node not in removed:
                        kept.append(node)
                draft.lanes[lane] = kept
            else:
                at = next(place for place, node in enumerate(nodes) if node in removed)
                others = [node for node in nodes if node not in removed]
                draft.lanes[lane] = [*others[:at], *(new for each in mine for new in each), *others[at:]]

    def _copied_edges(self, fresh: Sequence[dict[int, int]], removed: set[int]) -> list[tuple[int, int]]:
        kept: list[tuple[int, int]] = []
        for one, two in self.draft.across:
            if one not in removed and two not in removed:
                kept.append((one, two))
                continue
            for copies in fresh:
                if one in copies or two in copies:
                    kept.append((copies.get(one, one), copies.get(two, two)))
        return [(one, two) for one, two in kept if one not in removed and two not in removed]


def limit_of(gradients: Sequence[int], buckets: Sequence[int]) -> int:
    """DDP's limit in bytes that makes these buckets of these gradients, 0 where none does: 25 MiB where that
    fits, else the smallest whole MiB."""
    for mib in (25, *range(1, MOST_MIB)):
        made = bucket_sizes(gradients, mib << 20)
        if [sum(gradients[at] for at in bucket) for bucket in made] == list(buckets):
            return mib << 20
        if mib != 25 and (mib << 20) > sum(gradients):
            break
    return 0


def _since(sweep: Sweep) -> Iterator[int]:
    """Bytes of the gradients between each launch of a sweep and the one before."""
    marks = sorted(
        [(gradient.row, gradient.bytes) for gradient in sweep.gradients]
        + [(launch, -1) for _, launch in sweep.launches]
    )
    held = 0
    for _, size in marks:
        if size < 0:
            yield held
            held = 0
        else:
            held += size
