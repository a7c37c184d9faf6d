"""When everything happens in a setting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.longest_path import Schedule, make_schedule
from chakra_et.simulate.run import Run, Setting
from chakra_et.simulate.shared_links import share

_ATTEMPTS = 50


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
