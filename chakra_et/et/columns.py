"""One .et file as columns: the type shared by the converter, the writer, the reader and all analyses.

    trace = chakra_et.et.file.read("outputs/gpt2_2gpu_quick_trace.0.et")
    print(len(trace), trace.duration_micros.sum(), trace.metadata_int("rank"))

Row i of every column is the ith node of the file. Each distinct string is stored once, in a table, and rows
hold indices into it, so a million nodes are a few arrays and not a million objects.
Source of the schema: chakra/schema/protobuf/et_def.proto in the PyPI wheel ``mlc-chakra`` 1.0.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, TypeVar

import numpy as np

_ELEMENT_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2, "uint16": 2,
    "float": 4, "float32": 4, "tf32": 4, "int": 4, "int32": 4, "uint32": 4,
    "double": 8, "float64": 8, "long": 8, "int64": 8, "long int": 8, "uint64": 8, "unsigned long": 8,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


class NodeType(IntEnum):
    """``NodeType`` of the Chakra schema."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveType(IntEnum):
    """``CollectiveCommType`` of the Chakra schema: the value of the ``comm_type`` attribute."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


FOR_ALL = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
)
"""Collectives that give every rank a result of all: none is done before all have begun, and all use it."""


@functools.cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element; 0 for an unknown type."""
    name = dtype.lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name, 0)


ValueKind = Literal["int32", "int64", "uint64", "bool", "string", "double"] | str
"""The member of ``AttributeProto.value`` that an attribute uses (``int64`` is ``int64_val``). Foreign files
may use other members: ``schema.MEMBERS`` lists all."""


@dataclass(eq=False, repr=False)
class Strings:
    """A column of strings: ``table[index[i]]`` is the string of row i.

    ``table`` holds UTF-8 bytes, ``index`` is int32[rows].
    """

    table: list[bytes]
    index: np.ndarray

    def take(self, rows: np.ndarray) -> Strings:
        """The strings of ``rows``."""
        return Strings(self.table, self.index[rows])

    def __getitem__(self, row: int) -> str:
        return self.table[int(self.index[row])].decode("utf-8", "replace")


@dataclass(eq=False, repr=False)
class Ragged:
    """One list of integers per row: row i has ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` is int64[rows + 1], ``values`` uint64.
    """

    offsets: np.ndarray
    values: np.ndarray

    @classmethod
    def of_edges(cls, source: np.ndarray, target: np.ndarray, count: int) -> Ragged:
        """Of each of ``count`` rows the distinct sources of its edges, ascending, as ids from 1 on."""
        target, source = np.divmod(np.unique(target * count + source), max(count, 1))
        offsets = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=count))))
        return cls(offsets.astype(np.int64), (source + 1).astype(np.uint64))

    @classmethod
    def empty(cls, count: int) -> Ragged:
        """``count`` rows with nothing."""
        return cls(np.zeros(count + 1, np.int64), np.zeros(0, np.uint64))


@dataclass(eq=False, repr=False)
class Attribute:
    """One attribute of the K nodes that have it.

    ``rows`` is int64[K], ascending. ``values`` has K entries: int64 or int32 (kinds int32, int64, bool),
    uint64, float64, or a ``Strings`` column for kind ``string`` (in foreign files also for ``bytes`` and for
    lists, which stay encoded).
    """

    kind: ValueKind
    rows: np.ndarray
    values: np.ndarray | Strings

    def take(self, at: np.ndarray, rows: np.ndarray) -> Attribute:
        """The values at places ``at``, as those of ``rows``."""
        values = self.values
        taken = values.take(at) if isinstance(values, Strings) else values[at]
        return Attribute(self.kind, rows, taken)


@dataclass(eq=False, repr=False)
class TensorInfo:
    """The ``IOInfo`` of the inputs or outputs of the K nodes that have one.

    ``rows`` is int64[K], ascending; ``values``, ``shapes`` and ``types`` are K UTF-8 byte strings each, in a
    list or in ``wire.Cells``.
    """

    rows: np.ndarray
    values: Sequence[bytes]
    shapes: Sequence[bytes]
    types: Sequence[bytes]

    def take(self, at: np.ndarray, rows: np.ndarray) -> TensorInfo:
        """The strings at places ``at``, as those of ``rows``."""
        places = at.tolist()
        columns = ([column[place] for place in places] for column in (self.values, self.shapes, self.types))
        return TensorInfo(rows, *columns)


_OfSome = TypeVar("_OfSome", Attribute, TensorInfo)


def _copied(column: _OfSome, rows: np.ndarray) -> _OfSome:
    """What new nodes have, of which node i is a copy of row ``rows[i]``."""
    at = np.searchsorted(column.rows, rows)
    have = np.flatnonzero(np.append(column.rows, -1)[at] == rows)
    return column.take(at[have], have)


@dataclass(eq=False, repr=False)
class ExecutionTrace:
    """The N nodes of one rank's .et file.

    - ``ids`` uint64[N]; ``names``: N strings; ``types`` uint8[N] of ``NodeType``
    - ``start_micros``, ``duration_micros``: uint64[N], µs
    - ``data_deps``, ``ctrl_deps``: one list of node ids per node
    - ``attributes``: by name, in the order in which they are written. If a foreign file has a name with two
      kinds of value, the second is kept as ``name#kind``.
    - ``metadata``: the ``GlobalMetadata`` as name → int (int64_val; uint64_val for pid, start_ts and
      finish_ts, as in MLCommons' converter), str (string_val), bool or float, and the field ``version``
    - ``has_metadata``: False for a file whose first message is a node
    """

    ids: np.ndarray
    names: Strings
    types: np.ndarray
    start_micros: np.ndarray
    duration_micros: np.ndarray
    data_deps: Ragged
    ctrl_deps: Ragged
    inputs: TensorInfo | None = None
    outputs: TensorInfo | None = None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    metadata: dict[str, int | str | bool | float] = field(default_factory=dict)
    has_metadata: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str, default: int = 0) -> np.ndarray:
        """Integer attribute ``name`` as int64[N], ``default`` for nodes without it."""
        dense = np.full(len(self), default, dtype=np.int64)
        attribute = self.attributes.get(name)
        values = None if attribute is None else attribute.values
        if attribute and isinstance(values, np.ndarray) and values.dtype.kind in "iu":
            dense[attribute.rows] = values
        return dense

    def metadata_int(self, name: str) -> int | None:
        """Integer ``name`` of the metadata; None if it is missing or not an integer."""
        value = self.metadata.get(name)
        return value if type(value) is int else None

    def metadata_str(self, name: str) -> str:
        """String ``name`` of the metadata; "" if it is missing or not a string."""
        value = self.metadata.get(name)
        return value if isinstance(value, str) else ""

    def of_rows(self, rows: np.ndarray) -> ExecutionTrace:
        """The nodes ``rows`` (int64[M]), in that order and as often as named, without dependencies."""
        attributes = {name: _copied(attribute, rows) for name, attribute in self.attributes.items()}
        return replace(
            self,
            ids=self.ids[rows],
            names=self.names.take(rows),
            types=self.types[rows],
            start_micros=self.start_micros[rows],
            duration_micros=self.duration_micros[rows],
            data_deps=Ragged.empty(len(rows)),
            ctrl_deps=Ragged.empty(len(rows)),
            inputs=self.inputs and _copied(self.inputs, rows),
            outputs=self.outputs and _copied(self.outputs, rows),
            attributes={name: taken for name, taken in attributes.items() if len(taken.rows)},
        )

    def communication(self) -> ExecutionTrace:
        """A trace of the communication nodes only, without dependencies and tensors."""
        bare = replace(self, inputs=None, outputs=None)
        return bare.of_rows(np.flatnonzero(self.types >= NodeType.COMM_SEND))
