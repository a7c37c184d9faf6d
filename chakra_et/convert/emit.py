"""Turn the graph of a rank into the columns of an .et file that both feeders of the Chakra schema can read.

Every attribute of MLCommons' converter is there with its name and type: rf_id, fw_parent, seq_id, scope, tid,
fw_tid, op_schema, is_cpu_op, stream; comm_type, comm_size, pg_name. ``pg_name`` is an integer ≥ 1, as
ASTRA-sim parses it as an integer; PyTorch's name is in ``pg_original_name``. All dependencies are data
dependencies, as Chakra's feeder reads no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chakra_et.arrays import coded_pairs
from chakra_et.convert import emit_operators
from chakra_et.convert.columns import coded, collector, whole_micros
from chakra_et.convert.emit_communication import CommTypes, add_communication, communicating
from chakra_et.convert.emit_memory import add_memory
from chakra_et.convert.graph.device_graphs import Captured, with_captured_modules, with_captured_work
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import KIND_NAMES, Graph
from chakra_et.convert.graph.operator_hierarchy import find_hierarchy
from chakra_et.convert.graph.timeline import Lane
from chakra_et.convert.graph.work import find_work
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings

# Letters by ``EdgeKind`` for the attribute ``dep_kinds``: one per dependency, in the order of data_deps.
EDGE_LETTERS = b"PLSYTC"


def emit(
    rank: LinkedRank,
    graph: Graph,
    number: int,
    metadata: dict[str, Any],
    timestamps: bool = True,
    comm_types: CommTypes = "schema",
    captured: Captured | None = None,
) -> ExecutionTrace:
    """The columns of the file of rank ``number``. Node i of the graph gets id i + 1.

    ``captured``: the operators that launched the kernels of CUDA or HIP graphs.
    """
    rows = len(graph)
    everywhere = np.arange(rows)
    operator = emit_operators.operators(rank, graph)
    host_row = np.where(operator >= 0, rank.link.host_row[operator], -1)
    hierarchy = find_hierarchy(rank)
    work = find_work(rank, hierarchy.parent)
    if captured is not None:
        hierarchy, work = with_captured_modules(hierarchy, captured), with_captured_work(rank, work, captured)
    attributes: dict[str, Attribute] = {}
    add = collector(attributes)
    emit_operators.add_host(rank, graph, operator, host_row, add)
    lane_kind = np.array([lane.kind for lane in graph.lanes])
    add("is_cpu_op", "bool", everywhere, (lane_kind == "cpu")[graph.lane].astype(np.int32))
    on_gpu = np.flatnonzero((lane_kind == "gpu")[graph.lane])
    for name in ("stream", "device"):
        of_lane = np.array([getattr(lane, name) for lane in graph.lanes], dtype=np.int64)
        add(name, "int64", on_gpu, of_lane[graph.lane[on_gpu]])
    add("kind", "string", everywhere, coded(KIND_NAMES, graph.kind))
    add("lane", "int64", everywhere, graph.lane)
    further = np.flatnonzero(graph.segment > 0)
    add("segment", "int64", further, graph.segment[further])
    emit_operators.add_hierarchy(graph, hierarchy, add)
    emit_operators.add_device(rank, graph, work, captured, add)
    add_memory(rank, graph, add)
    del hierarchy, work  # each with columns of all events
    communication = communicating(graph, rank.communication.items, comm_types)
    of_node = [rank.communication.items[item] for item in graph.item[communication].tolist()]
    add_communication(communication, of_node, number, comm_types, add)

    sources = graph.source.astype(np.uint64)
    sources += np.uint64(1)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(graph.target, minlength=rows), out=offsets[1:])
    add("dep_kinds", "string", np.flatnonzero(np.diff(offsets)), _dependency_kinds(graph, offsets))
    types = np.full(rows, NodeType.COMP, dtype=np.uint8)
    types[communication] = [item.type for item in of_node]
    start = graph.start // 1000 if timestamps else np.zeros(rows, dtype=np.int64)
    return ExecutionTrace(
        ids=np.arange(1, rows + 1, dtype=np.uint64),
        names=emit_operators.names(graph, rank),
        types=types,
        start_micros=start.view(np.uint64),
        duration_micros=whole_micros(graph.lane, graph.end - graph.start).view(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.broadcast_to(np.int64(0), rows + 1), np.zeros(0, dtype=np.uint64)),
        inputs=emit_operators.with_captured(
            emit_operators.tensor_info(rank, graph, host_row, rank.host.inputs), graph, captured
        ),
        outputs=emit_operators.tensor_info(rank, graph, host_row, rank.host.outputs),
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


def lanes_text(lanes: list[Lane]) -> list[dict[str, Any]]:
    """The lanes for the file's metadata."""
    return [{"kind": lane.kind, "label": lane.label} for lane in lanes]
