"""What devices, threads and communication do during the steps, as parts of the time of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import NodeType
from chakra_et.simulate.breakdown import ACTIVITIES, activity
from chakra_et.simulate.run import Run


@dataclass(frozen=True)
class BusyTime:
    """``parts`` float64[T, 6]: the share of each rank's time by ``breakdown.ACTIVITIES``; ``hidden``: which
    part of all communication runs beside compute (None without any). ``message_wait``, ``group_wait``: the
    part of all ranks' time in which messages, or collectives, wait for a partner."""

    parts: np.ndarray
    hidden: float | None
    message_wait: float
    group_wait: float

    def share(self, name: str) -> float:
        """The mean part of an activity over all ranks."""
        return float(self.parts[:, ACTIVITIES.index(name)].mean())


def busy_time(run: Run) -> BusyTime:
    """Of a run as replayed, each rank from its first node to its end."""
    wait = waits(run)
    parts, hidden, whole = [], 0, 0
    for at, trace in enumerate(run.graph.traces):
        own = slice(run.graph.first[at], run.graph.first[at + 1])
        row = run.graph.row[own]
        start, end, waited = (np.empty(len(trace), np.int64) for _ in range(3))
        start[row], end[row], waited[row] = run.start_ns[own], run.end_ns[own], wait[own]
        found = activity(trace, start, end, waited)
        first, last = np.array([start.min()]), np.array([end.max()])
        spent = found.parts(first, last)[0]
        covered = int(found.hidden_ns(first, last)[0])
        hidden += covered
        whole += covered + int(spent[ACTIVITIES.index("communication")])
        parts.append(spent / max(int(spent.sum()), 1))
    total = max(float(sum(_lengths(run))), 1.0)
    is_message = run.graph.types != NodeType.COMM_COLL
    return BusyTime(
        np.array(parts),
        hidden / whole if whole else None,
        float(_alone(run, wait * is_message)) / total,
        float(_alone(run, wait * ~is_message)) / total,
    )


def waits(run: Run) -> np.ndarray:
    """How long each node waited for the last member of its operation, or for a partner that isn't in the
    files, ns, int64[N]."""
    wait = np.minimum(run.graph.attribute("wait_micros", 0) * 1000, run.end_ns - run.start_ns)
    for nodes in run.members:
        wait[nodes] = np.clip(run.start_ns[nodes].max() - run.start_ns[nodes], 0, None)
    bounded: np.ndarray = np.minimum(wait, run.end_ns - run.start_ns)
    return bounded


def _alone(run: Run, wait: np.ndarray) -> int:
    """The union of the waits of each rank, summed over the ranks, ns."""
    total = 0
    for at in range(len(run.graph.traces)):
        own = np.flatnonzero((run.graph.trace_of == at) & (wait > 0))
        own = own[np.argsort(run.start_ns[own], kind="stable")]
        start, end = run.start_ns[own], run.start_ns[own] + wait[own]
        reached = np.maximum.accumulate(np.append(0, end))[:-1]
        total += int(np.clip(end - np.maximum(start, reached), 0, None).sum())
    return total


def _lengths(run: Run) -> list[int]:
    """From the first node of each rank to its end, ns."""
    edges = run.graph.first[:-1]
    ends, starts = np.maximum.reduceat(run.end_ns, edges), np.minimum.reduceat(run.start_ns, edges)
    found: list[int] = (ends - starts).tolist()
    return found
