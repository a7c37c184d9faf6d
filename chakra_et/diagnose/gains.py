"""What a diagnosis rests on: what ranks do during the steps, and by how much these get shorter where some of
their time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.predict.predict import predict
from chakra_et.simulate.breakdown import ACTIVITIES, COMMUNICATION, activity, union_ns
from chakra_et.simulate.run import Run, Setting
from chakra_et.transform.changes import Change
from chakra_et.transform.durations import RankAs

FEW_RANKS = 8
"""Of more ranks than these, only the ones that compute the longest are tried as the slow one."""


@dataclass(frozen=True)
class Faster:
    """Chosen nodes (bool[N]) take ``factor`` times as long; of matched communication, its transfer."""

    chosen: np.ndarray
    factor: float

    def apply(self, run: Run, setting: Setting) -> Setting:
        factor = np.where(self.chosen, self.factor, 1.0)
        return replace(
            setting,
            own_ns=np.rint(setting.own_ns * factor).astype(np.int64),
            lasting_ns=np.rint(setting.lasting_ns * factor).astype(np.int64),
        )


def gain(run: Run, *changes: Change) -> float | None:
    """The part of the step (of the slowest rank, mean of its steps) that goes, as ``chakra-et predict`` has
    it; None where a change doesn't fit the run."""
    try:
        found = predict(run, changes, explain=False)
    except TraceError:
        return None
    return 1 - found.after_ms / found.before_ms if found.before_ms else None


def step_ms(run: Run) -> float:
    """The mean step of the slowest rank as replayed, ms."""
    return predict(run, [], explain=False).before_ms


def slowest_rank(run: Run) -> tuple[int, float] | None:
    """(rank, gain): the one rank that, as fast as the median of the others, shortens the step the most; None
    where none does by anything. ``run`` begins on all ranks at once."""
    ranks = run.graph.ranks
    computing = np.bincount(run.graph.trace_of, run.measured.own_ns * ~run.is_communication, len(ranks))
    found = []
    for at in np.argsort(-computing, kind="stable")[:FEW_RANKS].tolist() if len(ranks) > 1 else ():
        value = gain(run, RankAs(ranks[at]))
        if value is not None and value > 0 and computing[at]:
            found.append((value, -ranks[at]))
    if not found:
        return None
    value, rank = max(found)
    return -rank, value


@dataclass(frozen=True)
class BusyTime:
    """``shares``: the mean part of the ranks' time by ``breakdown.ACTIVITIES``; ``hidden``: which part of all
    communication runs beside compute (None without any). ``message_wait``, ``group_wait``: the part of all
    ranks' time in which messages, or collectives, wait for a partner."""

    shares: dict[str, float]
    hidden: float | None
    message_wait: float
    group_wait: float


def busy_time(run: Run) -> BusyTime:
    """Of a run as replayed, each rank from its first node to its end."""
    graph, lasted = run.graph, run.end_ns - run.start_ns
    # For the last member of its operation, or for a partner that isn't in the files.
    wait = graph.attribute("wait_micros", 0) * 1000
    for nodes in run.members:
        wait[nodes] = np.clip(run.start_ns[nodes].max() - run.start_ns[nodes], 0, None)
    wait = np.minimum(wait, lasted)
    is_message = graph.types != NodeType.COMM_COLL
    columns = (run.start_ns, run.end_ns, wait, wait * is_message, wait * ~is_message)
    of_rank = zip(graph.traces, *map(graph.scatter, columns), strict=True)
    parts, total, hidden, shown, waited = [], 0, 0, 0, [0, 0]
    for trace, start, end, own_wait, *kinds in of_rank:
        window = start.min(keepdims=True), end.max(keepdims=True)
        found = activity(trace, start, end, own_wait)
        spent = found.parts(*window)[0]
        total += int(spent.sum())
        hidden += int(found.hidden_ns(*window)[0])
        shown += int(spent[COMMUNICATION])
        for at, each in enumerate(kinds):
            own = each > 0
            waited[at] += int(union_ns(start[own], (start + each)[own], *window)[0])
        parts.append(spent / max(int(spent.sum()), 1))
    messages, groups = (each / max(total, 1) for each in waited)
    shares = {name: float(np.mean([each[at] for each in parts])) for at, name in enumerate(ACTIVITIES)}
    return BusyTime(shares, hidden / (hidden + shown) if hidden + shown else None, messages, groups)
