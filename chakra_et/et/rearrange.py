"""New traces from nodes of given ones: some left out, some copied, some moved, some new."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chakra_et.et import node_attributes as attributes
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, Ragged
from chakra_et.et.edges import edges_of


def take_rows(
    trace: ExecutionTrace,
    rows: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
    without: tuple[str, ...] = (),
) -> ExecutionTrace:
    """The nodes ``rows`` (int64[M]), in that order and as often as they are named, with ids 1 … M.

    ``source``, ``target``: all their dependencies, as places in that order. They lack the attributes
    ``without``, and dep_kinds, which would be of other dependencies.
    """
    ids, deps = np.arange(1, len(rows) + 1, dtype=np.uint64), Ragged.of_edges(source, target, len(rows))
    made = trace.of_rows(rows)
    for name in ("dep_kinds", *without):
        made.attributes.pop(name, None)
    return dataclasses.replace(made, ids=ids, data_deps=deps)


def select(trace: ExecutionTrace, keep: np.ndarray, chains: np.ndarray) -> ExecutionTrace:
    """Nodes ``keep`` (bool[N]), in the same order, with dependencies that lead through left-out nodes.

    ``chains`` int64[N]: the chain that each node belongs to, -1 for none; kept nodes of one chain stay in
    order. A left-out node passes on, for each chain, the last of its kept ancestors there, so that the number
    of dependencies stays small. Nodes must be in an order in which dependencies point back. Ids become 1 … K.
    """
    rows = np.flatnonzero(keep)
    place = np.full(len(trace), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    lists = _contracted(trace, keep, chains)
    flat = np.array([parent for each in lists for parent in each], dtype=np.int64)
    return take_rows(trace, rows, place[flat], np.repeat(np.arange(len(rows)), [*map(len, lists)]))


def arrange(
    trace: ExecutionTrace,
    rows: np.ndarray,
    kept: tuple[np.ndarray, np.ndarray] | None = None,
    more: Sequence[tuple[int, int]] = (),
    unchained: Sequence[int] = (),
    bare: np.ndarray | None = None,
) -> ExecutionTrace:
    """The trace whose node at place i is a copy of row ``rows[i]`` (int64[M]); ids become 1 … M.

    A copy depends on the latest copies in front of it of what its original depended on, and on the node
    before it on its thread, stream or communicator where that is another than in the original. ``kept``: the
    dependencies of ``trace`` (source and target rows) that count, all of them if None. ``more``: further
    dependencies as pairs of places (source, target). ``unchained``: places that go to another lane. ``bare``:
    places whose copies have no dependencies but those of ``more`` and of their lane.
    """
    original = rows.copy()
    if bare is not None:
        original[bare] = len(trace)
    source, target = _copied(len(trace) + 1, original, *(kept or attributes.dependencies(trace)))
    chained = _chains(trace, rows, unchained)
    given = np.array(more, np.int64).reshape(-1, 2)
    source = np.concatenate([source, chained[0], given[:, 0]])
    target = np.concatenate([target, chained[1], given[:, 1]])
    made = take_rows(trace, rows, source, target, without=("parent",))
    parent = attributes.parents(trace)
    inside = np.flatnonzero(parent >= 0)
    above, below = _copied(len(trace) + 1, rows, parent[inside], inside)
    return attributes.with_integers(
        made, "parent", dict(zip(below.tolist(), (above + 1).tolist(), strict=True))
    )


@dataclass(eq=False)
class New:
    """A node like row ``like`` behind row ``after`` (-1: in front of all), lasting ``micros``. ``name`` None:
    that of ``like``; a node with a name of its own has no tensors and autograd number.

    ``needs``: rows and new nodes that it depends on; ``needed_by``: rows that depend on it; those of its lane
    need not be named. ``parent``: the operator that it is in; None: that of ``like``. ``collective``: the
    bytes (comm_size) of a collective of type ``kind``, None for other nodes; its ``lane``. ``texts``: string
    attributes.
    """

    after: int
    like: int
    micros: float
    name: str | None = None
    needs: list[int | New] = field(default_factory=list)
    needed_by: list[int] = field(default_factory=list)
    parent: int | New | None = None
    collective: int | None = None
    kind: CollectiveType = CollectiveType.ALL_REDUCE
    lane: int = -1
    texts: Mapping[str, str] = field(default_factory=dict)


_OF_OPERATORS = ("segment", "rf_id", "seq_id", "fw_parent", "fw_tid", "op_schema")


def insert(trace: ExecutionTrace, removed: np.ndarray, new: Sequence[New]) -> ExecutionTrace:
    """The trace without the rows ``removed`` (bool[N]) and all their dependencies, and with ``new`` nodes;
    those behind one row are in the order given. A further collective of a lane follows the one before it."""
    behind: dict[int, list[New]] = defaultdict(list)
    for node in new:
        behind[node.after].append(node)
    rows: list[int] = []
    place: dict[int | New, int] = {}
    for row in range(-1, len(trace)):
        if row >= 0 and not removed[row]:
            place[row] = len(rows)
            rows.append(row)
        for node in behind.get(row, ()):
            place[node] = len(rows)
            rows.append(node.like)
    more: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    for node in sorted(new, key=lambda node: place[node]):
        at = place[node]
        more += [(place[each], at) for each in node.needs]
        more += [(at, place[row]) for row in node.needed_by]
        if node.collective is not None:
            more += [(last[node.lane], at)] if node.lane in last else []
            last[node.lane] = at
    source, target = attributes.dependencies(trace)
    # Copies of a kept row must not take over its dependencies: only its first copy, which is itself, has
    # them.
    copies = np.array([place[node] for node in new if not removed[node.like]], np.int64)
    kept = ~removed[source] & ~removed[target]
    unchained = [place[node] for node in new if node.collective is not None]
    made = arrange(trace, np.array(rows), (source[kept], target[kept]), more, unchained, copies)
    names = {place[node]: node.name for node in new if node.name is not None}
    made = attributes.renamed(attributes.without(made, _OF_OPERATORS, _rows(made, names)), names)
    inside = {place[node]: place[node.parent] + 1 for node in new if node.parent is not None}
    made = attributes.with_integers(made, "parent", inside)
    for name in sorted({name for node in new for name in node.texts}):
        texts = {place[node]: node.texts[name] for node in new if name in node.texts}
        made = attributes.with_texts(made, name, texts)
    collectives = {place[node]: node for node in new if node.collective is not None}
    made = _collectives(made, collectives) if collectives else made
    return attributes.lasting(made, {place[node]: node.micros for node in new})


def _collectives(trace: ExecutionTrace, nodes: Mapping[int, New]) -> ExecutionTrace:
    """The trace whose nodes at these places are collectives."""
    trace.types[list(nodes)] = NodeType.COMM_COLL
    trace = attributes.without(trace, ("tid", *_OF_OPERATORS), _rows(trace, nodes))
    # The order of the nodes is now that of the calls.
    trace = attributes.without(trace, ["comm_sequence"], np.ones(len(trace), bool))
    for name, kind, values in (
        ("comm_type", "int64", {at: int(node.kind) for at, node in nodes.items()}),
        ("comm_size", "int64", {at: node.collective or 0 for at, node in nodes.items()}),
        ("lane", "int64", {at: node.lane for at, node in nodes.items() if node.lane >= 0}),
        ("is_cpu_op", "bool", dict.fromkeys(nodes, 0)),
    ):
        trace = attributes.with_integers(trace, name, values, kind)
    return trace


def _rows(trace: ExecutionTrace, rows: Iterable[int]) -> np.ndarray:
    """bool[N]: these rows."""
    mask = np.zeros(len(trace), bool)
    mask[list(rows)] = True
    return mask


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


def _copied(
    count: int, rows: np.ndarray, source: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Edges between ``count`` rows as edges between places: from the latest copy of the source in front of
    each copy of the target."""
    order = np.argsort(rows, kind="stable")  # the places of each row, in order
    first = np.searchsorted(rows[order], np.arange(count + 1))
    copies = np.diff(first)[target]
    edge = np.repeat(np.arange(len(target)), copies)
    nth = np.arange(len(edge)) - np.repeat(np.cumsum(copies) - copies, copies)
    place = order[first[target[edge]] + nth]
    width = len(rows) + 1
    keys = rows[order] * width + order
    at = np.searchsorted(keys, source[edge] * width + place) - 1
    found = (at >= 0) & (rows[order[np.maximum(at, 0)]] == source[edge])
    return order[at[found]], place[found]


def _chains(
    trace: ExecutionTrace, rows: np.ndarray, unchained: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Edges between places that follow on one another on a lane and whose originals didn't."""
    lane = attributes.lanes(trace)
    before = np.full(len(trace), -1)
    order = np.argsort(lane, kind="stable")
    follows = (lane[order[1:]] == lane[order[:-1]]) & (lane[order[1:]] >= 0)
    before[order[1:][follows]] = order[:-1][follows]
    places = np.setdiff1d(np.arange(len(rows)), np.array(unchained, np.int64))
    places = places[np.argsort(lane[rows[places]], kind="stable")]
    first, second = places[:-1], places[1:]
    same = (lane[rows[first]] == lane[rows[second]]) & (lane[rows[first]] >= 0)
    new = same & (before[rows[second]] != rows[first])
    return first[new], second[new]
