"""Ids within copied nodes: parents, record functions, calls, autograd sequence numbers, modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chakra_et.et.columns import ExecutionTrace, Strings
from chakra_et.et.node_attributes import has, set_integers, set_texts, texts
from chakra_et.job.blocks import Blocks


def references(
    new: ExecutionTrace,
    old: ExecutionTrace,
    above: Mapping[int, tuple[int, int]],
    source: np.ndarray,
    copy: np.ndarray,
) -> ExecutionTrace:
    """``parent`` and ``graph_launch`` name the same copy of the nodes that they named, or the only one.
    ``above``: other parents, by place."""
    place = {
        (row, number): at for at, (row, number) in enumerate(zip(source.tolist(), copy.tolist(), strict=True))
    }
    for name in ("parent", "graph_launch"):
        attribute = new.attributes.get(name)
        if attribute is None or isinstance(attribute.values, Strings):
            continue
        values = np.full(len(new), -1)
        for row, number in zip(attribute.rows.tolist(), attribute.values.tolist(), strict=True):
            wanted = number - 1, int(copy[row])  # converted files count rows from 1
            if name == "parent":
                wanted = above.get(row, wanted)
            values[row] = place.get(wanted, place.get((wanted[0], 0), -2)) + 1
        new = set_integers(new, name, attribute.kind, values, values > 0)
    return new


def records(new: ExecutionTrace, copy: np.ndarray) -> ExecutionTrace:
    """Copies of an operator have records (``rf_id``) of their own, one for all nodes of a copy."""
    if "rf_id" not in new.attributes:
        return new
    record, kind = new.column("rf_id", -1), new.attributes["rf_id"].kind
    values = np.where(record > 0, record + copy * (int(record.max()) + 1), record)
    return set_integers(new, "rf_id", kind, values, has(new, "rf_id"))


def calls(new: ExecutionTrace, old: ExecutionTrace, source: np.ndarray) -> ExecutionTrace:
    """``comm_sequence``, the order in which collectives were called, is that of the operators around them: a
    later one may have started first."""
    rows = np.flatnonzero(has(old, "comm_sequence")[source])
    if not len(rows):
        return new
    caller = new.column("parent")[rows] - 1
    order = np.argsort(np.where(caller >= 0, caller, rows), kind="stable")
    values, present = np.full(len(new), -1), np.zeros(len(new), dtype=bool)
    values[rows[order]], present[rows] = np.arange(len(rows)), True
    return set_integers(new, "comm_sequence", old.attributes["comm_sequence"].kind, values, present)


def sequences(
    new: ExecutionTrace, old: ExecutionTrace, blocks: Blocks, source: np.ndarray, copy: np.ndarray
) -> ExecutionTrace:
    """The autograd numbers (``seq_id``) of copies follow each other, and tie backward to forward operators as
    before."""
    numbers = old.column("seq_id", -1)
    forward = np.flatnonzero((blocks.group >= 0) & (numbers >= 0))
    forward = forward[~np.array(blocks.is_backward, dtype=bool)[blocks.group[forward]]]
    if not len(forward) or "seq_id" not in new.attributes:
        return new
    key = blocks.group[forward] * blocks.held + blocks.block[forward]
    lowest, highest = np.full(int(key.max()) + 1, 1 << 60), np.full(int(key.max()) + 1, -1)
    np.minimum.at(lowest, key, numbers[forward])
    np.maximum.at(highest, key, numbers[forward])
    there = np.argsort(lowest)
    there = there[highest[there] >= 0]
    starts, lengths = lowest[there], (highest - lowest + 1)[there]
    most = int(copy[blocks.block[source] >= 0].max(initial=0)) + 1
    own = numbers[source]
    at = np.maximum(np.searchsorted(starts, own, side="right") - 1, 0)
    inside = (blocks.block[source] >= 0) & (own >= starts[at])
    values = own * most + np.where(inside, (own - starts[at]) * (1 - most) + copy * lengths[at], 0)
    kind = new.attributes["seq_id"].kind
    return set_integers(new, "seq_id", kind, np.where(own >= 0, values, own), has(new, "seq_id"))


def modules(new: ExecutionTrace, blocks: Blocks, source: np.ndarray, copy: np.ndarray) -> ExecutionTrace:
    """The modules of blocks with the numbers of their copies."""
    table, index = texts(new, "module")
    block = blocks.block[source]
    depth = _block_depth(table, index, block)
    if depth < 0:
        return new
    most = np.zeros(blocks.held, dtype=np.int64)
    np.maximum.at(most, block[block >= 0], copy[block >= 0] + 1)
    begins = np.concatenate(([0], np.cumsum(most)))
    renamed: dict[tuple[int, int], int] = {}
    fresh: list[str] = []
    for row in np.flatnonzero(index >= 0).tolist():
        number = int(begins[block[row]] + copy[row]) if block[row] >= 0 else -1
        key = int(index[row]), number
        if key not in renamed:
            path = table[key[0]].split("/")
            if number >= 0 and len(path) > depth:
                path[depth] = f"{path[depth].rpartition('_')[0]}_{number}"
            renamed[key] = len(fresh)
            fresh.append("/".join(path))
        index[row] = renamed[key]
    return set_texts(new, "module", fresh, index)


def _block_depth(table: Sequence[str], index: np.ndarray, block: np.ndarray) -> int:
    """The depth in module paths at which blocks differ; -1 for none."""
    used = [table[at].split("/") for at in np.unique(index[(index >= 0) & (block >= 0)]).tolist()]
    for depth in range(min(map(len, used), default=0)):
        if len({path[depth] for path in used}) > 1:
            return depth
    return -1
