"""Turn the graph of a rank into the columns of an .et file that both feeders of the Chakra schema can read.

Every attribute of MLCommons' converter is there with its name and type: rf_id, fw_parent, seq_id, scope, tid,
fw_tid, op_schema, is_cpu_op, stream; comm_type, comm_size, pg_name. ``pg_name`` is an integer ≥ 1, as
ASTRA-sim parses it as an integer; PyTorch's name is in ``pg_original_name``. All dependencies are data
dependencies, as Chakra's feeder reads no others.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from chakra_et.arrays import coded_pairs, narrowed
from chakra_et.convert import emit_columns
from chakra_et.convert.emit_columns import Add, coded, strings
from chakra_et.convert.graph.communication import Communication, group_number
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import KIND_NAMES, Graph, NodeKind
from chakra_et.convert.graph.operators import find_hierarchy, find_work
from chakra_et.et.columns import (
    Attribute,
    CollectiveType,
    ExecutionTrace,
    NodeType,
    Ragged,
    Strings,
    ValueKind,
)

# Letters by ``EdgeKind`` for the attribute ``dep_kinds``: one per dependency, in the order of data_deps.
EDGE_LETTERS = b"PLSYTC"
CommTypes = Literal["schema", "astra-sim"]
# The substitutes for collectives that ASTRA-sim does not simulate.
NEAREST_IN_ASTRA_SIM = {
    CollectiveType.BARRIER: CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE: CollectiveType.ALL_REDUCE,
    CollectiveType.GATHER: CollectiveType.ALL_GATHER,
    CollectiveType.SCATTER: CollectiveType.BROADCAST,
    CollectiveType.REDUCE_SCATTER_BLOCK: CollectiveType.REDUCE_SCATTER,
}


def emit(
    rank: LinkedRank,
    graph: Graph,
    number: int,
    metadata: dict[str, Any],
    timestamps: bool = True,
    comm_types: CommTypes = "schema",
) -> ExecutionTrace:
    """The columns of the file of rank ``number``. Node i of the graph gets id i + 1."""
    rows = len(graph)
    everywhere = np.arange(rows)
    operator = emit_columns.operators(rank, graph)
    host_row = np.where(operator >= 0, rank.link.host_row[operator], -1)
    hierarchy = find_hierarchy(rank)
    work = find_work(rank, hierarchy.parent)
    attributes: dict[str, Attribute] = {}

    def add(name: str, kind: ValueKind, rows: np.ndarray, values: Any) -> None:
        if len(rows):
            known = isinstance(values, Strings) or values.dtype == np.uint64
            attributes[name] = Attribute(kind, rows, values if known else narrowed(values))

    emit_columns.add_host(rank, graph, operator, host_row, add)
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
    emit_columns.add_hierarchy(graph, hierarchy, add)
    emit_columns.add_device(rank, graph, work, add)
    emit_columns.add_memory(rank, graph, add)
    del hierarchy, work  # each with columns of all events
    # For ASTRA-sim, only those of known size, and of known peer or type.
    items = rank.communication.items
    communication = np.flatnonzero(graph.item >= 0)
    is_kept = [
        not item.is_local
        and (
            comm_types == "schema"
            or (item.size > 0 and (item.peer >= 0 if item.is_message else item.collective is not None))
        )
        for item in items
    ]
    communication = communication[np.array(is_kept, dtype=bool)[graph.item[communication]]]
    items = [items[number] for number in graph.item[communication].tolist()]
    _add_communication(communication, items, number, comm_types, add)

    sources = graph.source.astype(np.uint64)
    sources += np.uint64(1)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.target, minlength=rows), out=offsets[1:])
    add("dep_kinds", "string", np.flatnonzero(np.diff(offsets)), _dependency_kinds(graph, offsets))
    types = np.full(rows, NodeType.COMP, dtype=np.uint8)
    types[communication] = [item.type for item in items]
    start = graph.start // 1000 if timestamps else np.zeros(rows, dtype=np.int64)
    names = [*rank.device.names, "host-overhead", "device-overhead"]
    name = rank.device.name[np.maximum(graph.event, 0)].astype(np.int32)
    name[graph.kind == NodeKind.HOST_OVERHEAD] = len(names) - 2
    name[graph.kind == NodeKind.DEVICE_OVERHEAD] = len(names) - 1
    return ExecutionTrace(
        ids=np.arange(1, rows + 1, dtype=np.uint64),
        names=coded(names, name),
        types=types,
        start_micros=start.view(np.uint64),
        duration_micros=emit_columns.whole_micros(graph.lane, graph.end - graph.start).view(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.broadcast_to(np.int64(0), rows + 1), np.zeros(0, dtype=np.uint64)),
        inputs=emit_columns.tensor_info(rank, graph, host_row, rank.host.inputs),
        outputs=emit_columns.tensor_info(rank, graph, host_row, rank.host.outputs),
        attributes=attributes,
        metadata=metadata,
    )


def _dependency_kinds(graph: Graph, offsets: np.ndarray) -> Strings:
    letters = np.frombuffer(EDGE_LETTERS, dtype=np.uint8)[graph.edge_kind].tobytes()
    table = {EDGE_LETTERS[kind : kind + 1]: kind for kind in range(len(EDGE_LETTERS))}
    some = np.flatnonzero(np.diff(offsets))
    first, last = offsets[some], offsets[some + 1]
    index = graph.edge_kind[first].astype(np.int32)
    two = np.flatnonzero(last == first + 2)
    pairs, of = coded_pairs(graph.edge_kind[first[two]], graph.edge_kind[first[two] + 1])
    codes = [table.setdefault(bytes([EDGE_LETTERS[a], EDGE_LETTERS[b]]), len(table)) for a, b in pairs]
    index[two] = np.array(codes, dtype=np.int32)[of]
    more = np.flatnonzero(last > first + 2)
    spans = zip(first[more].tolist(), last[more].tolist(), strict=True)
    index[more] = [table.setdefault(letters[a:b], len(table)) for a, b in spans]
    return Strings(list(table), index)


def _add_communication(
    nodes: np.ndarray, of_node: list[Communication], rank: int, comm_types: CommTypes, add: Add
) -> None:
    """Add the attributes of the communication ``nodes``; ``of_node`` has one entry per node.

    An unknown type or size is left out. ``comm_types``: "schema" keeps the collective types, "astra-sim"
    substitutes those that ASTRA-sim does not simulate (``comm_operator`` has the actual operator).
    """

    def add_known(name: str, kind: ValueKind, values: list[int | None]) -> None:
        known = [value for value in values if value is not None]
        at = nodes[np.array([value is not None for value in values], dtype=bool)]
        add(name, kind, at, np.array(known, dtype=np.int64))

    kinds: list[int | None] = []
    sizes: list[int | None] = []
    for item in of_node:
        kind, size = item.collective, item.size
        if kind in NEAREST_IN_ASTRA_SIM and comm_types == "astra-sim":
            if kind is CollectiveType.SCATTER and item.is_root and item.group.ranks:
                size = max(1, size // len(item.group.ranks))  # the root's input is the output of all ranks
            kind = NEAREST_IN_ASTRA_SIM[kind]
        kinds.append(kind)
        sizes.append(size or None)
    add_known("comm_type", "int64", kinds)
    add_known("comm_size", "int64", sizes)
    text = {
        "pg_name": [str(group_number(item.group)) for item in of_node],
        "pg_original_name": [item.group.name for item in of_node],
        "pg_description": [item.group.description for item in of_node],
        "comm_dtype": [item.dtype for item in of_node],
        "comm_operator": [item.api for item in of_node],
    }
    for name, values in text.items():
        add(name, "string", nodes, strings(values))
    for name in ("in_split", "out_split"):
        splits = [getattr(item, name) for item in of_node]
        some = np.array([bool(split) for split in splits], dtype=bool)
        add(f"comm_{name}", "string", nodes[some], strings([split for split in splits if split]))
    add_known("comm_sequence", "int64", [item.sequence if item.sequence >= 0 else None for item in of_node])
    add_known("comm_async", "bool", [item.asynchronous for item in of_node])
    ends = [(rank, item.peer) if item.type is NodeType.COMM_SEND else (item.peer, rank) for item in of_node]
    messages = [item.is_message for item in of_node]
    for at, name in enumerate(("comm_src", "comm_dst")):
        here = [end[at] if message else None for end, message in zip(ends, messages, strict=True)]
        add_known(name, "int32", here)
    add_known("comm_tag", "int32", [item.tag if item.is_message else None for item in of_node])
