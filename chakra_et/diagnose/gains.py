"""What a diagnosis rests on: what ranks do during the steps, and by how much these get shorter where some of
their time goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chakra_et.diagnose.node_classes import ALLOCATING, CLASSES, COMPILING, HOST, LOADING, STARTING
from chakra_et.diagnose.rates import LISTED
from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.predict.predict import changed_step_ns, mean_step_ns
from chakra_et.simulate.breakdown import ACTIVITIES, COMMUNICATION, WAIT, activity
from chakra_et.simulate.critical_path import critical_path
from chakra_et.simulate.run import Run, Setting, solve
from chakra_et.simulate.time_by_kind import KINDS, LONG_NS
from chakra_et.simulate.timing import waits
from chakra_et.transform.changes import Change
from chakra_et.transform.durations import RankAs, scaled

FEW_RANKS = 8
"""Of more ranks than these, only the ones that compute the longest are tried as the slow ones."""
SLOWER = 0.02
"""By which part a rank must compute longer than the median one to be one of several slow ranks."""


@dataclass(frozen=True)
class Faster:
    """Chosen nodes (bool[N]) take ``factor`` times as long; of matched communication, its transfer."""

    chosen: np.ndarray
    factor: float

    def apply(self, run: Run, setting: Setting) -> Setting:
        return scaled(run, setting, self.chosen, self.factor, "")


@dataclass(frozen=True)
class Balanced:
    """What all ranks compute takes what it takes in the median of them, call by call."""

    def apply(self, run: Run, setting: Setting) -> Setting:
        ranks, trace = len(run.graph.ranks), run.graph.trace_of
        code = np.where(run.is_communication, -1, run.name_of * len(KINDS) + run.kind)
        order, own = np.lexsort((trace, code)), setting.own_ns.copy()
        for nodes in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            count = np.bincount(trace[nodes], minlength=ranks)
            if code[nodes[0]] >= 0 and (count == count[0]).all():
                own[nodes] = np.tile(np.median(own[nodes].reshape(ranks, -1), axis=0), ranks)
        return replace(setting, own_ns=own)


def gain(run: Run, *changes: Change) -> float:
    """The part of the step (of the slowest rank, mean of its steps) that goes, as ``chakra-et predict`` has
    it; 0 where a change doesn't fit the run."""
    setting = run.measured
    try:
        for change in changes:
            setting = change.apply(run, setting)
        before, after = changed_step_ns(run, solve(run, run.measured), run, solve(run, setting))
    except TraceError:
        return 0.0
    return 1 - float(after.max() / before.max()) if before.any() else 0.0


def step_ms(run: Run) -> float:
    """The mean step of the slowest rank as replayed, ms."""
    return float(mean_step_ns(run, solve(run, run.measured)).max()) / 1e6


def slow_ranks(run: Run, least: float) -> tuple[list[int], float]:
    """The fewest ranks that, as fast as the median of the others, shorten the step the most, the one that
    computes the longest first, and by which part of it; none where less than ``least`` is gained. ``run``
    begins on all ranks at once."""
    ranks = run.graph.ranks
    if len(ranks) < 2:
        return [], 0.0
    computing = np.bincount(run.graph.trace_of, run.measured.own_ns * ~run.is_communication, len(ranks))
    order = np.argsort(-computing, kind="stable").tolist()
    tried = [ranks[at] for at in order[:FEW_RANKS] if computing[at]]
    best, slowest = max(((gain(run, RankAs(rank)), -rank) for rank in tried), default=(0.0, 0))
    chosen = [-slowest]
    above = int((computing > (1 + SLOWER) * np.median(computing)).sum())
    # Two slow ranks hide each other: neither alone shortens the step.
    if 1 < above <= len(ranks) // 2 and above <= FEW_RANKS:
        several = [ranks[at] for at in order[:above]]
        value = gain(run, *map(RankAs, several))
        if value > best + SLOWER:
            for rank in reversed(several):  # who gains nothing beside the others isn't one of them
                without = [each for each in several if each != rank]
                if gain(run, *map(RankAs, without)) > value - SLOWER / 2:
                    several = without
            best, chosen = gain(run, *map(RankAs, several)), several
    return (chosen, best) if best >= least else ([], 0.0)


def busy_time(run: Run) -> tuple[dict[str, float], float | None, float]:
    """Of a run as replayed, each rank from its first node to its end: the mean part of the ranks' time by
    ``breakdown.ACTIVITIES``; which part of all communication runs beside compute (None without any); and the
    part of all ranks' time in which messages wait for a partner, as in a bubble or for a slow stage, and
    nothing runs."""
    graph, lasted = run.graph, run.end_ns - run.start_ns
    # For the last member of its operation, or for a partner that isn't in the files.
    without = np.minimum(graph.attribute("wait_micros", 0) * 1000, lasted)
    wait = np.where(run.operation >= 0, waits(run.matching, run.start_ns, lasted), without)
    is_message = graph.types != NodeType.COMM_COLL
    columns = map(graph.scatter, (run.start_ns, run.end_ns, wait, wait * is_message))
    spent, hidden, messages = [], 0, 0
    for trace, start, end, own_wait, for_message in zip(graph.traces, *columns, strict=True):
        window = start.min(keepdims=True), end.max(keepdims=True)
        found = activity(trace, start, end, own_wait)
        spent.append(found.parts(*window)[0])
        hidden += int(found.hidden_ns(*window)[0])
        if for_message.any():
            messages += int(activity(trace, start, end, for_message).parts(*window)[0][WAIT])
    every = np.array(spent)
    whole, lasts = every.sum(axis=0), np.maximum(every.sum(axis=1, keepdims=True), 1)
    shares = dict(zip(ACTIVITIES, (every / lasts).mean(axis=0).tolist(), strict=True))
    communicates = hidden + int(whole[COMMUNICATION])
    beside = hidden / communicates if communicates else None
    return shares, beside, messages / max(int(whole.sum()), 1)


def host_path(run: Run, classes: np.ndarray) -> tuple[list[tuple[str, float]], float]:
    """What the host does on the critical path: [(name, share)], the most time first, and the share of
    stretches of ``LONG_NS`` and more outside of operators and calls, which are no launching."""
    last = run.matching.last_members(run.start_ns)
    path = critical_path(run.graph, last, run.start_ns, run.end_ns)
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
    shape = len(run.graph.ranks), len(CLASSES)
    own = run.measured.own_ns * ~run.is_communication
    spent = np.bincount(run.graph.trace_of * shape[1] + classes, own, shape[0] * shape[1]).reshape(shape)
    return CLASSES[int((spent[run.graph.ranks.index(rank)] - np.median(spent, axis=0)).argmax())]


def uneven_steps(run: Run) -> str:
    """A sentence where a step lasts much longer than the median one: warm-up, or an outlier."""
    for rank, steps in zip(run.graph.ranks, run.steps, strict=True):
        lasted, count = steps.measured_ns, len(steps.names)
        if lasted is None or count < 3 or not (middle := float(np.median(lasted))):
            continue
        most = int(np.argmax(lasted))
        ratio, spread = lasted[most] / middle, float(np.median(np.abs(lasted - middle))) / middle
        if ratio >= 1.2 and ratio - 1 >= 5 * spread:
            about = "" if most else "; it is the first recorded one and may include warm-up"
            return f"{steps.names[most]} of rank {rank} takes {ratio:.1f} times the median step{about}."
    return ""
