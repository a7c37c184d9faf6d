"""A trace with its repeated blocks run more or fewer times: nodes, their order on each lane, dependencies.

``drafted`` has the new nodes lane by lane, which may then be edited; ``finished`` makes a trace of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, Ragged
from chakra_et.et.edges import edges_of
from chakra_et.et.node_attributes import has, set_integers
from chakra_et.et.rearrange import take_rows
from chakra_et.job.blocks import Blocks
from chakra_et.transform.copied_ids import calls, modules, records, references, sequences


@dataclass
class Draft:
    """New nodes by number. ``old``: the row that each is a copy of; ``copy``: which copy, in the order of the
    layers. ``lanes``: nodes in order. ``across``: dependencies (from, to) but for those along a lane: there a
    node follows the one before it if its row is ``chained``. ``sizes``, ``micros``: other comm_size and
    duration of nodes; ``above``: another parent of nodes, as (row, copy)."""

    old: list[int]
    copy: list[int]
    lanes: dict[int, list[int]]
    chained: np.ndarray
    across: list[tuple[int, int]]
    sizes: dict[int, int] = field(default_factory=dict)
    micros: dict[int, int] = field(default_factory=dict)
    above: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unrolled:
    """``trace``: the new one. ``source``: the row that each of its nodes is a copy of, ``node``: its number
    in the draft; int64[M]."""

    trace: ExecutionTrace
    source: np.ndarray
    node: np.ndarray


def drafted(trace: ExecutionTrace, blocks: Blocks, copies: Sequence[int]) -> Draft:
    """Block b of every pass ``copies[b]`` times (0: left out), one copy after the other.

    On a lane each node follows the one before it, as its original did. A dependency within a block, or
    between its forward and its backward pass, is one within each copy; one from outside holds for all copies,
    one to outside starts at all of them.
    """
    count = len(trace)
    times = np.ones(count, dtype=np.int64)
    inside = blocks.block >= 0
    times[inside] = np.asarray(copies)[blocks.block[inside]]
    first = np.concatenate(([0], np.cumsum(times)))
    old = np.repeat(np.arange(count), times)
    lanes = trace.column("lane")
    edges = edges_of(trace)
    known = edges.parent >= 0
    child, parent = edges.child[known], edges.parent[known]
    before = _before(lanes)
    chained = np.zeros(count, dtype=bool)
    chained[child[before[child] == parent]] = True
    rest = before[child] != parent
    return Draft(
        old.tolist(),
        (np.arange(len(old)) - first[old]).tolist(),
        {
            lane: _run(blocks, np.flatnonzero(lanes == lane), times, first)
            for lane in np.unique(lanes).tolist()
        },
        chained,
        _across(blocks, parent[rest], child[rest], first),
    )


def finished(draft: Draft, trace: ExecutionTrace, blocks: Blocks, where: str) -> Unrolled:
    """Raises ``TraceError`` where dependencies make a circle."""
    edges = [*draft.across]
    for nodes in draft.lanes.values():
        edges += [(a, b) for a, b in zip(nodes, nodes[1:], strict=False) if draft.chained[draft.old[b]]]
    there = sorted(node for nodes in draft.lanes.values() for node in nodes)
    order = _ordered(there, edges, _priority(draft, blocks))
    if order is None:
        raise TraceError(
            f"{where}: its blocks depend on each other across lanes so that they can't be run more often: "
            "--layers needs blocks that follow each other"
        )
    place = {node: at for at, node in enumerate(order)}
    lists: list[set[int]] = [set() for _ in order]
    for one, two in edges:
        if one in place and two in place:
            lists[place[two]].add(place[one] + 1)
    source = np.array(draft.old, dtype=np.int64)[order]
    copy = np.array(draft.copy, dtype=np.int64)[order]
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in lists], dtype=np.int64)))
    values = np.array([one for each in lists for one in sorted(each)], dtype=np.uint64)
    new = take_rows(trace, source, Ragged(offsets, values), without=("comm_sequence",))
    above = {place[node]: of for node, of in draft.above.items() if node in place}
    new = references(new, trace, above, source, copy)
    new = calls(records(new, copy), trace, source)
    new = sequences(new, trace, blocks, source, copy)
    new = modules(new, blocks, source, copy)
    if draft.sizes:
        sizes = new.column("comm_size")
        sizes[[place[node] for node in draft.sizes]] = list(draft.sizes.values())
        new = set_integers(new, "comm_size", new.attributes["comm_size"].kind, sizes, has(new, "comm_size"))
    if draft.micros:
        duration = new.duration_micros.copy()
        duration[[place[node] for node in draft.micros]] = list(draft.micros.values())
        new = replace(new, duration_micros=duration)
    return Unrolled(new, source, np.array(order, dtype=np.int64))


def _before(lanes: np.ndarray) -> np.ndarray:
    """The row before each on its lane, -1 for none."""
    order = np.argsort(lanes, kind="stable")
    before = np.full(len(lanes), -1)
    same = lanes[order][1:] == lanes[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _run(blocks: Blocks, rows: np.ndarray, times: np.ndarray, first: np.ndarray) -> list[int]:
    """The nodes of a lane's rows, the copies of a block after each other: in a backward pass the last
    first. What lies between the rows of a block and belongs to none is in the copy that runs last."""
    found: list[int] = []
    for run in np.split(rows, _begins(blocks, rows)):
        inside = blocks.block[run] >= 0
        group = blocks.group[run[0]]
        copies = list(range(int(times[run[0]])))
        if group >= 0 and blocks.is_backward[group]:
            copies.reverse()
        for copy in copies[:-1]:
            found += (first[run[inside]] + copy).tolist()
        last = copies[-1:]
        chosen = run if last else run[~inside]
        found += (first[chosen] + np.where(blocks.block[chosen] >= 0, sum(last), 0)).tolist()
    return found


def _begins(blocks: Blocks, rows: np.ndarray) -> np.ndarray:
    """Where in a lane's rows each block or stretch outside of blocks begins, but for the first."""
    key = np.where(blocks.block[rows] >= 0, blocks.group[rows] * (blocks.held + 1) + blocks.block[rows], -1)
    inside = np.flatnonzero(key >= 0)
    # Rows between two of the same block stay with these.
    before, after = np.full(len(key), -1), np.full(len(key), -1)
    before[inside], after[inside] = key[inside], key[inside]
    before = _carried(before)
    after = _carried(after[::-1])[::-1]
    whole = np.where(before == after, before, key)
    return np.flatnonzero(np.diff(whole)) + 1


def _carried(values: np.ndarray) -> np.ndarray:
    """Each value below 0 becomes the last one before it that isn't."""
    at = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), -1))
    found: np.ndarray = np.where(at >= 0, values[at], -1)
    return found


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


def _priority(draft: Draft, blocks: Blocks) -> list[tuple[int, int, int]]:
    """Original row, then index among its copies, in the order of execution."""
    old, copy = np.array(draft.old), np.array(draft.copy)
    backward = np.array([*blocks.is_backward, False])[blocks.group[old]]
    ran = np.where(backward, -copy, copy)
    return list(zip(old.tolist(), ran.tolist(), range(len(old)), strict=True))


def _ordered(
    nodes: Sequence[int], edges: Sequence[tuple[int, int]], priority: Sequence[tuple[int, int, int]]
) -> list[int] | None:
    """The nodes in an order in which all edges point forward, by priority; None for a circle."""
    after: dict[int, list[int]] = {node: [] for node in nodes}
    waits = dict.fromkeys(nodes, 0)
    for one, two in edges:
        if one in waits and two in waits:
            after[one].append(two)
            waits[two] += 1
    ready = [priority[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, priority[other])
    return order if len(order) == len(waits) else None
