"""The host trace of PyTorch's ExecutionTraceObserver as columns.

There are two layouts: schema 1.0.x has all fields on the node, later ones have them in ``inputs``,
``outputs`` and ``attrs``. The layout is determined by the nodes, never by the version string.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et.arrays import narrowed
from chakra_et.errors import TraceError
from chakra_et.et import wire
from chakra_et.et.wire import Cells
from chakra_et.files import path_of
from chakra_et.findings import Findings
from chakra_et.redact import redacted_json
from chakra_et.traces.fields import Number, add_repairs, as_column, copies, each, indices, strided
from chakra_et.traces.records import MAX_BYTES, Taker, read_records

# The numbers of a node, and what stands for one that isn't recorded.
DEFAULTS = {"rf_id": 0, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 0, "fw_tid": 0}
# Attributes of record_param_comms that describe its collective, from PyTorch 2.2.
COMMUNICATION = re.compile(
    "collective_name|dtype|(in|out)_(msg_nelems|split_size)|global_rank_(start|stride)|pg_(name|desc|size)"
)
# About the operator's kernel, empty for nearly all operators and read by nothing.
UNUSED = frozenset(("kernel_backend", "kernel_file", "tensor_range"))
STRUCTURE = tuple(
    f"[pytorch|profiler|execution_{of}|{what}]" for of in ("trace", "graph") for what in ("process", "thread")
)
GROUP_RECORD = "## process_group:init ##"
TENSOR = re.compile(rb'\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*"[^"]*"\s*\]')
"""One tensor in a list of values: [tensor id, storage id, offset, elements, bytes per element, device]."""


class Values(msgspec.Struct, gc=False):
    values: msgspec.Raw = msgspec.Raw(b"[]")
    shapes: msgspec.Raw = msgspec.Raw(b"[]")
    types: msgspec.Raw = msgspec.Raw(b"[]")
    strides: msgspec.Raw = msgspec.Raw(b"[]")


class Attr(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class HostRecord(msgspec.Struct, gc=False):
    """A node of the layout with ``attrs``."""

    id: Number
    name: Any = ""
    inputs: Values | None = None
    outputs: Values | None = None
    attrs: list[Attr] | None = None


class FlatNode(msgspec.Struct, gc=False):
    """A node of schema 1.0.x."""

    id: Number
    name: Any = ""
    rf_id: Number = 0
    fw_parent: Number = 0
    seq_id: Number = -1
    scope: Number = 0
    tid: Number = 0
    fw_tid: Number = 0
    op_schema: Any = ""
    inputs: msgspec.Raw = msgspec.Raw(b"[]")
    input_shapes: msgspec.Raw = msgspec.Raw(b"[]")
    input_types: msgspec.Raw = msgspec.Raw(b"[]")
    outputs: msgspec.Raw = msgspec.Raw(b"[]")
    output_shapes: msgspec.Raw = msgspec.Raw(b"[]")
    output_types: msgspec.Raw = msgspec.Raw(b"[]")


class HostDocument(msgspec.Struct, kw_only=True):
    nodes: list[HostRecord]
    schema: Any = ""
    pid: Any = 0
    time: Any = ""
    start_ts: Any = 0
    finish_ts: Any = 0
    chakra_et_repairs: Any = None


class FlatDocument(HostDocument, kw_only=True):
    nodes: list[FlatNode]  # type: ignore[assignment]


@dataclass(eq=False, repr=False)
class HostTrace:
    """The nodes of one rank, one row each, in file order.

    - ``rf_id``, ``fw_parent``, ``seq_id``, ``scope``, ``tid``, ``fw_tid``: int64[rows], or int32 where that
      suffices; ids and parents aren't kept, as nesting is by the times of the device trace
    - ``name``: index into ``names``; ``op_schema``: index into ``schemas``
    - ``inputs``, ``outputs``: values, shapes and types of each row as JSON text of the trace (UTF-8)
    - ``communication``: row → attributes of a collective; ``strides``: row → strides of
      the inputs as JSON text, if one isn't contiguous
    - ``groups``: the recorded process groups; ``header``: schema, pid, time, start_ts, finish_ts
    - ``recorded``: False if there is no host trace and the operators come from the device trace
    """

    path: Path
    name: np.ndarray
    names: list[str]
    op_schema: np.ndarray
    schemas: list[str]
    rf_id: np.ndarray
    fw_parent: np.ndarray
    seq_id: np.ndarray
    scope: np.ndarray
    tid: np.ndarray
    fw_tid: np.ndarray
    inputs: tuple[Cells, Cells, Cells]
    outputs: tuple[Cells, Cells, Cells]
    communication: dict[int, dict[str, Any]]
    strides: dict[int, str]
    groups: list[dict[str, Any]]
    header: dict[str, Any]
    findings: Findings = field(default_factory=Findings)
    recorded: bool = True

    def __len__(self) -> int:
        return len(self.name)


class _Columns(Taker):
    """Collects columns piece by piece."""

    def __init__(self) -> None:
        self.numbers = defaultdict[str, list[np.ndarray]](list)
        self.names: dict[str, int] = {}
        self.schemas: dict[str, int] = {}
        self.inputs: list[Cells] = []
        self.outputs: list[Cells] = []
        self.texts_known: dict[bytes, int] = {}
        self.communication: dict[int, dict[str, Any]] = {}
        self.strides: dict[int, str] = {}
        self.findings = Findings()
        self.rows = 0

    def take(self, nodes: list[Any]) -> None:
        if not nodes:
            return
        if isinstance(nodes[0], FlatNode):
            columns = {name: each(name, nodes) for name in (*DEFAULTS, "op_schema")}
            nodes_in = [Values(n.inputs, n.input_shapes, n.input_types) for n in nodes]
            nodes_out = [Values(n.outputs, n.output_shapes, n.output_types) for n in nodes]
        else:
            columns = self._attrs(nodes)
            empty = Values()
            nodes_in = [node.inputs or empty for node in nodes]
            nodes_out = [node.outputs or empty for node in nodes]
        shapes = self._take_values("inputs", self.inputs, nodes_in)
        # Schemas before 1.1.1 have none.
        self.strides |= strided(shapes, copies(each("strides", nodes_in)), self.rows)
        self._take_values("outputs", self.outputs, nodes_out)
        self.numbers["name"].append(indices(each("name", nodes), self.names))
        self.numbers["op_schema"].append(indices(columns.pop("op_schema"), self.schemas))
        for name, values in columns.items():
            self.numbers[name].append(as_column(values))
        self.rows += len(nodes)

    def leave_out(self, record: bytes) -> None:
        self.findings.add("bad-node")

    def _attrs(self, nodes: list[HostRecord]) -> dict[str, list[Any]]:
        """The attributes of the nodes as columns, but for those of communication, which are kept."""
        columns: dict[str, list[Any]] = {name: [missing] * len(nodes) for name, missing in DEFAULTS.items()}
        columns["op_schema"] = [""] * len(nodes)
        column_of = columns.get
        for at, attrs in enumerate(each("attrs", nodes)):
            for attr in attrs or ():
                column = column_of(attr.name)
                if column is not None:
                    column[at] = attr.value
                elif not attr.value or (name := attr.name) in UNUSED:
                    pass
                elif COMMUNICATION.fullmatch(name):
                    self.communication.setdefault(self.rows + at, {})[name] = attr.value
                else:
                    self.findings.add("unknown-attribute", detail=name)
        return columns

    def _take_values(self, side: str, values: list[Cells], sources: list[Values]) -> list[bytes]:
        """Collect one side's arguments; returns their shapes, as JSON texts."""
        shapes, types = (copies(each(name, sources)) for name in ("shapes", "types"))
        texts = each("values", sources)
        with_strings = {kinds for kinds in set(types) if b"String" in kinds}
        for at, kinds in enumerate(types):
            if kinds in with_strings:
                texts[at] = redacted_json(bytes(texts[at]))
        values.append(wire.byte_strings(texts))
        for name, column in (("shapes", shapes), ("types", types)):
            self.numbers[f"{side} {name}"].append(indices(column, self.texts_known, bytes))
        return shapes


def load(path: str | Path, max_bytes: int = MAX_BYTES) -> HostTrace:
    """Read a host trace (``.json`` or ``.json.gz``).

    Raises ``TraceError`` if it is not readable, is too long or has no node.
    """
    path = path_of(path)
    columns = _Columns()

    def layout(head: bytes) -> type:
        return FlatDocument if b'"input_shapes"' in head and b'"attrs"' not in head else HostDocument

    document = read_records(path, "nodes", layout, columns, max_bytes)
    if columns.rows == 0:
        raise TraceError(f"{path}: has no node; did the run reach an active profiler step?")
    joined: dict[str, Any] = {
        name: narrowed(np.concatenate(columns.numbers.pop(name))) for name in list(columns.numbers)
    }
    table = wire.byte_strings(list(columns.texts_known))
    texts = {
        name: table.take(joined.pop(name)) for name in list(joined) if name.endswith((" shapes", " types"))
    }
    inputs, outputs = wire.joined(columns.inputs), wire.joined(columns.outputs)
    add_repairs(columns.findings, "host", document.chakra_et_repairs)
    return HostTrace(
        path=path,
        names=list(columns.names),
        schemas=list(columns.schemas),
        inputs=(inputs, texts["inputs shapes"], texts["inputs types"]),
        outputs=(outputs, texts["outputs shapes"], texts["outputs types"]),
        communication=columns.communication,
        strides=columns.strides,
        groups=_groups(columns, joined["name"], inputs),
        header={key: getattr(document, key) for key in ("schema", "pid", "time", "start_ts", "finish_ts")},
        findings=columns.findings,
        **joined,
    )


def tensors(values: bytes) -> list[tuple[int, int, int]]:
    """(storage id, elements, bytes per element) of each tensor in the JSON text of a node's values."""
    return [(int(t[1]), int(t[3]), int(t[4])) for t in TENSOR.findall(values)]


def _groups(columns: _Columns, name: np.ndarray, inputs: Cells) -> list[dict[str, Any]]:
    """The process groups in the process-group record, which are JSON in a string."""
    code = columns.names.get(GROUP_RECORD, -1)
    for row in np.flatnonzero(name == code).tolist():
        try:
            (payload, *_) = msgspec.json.decode(inputs[row], type=list[str])
            return msgspec.json.decode(payload, type=list[dict[str, Any]])
        except (msgspec.DecodeError, ValueError, RecursionError):
            columns.findings.add("bad-group-record")
    return []
