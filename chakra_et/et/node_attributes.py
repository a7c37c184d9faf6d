"""New traces from given ones: other attributes, names, tensors and times. What is given is never changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Strings, TensorInfo, ValueKind
from chakra_et.et.edges import edges_of, rows_of

# The letters in the attribute ``dep_kinds``, one per data dependency.
EDGE_KINDS = {
    "P": "program order",
    "L": "launch",
    "S": "stream order",
    "Y": "synchronisation",
    "T": "inter thread",
    "C": "collective",
}
EDGE_NAMES = (*EDGE_KINDS.values(), "dependency")


def communicates(trace: ExecutionTrace) -> np.ndarray:
    """bool[N]: collectives, sends and receives."""
    return np.asarray((trace.types >= NodeType.COMM_SEND) & (trace.types <= NodeType.COMM_COLL))


def in_phase(trace: ExecutionTrace, name: bytes) -> np.ndarray:
    """bool[N]: the nodes of a phase."""
    table, index = texts(trace, "phase")
    return np.isin(index, [at for at, text in enumerate(table) if text == name.decode()])


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


def kinds_of_edges(trace: ExecutionTrace) -> np.ndarray:
    """Index into ``EDGE_NAMES`` of each dependency of a file, data before ctrl, int64[edges]."""
    unknown = len(EDGE_KINDS)
    found = np.full(len(trace.data_deps.values) + len(trace.ctrl_deps.values), unknown)
    words, index = texts(trace, "dep_kinds")
    if np.array_equal(np.array([*map(len, words), 0])[index], np.diff(trace.data_deps.offsets)):
        of_letter = np.full(256, unknown)
        of_letter[[ord(letter) for letter in EDGE_KINDS]] = np.arange(unknown)
        letters = "".join([words[at] for at in index[index >= 0].tolist()]).encode("latin-1", "replace")
        found[: len(letters)] = of_letter[np.frombuffer(letters, np.uint8)]
    return found


def splits(trace: ExecutionTrace, name: str) -> dict[int, list[int]]:
    """Node (its row) → ``comm_in_split`` or ``comm_out_split`` as rows per member; [] for any other text."""
    table, index = texts(trace, name)
    found = []
    for text in table:
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError):
            rows = None
        whole = isinstance(rows, list) and all(type(n) is int and n >= 0 for n in rows)
        found.append(rows if whole else [])
    return {row: found[index[row]] for row in np.flatnonzero(index >= 0).tolist()}


def lanes(trace: ExecutionTrace) -> np.ndarray:
    """The thread, stream or communicator of each node, -1 for none, int64[N]; the numbers mean nothing."""
    lane, tid, stream = (trace.column(name, -1) for name in ("lane", "tid", "stream"))
    on_cpu = trace.column("is_cpu_op") != 0
    kind = np.select([lane >= 0, on_cpu, stream >= 0], [0, 1, 2], 3)
    value = np.select([lane >= 0, on_cpu, stream >= 0], [lane, tid, stream], -1)
    return np.where((kind == 3) | (value < 0), -1, (kind << 60) + (value & ((1 << 60) - 1)))


def parents(trace: ExecutionTrace) -> np.ndarray:
    """The row of the operator around each node, -1 for none; int64[N]."""
    return rows_of(trace.ids, trace.column("parent", -1).clip(0).astype(np.uint64))


def dependencies(trace: ExecutionTrace) -> tuple[np.ndarray, np.ndarray]:
    """All dependencies as rows (source, target), int64[E]."""
    edges = edges_of(trace)
    known = edges.parent >= 0
    return edges.parent[known], edges.child[known]


def set_integers(
    trace: ExecutionTrace, name: str, kind: ValueKind, values: np.ndarray, present: np.ndarray
) -> ExecutionTrace:
    """The trace with integer attribute ``name`` of ``values`` (N) on nodes ``present`` (bool[N])."""
    rows = np.flatnonzero(present)
    return _set(trace, name, Attribute(kind, rows, values[rows]))


def _set(trace: ExecutionTrace, name: str, attribute: Attribute) -> ExecutionTrace:
    """The trace with this attribute, without it if no node has it."""
    attributes = {**trace.attributes, name: attribute}
    if not len(attribute.rows):
        del attributes[name]
    return dataclasses.replace(trace, attributes=attributes)


def with_integers(
    trace: ExecutionTrace, name: str, values: Mapping[int, int], kind: ValueKind = "int64"
) -> ExecutionTrace:
    """The trace with other ``values`` (by row) of integer attribute ``name``; ``kind`` where it is new."""
    given = trace.attributes.get(name)
    present, column = has(trace, name), trace.column(name)
    rows = np.array(list(values), np.int64)
    present[rows] = True
    column[rows] = list(values.values())
    return set_integers(trace, name, kind if given is None else given.kind, column, present)


def set_texts(trace: ExecutionTrace, name: str, table: Sequence[str], index: np.ndarray) -> ExecutionTrace:
    """The trace with string attribute ``name``: ``table[index[i]]`` on node i, none where the index is -1."""
    rows = np.flatnonzero(index >= 0)
    encoded = [text.encode("utf-8", "replace") for text in table]
    return _set(trace, name, Attribute("string", rows, Strings(encoded, index[rows].astype(np.int32))))


def with_texts(trace: ExecutionTrace, name: str, values: Mapping[int, str]) -> ExecutionTrace:
    """The trace whose nodes have other ``values`` (by row) of string attribute ``name``."""
    table, index = texts(trace, name)
    place = {text: at for at, text in enumerate(table)}
    for row, text in values.items():
        index[row] = place.setdefault(text, len(place))
    return set_texts(trace, name, list(place), index)


def without(trace: ExecutionTrace, names: Sequence[str], rows: np.ndarray) -> ExecutionTrace:
    """The trace whose nodes ``rows`` (bool[N]) have none of the attributes ``names``."""
    for name in names:
        attribute = trace.attributes.get(name)
        if attribute is not None:
            kept = np.flatnonzero(~rows[attribute.rows])
            trace = _set(trace, name, attribute.take(kept, attribute.rows[kept]))
    return trace


def renamed(trace: ExecutionTrace, names: Mapping[int, str]) -> ExecutionTrace:
    """The trace whose nodes have other ``names`` (by row), and none of the recorded inputs and outputs."""
    place = {text: at for at, text in enumerate(trace.names.table)}
    index = trace.names.index.copy()
    for row, name in names.items():
        index[row] = place.setdefault(name.encode(), len(place))

    def others(tensors: TensorInfo | None) -> TensorInfo | None:
        if tensors is None:
            return None
        kept = np.flatnonzero(~np.isin(tensors.rows, list(names)))
        return tensors.take(kept, tensors.rows[kept])

    inputs, outputs = others(trace.inputs), others(trace.outputs)
    return dataclasses.replace(trace, names=Strings(list(place), index), inputs=inputs, outputs=outputs)


def lasting(trace: ExecutionTrace, micros: Mapping[int, float]) -> ExecutionTrace:
    """The trace whose nodes last ``micros`` (by row); communication among them has no more waits."""
    duration = trace.duration_micros.copy()
    for row, value in micros.items():
        duration[row] = max(round(value), 0)
    trace = dataclasses.replace(trace, duration_micros=duration)
    communication = [row for row in micros if trace.types[row] >= NodeType.COMM_SEND]
    if not communication:
        return trace
    trace = with_integers(trace, "transfer_micros", {row: int(duration[row]) for row in communication})
    return with_integers(trace, "wait_micros", dict.fromkeys(communication, 0))


def with_metadata(trace: ExecutionTrace, **values: int | str | None) -> ExecutionTrace:
    """The trace with other metadata; None removes an entry."""
    metadata = {**trace.metadata, **values}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return dataclasses.replace(trace, metadata=kept)
