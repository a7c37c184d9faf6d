"""One .et file as columns: the type shared by the converter, the writer, the reader and all analyses.

Row i of every column is the ith node of the file. Each distinct string is stored once, in a table, and rows
hold indices into it, so a million nodes are a few arrays and not a million objects.
Source of the schema: chakra/schema/protobuf/et_def.proto in the PyPI wheel ``mlc-chakra`` 1.0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np


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

    def __getitem__(self, row: int) -> str:
        return self.table[int(self.index[row])].decode("utf-8", "replace")


class Texts(Sequence[bytes]):
    """A list of byte strings with few distinct ones: string i is ``table[codes[i]]``.

    ``codes`` is int32[strings].
    """

    def __init__(self, table: list[bytes], codes: np.ndarray) -> None:
        self.table, self.codes = table, codes

    @staticmethod
    def of(texts: Sequence[bytes]) -> Texts:
        """The same strings, each stored once."""
        if isinstance(texts, Texts):
            return texts
        table: dict[bytes, int] = {}
        codes = [table.setdefault(text, len(table)) for text in texts]
        return Texts(list(table), np.array(codes, dtype=np.int32))

    def take(self, rows: np.ndarray) -> Texts:
        """The strings at ``rows``."""
        return Texts(self.table, self.codes[rows])

    def __getitem__(self, row: Any) -> Any:
        return list(self)[row] if isinstance(row, slice) else self.table[self.codes[row]]

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.table.__getitem__, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class Ragged:
    """One list of integers per row: row i has ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` is int64[rows + 1], ``values`` uint64.
    """

    offsets: np.ndarray
    values: np.ndarray


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


@dataclass(eq=False, repr=False)
class TensorInfo:
    """The ``IOInfo`` of the inputs or outputs of the K nodes that have one.

    ``rows`` is int64[K], ascending; ``values``, ``shapes`` and ``types`` are K UTF-8 byte strings each.
    """

    rows: np.ndarray
    values: Sequence[bytes]
    shapes: Sequence[bytes]
    types: Sequence[bytes]


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
    - ``unread_fields``: the number of fields that the reader ignored
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
    unread_fields: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str, default: int = 0) -> np.ndarray:
        """Integer attribute ``name`` as int64[N], ``default`` for nodes without it."""
        dense = np.full(len(self), default, dtype=np.int64)
        attribute = self.attributes.get(name)
        if attribute is None or isinstance(attribute.values, Strings):
            return dense
        if attribute.values.dtype.kind in "iu":
            dense[attribute.rows] = attribute.values
        return dense

    def metadata_int(self, name: str) -> int | None:
        """Integer ``name`` of the metadata; None if it is missing or not an integer."""
        value = self.metadata.get(name)
        return value if type(value) is int else None

    def metadata_str(self, name: str) -> str:
        """String ``name`` of the metadata; "" if it is missing or not a string."""
        value = self.metadata.get(name)
        return value if isinstance(value, str) else ""

    def communication(self) -> ExecutionTrace:
        """A trace of the communication nodes only, without dependencies and tensors."""
        rows = np.flatnonzero(self.types >= NodeType.COMM_SEND)
        place = np.full(len(self), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        attributes = {}
        for name, attribute in self.attributes.items():
            kept = np.flatnonzero(place[attribute.rows] >= 0)
            values = attribute.values
            taken = Strings(values.table, values.index[kept]) if isinstance(values, Strings) else values[kept]
            if len(kept):
                attributes[name] = Attribute(attribute.kind, place[attribute.rows[kept]], taken)
        nothing = Ragged(np.zeros(len(rows) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint64))
        return ExecutionTrace(
            ids=self.ids[rows],
            names=Strings(self.names.table, self.names.index[rows]),
            types=self.types[rows],
            start_micros=self.start_micros[rows],
            duration_micros=self.duration_micros[rows],
            data_deps=nothing,
            ctrl_deps=nothing,
            attributes=attributes,
            metadata=self.metadata,
        )
