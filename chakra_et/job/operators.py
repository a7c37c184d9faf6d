"""The operators of a rank as a tree, by lane: what recognises blocks and tensors has in common."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from chakra_et.arrays import nearest
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, item_bytes
from chakra_et.et.node_attributes import parents, texts

ENGINE = "autograd::engine::evaluate_function"
GRADIENT = "torch::autograd::AccumulateGrad"
"""The autograd function whose input is a parameter's whole gradient."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operators:
    """``parent``: row of the operator or annotation around each node, -1 for none. ``top``: row of the
    outermost operator around each node (itself, where none is), -1 for what lies in none. ``lane``: int64[N].
    ``tops``: by CPU lane, the rows of the outermost operators in order. ``phase``: text of each row."""

    trace: ExecutionTrace
    parent: np.ndarray
    top: np.ndarray
    lane: np.ndarray
    tops: dict[int, list[int]]
    phase: list[str]

    @functools.cached_property
    def name(self) -> list[str]:
        table = [text.decode("utf-8", "replace") for text in self.trace.names.table]
        return [table[index] for index in self.trace.names.index.tolist()]

    @functools.cached_property
    def sequence(self) -> dict[int, int]:
        """Of each outermost operator, the autograd number of itself or else the first one in it."""
        found: dict[int, int] = {}
        numbers = self.trace.column("seq_id", -1)
        for row in np.flatnonzero((numbers >= 0) & (self.top >= 0)).tolist():
            found.setdefault(int(self.top[row]), int(numbers[row]))
        return found

    def shapes(self, row: int) -> tuple[Shape, ...]:
        """The shapes of the tensors among a node's inputs, lists of tensors taken apart."""
        at = self._input_of.get(row)
        return () if at is None or self.trace.inputs is None else shapes_in(self.trace.inputs.shapes[at])

    def item(self, row: int) -> int:
        """Bytes of an element of a node's first input; 4 where unknown."""
        return item_bytes(self.type(row)) or 4

    def type(self, row: int) -> str:
        """The type of the elements of a node's first input, "" where unknown."""
        at = self._input_of.get(row)
        if at is None or self.trace.inputs is None:
            return ""
        kind = self.trace.inputs.types[at].decode("utf-8", "replace")
        return kind.partition("Tensor(")[2].partition(")")[0]

    @functools.cached_property
    def _input_of(self) -> dict[int, int]:
        inputs = self.trace.inputs
        return {} if inputs is None else {row: at for at, row in enumerate(inputs.rows.tolist())}


def operators_of(trace: ExecutionTrace, where: str) -> Operators:
    """Raises ``TraceError`` for a file without the attributes that ``chakra-et convert`` writes."""
    if trace.metadata.get("schema") == "fasop":
        raise TraceError(
            f"{where}: is a planned set, which has no operators or tensors: plan the other model, batch or "
            "sequence (fasop plan --models-file, --mbs) and simulate that with --et"
        )
    missing = [name for name in ("lane", "kind", "parent") if name not in trace.attributes]
    if missing:
        raise TraceError(
            f"{where}: its nodes have no attribute {missing[0]}, from which operators are told: convert the "
            "traces with chakra-et convert"
        )
    parent = parents(trace)
    table, index = texts(trace, "kind")
    kind = np.array([*table, ""])[index]
    annotation = kind == "annotation"
    operator = (kind == "operator") | (trace.column("segment") > 0) & ~annotation
    outermost = nearest((parent < 0) | annotation[parent], parent)
    lane, on_cpu = trace.column("lane"), trace.column("is_cpu_op") != 0
    own = operator & on_cpu & (outermost == np.arange(len(trace))) & (trace.column("segment") == 0)
    tops: dict[int, list[int]] = {}
    for row in np.flatnonzero(own).tolist():
        tops.setdefault(int(lane[row]), []).append(row)
    names, at = texts(trace, "phase")
    phase = [names[number] if number >= 0 else "" for number in at.tolist()]
    return Operators(trace, parent, np.where(own[outermost], outermost, -1), lane, tops, phase)


def first_nodes(trace: ExecutionTrace, rows: np.ndarray) -> np.ndarray:
    """For each row, that of ``rows`` which is of the same operator (attribute rf_id), -1 for none; int64."""
    record = trace.column("rf_id", -1)
    known = rows[record[rows] > 0]
    found = np.full(len(trace), -1)
    if len(known):
        known = known[np.argsort(record[known], kind="stable")]
        at = np.minimum(np.searchsorted(record[known], record), len(known) - 1)
        found = np.where(record[known][at] == record, known[at], -1)
    return found


def inside(trace: ExecutionTrace, anchors: list[int]) -> np.ndarray:
    """Which of the ``anchors`` (rows) each node is in or is a further segment of, -1 for none; int64[N]."""
    number = np.full(len(trace), -1)
    number[anchors] = np.arange(len(anchors))
    first, above = first_nodes(trace, np.array(anchors, np.int64)), parents(trace)
    found = np.where((number < 0) & (first >= 0), number[first], number)
    at = nearest(found >= 0, above)
    return np.where(at >= 0, found[at], -1)


@functools.lru_cache(maxsize=65536)
def shapes_in(text: bytes) -> tuple[Shape, ...]:
    """The shapes in the JSON text of a node's inputs; scalars are left out."""
    found: list[Shape] = []

    def note(shape: Shape) -> Shape:
        found.append(shape)
        return shape

    with_shapes(text, note)
    return tuple(found)


def with_shapes(shapes: bytes, changed: Callable[[Shape], Shape]) -> bytes:
    """The JSON text of an operator's shapes with each changed; as it is if it can't be read."""
    try:
        loaded = msgspec.json.decode(shapes)
    except (msgspec.DecodeError, RecursionError):
        return shapes
    made = _each_shape(loaded, changed)
    return shapes if made == loaded else json.dumps(made, separators=(",", ":")).encode()


def _each_shape(value: object, changed: Callable[[Shape], Shape]) -> object:
    if not isinstance(value, list):
        return value
    if value and all(type(each) is int for each in value):
        return list(changed(tuple(value)))
    return [_each_shape(each, changed) for each in value]
