"""A new trace out of the nodes of a measured one: some left out, some copied, some moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from chakra_et.et.columns import Attribute, ExecutionTrace, Ragged, Strings, TensorInfo, ValueKind
from chakra_et.et.edges import edges_of, rows_of
from chakra_et.et.rows import take_rows


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
    source, target = _copied(len(trace) + 1, original, *(kept or dependencies(trace)))
    chained = _chains(trace, rows, unchained)
    given = np.array(more, np.int64).reshape(-1, 2)
    source = np.concatenate([source, chained[0], given[:, 0]])
    target = np.concatenate([target, chained[1], given[:, 1]])
    target, source = np.unique(np.stack([target, source]), axis=1)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=len(rows)))))
    data_deps = Ragged(offsets.astype(np.int64), (source + 1).astype(np.uint64))
    made = take_rows(trace, rows, data_deps, without=("parent",))
    parent = parents(trace)
    inside = np.flatnonzero(parent >= 0)
    above, below = _copied(len(trace) + 1, rows, parent[inside], inside)
    return with_integers(made, "parent", dict(zip(below.tolist(), (above + 1).tolist(), strict=True)))


def dependencies(trace: ExecutionTrace) -> tuple[np.ndarray, np.ndarray]:
    """All dependencies as rows (source, target), int64[E]."""
    edges = edges_of(trace)
    known = edges.parent >= 0
    return edges.parent[known], edges.child[known]


def parents(trace: ExecutionTrace) -> np.ndarray:
    """The row of the operator around each node, -1 for none; int64[N]."""
    return rows_of(trace.ids, trace.column("parent", -1).clip(0).astype(np.uint64))


def with_integers(
    trace: ExecutionTrace, name: str, values: Mapping[int, int], kind: ValueKind = "int64"
) -> ExecutionTrace:
    """The trace whose nodes have other ``values`` (by row) of integer attribute ``name``."""
    known: dict[int, int] = {}
    if name in trace.attributes:
        old = trace.attributes[name]
        assert not isinstance(old.values, Strings)
        kind = old.kind
        known = dict(zip(old.rows.tolist(), old.values.tolist(), strict=True))
    known |= values
    order = sorted(known)
    column = Attribute(kind, np.array(order, np.int64), np.array([known[row] for row in order], np.int64))
    return replace(trace, attributes={**trace.attributes, name: column})


def with_texts(trace: ExecutionTrace, name: str, values: Mapping[int, str]) -> ExecutionTrace:
    """The trace whose nodes have other ``values`` (by row) of string attribute ``name``."""
    known: dict[int, bytes] = {}
    old = trace.attributes.get(name)
    if old is not None and isinstance(old.values, Strings):
        table = old.values.table
        pairs = zip(old.rows.tolist(), old.values.index.tolist(), strict=True)
        known = {row: table[index] for row, index in pairs}
    known |= {row: text.encode() for row, text in values.items()}
    column = Attribute(
        "string", np.array(sorted(known), np.int64), _strings([known[r] for r in sorted(known)])
    )
    return replace(trace, attributes={**trace.attributes, name: column})


def without_attributes(trace: ExecutionTrace, names: Sequence[str], rows: Sequence[int]) -> ExecutionTrace:
    """The trace whose nodes ``rows`` have none of the attributes ``names``."""
    attributes = dict(trace.attributes)
    for name in names:
        if name in attributes:
            old = attributes[name]
            kept = np.flatnonzero(~np.isin(old.rows, list(rows)))
            values = old.values
            left = Strings(values.table, values.index[kept]) if isinstance(values, Strings) else values[kept]
            attributes[name] = Attribute(old.kind, old.rows[kept], left)
    return replace(trace, attributes={name: each for name, each in attributes.items() if len(each.rows)})


def without_tensors(trace: ExecutionTrace, rows: Sequence[int]) -> ExecutionTrace:
    """The trace whose nodes ``rows`` have no recorded inputs and outputs."""
    return replace(trace, inputs=_kept(trace.inputs, rows), outputs=_kept(trace.outputs, rows))


def _kept(tensors: TensorInfo | None, rows: Sequence[int]) -> TensorInfo | None:
    if tensors is None or not np.isin(tensors.rows, list(rows)).any():
        return tensors
    kept = np.flatnonzero(~np.isin(tensors.rows, list(rows)))
    columns = (
        [column[n] for n in kept.tolist()] for column in (tensors.values, tensors.shapes, tensors.types)
    )
    return TensorInfo(tensors.rows[kept], *columns)


def renamed(trace: ExecutionTrace, names: Mapping[int, str]) -> ExecutionTrace:
    """The trace whose nodes have other ``names`` (by row)."""
    table = list(trace.names.table)
    place = {text: at for at, text in enumerate(table)}
    index = trace.names.index.copy()
    for row, name in names.items():
        text = name.encode()
        if text not in place:
            place[text] = len(table)
            table.append(text)
        index[row] = place[text]
    return replace(trace, names=Strings(table, index))


def lasting(trace: ExecutionTrace, micros: Mapping[int, float]) -> ExecutionTrace:
    """The trace whose nodes last ``micros`` (by row); communication among them has no more waits."""
    duration = trace.duration_micros.copy()
    for row, value in micros.items():
        duration[row] = max(round(value), 0)
    trace = replace(trace, duration_micros=duration)
    communication = [row for row in micros if trace.types[row] >= 5]
    if not communication:
        return trace
    trace = with_integers(trace, "transfer_micros", {row: int(duration[row]) for row in communication})
    return with_integers(trace, "wait_micros", dict.fromkeys(communication, 0))


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
    lane = lanes(trace)
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


def in_phase(trace: ExecutionTrace, name: bytes) -> np.ndarray:
    """bool[N]: the nodes of a phase."""
    found = np.zeros(len(trace), bool)
    column = trace.attributes.get("phase")
    if column is not None and isinstance(column.values, Strings):
        named = np.array([text == name for text in column.values.table])
        found[column.rows] = named[column.values.index]
    return found


def lanes(trace: ExecutionTrace) -> np.ndarray:
    """The thread, stream or communicator of each node, -1 for none, int64[N]; the numbers mean nothing."""
    lane, tid, stream = (trace.column(name, -1) for name in ("lane", "tid", "stream"))
    on_cpu = trace.column("is_cpu_op") != 0
    kind = np.select([lane >= 0, on_cpu, stream >= 0], [0, 1, 2], 3)
    value = np.select([lane >= 0, on_cpu, stream >= 0], [lane, tid, stream], -1)
    values, code = np.unique(value, return_inverse=True)
    return np.where((kind == 3) | (value < 0), -1, kind * len(values) + code.reshape(-1))


def _strings(texts: Sequence[bytes]) -> Strings:
    table = list(dict.fromkeys(texts))
    place = {text: at for at, text in enumerate(table)}
    return Strings(table, np.array([place[text] for text in texts], np.int32))
