"""Keep, fold or drop host overhead: thread time outside all operators (Python, data loading)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from chakra_et.convert.graph.nodes import Graph, NodeKind
from chakra_et.findings import Findings

HostGaps = Literal["node", "fold", "drop"]


def apply(graph: Graph, mode: HostGaps) -> tuple[Graph, Findings]:
    """Keep host overhead as nodes, fold it into the next node of its lane, or drop it.

    ``fold`` keeps overhead nodes on which other lanes depend, and those before a node with further
    dependencies, so that times stay correct. Returns the graph and the findings: the number of nodes removed
    and, for ``drop``, their ns.
    """
    overhead = graph.kind == NodeKind.HOST_OVERHEAD
    findings = Findings()
    if mode == "node" or not overhead.any():
        return graph, findings
    start, end = graph.start.copy(), graph.end
    removed = overhead.copy()
    if mode == "fold":
        leaves = np.bincount(graph.source, minlength=len(graph))
        arrives = np.bincount(graph.target, minlength=len(graph))
        same_lane = graph.lane[graph.source] == graph.lane[graph.target]
        removed[graph.source[~same_lane]] = False
        removed &= leaves == 1
        # From last to first, so that consecutive gaps are folded into the same node.
        next_of = np.full(len(graph), -1, dtype=np.int64)
        next_of[graph.source[same_lane]] = graph.target[same_lane]
        for node in np.flatnonzero(removed)[::-1].tolist():
            follower = next_of[node]
            # With other dependencies, the node would wait for them before the gap instead of after it.
            if graph.item[follower] >= 0 or arrives[follower] > 1:
                removed[node] = False
        for node in np.flatnonzero(removed).tolist():
            follower = next_of[node]
            start[follower] = start[node]
        findings.add("gap-folded", int(removed.sum()))
    else:
        lost = int((graph.end - graph.start)[removed].sum())
        findings.add("gap-dropped", int(removed.sum()))
        findings.add("gap-dropped-ns", lost)
    return _without(replace(graph, start=start, end=end), removed), findings


def _without(graph: Graph, removed: np.ndarray) -> Graph:
    """The graph without the nodes ``removed``; edges into one are passed on to its successors."""
    into: dict[int, list[tuple[int, int]]] = {}
    touched = removed[graph.source]
    for source, target, kind in zip(
        graph.source[removed[graph.target]].tolist(),
        graph.target[removed[graph.target]].tolist(),
        graph.edge_kind[removed[graph.target]].tolist(),
        strict=True,
    ):
        into.setdefault(target, []).append((source, kind))
    resolved: dict[int, dict[int, int]] = {}
    for node in np.flatnonzero(removed).tolist():
        before: dict[int, int] = {}
        for source, kind in into.get(node, ()):
            before |= resolved[source] if removed[source] else {source: kind}
        resolved[node] = before
    extra = []
    for source, target in zip(graph.source[touched].tolist(), graph.target[touched].tolist(), strict=True):
        if not removed[target]:
            extra += [(before, target, kind) for before, kind in resolved[source].items()]
    keep = ~touched & ~removed[graph.target]
    more = np.array(extra, dtype=np.int64).reshape(-1, 3)
    source = np.concatenate([graph.source[keep], more[:, 0]])
    target = np.concatenate([graph.target[keep], more[:, 1]])
    kind = np.concatenate([graph.edge_kind[keep], more[:, 2]])
    kept = np.flatnonzero(~removed)
    # A folded gap moves the start of the next node, so renumber the nodes.
    kept = kept[np.lexsort((kept, graph.end[kept] > graph.start[kept], graph.start[kept]))]
    rank = np.full(len(graph), -1, dtype=np.int64)
    rank[kept] = np.arange(len(kept))
    source, target = rank[source], rank[target]
    order = np.lexsort((kind, source, target))
    source, target, kind = source[order], target[order], kind[order]
    new = np.ones(len(source), dtype=bool)
    new[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    columns = {
        name: getattr(graph, name)[kept]
        for name in (
            "lane",
            "start",
            "end",
            "event",
            "segment",
            "item",
            "kind",
            "launch_latency",
            "stream_gap",
        )
    }
    return replace(graph, source=source[new], target=target[new], edge_kind=kind[new], **columns)
