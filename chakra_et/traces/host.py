"""The ExecutionTraceObserver's host trace as columns.

Two layouts exist: schema 1.0.x keeps every field flat on the node, later ones keep them in ``inputs``,
``outputs`` and ``attrs``. Which one a file has is seen from its nodes, never from its version string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.traces.fields import Number, as_column
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits
from chakra_et.traces.records import read_records

NUMERIC = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")
DEFAULTS = {"rf_id": 0, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 0, "fw_tid": 0}
# What record_param_comms says of its collective, from PyTorch 2.2 on.
COMMUNICATION = frozenset(
    (
        "collective_name",
        "dtype",
        "in_msg_nelems",
        "out_msg_nelems",
        "in_split_size",
        "out_split_size",
        "global_rank_start",
        "global_rank_stride",
        "pg_name",
        "pg_desc",
        "pg_size",
    )
)
# Attributes that are text about the operator's kernel; empty for nearly all operators.
TEXT = frozenset(("kernel_backend", "kernel_file", "tensor_range"))
STRUCTURE = (
    "[pytorch|profiler|execution_trace|process]",
    "[pytorch|profiler|execution_trace|thread]",
    "[pytorch|profiler|execution_graph|process]",
    "[pytorch|profiler|execution_graph|thread]",
)
GROUP_RECORD = "## process_group:init ##"
TENSOR = re.compile(rb'\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*"[^"]*"\s*\]')
"""One tensor in a list of values: [tensor id, storage id, offset, elements, bytes per element, device]."""


class Values(msgspec.Struct, gc=False):
    values: msgspec.Raw = msgspec.Raw(b"[]")
    shapes: msgspec.Raw = msgspec.Raw(b"[]")
    types: msgspec.Raw = msgspec.Raw(b"[]")


class Attr(msgspec.Struct, gc=False):
    name: str
    value: Any = None


# Getters for map: a million calls from C take half the time of a comprehension's.
_attr_name, _attr_value = attrgetter("name"), attrgetter("value")
_values, _shapes, _types = attrgetter("values"), attrgetter("shapes"), attrgetter("types")


class Node(msgspec.Struct, gc=False):
    """A node of the layout with ``attrs``. ``ctrl_deps`` is the one parent."""

    id: Number
    name: Any = ""
    ctrl_deps: Any = None
    inputs: Values | None = None
    outputs: Values | None = None
    attrs: list[Attr] | None = None


class FlatNode(msgspec.Struct, gc=False):
    """A node of schema 1.0.x."""

    id: Number
    name: Any = ""
    parent: Any = None
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


class Document(msgspec.Struct):
    nodes: list[Node]
    schema: Any = ""
    pid: Any = 0
    time: Any = ""
    start_ts: Any = 0
    finish_ts: Any = 0


class FlatDocument(Document):
    nodes: list[FlatNode]


@dataclass
class HostTrace:
    """The nodes of one rank, one row each, in file order.

    ``id``, ``parent`` (-1: none), ``rf_id``, ``fw_parent``, ``seq_id``, ``scope``, ``tid``, ``fw_tid``:
    int64. ``name`` and ``op_schema`` index ``names`` and ``schemas``. ``inputs``, ``outputs``: values,
    shapes and types of row i as the JSON text of the trace (UTF-8). ``communication``: the collective's
    attributes of the rows that have them. ``texts``: other text attributes that are not empty.
    ``groups``: the process groups as recorded. ``header``: schema, pid, time, start_ts, finish_ts.
    ``recorded`` is False where there is no host trace, and the operators come from the device trace.
    """

    path: Path
    id: np.ndarray
    parent: np.ndarray
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
    inputs: tuple[list[bytes], list[bytes], list[bytes]]
    outputs: tuple[list[bytes], list[bytes], list[bytes]]
    communication: dict[int, dict[str, Any]]
    texts: dict[int, dict[str, str]]
    groups: list[dict[str, Any]]
    header: dict[str, Any]
    findings: Findings = field(default_factory=Findings)
    recorded: bool = True

    def __len__(self) -> int:
        return len(self.id)


class _Columns:
    """Collects columns over the pieces of the file."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.names: dict[str, int] = {}
        self.schemas: dict[str, int] = {}
        self.inputs: tuple[list[bytes], ...] = ([], [], [])
        self.outputs: tuple[list[bytes], ...] = ([], [], [])
        self.known: dict[bytes, bytes] = {}
        self.communication: dict[int, dict[str, Any]] = {}
        self.texts: dict[int, dict[str, str]] = {}
        self.findings = Findings()
        self.rows = 0

    def take(self, nodes: list[Any]) -> None:
        if not nodes:
            return
        names, schemas = self.names, self.schemas
        flat = isinstance(nodes[0], FlatNode)
        self._add("id", as_column([node.id for node in nodes]))
        self._add("parent", as_column([_parent(node.parent if flat else node.ctrl_deps) for node in nodes]))
        self._add("name", np.array([names.setdefault(str(n.name), len(names)) for n in nodes], np.int32))
        if flat:
            for column in NUMERIC:
                self._add(column, as_column([getattr(node, column) for node in nodes]))
            schema = [schemas.setdefault(str(node.op_schema), len(schemas)) for node in nodes]
            nodes_in = [Values(n.inputs, n.input_shapes, n.input_types) for n in nodes]
            nodes_out = [Values(n.outputs, n.output_shapes, n.output_types) for n in nodes]
        else:
            schema = self._take_attrs(nodes)
            empty = Values()
            nodes_in = [node.inputs or empty for node in nodes]
            nodes_out = [node.outputs or empty for node in nodes]
        _keep(self.inputs, nodes_in, self.known)
        _keep(self.outputs, nodes_out, self.known)
        self._add("op_schema", np.array(schema, np.int32))
        self.rows += len(nodes)

    def leave_out(self, record: bytes) -> None:
        self.findings.add("bad-node")

    def _take_attrs(self, nodes: list[Node]) -> list[int]:
        """Split the nodes' attributes into columns; returns their operator schemas' indices.

        Nearly all nodes carry the same attributes in the same order, so these are taken a column at a time.
        """
        schemas = self.schemas
        columns: dict[str, list[Any]] = {name: [DEFAULTS[name]] * len(nodes) for name in NUMERIC}
        op_schema = [schemas.setdefault("", len(schemas))] * len(nodes)
        usual = len(nodes[len(nodes) // 2].attrs or ())
        alike = [at for at, node in enumerate(nodes) if node.attrs and len(node.attrs) == usual]
        places: list[tuple[int, list[Attr]]] = []
        for position in zip(*[nodes[at].attrs for at in alike], strict=True):
            name = position[0].name
            if len(set(map(_attr_name, position))) > 1:
                places = [(at, nodes[at].attrs) for at in alike]
                break
            values = list(map(_attr_value, position))
            if name in columns:
                full = columns[name]
                if len(alike) == len(nodes):
                    columns[name] = values
                else:
                    for at, value in zip(alike, values, strict=True):
                        full[at] = value
            elif name == "op_schema":
                for at, value in zip(alike, values, strict=True):
                    op_schema[at] = schemas.setdefault(str(value), len(schemas))
            elif any(values):
                places += [(at, [attr]) for at, attr in zip(alike, position, strict=True) if attr.value]
        taken = set(alike)
        places += [(at, node.attrs or []) for at, node in enumerate(nodes) if at not in taken]
        for at, attrs in places:
            for attr in attrs:
                name, value = attr.name, attr.value
                if name in columns:
                    columns[name][at] = value
                elif name == "op_schema":
                    op_schema[at] = schemas.setdefault(str(value), len(schemas))
                elif not value:
                    continue
                elif name in COMMUNICATION:
                    self.communication.setdefault(self.rows + at, {})[name] = value
                elif name in TEXT:
                    self.texts.setdefault(self.rows + at, {})[name] = str(value)
                else:
                    self.findings.add("unknown-attribute", detail=name)
        for name, values in columns.items():
            self._add(name, as_column(values))
        return op_schema

    def _add(self, name: str, column: np.ndarray) -> None:
        self.numbers.setdefault(name, []).append(column)


def _keep(target: tuple[list[bytes], ...], sources: list[Values], known: dict[bytes, bytes]) -> None:
    """Add the texts of ``sources`` to ``target``; ``known`` keeps one copy of each that repeats."""
    values, shapes, types = target
    values += map(bytes, map(_values, sources))
    for texts, get in ((shapes, _shapes), (types, _types)):
        read = list(map(bytes, map(get, sources)))
        texts += map(known.setdefault, read, read)


def load(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> HostTrace:
    """Read a host trace (``.json`` or ``.json.gz``).

    Raises ``TraceError`` if it is not readable, beyond the limits or holds no node.
    """
    path = Path(path)
    columns = _Columns()

    def layout(head: bytes) -> type:
        return FlatDocument if b'"input_shapes"' in head and b'"attrs"' not in head else Document

    document = read_records(path, "nodes", layout, columns, limits)
    if columns.rows == 0:
        raise TraceError(f"{path}: no node in it; was the profiler's active step reached?")
    joined = {name: np.concatenate(parts) for name, parts in columns.numbers.items()}
    _check_family(joined["id"], joined["parent"], columns.findings)
    return HostTrace(
        path=path,
        names=list(columns.names),
        schemas=list(columns.schemas),
        inputs=columns.inputs,
        outputs=columns.outputs,
        communication=columns.communication,
        texts=columns.texts,
        groups=_groups(columns, joined["name"]),
        header={key: getattr(document, key) for key in ("schema", "pid", "time", "start_ts", "finish_ts")},
        findings=columns.findings,
        **joined,
    )


def _check_family(ids: np.ndarray, parents: np.ndarray, findings: Findings) -> None:
    """Count wrong ids and parents. They cost no node: nesting is taken from the times."""
    known, first = np.unique(ids, return_index=True)
    parents = parents[first]
    up = np.minimum(np.searchsorted(known, parents), len(known) - 1)
    absent = known[up] != parents
    nodes = np.arange(len(known))
    up = np.where(absent, nodes, up)
    # The process has no parent or itself; it has the lowest id, and may not be in the trace.
    ends = absent | ((up == nodes) & (nodes == 0))
    absent &= (nodes > 0) & (parents != known[0] - 1)
    for _ in range(len(known).bit_length()):
        up = up[up]  # twice as far in each round
    findings.add("duplicate-host-id", len(ids) - len(known))
    findings.add("absent-host-parent", int(absent.sum()))
    findings.add("cyclic-host-parent", int((~ends[up]).sum()))


def tensors(values: bytes) -> list[tuple[int, int, int]]:
    """The tensors in the JSON text of a node's values: (storage id, elements, bytes per element) each."""
    return [(int(t[1]), int(t[3]), int(t[4])) for t in TENSOR.findall(values)]


def _parent(value: Any) -> Number:
    return value[0] if isinstance(value, list) and value else value if isinstance(value, int) else None


def _groups(columns: _Columns, name: np.ndarray) -> list[dict[str, Any]]:
    """The payload of the process-group record: JSON inside a string."""
    code = columns.names.get(GROUP_RECORD, -1)
    for row in np.flatnonzero(name == code).tolist():
        try:
            (payload, *_) = msgspec.json.decode(columns.inputs[0][row], type=list[str])
            return msgspec.json.decode(payload, type=list[dict[str, Any]])
        except (msgspec.DecodeError, ValueError, RecursionError):
            columns.findings.add("bad-group-record")
    return []
