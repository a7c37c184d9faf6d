"""When each node starts and ends in a setting; transfers that overlap on a link share it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.longest_path import Schedule, make_schedule
from chakra_et.simulate.run import Run, Setting

_ATTEMPTS = 50
_DONE = 1e-3
"""ns on the wire that count as nothing."""


@dataclass(frozen=True)
class NodeTimes:
    """``start_ns[N]`` and ``end_ns[N]`` of each node; ``lasting_ns[N]``: the transfer of matched
    communication with what other transfers on its links cost it; int64."""

    setting: Setting
    start_ns: np.ndarray
    end_ns: np.ndarray
    lasting_ns: np.ndarray


def solve(run: Run, setting: Setting) -> NodeTimes:
    """The timeline of a setting. Raises ``TraceError`` where its dependencies let ranks wait for ever."""
    if setting is run.measured:
        return NodeTimes(setting, run.start_ns, run.end_ns, setting.lasting_ns)
    same = setting.graph is run.graph
    schedule = run.schedule if same else make_schedule(setting.graph, run.matching)
    if setting.demand is None or not run.members:
        start, end = schedule.run(setting.own_ns, setting.lasting_ns, run.release_ns)
        return NodeTimes(setting, start, end, setting.lasting_ns)
    return _with_links(run, setting, schedule)


def _with_links(run: Run, setting: Setting, schedule: Schedule) -> NodeTimes:
    """The timeline in which transfers at the same time share their links.

    How long a transfer lasts depends on which others run beside it, and when these begin depends on how long
    earlier ones last. Each attempt gets right at least the transfers that depend on none that was wrong
    before, so that the attempts end where nothing changes.
    """
    assert setting.demand is not None
    demand, lasting = setting.demand, setting.lasting_ns
    first = np.array([nodes[0] for nodes in run.members])
    users = [np.unique(run.graph.trace_of[nodes]).tolist() for nodes in run.members]
    flat = np.concatenate(run.members)
    bounds = np.concatenate(([0], np.cumsum([len(nodes) for nodes in run.members])[:-1]))
    matched = run.operation >= 0
    for _ in range(_ATTEMPTS):
        start, end = schedule.run(setting.own_ns, lasting, run.release_ns)
        begin = np.maximum.reduceat(start[flat], bounds)
        done = share(begin, demand.wire_ns, users) - begin + demand.fixed_ns
        needed = np.rint(np.maximum(done, demand.least_ns)).astype(np.int64)
        if (np.abs(needed - lasting[first]) <= 1).all():
            return NodeTimes(setting, start, end, lasting)
        lasting = lasting.copy()
        lasting[matched] = needed[run.operation[matched]]
    raise TraceError(
        f"the transfers that share links don't settle in {_ATTEMPTS} attempts: predict with --contention off"
    )


def share(begin_ns: np.ndarray, wire_ns: np.ndarray, users: Sequence[Sequence[int]]) -> np.ndarray:
    """When each of K transfers is done, float64[K].

    ``begin_ns[K]``: when each is ready; ``wire_ns[K]``: its time on links that nothing else uses; ``users``:
    the ranks whose links each of them occupies. A transfer goes on at the rate of its most crowded link,
    where n transfers get 1/n each (processor sharing, as TCP flows on one bottleneck do).
    """
    end = begin_ns.astype(np.float64)
    left = wire_ns.astype(np.float64)
    arrivals = [(float(begin_ns[at]), at) for at in range(len(begin_ns)) if wire_ns[at] > 0]
    heapq.heapify(arrivals)
    active: list[int] = []
    crowd: dict[int, int] = {}
    now = 0.0
    while active or arrivals:
        rates = [1.0 / max(crowd[rank] for rank in users[at]) for at in active]
        until = min((left[at] / rate for at, rate in zip(active, rates, strict=True)), default=np.inf)
        arriving = bool(arrivals) and arrivals[0][0] <= now + until
        step = max(arrivals[0][0] - now, 0.0) if arriving else until
        now += step
        for at, rate in zip(active, rates, strict=True):
            left[at] -= step * rate
        if arriving:
            at = heapq.heappop(arrivals)[1]
            active.append(at)
            for rank in users[at]:
                crowd[rank] = crowd.get(rank, 0) + 1
            continue
        for at in [at for at in active if left[at] <= _DONE]:
            end[at] = now
            active.remove(at)
            for rank in users[at]:
                crowd[rank] -= 1
    return end
