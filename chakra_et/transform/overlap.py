"""What-ifs about overlap: all communication hidden behind computation, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
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
    communication = run.is_communication
    lanes = graph.lanes()
    waits = communication[graph.source] & ~communication[graph.target]
    waits &= lanes[graph.source] != lanes[graph.target]
    source, target = [], []
    for node in np.unique(graph.source[waits]).tolist():
        later = run.steps[int(graph.trace_of[node])].first
        later = later[(later >= 0) & (graph.position[later] > graph.position[node])]
        if len(later):
            source.append(node)
            target.append(int(later[0]))
    changed = replace(
        graph,
        source=np.concatenate([graph.source[~waits], np.array(source, np.int64)]),
        target=np.concatenate([graph.target[~waits], np.array(target, np.int64)]),
        lag_ns=np.concatenate([graph.lag_ns[~waits], np.zeros(len(source), np.int64)]),
    )
    return replace(setting, graph=changed).noting(
        f"--overlap on: {int(waits.sum()):,} dependencies on communication move to the end of their step"
    )


def _expose(run: Run, setting: Setting) -> Setting:
    graph = setting.graph
    device = graph.attribute("device", -1)
    lanes = graph.lanes()
    issuer = np.full(len(graph), -1, np.int64)
    from_cpu = graph.is_cpu[graph.source]
    issuer[graph.target[from_cpu]] = graph.source[from_cpu]
    followers = _Followers(run, lanes)
    source, target = [], []
    for node in np.flatnonzero(run.is_communication).tolist():
        if device[node] >= 0:
            same = (device == device[node]) & (graph.trace_of == graph.trace_of[node]) & ~graph.is_cpu
            waiting = [lane for lane in followers.lanes_of(same) if lane != lanes[node]]
        else:
            waiting = [int(lanes[issuer[node]])] if issuer[node] >= 0 else []
        for lane in waiting:
            follower = followers.after(lane, int(graph.position[node]))
            if follower >= 0:
                source.append(node)
                target.append(follower)
    changed = replace(
        graph,
        source=np.concatenate([graph.source, np.array(source, np.int64)]),
        target=np.concatenate([graph.target, np.array(target, np.int64)]),
        lag_ns=np.concatenate([graph.lag_ns, np.zeros(len(source), np.int64)]),
    )
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
        f"--overlap off: {len(source):,} dependencies make computation wait for communication"
    )


class _Followers:
    """The nodes of each lane by position."""

    def __init__(self, run: Run, lanes: np.ndarray) -> None:
        order = np.lexsort((run.graph.position, lanes))
        self.lanes, self.nodes, self.position = lanes, order, run.graph.position
        self.sorted = lanes[order]
        self.known: dict[bytes, list[int]] = {}

    def lanes_of(self, chosen: np.ndarray) -> list[int]:
        """The lanes of the chosen nodes."""
        key = np.packbits(chosen).tobytes()
        if key not in self.known:
            self.known[key] = [lane for lane in np.unique(self.lanes[chosen]).tolist() if lane >= 0]
        return self.known[key]

    def after(self, lane: int, position: int) -> int:
        """The first node of a lane behind a position, -1 for none."""
        low, high = np.searchsorted(self.sorted, [lane, lane + 1])
        at = low + np.searchsorted(self.position[self.nodes[low:high]], position, side="right")
        return int(self.nodes[at]) if at < high else -1
