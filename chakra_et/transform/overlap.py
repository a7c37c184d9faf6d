"""What-ifs about overlap: all communication hidden behind computation, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.longest_path import make_schedule
from chakra_et.simulate.run import Run, Setting


@dataclass(frozen=True)
class Overlap:
    """``hidden`` True: computation waits for the communication of its step only at the end of the step, the
    most that overlap can give. False: the issuing thread, and for device communication the kernels of its
    device, wait for each communication before they go on."""

    hidden: bool

    def apply(self, run: Run, setting: Setting) -> Setting:
        if not run.is_communication.any():
            raise TraceError("--overlap: the files have no communication")
        return _hide(run, setting) if self.hidden else _expose(run, setting)


def _hide(run: Run, setting: Setting) -> Setting:
    graph = setting.graph
    communication, lanes = run.is_communication, graph.lanes()
    waits = communication[graph.source] & ~communication[graph.target]
    waits &= lanes[graph.source] != lanes[graph.target]
    edges = []
    for node in np.unique(graph.source[waits]).tolist():
        later = run.steps[int(graph.trace_of[node])].first
        later = later[(later >= 0) & (graph.position[later] > graph.position[node])]
        edges += [(node, int(later[0]))] if len(later) else []
    return replace(setting, graph=_rewired(graph, ~waits, edges)).noting(
        f"--overlap on: {int(waits.sum()):,} dependencies on communication move to the end of their step"
    )


def _expose(run: Run, setting: Setting) -> Setting:
    graph = setting.graph
    device, lanes = graph.attribute("device", -1), graph.lanes()
    issuer = np.full(len(graph), -1, np.int64)
    from_cpu = graph.is_cpu[graph.source]
    issuer[graph.target[from_cpu]] = graph.source[from_cpu]
    nodes_of: dict[int, np.ndarray] = {}  # of each lane, by position
    streams: dict[tuple[int, int], list[int]] = {}
    for lane in np.unique(lanes).tolist():
        nodes = np.flatnonzero(lanes == lane)
        nodes_of[lane] = nodes[np.argsort(graph.position[nodes], kind="stable")]
    edges = []
    for node in np.flatnonzero(run.is_communication).tolist():
        key = int(graph.trace_of[node]), int(device[node])
        if key[1] >= 0:
            if key not in streams:
                same = (device == key[1]) & (graph.trace_of == key[0]) & ~graph.is_cpu
                streams[key] = np.unique(lanes[same & (lanes >= 0)]).tolist()
            waiting = [lane for lane in streams[key] if lane != lanes[node]]
        else:
            waiting = [int(lanes[issuer[node]])] if issuer[node] >= 0 else []
        for lane in waiting:
            nodes = nodes_of[lane]
            at = int(np.searchsorted(graph.position[nodes], graph.position[node], side="right"))
            edges += [(node, int(nodes[at]))] if at < len(nodes) else []
    changed = _rewired(graph, np.ones(len(graph.source), bool), edges)
    try:
        make_schedule(changed, run.matching)
    except TraceError:
        # The run itself was replayed, so that it is this change that doesn't fit.
        raise TraceError(
            "--overlap off: with each communication awaited where it is called the ranks would wait for each "
            "other for ever, since some of this run's (exchanged messages, for one) can only end while its "
            "rank goes on: leave --overlap off out"
        ) from None
    return replace(setting, graph=changed).noting(
        f"--overlap off: {len(edges):,} dependencies make computation wait for communication"
    )


def _rewired(graph: ReplayGraph, kept: np.ndarray, edges: list[tuple[int, int]]) -> ReplayGraph:
    """The graph with the ``kept`` dependencies (bool[E]) and more ``edges`` (source, target)."""
    source, target = np.array(edges, np.int64).reshape(-1, 2).T
    return replace(
        graph,
        source=np.concatenate([graph.source[kept], source]),
        target=np.concatenate([graph.target[kept], target]),
        lag_ns=np.concatenate([graph.lag_ns[kept], np.zeros(len(edges), np.int64)]),
    )
