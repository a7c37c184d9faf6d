"""Keep, fold or drop host overhead: thread time outside all operators (Python, data loading)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from chakra_et.convert.graph.nodes import NODE_COLUMNS, Graph, NodeKind, distinct
from chakra_et.findings import Findings

HostGaps = Literal["node", "fold", "drop"]


def apply(graph: Graph, mode: HostGaps) -> tuple[Graph, Findings]:
    """Keep host overhead as nodes, fold it into the next node of its lane, or drop it.

    ``fold`` keeps overhead nodes on which other lanes depend, and those before a node with further
    dependencies, so that times stay correct. Returns the graph and the findings: the number of nodes removed
    and, for ``drop``, their ns.
    """
    removed = graph.kind == NodeKind.HOST_OVERHEAD
    findings = Findings()
    if mode == "node" or not removed.any():
        return graph, findings
    start = graph.start.copy()
    if mode == "drop":
        findings.add("gap-dropped", int(removed.sum()))
        findings.add("gap-dropped-ns", int((graph.end - graph.start)[removed].sum()))
    else:
        leaves = np.bincount(graph.source, minlength=len(graph))
        arrives = np.bincount(graph.target, minlength=len(graph))
        same_lane = graph.lane[graph.source] == graph.lane[graph.target]
        removed[graph.source[~same_lane]] = False
        removed &= leaves == 1
        next_of = np.full(len(graph), -1, dtype=np.int64)
        next_of[graph.source[same_lane]] = graph.target[same_lane]
        # With other dependencies, the node would wait for them before the gap instead of after it.
        removed &= (graph.item[next_of] < 0) & (arrives[next_of] <= 1)
        for node in np.flatnonzero(removed).tolist():  # in order, as consecutive gaps go to the same node
            start[next_of[node]] = start[node]
        findings.add("gap-folded", int(removed.sum()))
    return _without(replace(graph, start=start), removed), findings


def _without(graph: Graph, removed: np.ndarray) -> Graph:
    """The graph without the nodes ``removed``; edges into one are passed on to its successors."""
    edges = np.stack([graph.source, graph.target, graph.edge_kind], axis=1).astype(np.int64)
    leaves, arrives = removed[graph.source], removed[graph.target]
    # Removed node → (source, kind) of the edges that take the place of those into it. By targets, so that
    # a node's sources are resolved before it.
    before: dict[int, dict[int, int]] = {node: {} for node in np.flatnonzero(removed).tolist()}
    for source, target, kind in edges[arrives].tolist():
        before[target] |= before[source] if removed[source] else {source: kind}
    passed_on = [
        (source, target, kind)
        for node, target, _ in edges[leaves & ~arrives].tolist()
        for source, kind in before[node].items()
    ]
    edges = np.concatenate([edges[~leaves & ~arrives], np.array(passed_on, dtype=np.int64).reshape(-1, 3)])
    kept = np.flatnonzero(~removed)
    # A folded gap moves the start of the next node, so renumber the nodes.
    kept = kept[np.lexsort((kept, graph.end[kept] > graph.start[kept], graph.start[kept]))]
    number = np.full(len(graph), -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    source, target, kinds = distinct(number[edges[:, 0]], number[edges[:, 1]], edges[:, 2])
    columns = {name: getattr(graph, name)[kept] for name in NODE_COLUMNS}
    return replace(graph, source=source, target=target, edge_kind=kinds, **columns)
