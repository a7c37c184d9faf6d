"""A trace with its repeated blocks run more or fewer times: nodes, their order on each lane, dependencies.

``drafted`` has the new nodes lane by lane, which may then be edited; ``finished`` makes a trace of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, Strings
from chakra_et.et.edges import topological_order
from chakra_et.et.node_attributes import dependencies, has, set_integers, set_texts, texts, with_integers
from chakra_et.et.rearrange import take_rows
from chakra_et.job.blocks import Blocks
from chakra_et.job.gradients import Retime
from chakra_et.transform.changes import with_sizes


@dataclass
class Draft:
    """New nodes by number. ``old``: the row that each is a copy of; ``copy``: which copy, in the order of the
    layers. ``lanes``: nodes in order. ``across``: dependencies (from, to) but for those along a lane: there a
    node follows the one before it if its row is ``chained``. Of single nodes, other bytes of communication
    (``sizes``), the ``ends`` of a message (source, target, tag), and another parent, as (row, copy)
    (``above``)."""

    trace: ExecutionTrace
    blocks: Blocks
    old: list[int]
    copy: list[int]
    lanes: dict[int, list[int]]
    chained: np.ndarray
    across: list[tuple[int, int]]
    sizes: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    above: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, row: int, copy: int) -> int:
        """A new node, on no lane yet."""
        self.old.append(row)
        self.copy.append(copy)
        return len(self.old) - 1


def drafted(trace: ExecutionTrace, blocks: Blocks | None = None, copies: Sequence[int] = ()) -> Draft:
    """Block b of every pass ``copies[b]`` times (0: left out), one copy after the other; without ``blocks``
    the nodes as they are.

    On a lane each node follows the one before it, as its original did. A dependency within a block, or
    between its forward and its backward pass, is one within each copy; one from outside holds for all copies,
    one to outside starts at all of them.
    """
    count = len(trace)
    if blocks is None:
        nothing = np.full(count, -1)
        blocks = Blocks(nothing, nothing, [], 0, "")
    times = np.append(np.array(copies, np.int64), 1)[blocks.block]
    first = np.concatenate(([0], np.cumsum(times)))
    old = np.repeat(np.arange(count), times)
    copy = np.arange(len(old)) - first[old]
    lane = trace.column("lane")
    order = np.argsort(lane, kind="stable")
    same = lane[order][1:] == lane[order][:-1]
    backward = np.array([*blocks.is_backward, False])
    stretch, around = _stretches(blocks, order, same)
    # In a backward pass the last copy comes first; what belongs to no block is in the copy that runs last.
    last = np.where(backward[blocks.group[around]], 0, times[around] - 1)
    ran = np.where(blocks.block[old] < 0, last[old], np.where(backward[blocks.group[old]], -copy, copy))
    nodes = np.lexsort((old, ran, stretch[old]))
    lanes = {each: of_lane.tolist() for each, of_lane in rows_by_value(lane[old], nodes).items()}
    parent, child = dependencies(trace)
    before = np.full(count, -1)
    before[order[1:][same]] = order[:-1][same]
    along = before[child] == parent
    chained = np.zeros(count, dtype=bool)
    chained[child[along]] = True
    across = _across(blocks, parent[~along], child[~along], first)
    return Draft(trace, blocks, old.tolist(), copy.tolist(), lanes, chained, across)


def finished(draft: Draft, where: str, retime: Retime) -> ExecutionTrace:
    """The new trace. Raises ``TraceError`` where dependencies make a circle."""
    edges = [*draft.across]
    for nodes in draft.lanes.values():
        edges += [(a, b) for a, b in zip(nodes, nodes[1:], strict=False) if draft.chained[draft.old[b]]]
    order = _ordered(draft, edges, where)
    place = {node: at for at, node in enumerate(order)}
    known = [(place[one], place[two]) for one, two in edges if one in place and two in place]
    parent, child = np.array(known, np.int64).reshape(-1, 2).T
    source = np.array(draft.old, dtype=np.int64)[order]
    copy = np.array(draft.copy, dtype=np.int64)[order]
    new = take_rows(draft.trace, source, parent, child, without=("comm_sequence",))
    new = _with_references(new, draft, place, source, copy)
    new = _with_calls(_with_records(new, copy), draft.trace, source)
    new = _with_sequences(new, draft, source, copy)
    new = _with_modules(new, draft.blocks, source, copy)
    new = with_sizes(new, {place[node]: size for node, size in draft.sizes.items()}, retime)
    for at, name in enumerate(("comm_src", "comm_dst", "comm_tag")):
        if draft.ends:
            new = with_integers(new, name, {place[n]: each[at] for n, each in draft.ends.items()}, "int32")
    return new


def _stretches(blocks: Blocks, order: np.ndarray, same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row the number of its stretch, a block or what lies between two on a lane, and a row of the
    block, itself outside of blocks; int64[N]. Rows between two of the same block are in its stretch.
    ``order``: the rows lane by lane; ``same[i]``: whether the rows i and i + 1 of that are on one lane."""
    lane, place = np.append(0, np.cumsum(~same)), np.arange(len(order))
    group, block = blocks.group[order], blocks.block[order]
    key = np.where(block >= 0, (lane * len(blocks.is_backward) + group) * (blocks.held + 1) + block, -1)
    before = np.maximum.accumulate(np.where(block >= 0, place, -1))
    after = np.minimum.accumulate(np.where(block >= 0, place, len(place))[::-1])[::-1]
    between = (before >= 0) & (after < len(place))
    between[between] = key[before[between]] == key[after[between]]
    home = np.where(between, before, place)
    stretch, around = np.empty((2, len(place)), np.int64)
    stretch[order] = np.append(0, np.cumsum((np.diff(key[home]) != 0) | ~same))
    around[order] = order[home]
    return stretch, around


def _across(
    blocks: Blocks, parent: np.ndarray, child: np.ndarray, first: np.ndarray
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    same = (blocks.block[parent] == blocks.block[child]) & (blocks.block[parent] >= 0)
    for p, c, together in zip(parent.tolist(), child.tolist(), same.tolist(), strict=True):
        ones, twos = range(first[p], first[p + 1]), range(first[c], first[c + 1])
        if not ones or not twos:
            continue
        if together:
            found += zip(ones, twos, strict=True)
        elif blocks.group[p] >= 0 and blocks.group[c] >= 0:
            # Between blocks: from the copy that runs last to the one that runs first.
            last = ones[0] if blocks.is_backward[blocks.group[p]] else ones[-1]
            found.append((last, twos[-1] if blocks.is_backward[blocks.group[c]] else twos[0]))
        else:
            found += [(one, two) for one in ones for two in twos]
    return found


def _ordered(draft: Draft, edges: Sequence[tuple[int, int]], where: str) -> list[int]:
    """The nodes in an order in which all edges point forward, by row and then by the order in which its
    copies run. Raises ``TraceError`` for a circle."""
    copy, backward = np.array(draft.copy), np.array([*draft.blocks.is_backward, False])
    ran = np.where(backward[draft.blocks.group[draft.old]], -copy, copy).tolist()
    nodes = [node for lane in draft.lanes.values() for node in lane]
    nodes.sort(key=lambda node: (draft.old[node], ran[node], node))
    number = {node: at for at, node in enumerate(nodes)}
    known = [(number[one], number[two]) for one, two in edges if one in number and two in number]
    order = topological_order(len(nodes), *np.array(known, np.int64).reshape(-1, 2).T)
    if len(order) < len(nodes):
        raise TraceError(
            f"{where}: its blocks depend on each other across lanes so that they can't be run more often: "
            "--layers needs blocks that follow each other"
        )
    return [nodes[at] for at in order]


def _with_references(
    new: ExecutionTrace, draft: Draft, place: Mapping[int, int], source: np.ndarray, copy: np.ndarray
) -> ExecutionTrace:
    """``parent`` and ``graph_launch`` name the same copy of the nodes that they named, or the only one."""
    above = {place[node]: of for node, of in draft.above.items() if node in place}
    at_of = {pair: at for at, pair in enumerate(zip(source.tolist(), copy.tolist(), strict=True))}
    for name in ("parent", "graph_launch"):
        attribute = new.attributes.get(name)
        if attribute is None or isinstance(attribute.values, Strings):
            continue
        values = np.full(len(new), -1)
        for row, number in zip(attribute.rows.tolist(), attribute.values.tolist(), strict=True):
            wanted = number - 1, int(copy[row])  # converted files count rows from 1
            if name == "parent":
                wanted = above.get(row, wanted)
            values[row] = at_of.get(wanted, at_of.get((wanted[0], 0), -2)) + 1
        new = set_integers(new, name, attribute.kind, values, values > 0)
    return new


def _with_records(new: ExecutionTrace, copy: np.ndarray) -> ExecutionTrace:
    """Copies of an operator have records (``rf_id``) of their own, one for all nodes of a copy."""
    if "rf_id" not in new.attributes:
        return new
    record, kind = new.column("rf_id", -1), new.attributes["rf_id"].kind
    values = np.where(record > 0, record + copy * (int(record.max()) + 1), record)
    return set_integers(new, "rf_id", kind, values, has(new, "rf_id"))


def _with_calls(new: ExecutionTrace, old: ExecutionTrace, source: np.ndarray) -> ExecutionTrace:
    """``comm_sequence``, the order in which collectives were called, is that of the operators around them: a
    later one may have started first."""
    rows = np.flatnonzero(has(old, "comm_sequence")[source])
    if not len(rows):
        return new
    caller = new.column("parent")[rows] - 1
    order = np.argsort(np.where(caller >= 0, caller, rows), kind="stable")
    values = dict(zip(rows[order].tolist(), range(len(rows)), strict=True))
    return with_integers(new, "comm_sequence", values, old.attributes["comm_sequence"].kind)


def _with_sequences(
    new: ExecutionTrace, draft: Draft, source: np.ndarray, copy: np.ndarray
) -> ExecutionTrace:
    """Autograd numbers (``seq_id``) of copies follow each other, and tie backward to forward as before."""
    blocks, numbers = draft.blocks, draft.trace.column("seq_id", -1)
    forward = np.flatnonzero((blocks.group >= 0) & (numbers >= 0))
    forward = forward[~np.array(blocks.is_backward, dtype=bool)[blocks.group[forward]]]
    if not len(forward) or "seq_id" not in new.attributes:
        return new
    by_number = forward[np.argsort(numbers[forward], kind="stable")]
    of_block = blocks.group[by_number] * blocks.held + blocks.block[by_number]
    starts = numbers[by_number[np.sort(np.unique(of_block, return_index=True)[1])]]  # the first of each block
    own = numbers[source]
    block = starts[np.searchsorted(starts, own, side="right") - 1]
    inside = (blocks.block[source] >= 0) & (own >= block)
    # Numbered by block, by copy, and within a copy as before.
    key = np.stack([np.where(inside, block, own), np.where(inside, copy, 0), own])
    order = np.lexsort(key[::-1])  # much faster than unique columns
    values = np.empty(len(own), np.int64)
    values[order] = np.append(0, np.cumsum((np.diff(key[:, order]) != 0).any(axis=0)))
    kind = new.attributes["seq_id"].kind
    return set_integers(new, "seq_id", kind, np.where(own >= 0, values, own), has(new, "seq_id"))


def _with_modules(
    new: ExecutionTrace, blocks: Blocks, source: np.ndarray, copy: np.ndarray
) -> ExecutionTrace:
    """The modules of blocks with the numbers of their copies."""
    table, index = texts(new, "module")
    block = blocks.block[source]
    # The depth in module paths at which blocks differ.
    used = [table[at].split("/") for at in np.unique(index[(index >= 0) & (block >= 0)]).tolist()]
    depth = next((at for at, names in enumerate(zip(*used, strict=False)) if len(set(names)) > 1), -1)
    if depth < 0:
        return new
    most = np.zeros(blocks.held, dtype=np.int64)
    np.maximum.at(most, block[block >= 0], copy[block >= 0] + 1)
    begins = np.concatenate(([0], np.cumsum(most)))
    rows = np.flatnonzero(index >= 0)
    number = np.where(block >= 0, begins[block] + copy, -1)[rows]
    used_by, at = np.unique([index[rows], number], axis=1, return_inverse=True)
    index[rows] = at.reshape(-1)
    fresh = []
    for text, own in used_by.T.tolist():
        path = table[text].split("/")
        if own >= 0:
            path[depth] = f"{path[depth].rpartition('_')[0]}_{own}"
        fresh.append("/".join(path))
    return set_texts(new, "module", fresh, index)
