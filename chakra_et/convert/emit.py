"""From the graph to the columns of an .et file, for both feeders of the Chakra schema.

Every attribute that MLCommons' converter writes is there under its name and type: rf_id, fw_parent,
seq_id, scope, tid, fw_tid, op_schema, is_cpu_op, stream; comm_type, comm_size, pg_name. ``pg_name`` is an
integer ≥ 1, as ASTRA-sim reads it as one; PyTorch's own name stands in ``pg_original_name``. All
dependencies are data dependencies, because Chakra's feeder reads no others.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from chakra_et.et.columns import (
    Attribute,
    ExecutionTrace,
    NodeType,
    Ragged,
    Strings,
    TensorInfo,
    ValueKind,
)
from chakra_et.graph.build import KIND_NAMES, Graph, NodeKind
from chakra_et.graph.communication import NEAREST_IN_ASTRA_SIM, Communication
from chakra_et.graph.groups import group_number
from chakra_et.graph.link import Link
from chakra_et.graph.linked import LinkedRank
from chakra_et.graph.timeline import Lane
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.host import DEFAULTS, NUMERIC, HostTrace

CommTypes = Literal["schema", "astra-sim"]
# One letter for each dependency of a node, in the order of its data_deps.
EDGE_LETTERS = b"PLSYTC"


def emit(
    rank: LinkedRank,
    graph: Graph,
    number: int,
    metadata: dict[str, Any],
    timestamps: bool = True,
    comm_types: CommTypes = "schema",
) -> ExecutionTrace:
    """The columns of rank ``number``'s file; node i of the graph gets id i + 1.

    ``comm_types``: the schema's collective types as they are, or those that ASTRA-sim does not know as the
    nearest that it does (the attribute ``comm_operator`` keeps what it was).
    """
    host, device, linked, items = rank.host, rank.device, rank.link, rank.communication.items
    rows = len(graph)
    host_row = _host_rows(rank, graph)
    attributes: dict[str, Attribute] = {}
    everywhere = np.arange(rows)

    def add(name: str, kind: ValueKind, at: np.ndarray, values: Any) -> None:
        if len(at):
            attributes[name] = Attribute(kind, at, values)

    for name in NUMERIC:
        values = np.where(host_row >= 0, getattr(host, name)[host_row], DEFAULTS[name])
        if name == "tid":
            values = np.where(host_row >= 0, values, _tid_of_lane(graph, host, host_row)[graph.lane])
        add(name, "int64", everywhere, values)
    schemas = [text.encode() for text in host.schemas] + [b""]
    stands = (host_row >= 0) & (graph.event >= 0) & (graph.kind <= NodeKind.ANNOTATION)
    schema = np.where(stands, host.op_schema[host_row], len(schemas) - 1)
    add("op_schema", "string", everywhere, Strings(schemas, schema.astype(np.int32)))
    on_cpu = np.array([lane.kind == "cpu" for lane in graph.lanes], dtype=bool)[graph.lane]
    add("is_cpu_op", "bool", everywhere, on_cpu.astype(np.int64))
    on_gpu = np.flatnonzero(np.array([lane.kind == "gpu" for lane in graph.lanes], dtype=bool)[graph.lane])
    for name in ("stream", "device"):
        of_lane = np.array([getattr(lane, name) for lane in graph.lanes], dtype=np.int64)
        add(name, "int64", on_gpu, of_lane[graph.lane[on_gpu]])
    add(
        "kind",
        "string",
        everywhere,
        Strings([name.encode() for name in KIND_NAMES], graph.kind.astype(np.int32)),
    )
    add("lane", "int64", everywhere, graph.lane)
    further = np.flatnonzero(graph.segment > 0)
    add("segment", "int64", further, graph.segment[further])
    _communication(graph, items, number, comm_types, add)
    _texts(graph, host, linked, add)

    sources = (graph.source + 1).astype(np.uint64)
    offsets = np.searchsorted(graph.target, np.arange(rows + 1)).astype(np.int64)
    add("dep_kinds", "string", np.flatnonzero(np.diff(offsets)), _dependency_kinds(graph, offsets))
    types = np.full(rows, NodeType.COMP, dtype=np.uint8)
    for node in _talking(graph, items).tolist():
        types[node] = items[graph.item[node]].type
    start = graph.start // 1000 if timestamps else np.zeros(rows, dtype=np.int64)
    return ExecutionTrace(
        ids=np.arange(1, rows + 1, dtype=np.uint64),
        names=_names(graph, device),
        types=types,
        start_micros=start.astype(np.uint64),
        duration_micros=_durations(graph).astype(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.zeros(rows + 1, dtype=np.int64), np.zeros(0, dtype=np.uint64)),
        inputs=_tensor_info(graph, linked, items, host.inputs),
        outputs=_tensor_info(graph, linked, items, host.outputs),
        attributes=attributes,
        metadata=metadata,
    )


def _durations(graph: Graph) -> np.ndarray:
    """Whole µs; what is cut off a node is carried to the next on its lane, so that no lane loses time."""
    order = np.argsort(graph.lane, kind="stable")
    length = (graph.end - graph.start)[order]
    lane = graph.lane[order]
    total = np.cumsum(length)
    first = np.searchsorted(lane, lane, side="left")
    total -= (total - length)[first]
    micros = total // 1000 - (total - length) // 1000
    result = np.empty(len(order), dtype=np.int64)
    result[order] = micros
    return result


def _names(graph: Graph, device: DeviceTrace) -> Strings:
    table = [name.encode("utf-8", "replace") for name in device.names] + [
        b"host-overhead",
        b"device-overhead",
    ]
    index = device.name[np.maximum(graph.event, 0)].astype(np.int32)
    index = np.where(graph.kind == NodeKind.HOST_OVERHEAD, len(device.names), index)
    index = np.where(graph.kind == NodeKind.DEVICE_OVERHEAD, len(device.names) + 1, index)
    return Strings(table, index.astype(np.int32))


def _host_rows(rank: LinkedRank, graph: Graph) -> np.ndarray:
    """For each node the host row of its operator: its own, or that around its runtime or launching call."""
    linked, calls = rank.link, rank.calls
    row = linked.host_row.copy()
    via = np.where(calls >= 0, calls, rank.timeline.parent)
    pending = np.flatnonzero(row < 0)
    at = via[pending]
    while len(pending):
        valid = at >= 0
        pending, at = pending[valid], at[valid]
        row[pending] = linked.host_row[at]
        open_ = row[pending] < 0
        pending, at = pending[open_], via[at[open_]]
    return np.where(graph.event >= 0, row[graph.event], -1)


def _tid_of_lane(graph: Graph, host: HostTrace, host_row: np.ndarray) -> np.ndarray:
    """The host trace's number of the thread of each lane, for nodes that have no operator."""
    tids = np.zeros(len(graph.lanes), dtype=np.int64)
    known = np.flatnonzero(host_row >= 0)
    lanes, first = np.unique(graph.lane[known], return_index=True)
    tids[lanes] = host.tid[host_row[known[first]]]
    return tids


def _talking(graph: Graph, items: list[Communication]) -> np.ndarray:
    """The nodes that are communication with another rank."""
    nodes = np.flatnonzero(graph.item >= 0)
    return np.array([node for node in nodes.tolist() if not items[graph.item[node]].is_local], dtype=np.int64)


def _communication(
    graph: Graph, items: list[Communication], rank: int, comm_types: CommTypes, add: Any
) -> None:
    nodes = _talking(graph, items)
    nearest = NEAREST_IN_ASTRA_SIM if comm_types == "astra-sim" else {}
    of_node = [items[number] for number in graph.item[nodes].tolist()]
    collective = np.array([item.collective is not None for item in of_node], dtype=bool)
    add("comm_type", "int64", nodes[collective],
        np.array([int(nearest.get(item.collective, item.collective)) for item in of_node
                  if item.collective is not None], dtype=np.int64))  # fmt: skip
    add("comm_size", "int64", nodes, np.array([item.size for item in of_node], dtype=np.int64))
    text = {
        "pg_name": [str(group_number(item.group)) for item in of_node],
        "pg_original_name": [item.group.name for item in of_node],
        "pg_description": [item.group.description for item in of_node],
        "comm_dtype": [item.dtype for item in of_node],
        "comm_operator": [item.api for item in of_node],
    }
    for name, values in text.items():
        add(name, "string", nodes, _strings(values))
    counted = np.array([item.sequence >= 0 for item in of_node], dtype=bool)
    add(
        "comm_sequence",
        "int64",
        nodes[counted],
        np.array([item.sequence for item in of_node if item.sequence >= 0], dtype=np.int64),
    )
    flagged = np.array([item.asynchronous is not None for item in of_node], dtype=bool)
    add(
        "comm_async",
        "bool",
        nodes[flagged],
        np.array([item.asynchronous for item in of_node if item.asynchronous is not None], dtype=np.int64),
    )
    paired = [item for item in of_node if item.collective is None]
    p2p = nodes[~collective]
    sends = [item.type is NodeType.COMM_SEND for item in paired]
    ends = {
        "comm_src": [rank if send else item.peer for send, item in zip(sends, paired, strict=True)],
        "comm_dst": [item.peer if send else rank for send, item in zip(sends, paired, strict=True)],
        "comm_tag": [item.tag for item in paired],
    }
    for name, values in ends.items():
        add(name, "int32", p2p, np.array(values, dtype=np.int64))


def _texts(graph: Graph, host: HostTrace, linked: Link, add: Any) -> None:
    """Kernel attributes of operators, where the host trace has any."""
    if not host.texts:
        return
    stands = np.flatnonzero((graph.event >= 0) & (graph.segment == 0))
    node_of = dict(zip(linked.host_row[graph.event[stands]].tolist(), stands.tolist(), strict=True))
    by_name: dict[str, list[tuple[int, str]]] = {}
    for row, texts in host.texts.items():
        for name, text in texts.items():
            if row in node_of:
                by_name.setdefault(name, []).append((node_of[row], text))
    for name, pairs in sorted(by_name.items()):
        pairs.sort()
        add(name, "string", np.array([node for node, _ in pairs]), _strings([text for _, text in pairs]))


def _dependency_kinds(graph: Graph, offsets: np.ndarray) -> Strings:
    letters = np.frombuffer(EDGE_LETTERS, dtype=np.uint8)[graph.edge_kind].tobytes()
    table: dict[bytes, int] = {}
    some = offsets[np.flatnonzero(np.diff(offsets))].tolist() + [int(offsets[-1])]
    index = [table.setdefault(letters[a:b], len(table)) for a, b in zip(some, some[1:], strict=False)]
    return Strings(list(table), np.array(index, dtype=np.int32))


def _tensor_info(
    graph: Graph, linked: Link, items: list[Communication], columns: tuple[list[bytes], ...]
) -> TensorInfo:
    """Inputs or outputs of the nodes that stand for an operator or a communication."""
    row = np.where(graph.event >= 0, linked.host_row[graph.event], -1)
    row[graph.segment > 0] = -1
    for node in np.flatnonzero((graph.item >= 0) & (row < 0)).tolist():
        launch = items[graph.item[node]].launch
        row[node] = linked.host_row[launch] if launch >= 0 else -1
    nodes = np.flatnonzero(row >= 0)
    taken = row[nodes].tolist()
    values, shapes, types = ([column[at] for at in taken] for column in columns)
    return TensorInfo(nodes, values, shapes, types)


def _strings(values: list[str]) -> Strings:
    table: dict[str, int] = {}
    index = [table.setdefault(value, len(table)) for value in values]
    return Strings([text.encode("utf-8", "replace") for text in table], np.array(index, dtype=np.int32))


def lanes_text(lanes: list[Lane]) -> list[dict[str, Any]]:
    """The lanes as the file's metadata holds them."""
    return [{"kind": lane.kind, "label": lane.label} for lane in lanes]
