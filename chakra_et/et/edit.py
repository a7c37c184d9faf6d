"""New traces from given ones: other attributes, fewer nodes. What is given is never changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from chakra_et.et.columns import (
    Attribute,
    ExecutionTrace,
    NodeType,
    Ragged,
    Strings,
    ValueKind,
)
from chakra_et.et.edges import edges_of
from chakra_et.et.rows import take_rows

COMMUNICATION = (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)


def communicates(trace: ExecutionTrace) -> np.ndarray:
    """bool[N]: collectives, sends and receives."""
    return np.isin(trace.types, COMMUNICATION)


def has(trace: ExecutionTrace, name: str) -> np.ndarray:
    """bool[N]: the nodes that have attribute ``name``."""
    present = np.zeros(len(trace), dtype=bool)
    attribute = trace.attributes.get(name)
    if attribute is not None:
        present[attribute.rows] = True
    return present


def texts(trace: ExecutionTrace, name: str) -> tuple[list[str], np.ndarray]:
    """String attribute ``name`` as (table, int64[N] indices into it, -1 where a node lacks it)."""
    index = np.full(len(trace), -1, dtype=np.int64)
    attribute = trace.attributes.get(name)
    if attribute is None or not isinstance(attribute.values, Strings):
        return [], index
    index[attribute.rows] = attribute.values.index
    return [text.decode("utf-8", "replace") for text in attribute.values.table], index


def with_integers(
    trace: ExecutionTrace, name: str, kind: ValueKind, values: np.ndarray, present: np.ndarray
) -> ExecutionTrace:
    """The trace with integer attribute ``name`` set to ``values`` (N) on the nodes ``present`` (bool[N])
    alone."""
    rows = np.flatnonzero(present)
    attributes = dict(trace.attributes)
    if len(rows):
        attributes[name] = Attribute(kind, rows, values[rows])
    else:
        attributes.pop(name, None)
    return dataclasses.replace(trace, attributes=attributes)


def with_texts(trace: ExecutionTrace, name: str, table: Sequence[str], index: np.ndarray) -> ExecutionTrace:
    """The trace with string attribute ``name``: ``table[index[i]]`` on node i, none where the index is -1."""
    rows = np.flatnonzero(index >= 0)
    attributes = dict(trace.attributes)
    if len(rows):
        encoded = [text.encode("utf-8", "replace") for text in table]
        attributes[name] = Attribute("string", rows, Strings(encoded, index[rows].astype(np.int32)))
    else:
        attributes.pop(name, None)
    return dataclasses.replace(trace, attributes=attributes)


def without(trace: ExecutionTrace, names: Sequence[str], rows: np.ndarray) -> ExecutionTrace:
    """The trace whose nodes ``rows`` (bool[N]) have none of the attributes ``names``."""
    attributes = dict(trace.attributes)
    for name in names:
        attribute = attributes.get(name)
        if attribute is not None:
            kept = ~rows[attribute.rows]
            if kept.any():
                attributes[name] = _taken(attribute, np.flatnonzero(kept), attribute.rows[kept])
            else:
                del attributes[name]
    return dataclasses.replace(trace, attributes=attributes)


def select(trace: ExecutionTrace, keep: np.ndarray, chains: np.ndarray) -> ExecutionTrace:
    """The nodes ``keep`` (bool[N]), in the same order, with the dependencies that lead through left-out
    nodes.

    ``chains`` int64[N]: the chain that each node belongs to, -1 for none; kept nodes of one chain stay in
    order. A left-out node passes on, for each chain, the last of its kept ancestors there, so that the number
    of dependencies stays small. Nodes must be in an order in which dependencies point back. Ids become 1 … K.
    """
    rows = np.flatnonzero(keep)
    place = np.full(len(trace), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    lists = _contracted(trace, keep, chains)
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in lists], dtype=np.int64)))
    flat = np.array([parent for each in lists for parent in each], dtype=np.int64)
    return take_rows(trace, rows, Ragged(offsets, (place[flat] + 1).astype(np.uint64)))


def _contracted(trace: ExecutionTrace, keep: np.ndarray, chains: np.ndarray) -> list[list[int]]:
    """For each kept row its kept ancestors, nearest first reached, as rows."""
    edges = edges_of(trace)
    order = np.argsort(edges.child, kind="stable")
    parents = edges.parent[order].tolist()
    offsets = np.searchsorted(edges.child[order], np.arange(len(trace) + 1)).tolist()
    kept, chain = keep.tolist(), chains.tolist()
    passed: list[dict[int, int]] = [{} for _ in kept]
    lists: list[list[int]] = []
    last: dict[int, int] = {}
    for row in range(len(kept)):
        reach: dict[int, int] = {}
        for parent in parents[offsets[row] : offsets[row + 1]]:
            if parent < 0:
                continue
            # A node of no chain is one of its own; its key can't be a chain's number.
            key = chain[parent] if chain[parent] >= 0 else -2 - parent
            found = {key: parent} if kept[parent] else passed[parent]
            for of, ancestor in found.items():
                if reach.get(of, -1) < ancestor:
                    reach[of] = ancestor
        if kept[row]:
            if chain[row] >= 0:
                if chain[row] in last:
                    reach[chain[row]] = max(reach.get(chain[row], -1), last[chain[row]])
                last[chain[row]] = row
            lists.append(sorted(reach.values()))
        else:
            passed[row] = reach
    return lists


def _taken(attribute: Attribute, at: np.ndarray, rows: np.ndarray) -> Attribute:
    values = attribute.values
    taken = Strings(values.table, values.index[at]) if isinstance(values, Strings) else values[at]
    return Attribute(attribute.kind, rows, taken)
