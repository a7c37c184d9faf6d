"""What bounds each rank: where the time goes along the longest path to its last node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from chakra_et.simulate.node_times import NodeTimes
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS


def bounds(run: Run, timeline: NodeTimes) -> list[dict[str, float]]:
    """For each trace, the shares (0 to 1) of the kinds of ``KINDS`` in the path that decides when it ends.

    The path runs back from the rank's last node, from each node to what it had to wait for: a dependency, the
    node before it on its thread or stream, or the last member of a collective to arrive, on whichever rank.
    Only what was recorded as a wait for communication that isn't matched counts as ``wait``.
    """
    before, last_member = _binding(run, timeline)
    lasts = _path_times(run, timeline)
    waiting = np.where(run.operation < 0, _unmatched_wait(run), 0)
    kind, lasted, waited = run.kind.tolist(), lasts.tolist(), waiting.tolist()
    found = []
    for trace in range(len(run.graph.traces)):
        first, last = run.graph.first[trace], run.graph.first[trace + 1]
        node = int(first + np.argmax(timeline.end_ns[first:last]))
        spent = [0] * len(KINDS)
        while node >= 0:
            node = last_member[node]
            spent[kind[node]] += lasted[node] - waited[node]
            spent[KINDS.index("wait")] += waited[node]
            node = before[node]
        total = max(sum(spent), 1)
        found.append({name: spent[at] / total for at, name in enumerate(KINDS) if spent[at]})
    return found


def describe(shares: Mapping[str, float], most: int = 3) -> str:
    """``operator 71%, transfer 22%``: the largest shares."""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


def _path_times(run: Run, timeline: NodeTimes) -> np.ndarray:
    """How long a node holds up the path: from the moment that it could start, with what has to pass first."""
    matched = run.operation >= 0
    taken: np.ndarray = np.where(matched, timeline.lasting_ns, timeline.end_ns - timeline.start_ns)
    return taken


def _unmatched_wait(run: Run) -> np.ndarray:
    """The part of unmatched communication that waited for other ranks, as the files have it, ns."""
    wait = run.graph.attribute("wait_micros", 0) * 1000
    bounded: np.ndarray = np.minimum(wait, run.measured.own_ns)
    return bounded


def _binding(run: Run, timeline: NodeTimes) -> tuple[list[int], list[int]]:
    """The node that each node waited for (-1: none), and the last member of its communication (or itself)."""
    graph = timeline.setting.graph
    lane_source, lane_target = graph.lane_edges()
    before = np.full(len(graph), -1, np.int64)
    lag = np.concatenate([np.zeros(len(lane_source), np.int64), graph.lag_ns])
    source, target = np.concatenate([lane_source, graph.source]), np.concatenate([lane_target, graph.target])
    binds = timeline.end_ns[source] + lag == timeline.start_ns[target]
    before[target[binds]] = source[binds]
    last = np.arange(len(graph))
    for nodes in run.members:
        last[nodes] = nodes[np.argmax(timeline.start_ns[nodes])]
    return before.tolist(), last.tolist()
