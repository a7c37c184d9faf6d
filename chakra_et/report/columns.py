"""The nodes and edges of a run as the columns of a page, in the order in which its timeline shows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from chakra_et.et.columns import NodeType
from chakra_et.et.node_attributes import EDGE_NAMES
from chakra_et.report.page import PackedColumns
from chakra_et.report.run import COMM_NAMES, LONGEST_NAME, NODE_KINDS, PHASES, ReportRun
from chakra_et.report.timeline import Stacks, curves, lay_out, queues

FURTHER, ON_PATH, SLICE = 1, 2, 4  # bits of the column "flags"


def add_nodes(run: ReportRun, columns: PackedColumns, stacks: Stacks) -> dict[str, Any]:
    """Add the columns of all nodes, and return the tables that they refer to.

    Columns of the N nodes and of the slices of call stacks, which have no dependencies, by row of the
    timeline and start: ``row``, ``start`` and ``length`` (in the unit of ``unit_ns``), ``name``, ``kind``,
    ``phase`` (0: none), ``module`` (0: none), ``parent`` (distance to the enclosing operator modulo 2^32, 0:
    none), ``flags``, ``degree``. Of the E dependencies, node by node:
    ``edge`` (distance to the node that is waited for modulo 2^32) and ``edge_kind``. Of device work:
    ``work_node``, ``work_ops``, ``work_bytes``. Of communication: ``comm_node``, ``comm_type``,
    ``comm_bytes``, ``comm_group``, ``comm_wait``, ``comm_operation`` (0: not matched). Of the critical path:
    ``path`` (nodes), ``path_from``, ``path_to``. Of memory, curve by curve: ``memory_time``,
    ``memory_allocated`` and ``memory_reserved``, in bytes.
    """
    graph = run.graph
    rows, row_of = lay_out(run, stacks)
    start_ns = np.maximum(np.append(run.start_ns, stacks.start_ns), 0)
    end_ns = np.append(run.end_ns, stacks.end_ns)
    order = np.lexsort((end_ns, start_ns, row_of))
    place = np.argsort(order)
    unit = 1000
    while int(end_ns.max()) // unit >= 1 << 32:
        unit *= 10

    def in_rows(of_node: np.ndarray, of_slice: np.ndarray | int = 0) -> np.ndarray:
        more = np.broadcast_to(of_slice, len(order) - len(graph))
        return np.concatenate((of_node, more))[order]

    columns.add("row", row_of[order], delta=True)
    columns.add("start", _units(start_ns[order], unit), delta=True)
    columns.add("length", np.maximum(_units(end_ns[order], unit) - _units(start_ns[order], unit), 0))
    name, names = run.names[0], list(run.names[1])
    known = {text: at for at, text in reversed(list(enumerate(names)))}
    of_slice = []
    for text in stacks.names:
        of_slice.append(known.setdefault(text[:LONGEST_NAME], len(names)))
        names += [text[:LONGEST_NAME]] * (of_slice[-1] == len(names))
    columns.add("name", in_rows(name, np.array(of_slice, dtype=np.int64)[stacks.name]))
    columns.add("kind", in_rows(run.node_kinds, stacks.kind))
    columns.add("phase", in_rows(run.graph.codes("phase", PHASES)[0] + 1))
    module, modules = run.graph.codes("module")
    columns.add("module", in_rows(module + 1))
    distance = np.where(run.parent >= 0, place[: len(graph)] - place[run.parent], 0)
    columns.add("parent", in_rows(distance & 0xFFFFFFFF))
    flags = np.where(graph.attribute("segment", 0) > 0, FURTHER, 0)
    flags[run.path.node] |= ON_PATH
    columns.add("path", place[run.path.node])
    ends = run.end_ns[run.path.node]
    columns.add("path_from", _units(np.maximum(ends - run.path.lasts_ns, 0), unit), delta=True)
    columns.add("path_to", _units(ends, unit), delta=True)
    columns.add("flags", in_rows(flags, SLICE))

    source, target, kind = place[graph.source], place[graph.target], run.edge_kinds
    by_node = np.lexsort((source, target))
    source, target, kind = source[by_node], target[by_node], kind[by_node]
    columns.add("degree", np.bincount(target, minlength=len(order)))
    columns.add("edge", (target - source) & 0xFFFFFFFF)
    columns.add("edge_kind", kind)
    _add_work(run, columns, place, unit)
    return {
        "unit_ns": unit,
        "rows": rows,
        "names": names,
        "modules": modules,
        "phases": PHASES,
        "kinds": NODE_KINDS,
        "edge_kinds": EDGE_NAMES,
        "comm_types": COMM_NAMES,
        "groups": graph.groups,
        "memory": _add_memory(run, columns, unit),
    }


def _units(moment_ns: np.ndarray, unit: int) -> np.ndarray:
    return (moment_ns + unit // 2) // unit


def _add_work(run: ReportRun, columns: PackedColumns, place: np.ndarray, unit: int) -> None:
    """The columns of device work and of communication."""
    graph = run.graph

    def in_order(chosen: np.ndarray) -> np.ndarray:
        nodes = np.flatnonzero(chosen)
        return nodes[np.argsort(place[nodes])]

    operations, size = graph.attribute("num_ops", 0), graph.attribute("tensor_size", 0)
    node = in_order((operations > 0) | (size > 0))
    columns.add("work_node", place[node], delta=True)
    columns.add("work_ops", operations[node].astype(np.float64))
    columns.add("work_bytes", size[node].astype(np.float64))

    node = in_order(graph.types >= NodeType.COMM_SEND)
    columns.add("comm_node", place[node], delta=True)
    columns.add("comm_type", run.comm_types[node])
    columns.add("comm_bytes", graph.attribute("comm_size", 0)[node].astype(np.float64))
    columns.add("comm_group", graph.group[node])
    columns.add("comm_wait", _units(run.wait_ns[node], unit))
    matched = run.arrivals[0] >= 0
    columns.add("comm_operation", np.where(matched, run.job.matching.operation + 1, 0)[node])


def _add_memory(run: ReportRun, columns: PackedColumns, unit: int) -> list[list[Any]]:
    """The curves: rank, label, first and last moment, and whether an allocator reserves any."""
    memory, end, found = list[list[Any]](), 0, [*curves(run), *queues(run)]
    for each in found:
        first, end = end, end + len(each.node)
        label = next(iter(each.lines())).removesuffix(" allocated")
        memory.append([each.rank, label, first, end, each.reserved is not None])
    if found:
        held = [each.allocated * 0 if each.reserved is None else each.reserved for each in found]
        times = _units(np.concatenate([each.time_ns for each in found]), unit)
        columns.add("memory_time", times, delta=True)
        for name, levels in (("allocated", [each.allocated for each in found]), ("reserved", held)):
            columns.add(f"memory_{name}", np.concatenate(levels).astype(np.float64))
    return memory
