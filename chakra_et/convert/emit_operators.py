"""The attributes of operators, calls and kernels: host trace, hierarchy, work, tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chakra_et.arrays import first_rows
from chakra_et.convert.columns import Add, coded, strings
from chakra_et.convert.graph.device_graphs import Captured, captured_operators
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import Graph, NodeKind
from chakra_et.convert.graph.operator_hierarchy import PHASE_NAMES, Hierarchy
from chakra_et.convert.graph.work import Work
from chakra_et.et.byte_strings import ByteStrings
from chakra_et.et.columns import Strings, TensorInfo, Texts
from chakra_et.traces.device_format import KERNEL, SYNC
from chakra_et.traces.host import DEFAULTS, NUMERIC, HostTrace

DEVICE_KINDS = (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET)


def operators(rank: LinkedRank, graph: Graph) -> np.ndarray:
    """int64[N]: the event of each node's operator (its own, or the one around its call), -1 for none."""
    known = rank.link.host_row >= 0
    row = np.where(known, np.arange(len(known)), -1)
    via = np.where(rank.calls >= 0, rank.calls, rank.timeline.parent)
    pending = np.flatnonzero(row < 0)
    at = via[pending]
    while len(pending):
        valid = at >= 0
        pending, at = pending[valid], at[valid]
        row[pending] = np.where(known[at], at, -1)
        open_ = row[pending] < 0
        pending, at = pending[open_], via[at[open_]]
    return np.where(graph.event >= 0, row[graph.event], -1)


def add_host(rank: LinkedRank, graph: Graph, operator: np.ndarray, host_row: np.ndarray, add: Add) -> None:
    """rf_id, fw_parent, seq_id, scope, tid, fw_tid and op_schema on all nodes, as in MLCommons' converter."""
    host = rank.host
    everywhere = np.arange(len(graph))
    # The host row may be that of the structure step, whose ids the other steps' operators don't have.
    own = {"rf_id": rank.device.rf_id, "seq_id": rank.device.sequence}
    for name in NUMERIC:
        values = np.append(getattr(host, name), DEFAULTS[name])[host_row]  # row -1: the default
        if name in own and rank.device.recording is not None:
            recorded = own[name][operator]
            values = np.where((operator >= 0) & (recorded > 0), recorded, values)
        if name == "tid":
            values = np.where(host_row >= 0, values, _tid_of_lane(graph, host, host_row)[graph.lane])
        add(name, "int64", everywhere, values)
    on_device = np.isin(graph.kind, DEVICE_KINDS)
    stands = (host_row >= 0) & (graph.event >= 0) & ((graph.kind <= NodeKind.ANNOTATION) | on_device)
    schema = np.append(host.op_schema, len(host.schemas))[np.where(stands, host_row, -1)]
    add("op_schema", "string", everywhere, coded([*host.schemas, ""], schema))
    add_texts(rank, graph, add)


def _tid_of_lane(graph: Graph, host: HostTrace, host_row: np.ndarray) -> np.ndarray:
    """int64[lanes]: the thread number of each lane in the host trace, for nodes without an operator."""
    tids = np.zeros(len(graph.lanes), dtype=np.int64)
    known = np.flatnonzero(host_row >= 0)
    lanes, first = first_rows(graph.lane[known])
    tids[lanes] = host.tid[host_row[known[first]]]
    return tids


def add_texts(rank: LinkedRank, graph: Graph, add: Add) -> None:
    """Text attributes of operators, such as kernel attributes, if the host trace has any."""
    texts_of = rank.host.texts
    if not texts_of:
        return
    stands = np.flatnonzero((graph.event >= 0) & (graph.segment == 0))
    by_name: dict[str, list[tuple[int, str]]] = {}
    for row, node in zip(rank.link.host_row[graph.event[stands]].tolist(), stands.tolist(), strict=True):
        for name, text in texts_of.get(row, {}).items():
            by_name.setdefault(name, []).append((node, text))
    for name, pairs in sorted(by_name.items()):
        pairs.sort()
        add(name, "string", np.array([node for node, _ in pairs]), strings([text for _, text in pairs]))


def add_hierarchy(graph: Graph, hierarchy: Hierarchy, add: Add) -> None:
    """``parent`` (id of the enclosing operator's first node), ``module`` and ``phase``."""
    node_of = np.full(len(hierarchy.parent), -1, dtype=np.int64)
    stands = np.flatnonzero((graph.event >= 0) & (graph.segment == 0))[::-1]
    node_of[graph.event[stands]] = stands
    of_event = np.flatnonzero(graph.event >= 0)
    event = graph.event[of_event]
    own = hierarchy.parent[event]
    node = np.where(own >= 0, node_of[own], -1)
    at = np.flatnonzero(node >= 0)
    add("parent", "int64", of_event[at], node[at] + 1)
    module = hierarchy.module[event] if hierarchy.modules else np.full(len(event), -1)
    at = np.flatnonzero(module >= 0)
    add("module", "string", of_event[at], coded(hierarchy.modules, module[at]))
    phase = hierarchy.phase[event]
    at = np.flatnonzero(phase)
    add("phase", "string", of_event[at], coded(PHASE_NAMES, phase[at]))


def add_device(rank: LinkedRank, graph: Graph, work: Work, captured: Captured | None, add: Add) -> None:
    """Attributes of device nodes: ``num_ops``, ``tensor_size``, ``grid``, ``block``, ``graph_id`` and
    ``graph_launch`` (id of the launching node). Also ``launch_latency_ns``, of the node or of the overhead in
    front of it: the earliest start after the launch; and ``stream_gap_ns`` of such overhead: the part of it
    that remains after the other dependencies."""
    device = rank.device
    at = np.flatnonzero(np.isin(graph.kind, DEVICE_KINDS))
    event = graph.event[at]
    add("num_ops", "int64", at, work.operations[event])
    add("tensor_size", "uint64", at, work.bytes[event].astype(np.uint64))
    shaped = device.shape[event] >= 0
    for place, name in enumerate(("grid", "block")):
        table = [shape[place] for shape in device.shapes]
        add(name, "string", at[shaped], coded(table, device.shape[event[shaped]]))
    for name, values in (("launch_latency_ns", graph.launch_latency), ("stream_gap_ns", graph.stream_gap)):
        known = np.flatnonzero(values >= 0)
        add(name, "int64", known, values[known])
    launch = rank.calls[event]
    by_graph = np.array(["GraphLaunch" in name for name in device.names], dtype=bool)
    of_graph = (launch >= 0) & by_graph[device.name[launch]]
    if of_graph.any():
        node_of = np.full(len(device), -1, dtype=np.int64)
        stands = np.flatnonzero((graph.event >= 0) & (graph.segment == 0))[::-1]
        node_of[graph.event[stands]] = stands
        add("graph_launch", "int64", at[of_graph], node_of[launch[of_graph]] + 1)
        named = np.where(device.graph[event] >= 0, device.graph[event], device.correlation[event])
        add("graph_id", "int64", at[of_graph], named[of_graph])
        _add_captured(graph, at[of_graph], captured, add)


def _add_captured(graph: Graph, nodes: np.ndarray, captured: Captured | None, add: Add) -> None:
    """``captured_op``: the operator that launched the kernel while its graph was captured."""
    if captured is None or captured.captures is None:
        return
    device = captured.captures.rank.device
    operator = captured_operators(captured, graph.event[nodes])
    known = operator >= 0
    add("captured_op", "string", nodes[known], coded(device.names, device.name[operator[known]]))


def with_captured(info: TensorInfo, graph: Graph, captured: Captured | None) -> TensorInfo:
    """``info`` with the inputs of the operators that launched captured kernels."""
    if captured is None or captured.captures is None:
        return info
    rank = captured.captures.rank
    nodes = np.flatnonzero((graph.event >= 0) & (graph.segment == 0))
    nodes = nodes[captured.certain[graph.event[nodes]]]
    operator = captured_operators(captured, graph.event[nodes])
    nodes, operator = nodes[operator >= 0], operator[operator >= 0]
    taken = rank.link.host_row[operator].tolist()
    kept = ~np.isin(info.rows, nodes)
    rows = np.concatenate([info.rows[kept], nodes])
    order = np.argsort(rows, kind="stable").tolist()

    def joined(own: Sequence[bytes], column: Sequence[bytes]) -> list[bytes]:
        both = [own[at] for at in np.flatnonzero(kept).tolist()] + [column[row] for row in taken]
        return [both[at] for at in order]

    parts = zip((info.values, info.shapes, info.types), rank.host.inputs, strict=True)
    return TensorInfo(rows[order], *(joined(own, column) for own, column in parts))


def tensor_info(
    rank: LinkedRank, graph: Graph, host_row: np.ndarray, columns: tuple[ByteStrings, Texts, Texts]
) -> TensorInfo:
    """Inputs or outputs of operators, communication and device work."""
    row = np.where(graph.event >= 0, rank.link.host_row[graph.event], -1)
    row[graph.segment > 0] = -1
    on_device = (graph.event >= 0) & (rank.device.category[graph.event] >= KERNEL)
    on_device &= rank.device.category[graph.event] < SYNC
    row = np.where(on_device, host_row, row)
    items = rank.communication.items
    for node in np.flatnonzero((graph.item >= 0) & ((row < 0) | on_device)).tolist():
        launch = items[graph.item[node]].launch
        if launch >= 0:
            row[node] = rank.link.host_row[launch]
    nodes = np.flatnonzero(row >= 0)
    taken = row[nodes]
    return TensorInfo(nodes, *(column.take(taken) for column in columns))


def names(graph: Graph, rank: LinkedRank) -> Strings:
    """The names of the nodes: those of the events, ``host-overhead`` or ``device-overhead``."""
    table = [*rank.device.names, "host-overhead", "device-overhead"]
    index = rank.device.name[np.maximum(graph.event, 0)].astype(np.int32)
    index = np.where(graph.kind == NodeKind.HOST_OVERHEAD, len(table) - 2, index)
    index = np.where(graph.kind == NodeKind.DEVICE_OVERHEAD, len(table) - 1, index)
    return coded(table, index)
