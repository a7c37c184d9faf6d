"""What a diagnosis rests on: what ranks do during the steps, and by how much these get shorter where some of
their time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.diagnose.node_classes import ALLOCATING, CLASSES, COMPILING, HOST, LOADING, STARTING
from chakra_et.diagnose.rates import LISTED
from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.predict.predict import predict
from chakra_et.simulate.breakdown import ACTIVITIES, COMMUNICATION, WAIT, activity
from chakra_et.simulate.critical_path import critical_path, find_operations
from chakra_et.simulate.run import Run, Setting
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.transform.changes import Change
from chakra_et.transform.durations import RankAs

FEW_RANKS = 8
"""Of more ranks than these, only the ones that compute the longest are tried as the slow ones."""
LONG_NS = 1e6
"""Who does so long nothing that was recorded, isn't launching."""
SLOWER = 0.02
"""By which part a rank must compute longer than the median one to be one of several slow ranks."""


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


def slow_ranks(run: Run) -> tuple[list[int], float]:
    """The fewest ranks that, as fast as the median of the others, shorten the step the most, the one that
    computes the longest first, and by which part of it; none where nothing is gained. ``run`` begins on all
    ranks at once."""
    ranks = run.graph.ranks
    if len(ranks) < 2:
        return [], 0.0
    computing = np.bincount(run.graph.trace_of, run.measured.own_ns * ~run.is_communication, len(ranks))
    order = np.argsort(-computing, kind="stable").tolist()
    tried = [[ranks[at]] for at in order[:FEW_RANKS] if computing[at]]
    if not tried:
        return [], 0.0
    above = int((computing > (1 + SLOWER) * np.median(computing)).sum())
    found = [(gain(run, *map(RankAs, each)) or 0.0, each) for each in tried]
    best, chosen = max(found, key=lambda each: (each[0], -each[1][0]))
    several = [ranks[at] for at in order[:above]]
    # Two slow ranks hide each other: neither alone shortens the step.
    if 1 < above <= len(ranks) // 2 and above <= FEW_RANKS:
        value = gain(run, *map(RankAs, several)) or 0.0
        if value > best + SLOWER:
            best, chosen = value, several
    return (chosen, best) if best > 0 else ([], 0.0)


@dataclass(frozen=True)
class BusyTime:
    """``shares``: the mean part of the ranks' time by ``breakdown.ACTIVITIES``; ``hidden``: which part of all
    communication runs beside compute (None without any). ``message_wait``, ``group_wait``: the part of all
    ranks' time in which messages, or collectives, wait for a partner, and nothing runs."""

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
    columns = (run.start_ns, run.end_ns, wait, wait * is_message)
    parts, total, hidden, shown, waited, messages = [], 0, 0, 0, 0, 0
    for trace, start, end, own_wait, for_message in zip(
        graph.traces, *map(graph.scatter, columns), strict=True
    ):
        window = start.min(keepdims=True), end.max(keepdims=True)
        found = activity(trace, start, end, own_wait)
        spent = found.parts(*window)[0]
        total += int(spent.sum())
        hidden += int(found.hidden_ns(*window)[0])
        shown += int(spent[COMMUNICATION])
        waited += int(spent[WAIT])
        if for_message.any():
            messages += int(activity(trace, start, end, for_message).parts(*window)[0][WAIT])
        parts.append(spent / max(int(spent.sum()), 1))
    message, group = messages / max(total, 1), max(waited - messages, 0) / max(total, 1)
    shares = {name: float(np.mean([each[at] for each in parts])) for at, name in enumerate(ACTIVITIES)}
    return BusyTime(shares, hidden / (hidden + shown) if hidden + shown else None, message, group)


def host_path(run: Run, classes: np.ndarray) -> tuple[list[tuple[str, float]], float]:
    """What the host does on the critical path: [(name, share)], the most time first, and the share of
    stretches of ``LONG_NS`` and more outside of operators and calls, which are no launching."""
    operations = find_operations(run.matching, run.start_ns)
    path = critical_path(run.graph, operations, run.start_ns, run.end_ns)
    on_host = np.isin(classes[path.node], (HOST, COMPILING, ALLOCATING, LOADING, STARTING))
    node, lasts = path.node[on_host], path.lasts_ns[on_host]
    spent, total = np.bincount(run.name_of[node], lasts, len(run.names)), max(int(lasts.sum()), 1)
    outside = (run.kind[node] == KINDS.index("host-overhead")) & (lasts >= LONG_NS)
    if any("skeleton" in trace.metadata for trace in run.graph.traces):
        outside[:] = False  # a node stands for many
    names = np.argsort(-spent, kind="stable")[:LISTED].tolist()
    return [(run.names[at], spent[at] / total) for at in names], float(lasts[outside].sum() / total)


def slow_in(run: Run, classes: np.ndarray, rank: int) -> str:
    """The class of work for which a rank takes most time beyond the median of all."""
    count, ranks = len(CLASSES), len(run.graph.ranks)
    own = np.where(run.is_communication, 0, run.measured.own_ns)
    spent = np.bincount(run.graph.trace_of * count + classes, own, ranks * count).reshape(ranks, count)
    beyond = spent[run.graph.ranks.index(rank)] - np.median(spent, axis=0)
    return CLASSES[int(beyond.argmax())]


def uneven_steps(run: Run) -> str:
    """A sentence where a step lasts much longer than the median one: warm-up, or an outlier."""
    for rank, steps in zip(run.graph.ranks, run.steps, strict=True):
        if steps.measured_ns is None or len(steps.names) < 3:
            continue
        middle = float(np.median(steps.measured_ns))
        most = int(np.argmax(steps.measured_ns))
        ratio = steps.measured_ns[most] / middle if middle else 1.0
        spread = float(np.median(np.abs(steps.measured_ns - middle))) / middle if middle else 0.0
        if ratio >= 1.2 and ratio - 1 >= 5 * spread:
            why = "; it is the first recorded one and may include warm-up" if most == 0 else ""
            if most == len(steps.names) - 1:
                why = "; it is the last one, in which devices also finish queued work"
            return f"{steps.names[most]} of rank {rank} takes {ratio:.1f} times the median step{why}."
    return ""
