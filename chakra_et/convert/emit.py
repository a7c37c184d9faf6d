"""Turn the graph of a rank into the columns of an .et file that both feeders of the Chakra schema can read.

Every attribute of MLCommons' converter is there with its name and type: rf_id, fw_parent, seq_id, scope, tid,
fw_tid, op_schema, is_cpu_op, stream; comm_type, comm_size, pg_name. ``pg_name`` is an integer ≥ 1, as
ASTRA-sim parses it as an integer; PyTorch's name is in ``pg_original_name``. All dependencies are data
dependencies, as Chakra's feeder reads no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chakra_et.arrays import coded_pairs, lane_order, narrowed, nearest
from chakra_et.convert.graph.communication import Communication, group_number
from chakra_et.convert.graph.link import operators_and_annotations
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import KIND_NAMES, Graph, NodeKind
from chakra_et.convert.graph.operators import PHASE_NAMES, Hierarchy, find_hierarchy, find_work
from chakra_et.convert.graph.timeline import named
from chakra_et.et import memory as memory_names
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings, TensorInfo, ValueKind
from chakra_et.et.node_attributes import EDGE_KINDS
from chakra_et.et.wire import Cells, windows
from chakra_et.redact import redacted
from chakra_et.traces.device import STEP
from chakra_et.traces.device_format import KERNEL, SYNC
from chakra_et.traces.fields import STRIDES
from chakra_et.traces.host import DEFAULTS

_LOWEST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype="<u8")
DEVICE_KINDS = (NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET)
Add = Callable[[str, ValueKind, np.ndarray, Any], None]
"""Add one attribute, unless no node has it: name, kind, the rows that have it (ascending), their values."""


def strings(values: list[str]) -> Strings:
    """A string column that stores equal strings once."""
    table: dict[str, int] = {}
    index = [table.setdefault(value, len(table)) for value in values]
    return coded(list(table), np.array(index, dtype=np.int32))


def coded(names: list[str], index: np.ndarray) -> Strings:
    """A string column from ``index``, int[rows] into ``names``."""
    return Strings([name.encode("utf-8", "replace") for name in names], index.astype(np.int32, copy=False))


def whole_micros(lane: np.ndarray, length_ns: np.ndarray) -> np.ndarray:
    """int64[N]: durations in whole µs. The remainder is carried to the next node of the lane, so that lanes
    lose no time. Nodes are in the order of their start."""
    order = lane_order(lane)
    total = np.cumsum(length_ns[order])
    nodes = np.bincount(lane)
    nodes = nodes[nodes > 0]
    first = np.cumsum(nodes) - nodes
    total -= np.repeat(np.append(0, total)[first], nodes)
    total //= 1000
    micros = np.diff(total, prepend=0)
    micros[first] = total[first]
    result = np.empty(len(order), dtype=np.int64)
    result[order] = micros
    return result


def _operators(rank: LinkedRank, graph: Graph, among: np.ndarray) -> np.ndarray:
    """int64[N]: the event of each node's operator (its own, or the one around its call), -1 for none; those
    ``among`` the events, bool, count as operators."""
    via = np.where(rank.calls >= 0, rank.calls, rank.timeline.parent)
    return np.where(graph.event >= 0, nearest(among, via)[graph.event], -1)


def emit(
    rank: LinkedRank, graph: Graph, number: int, metadata: dict[str, Any], timestamps: bool = True
) -> ExecutionTrace:
    """The columns of the file of rank ``number``. Node i of the graph gets id i + 1."""
    rows = len(graph)
    everywhere = np.arange(rows)
    host_row = np.append(rank.host_row, -1)[_operators(rank, graph, rank.host_row >= 0)]
    hierarchy = find_hierarchy(rank)
    work = find_work(rank, hierarchy.parent)
    attributes: dict[str, Attribute] = {}

    def add(name: str, kind: ValueKind, rows: np.ndarray, values: Any) -> None:
        if len(rows):
            known = isinstance(values, Strings) or values.dtype == np.uint64
            attributes[name] = Attribute(kind, rows, values if known else narrowed(values))

    _add_host(rank, graph, host_row, add)
    lane_kind = np.array([lane.kind for lane in graph.lanes])
    add("is_cpu_op", "bool", everywhere, (lane_kind == "cpu")[graph.lane].astype(np.int32))
    on_gpu = np.flatnonzero((lane_kind == "gpu")[graph.lane])
    for column in ("stream", "device"):
        of_lane = np.array([getattr(lane, column) for lane in graph.lanes], dtype=np.int64)
        add(column, "int64", on_gpu, of_lane[graph.lane[on_gpu]])
    add("kind", "string", everywhere, coded(KIND_NAMES, graph.kind))
    add("lane", "int64", everywhere, graph.lane)
    further = np.flatnonzero(graph.segment > 0)
    add("segment", "int64", further, graph.segment[further])
    _add_hierarchy(graph, hierarchy, add)
    _add_device(rank, graph, work, add)
    _add_memory(rank, graph, add)
    del hierarchy, work  # each with columns of all events
    items = rank.communication.items
    is_kept = np.array([*(not item.is_local for item in items), False])
    communication = np.flatnonzero(is_kept[graph.item])
    items = [items[number] for number in graph.item[communication].tolist()]
    _add_communication(communication, items, number, add)

    sources = graph.source.astype(np.uint64)
    sources += np.uint64(1)
    offsets = np.append(0, np.cumsum(np.bincount(graph.target, minlength=rows)))
    add("dep_kinds", "string", np.flatnonzero(np.diff(offsets)), _dependency_kinds(graph, offsets))
    types = np.full(rows, NodeType.COMP, dtype=np.uint8)
    types[communication] = [item.type for item in items]
    start = graph.start // 1000 if timestamps else np.zeros(rows, dtype=np.int64)
    names = [*map(redacted, rank.device.names), "host-overhead", "device-overhead"]
    name = rank.device.name[np.maximum(graph.event, 0)].astype(np.int32)
    name[graph.kind == NodeKind.HOST_OVERHEAD] = len(names) - 2
    name[graph.kind == NodeKind.DEVICE_OVERHEAD] = len(names) - 1
    nested = named(rank.device, STEP.fullmatch)
    nested[[row for _, row in rank.timeline.steps]] = False
    if nested.any():  # for readers of the file, which know steps by their names
        name[(graph.event >= 0) & nested[graph.event]] += len(names)
        names += [f"nested {each}" for each in names]
    return ExecutionTrace(
        ids=np.arange(1, rows + 1, dtype=np.uint64),
        names=coded(names, name),
        types=types,
        start_micros=start.view(np.uint64),
        duration_micros=whole_micros(graph.lane, graph.end - graph.start).view(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.broadcast_to(np.int64(0), rows + 1), np.zeros(0, dtype=np.uint64)),
        inputs=_tensor_info(rank, graph, host_row, rank.host.inputs),
        outputs=_tensor_info(rank, graph, host_row, rank.host.outputs),
        attributes=attributes,
        metadata=metadata,
    )


def _dependency_kinds(graph: Graph, offsets: np.ndarray) -> Strings:
    """The letters of the edges of each node that has any, in the order of data_deps."""
    of_kind = np.frombuffer("".join(EDGE_KINDS).encode(), np.uint8)
    letters = np.append(of_kind[graph.edge_kind], np.zeros(8, np.uint8))
    length = np.diff(offsets)
    start, length = offsets[:-1][length > 0], length[length > 0]
    # Up to eight letters are one number; few nodes have more.
    number = windows(letters, 8)[start].view("<u8") & _LOWEST_BYTES[np.minimum(length, 8)]
    _, first, index = np.unique(number, return_index=True, return_inverse=True)
    table = [letters[start[at] : start[at] + min(length[at], 8)].tobytes() for at in first.tolist()]
    for at in np.flatnonzero(length > 8).tolist():
        index[at] = len(table)
        table.append(letters[start[at] : start[at] + length[at]].tobytes())
    return Strings(table, index.astype(np.int32))


def _add_communication(nodes: np.ndarray, of_node: list[Communication], rank: int, add: Add) -> None:
    """Add the attributes of the communication ``nodes``; ``of_node`` has one entry per node. An unknown type
    or size is left out."""

    def end(item: Communication, mine: NodeType) -> int | None:
        return None if not item.is_message else rank if item.type is mine else item.peer

    table: tuple[tuple[str, ValueKind, Callable[[Communication], int | str | None]], ...] = (
        ("comm_type", "int64", lambda item: item.collective),
        ("comm_size", "int64", lambda item: item.size or None),
        ("pg_name", "string", lambda item: str(group_number(item.group))),
        ("pg_original_name", "string", lambda item: item.group.name),
        ("pg_description", "string", lambda item: item.group.description),
        ("comm_dtype", "string", lambda item: item.dtype),
        ("comm_operator", "string", lambda item: item.api),
        ("comm_in_split", "string", lambda item: item.in_split or None),
        ("comm_out_split", "string", lambda item: item.out_split or None),
        ("comm_sequence", "int64", lambda item: item.sequence if item.sequence >= 0 else None),
        ("comm_async", "bool", lambda item: item.asynchronous),
        ("comm_src", "int32", lambda item: end(item, NodeType.COMM_SEND)),
        ("comm_dst", "int32", lambda item: end(item, NodeType.COMM_RECV)),
        ("comm_tag", "int32", lambda item: item.tag if item.is_message else None),
    )
    for name, kind, value_of in table:
        values: list[Any] = list(map(value_of, of_node))
        known = [value for value in values if value is not None]
        at = nodes[np.array([value is not None for value in values], dtype=bool)]
        add(name, kind, at, strings(known) if kind == "string" else np.array(known, dtype=np.int64))


# ---- attributes of operators, calls, kernels and memory ----


def _add_host(rank: LinkedRank, graph: Graph, host_row: np.ndarray, add: Add) -> None:
    """rf_id, fw_parent, seq_id, scope, tid, fw_tid and op_schema on all nodes, as in MLCommons' converter;
    and the strides of operators with a tensor that isn't contiguous."""
    host = rank.host
    everywhere = np.arange(len(graph))
    # The host row may be that of the structure step, whose ids the other steps' operators don't have, or of
    # an operator around one that the structure step doesn't have: those are numbered behind all others.
    operator = _operators(rank, graph, operators_and_annotations(rank.device))
    rf_id = rank.device.rf_id
    rf_id = np.where(rf_id > 0, rf_id, rf_id.max(initial=0) + 1 + np.arange(len(rf_id)))
    own = {"rf_id": rf_id, "seq_id": rank.device.sequence}
    for name, missing in DEFAULTS.items():
        values = np.append(getattr(host, name), missing)[host_row]
        if name in own and rank.device.recording is not None:
            recorded = own[name][operator]
            values = np.where((operator >= 0) & (recorded > 0), recorded, values)
        if name == "tid":  # nodes without an operator get that of their lane
            tids = np.zeros(len(graph.lanes), dtype=np.int64)
            known = np.flatnonzero(host_row >= 0)[::-1]  # the first of each lane is assigned last
            tids[graph.lane[known]] = values[known]
            values = np.where(host_row >= 0, values, tids[graph.lane])
        add(name, "int64", everywhere, values)
    own_row = np.where(graph.kind <= NodeKind.ANNOTATION, np.append(rank.host_row, -1)[graph.event], -1)
    row = np.where(np.isin(graph.kind, DEVICE_KINDS), host_row, own_row)
    schema = np.append(host.op_schema, len(host.schemas))[row]
    add("op_schema", "string", everywhere, coded([*host.schemas, ""], schema))
    nodes = np.flatnonzero(graph.is_first)
    rows = rank.host_row[graph.event[nodes]].tolist()
    nodes = nodes[np.array([row in host.strides for row in rows], dtype=bool)]
    add(STRIDES, "string", nodes, strings([host.strides[row] for row in rows if row in host.strides]))


def _add_hierarchy(graph: Graph, hierarchy: Hierarchy, add: Add) -> None:
    """``parent`` (id of the enclosing operator's first node), ``module`` and ``phase``."""
    of_event = np.flatnonzero(graph.event >= 0)
    event = graph.event[of_event]
    own = hierarchy.parent[event]
    node = np.where(own >= 0, graph.node_of(len(hierarchy.parent))[own], -1)
    at = np.flatnonzero(node >= 0)
    add("parent", "int64", of_event[at], node[at] + 1)
    module = hierarchy.module[event]
    at = np.flatnonzero(module >= 0)
    add("module", "string", of_event[at], coded(hierarchy.modules, module[at]))
    phase = hierarchy.phase[event]
    at = np.flatnonzero(phase)
    add("phase", "string", of_event[at], coded(PHASE_NAMES, phase[at]))


def _add_device(rank: LinkedRank, graph: Graph, work: tuple[np.ndarray, np.ndarray], add: Add) -> None:
    """Attributes of device nodes: ``num_ops``, ``tensor_size``, ``grid``, ``block``, ``graph_id``,
    ``graph_launch`` (id of the launching node). Also ``launch_latency_ns``, of the node or of the overhead in
    front of it: the earliest start after the launch; and ``stream_gap_ns`` of such overhead: the part of it
    that remains after the other dependencies."""
    device = rank.device
    at = np.flatnonzero(np.isin(graph.kind, DEVICE_KINDS))
    event = graph.event[at]
    add("num_ops", "int64", at, work[0][event])
    add("tensor_size", "uint64", at, work[1][event].astype(np.uint64))
    shaped = device.shape[event] >= 0
    for place, name in enumerate(("grid", "block")):
        table = [shape[place] for shape in device.shapes]
        add(name, "string", at[shaped], coded(table, device.shape[event[shaped]]))
    for name, values in (("launch_latency_ns", graph.launch_latency), ("stream_gap_ns", graph.stream_gap)):
        known = np.flatnonzero(values >= 0)
        add(name, "int64", known, values[known])
    launch = rank.calls[event]
    of_graph = (launch >= 0) & named(device, lambda name: "GraphLaunch" in name)[launch]
    at, event, launch = at[of_graph], event[of_graph], launch[of_graph]
    add("graph_launch", "int64", at, graph.node_of(len(device))[launch] + 1)
    add("graph_id", "int64", at, np.where(device.graph[event] >= 0, device.graph[event],
                                          device.correlation[event]))  # fmt: skip


def _tensor_info(
    rank: LinkedRank, graph: Graph, host_row: np.ndarray, columns: tuple[Cells, Cells, Cells]
) -> TensorInfo:
    """Inputs or outputs of operators, communication and device work."""
    row = np.where(graph.is_first, rank.host_row[graph.event], -1)
    category = rank.device.category[graph.event]
    on_device = (graph.event >= 0) & (category >= KERNEL) & (category < SYNC)
    row = np.where(on_device, host_row, row)
    items = rank.communication.items
    for node in np.flatnonzero((graph.item >= 0) & ((row < 0) | on_device)).tolist():
        launch = items[graph.item[node]].launch
        if launch >= 0:
            row[node] = rank.host_row[launch]
    nodes = np.flatnonzero(row >= 0)
    taken = row[nodes]
    return TensorInfo(nodes, *(column.take(taken) for column in columns))


def _add_memory(rank: LinkedRank, graph: Graph, add: Add) -> None:
    """What each node allocated and freed, and the level of each device after it, see ``et.memory``.

    An event belongs to the node of its thread that ran at its time, or that was the thread's last one. Events
    of threads without nodes, and those before the first node, belong to the main thread's node and the first
    one.
    """
    device, memory = rank.device, rank.device.memory
    if not len(memory):
        return
    placed = np.flatnonzero(device.thread >= 0)
    pairs, _ = coded_pairs(device.thread[placed], rank.timeline.lane[placed])
    used = set(np.unique(graph.lane).tolist())
    lane_of = {thread: number for thread, number in pairs if number in used}
    lane = np.array([lane_of.get(thread, rank.timeline.main) for thread in memory.thread.tolist()])
    node = np.zeros(len(memory), dtype=np.int64)
    for number in np.unique(lane).tolist():
        rows, at = np.flatnonzero(graph.lane == number), np.flatnonzero(lane == number)
        if len(rows):
            place = np.searchsorted(graph.start[rows], memory.time[at], side="right") - 1
            node[at] = rows[np.maximum(place, 0)]
    for number, name in enumerate(memory.devices):
        own = np.flatnonzero(memory.device == number)
        own = own[np.argsort(node[own], kind="stable")]
        if not len(own):
            continue
        rows, first = np.unique(node[own], return_index=True)
        last = np.append(first[1:], len(own)) - 1
        size, level = memory.bytes[own], memory.allocated[own]
        # A node that only frees memory has its peak before its first event.
        highest = np.maximum(np.maximum.reduceat(level, first), level[first] - size[first])
        values = {
            memory_names.ALLOCATED: level[last],
            memory_names.PEAK: highest,
            memory_names.RESERVED: memory.reserved[own][last],
            memory_names.ALLOCATIONS: np.add.reduceat((size > 0).astype(np.int64), first),
            memory_names.FREES: np.add.reduceat((size < 0).astype(np.int64), first),
            memory_names.ALLOCATED_IN: np.add.reduceat(np.maximum(size, 0), first),
            memory_names.FREED_IN: np.add.reduceat(np.maximum(-size, 0), first),
        }
        for field, column in values.items():
            if field != memory_names.RESERVED or column.any():
                add(memory_names.attribute(name, field), "int64", rows, column)
