"""The nodes and edges of a run as the columns of a page, in the order in which its timeline shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, Strings
from chakra_et.info.describe import EDGE_KINDS
from chakra_et.report.lanes import lay_out
from chakra_et.report.memory import curves, device_name
from chakra_et.report.pack import PackedColumns
from chakra_et.report.run import ReportRun, text_column
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

PHASES = ("forward", "backward", "optimizer")
NODE_KINDS = (*KINDS[:-2], "host overhead", "device overhead", "annotation")
ANNOTATION = len(NODE_KINDS) - 1
EDGE_NAMES = (*EDGE_KINDS.values(), "dependency")
COMM_NAMES = (*(kind.name.lower().replace("_", "-") for kind in CollectiveType), "send", "receive", "unknown")
LONGEST_NAME = 1000
FURTHER, ON_PATH = 1, 2  # bits of the column "flags"


def add_nodes(run: ReportRun, columns: PackedColumns) -> dict[str, Any]:
    """Add the columns of all nodes, and return the tables that they refer to.

    Columns of the N nodes, by row of the timeline and start: ``row``, ``start`` and ``length`` (in the unit
    of ``unit_ns``), ``name``, ``kind``, ``phase`` (0: none), ``module`` (0: none), ``parent`` (distance to
    the enclosing operator modulo 2^32, 0: none), ``flags``, ``degree``. Of the E dependencies, node by node:
    ``edge`` (distance to the node that is waited for modulo 2^32) and ``edge_kind``. Of device work:
    ``work_node``, ``work_ops``, ``work_bytes``. Of communication: ``comm_node``, ``comm_type``,
    ``comm_bytes``, ``comm_group``, ``comm_wait``, ``comm_operation`` (0: not matched). Of the critical path:
    ``path`` (nodes), ``path_from``, ``path_to``. Of memory, curve by curve: ``memory_time``,
    ``memory_allocated`` and ``memory_reserved``, in bytes.
    """
    graph = run.graph
    rows, of_node = lay_out(run)
    order = np.lexsort((run.end_ns, run.start_ns, of_node))
    place = np.empty(len(graph), dtype=np.int64)
    place[order] = np.arange(len(graph))
    unit = 1000
    while int(run.end_ns.max()) // unit >= 1 << 32:
        unit *= 10

    def units(moment: np.ndarray) -> np.ndarray:
        return (moment + unit // 2) // unit

    columns.add("row", of_node[order], delta=True)
    columns.add("start", units(run.start_ns[order]), delta=True)
    columns.add("length", units(run.end_ns[order]) - units(run.start_ns[order]))
    name, names = name_codes(run)
    columns.add("name", name[order])
    columns.add("kind", page_kinds(run)[order])
    columns.add("phase", (shared_codes(run, "phase", PHASES)[0] + 1)[order])
    module, modules = shared_codes(run, "module")
    columns.add("module", (module + 1)[order])
    distance = np.where(run.parent >= 0, place - place[np.maximum(run.parent, 0)], 0)
    columns.add("parent", (distance & 0xFFFFFFFF)[order])
    flags = np.where(graph.attribute("segment", 0) > 0, FURTHER, 0)
    if run.path is not None:
        flags[run.path.node] |= ON_PATH
        columns.add("path", place[run.path.node])
        columns.add("path_from", units(run.path.from_ns), delta=True)
        columns.add("path_to", units(run.path.to_ns), delta=True)
    columns.add("flags", flags[order])
    _add_edges(run, place, columns)
    _add_work(run, place, columns)
    groups = _add_communication(run, place, columns, units)
    memory = _add_memory(run, columns, units)
    return {
        "unit_ns": unit,
        "rows": [[row.rank, row.kind, row.label] for row in rows],
        "names": names,
        "modules": modules,
        "phases": PHASES,
        "kinds": NODE_KINDS,
        "edge_kinds": EDGE_NAMES,
        "comm_types": COMM_NAMES,
        "groups": groups,
        "memory": memory,
    }


def name_codes(run: ReportRun) -> tuple[np.ndarray, list[str]]:
    """The name of each node as an index, int64[N], into the names of the run, the most frequent first."""
    known: dict[bytes, int] = {}
    of_trace = []
    for trace in run.traces:
        codes = np.array([known.setdefault(text, len(known)) for text in trace.names.table] or [0])
        of_trace.append(codes[trace.names.index])
    name = run.graph.gather(of_trace)
    used = np.bincount(name, minlength=len(known))
    by_use = np.argsort(-used, kind="stable")[: int((used > 0).sum())]
    rank = np.zeros(len(known), dtype=np.int64)
    rank[by_use] = np.arange(len(by_use))
    texts = list(known)
    return rank[name], [texts[at].decode("utf-8", "replace")[:LONGEST_NAME] for at in by_use.tolist()]


def page_kinds(run: ReportRun) -> np.ndarray:
    """Index into ``NODE_KINDS`` of each node, int64[N]."""
    kind = run.graph.gather([node_kinds(trace) for trace in run.traces])
    kind[_has_value(run, "kind", b"annotation")] = ANNOTATION
    return kind


def _has_value(run: ReportRun, attribute: str, value: bytes) -> np.ndarray:
    """bool[N]: nodes whose text attribute has this value."""
    found = []
    for trace in run.traces:
        rows = np.zeros(len(trace), dtype=bool)
        column = trace.attributes.get(attribute)
        if column is not None and isinstance(column.values, Strings) and value in column.values.table:
            rows[column.rows] = column.values.index == column.values.table.index(value)
        found.append(rows)
    return run.graph.gather(found)


def shared_codes(run: ReportRun, attribute: str, known: Sequence[str] = ()) -> tuple[np.ndarray, list[str]]:
    """A text attribute of all ranks as (index int64[N], -1 for none; texts). The texts are ``known``, or
    where that is empty, those that occur."""
    table = {text: at for at, text in enumerate(known)}
    found = []
    for trace in run.traces:
        texts, index = text_column(trace, attribute)
        codes = [table.get(text, -1) if known else table.setdefault(text, len(table)) for text in texts]
        found.append(np.array([*codes, -1], dtype=np.int64)[index])
    return run.graph.gather(found), list(table)


def _add_edges(run: ReportRun, place: np.ndarray, columns: PackedColumns) -> None:
    """``edge`` is how many places before its node the dependency stands; ``edge_kind`` of ``EDGE_NAMES``."""
    source, target = place[run.graph.source], place[run.graph.target]
    kind = edge_kinds(run)
    order = np.lexsort((source, target))
    source, target, kind = source[order], target[order], kind[order]
    columns.add("degree", np.bincount(target, minlength=len(run.graph)))
    columns.add("edge", (target - source) & 0xFFFFFFFF)
    columns.add("edge_kind", kind)


def edge_kinds(run: ReportRun) -> np.ndarray:
    """Index into ``EDGE_NAMES`` of each dependency of the run's graph, int64[E]."""
    return np.concatenate([_edge_kinds(trace) for trace in run.traces])


def _edge_kinds(trace: ExecutionTrace) -> np.ndarray:
    """Index into ``EDGE_NAMES`` of each dependency, data before ctrl, in the order of the file."""
    letters, unknown = list(EDGE_KINDS), len(EDGE_NAMES) - 1
    data = np.full(len(trace.data_deps.values), unknown)
    attribute = trace.attributes.get("dep_kinds")
    if attribute is not None and isinstance(attribute.values, Strings):
        table, index = attribute.values.table, attribute.values.index
        lengths = np.array([len(text) for text in table], dtype=np.int64)[index]
        degree = np.diff(trace.data_deps.offsets)
        some = np.flatnonzero(degree)
        if np.array_equal(some, attribute.rows) and np.array_equal(degree[some], lengths):
            codes = np.full(256, unknown)
            codes[[ord(letter) for letter in letters]] = np.arange(len(letters))
            joined = b"".join([table[at] for at in index.tolist()])
            data = codes[np.frombuffer(joined, np.uint8)]
    return np.concatenate([data, np.full(len(trace.ctrl_deps.values), unknown)])


def _add_work(run: ReportRun, place: np.ndarray, columns: PackedColumns) -> None:
    operations, size = run.graph.attribute("num_ops", 0), run.graph.attribute("tensor_size", 0)
    node = np.flatnonzero((operations > 0) | (size > 0))
    node = node[np.argsort(place[node])]
    columns.add("work_node", place[node], delta=True)
    columns.add("work_ops", operations[node].astype(np.float64))
    columns.add("work_bytes", size[node].astype(np.float64))


def _add_communication(run: ReportRun, place: np.ndarray, columns: PackedColumns, units: Any) -> list[str]:
    """Add what communication nodes have, and return the names of the groups."""
    graph = run.graph
    node = np.flatnonzero(graph.types >= NodeType.COMM_SEND)
    node = node[np.argsort(place[node])]
    columns.add("comm_node", place[node], delta=True)
    columns.add("comm_type", comm_types(run)[node])
    columns.add("comm_bytes", graph.attribute("comm_size", 0)[node].astype(np.float64))
    columns.add("comm_group", graph.group[node])
    columns.add("comm_wait", units(run.wait_ns[node]))
    columns.add("comm_operation", run.operations.of_node[node] + 1)
    return graph.groups


def _add_memory(run: ReportRun, columns: PackedColumns, units: Any) -> list[list[Any]]:
    """Add all memory; of each curve: [rank, device, first row, end, whether some is reserved]."""
    found = curves(run)
    if not found:
        return []
    columns.add("memory_time", units(np.concatenate([each.time_ns for each in found])), delta=True)
    columns.add("memory_allocated", np.concatenate([each.allocated for each in found]).astype(np.float64))
    reserved = [np.zeros_like(each.allocated) if each.reserved is None else each.reserved for each in found]
    columns.add("memory_reserved", np.concatenate(reserved).astype(np.float64))
    end = np.cumsum([len(each.time_ns) for each in found]).tolist()
    return [
        [each.rank, device_name(each.device), first, last, each.reserved is not None]
        for each, first, last in zip(found, [0, *end], end, strict=False)
    ]


def comm_types(run: ReportRun) -> np.ndarray:
    """Index into ``COMM_NAMES`` of each node, int64[N]; "unknown" for what is no communication."""
    graph = run.graph
    kind = graph.attribute("comm_type", -1)
    unknown = len(COMM_NAMES) - 1
    known = (graph.types == NodeType.COMM_COLL) & (kind >= 0) & (kind < len(CollectiveType))
    choices = [graph.types == NodeType.COMM_SEND, graph.types == NodeType.COMM_RECV, known]
    return np.select(choices, [unknown - 2, unknown - 1, kind], unknown)
