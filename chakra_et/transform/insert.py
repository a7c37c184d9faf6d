"""New nodes in a measured trace, made after the model of measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.transform import edit


@dataclass(eq=False)
class New:
    """A node like row ``like`` behind row ``after`` (-1: in front of all), lasting ``micros``. ``name`` None:
    that of ``like``; a node with a name of its own has no tensors and autograd number.

    ``needs``: rows and new nodes that it depends on; ``needed_by``: rows that depend on it; those of its lane
    need not be named. ``parent``: the operator that it is in; None: that of ``like``. ``collective``: the
    bytes (comm_size) of a collective of type ``kind``, None for other nodes; ``lane`` of it. ``texts``:
    string attributes.
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
_NOT_OF_COLLECTIVES = ("tid", "comm_sequence", *_OF_OPERATORS)


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
    source, target = edit.dependencies(trace)
    # Copies of a kept row must not take over its dependencies: only its first copy, which is itself, has
    # them.
    copies = np.array([place[node] for node in new if not removed[node.like]], np.int64)
    kept = ~removed[source] & ~removed[target]
    unchained = [place[node] for node in new if node.collective is not None]
    made = edit.arrange(trace, np.array(rows), (source[kept], target[kept]), more, unchained, copies)
    made = edit.lasting(made, {place[node]: node.micros for node in new})
    names = {place[node]: node.name for node in new if node.name is not None}
    made = edit.without_tensors(edit.without_attributes(made, _OF_OPERATORS, list(names)), list(names))
    made = edit.renamed(made, names)
    inside = {place[node]: place[node.parent] + 1 for node in new if node.parent is not None}
    made = edit.with_integers(made, "parent", inside)
    for name in {name for node in new for name in node.texts}:
        texts = {place[node]: node.texts[name] for node in new if name in node.texts}
        made = edit.with_texts(made, name, texts)
    collectives = {place[node]: node for node in new if node.collective is not None}
    return _collectives(made, collectives) if collectives else made


def _collectives(trace: ExecutionTrace, nodes: Mapping[int, New]) -> ExecutionTrace:
    """The trace whose nodes at these places are collectives."""
    types = trace.types.copy()
    types[list(nodes)] = NodeType.COMM_COLL
    trace.types = types
    trace = edit.without_attributes(trace, _NOT_OF_COLLECTIVES, list(nodes))
    # The order of the nodes is now that of the calls.
    trace = edit.without_attributes(trace, ["comm_sequence"], range(len(trace)))
    for name, kind, values in (
        ("comm_type", "int64", {at: int(node.kind) for at, node in nodes.items()}),
        ("comm_size", "int64", {at: node.collective or 0 for at, node in nodes.items()}),
        ("lane", "int64", {at: node.lane for at, node in nodes.items() if node.lane >= 0}),
        ("is_cpu_op", "bool", dict.fromkeys(nodes, 0)),
    ):
        trace = edit.with_integers(trace, name, values, kind) if values else trace
    micros = {at: node.micros for at, node in nodes.items()}
    return edit.lasting(trace, micros)
