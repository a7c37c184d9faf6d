"""The prediction: what each rank's step takes, what bounds it, and how uncertain that is.

    found = predict(chakra_et.load("outputs/gpt2_2gpu_quick_trace").run, [])
    print(found.before_ms, [rank.uncertainty_ms for rank in found.ranks])

Times are milliseconds per step, by rank and jointly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et.et.columns import ExecutionTrace, Ragged
from chakra_et.et.node_attributes import with_integers, with_metadata
from chakra_et.et.record import write_run
from chakra_et.names import run_at
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.run import NodeTimes, Run, solve
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.transform.changes import Change, Rebuild


@dataclass(frozen=True)
class StepPrediction:
    """One step of one rank, ns; ``measured_ns`` is None where the file holds no start times. ``before_ns``:
    as replayed without changes."""

    name: str
    measured_ns: int | None
    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class RankPrediction:
    """One rank: means over its steps, and one standard deviation of uncertainty, ns.

    Means, as they are the time of all steps over their number: where the host runs ahead, the device's work
    of all steps ends in the last one, and a median wouldn't show how it changes.
    ``uncertainty_ns`` is only what is known of it where ``scatter_is_known`` is False: how much steps differ
    doesn't show in one.
    ``bound_before`` and ``bound_after``: shares by kind along the path that decides when the rank ends; empty
    where they weren't asked for.
    """

    rank: int
    steps: list[StepPrediction]
    before_ns: float
    after_ns: float
    uncertainty_ns: float
    scatter_is_known: bool
    bound_before: dict[str, float]
    bound_after: dict[str, float]

    @property
    def before_ms(self) -> float:
        return self.before_ns / 1e6

    @property
    def after_ms(self) -> float:
        return self.after_ns / 1e6

    @property
    def measured_ns(self) -> float | None:
        found = [step.measured_ns for step in self.steps if step.measured_ns is not None]
        return sum(found) / len(found) if found else None

    @property
    def uncertainty_ms(self) -> float:
        return self.uncertainty_ns / 1e6

    def median_ns(self, of: str) -> float:
        """The median step; ``of``: ``before_ns`` or ``after_ns``."""
        return float(np.median([getattr(step, of) for step in self.steps]))


@dataclass(frozen=True)
class Prediction:
    """A changed run; ``before`` and ``after`` are the timelines of ``run`` as measured and of ``changed``:
    the same run, but where a change gave it other nodes."""

    run: Run
    changed: Run
    ranks: list[RankPrediction]
    notes: list[str]
    before: NodeTimes
    after: NodeTimes

    @property
    def before_ms(self) -> float:
        """The step time of the slowest rank."""
        return max(rank.before_ms for rank in self.ranks)

    @property
    def after_ms(self) -> float:
        """The step time of the slowest rank after the change."""
        return max(rank.after_ms for rank in self.ranks)


def predict(run: Run, changes: Sequence[Change | Rebuild], explain: bool = True) -> Prediction:
    """Apply ``changes`` in order, first those that change nodes, and compute the run's times anew, jointly
    over all ranks. Where nodes change, gloo's threads slow other operators than in the run.

    ``explain``: also find what bounds each rank, and the uncertainty that comes from the changes; a sweep is
    quicker without. Raises ``TraceError`` where a change doesn't fit the run.
    """
    rebuilds = [change for change in changes if isinstance(change, Rebuild)]
    slowdown = None
    if rebuilds:
        from chakra_et.transform.contention import find_slowdown

        slowdown = find_slowdown(run)
    changed = slowdown.without(run) if slowdown else run
    for rebuild in rebuilds:
        changed = rebuild.rebuild(changed)
    setting = changed.measured
    setting = slowdown.within(changed, setting) if slowdown else setting
    for change in changes:
        if isinstance(change, Change):
            setting = change.apply(changed, setting)
    before, after = solve(run, run.measured), solve(changed, setting)
    before_ns, after_ns = changed_step_ns(run, before, changed, after)
    means_ns = mean_step_ns(changed, after)
    off = []  # by each doubt come true by one standard deviation
    for own, lasting in setting.doubts if explain else ():
        if own.any() or lasting.any():
            doubtful = replace(
                setting,
                own_ns=np.maximum(setting.own_ns + own, 0),
                lasting_ns=np.maximum(setting.lasting_ns + lasting, 0),
                demand=None if lasting.any() else setting.demand,
            )
            off.append(mean_step_ns(changed, solve(changed, doubtful)) - means_ns)
    none: list[dict[str, float]] = [{}] * max(len(run.steps), len(changed.steps))
    bound = [bounds(run, before), bounds(changed, after)] if explain else [none, none]
    steps_before = run.step_times(before.start_ns, before.end_ns)
    steps_after = changed.step_times(after.start_ns, after.end_ns)
    ranks = []
    for at, rank in enumerate(changed.graph.ranks):
        like = at % len(run.steps)  # the measured rank that it was made of
        means, measured = (float(before_ns[like]), float(after_ns[at])), run.steps[like].measured_ns
        taken = [None] * len(steps_before[like]) if measured is None else measured.tolist()
        rows = zip(run.steps[like].names, taken, steps_before[like], steps_after[at], strict=True)
        steps = [StepPrediction(*row) for row in rows]
        spread = math.hypot(*(each[at] for each in off), *_own_error(measured, *means))
        known = measured is not None and len(measured) > 1
        ranks.append(RankPrediction(rank, steps, *means, spread, known, bound[0][like], bound[1][at]))
    return Prediction(run, changed, ranks, [*changed.notes, *setting.notes], before, after)


def mean_step_ns(run: Run, timeline: NodeTimes) -> np.ndarray:
    """The mean step of each trace, float64[T] ns: see ``RankPrediction``."""
    every = run.step_times(timeline.start_ns, timeline.end_ns)
    return np.array([sum(steps) / len(steps) for steps in every])


def changed_step_ns(
    run: Run, before: NodeTimes, changed: Run, after: NodeTimes
) -> tuple[np.ndarray, np.ndarray]:
    """The mean step of each trace of ``run`` and, in the same proportion to it as in a long run, which has
    one end, that of each trace of ``changed``; float64[T] ns."""
    before_ns = mean_step_ns(run, before)
    by_end = before_ns / np.maximum(steady_ns(run, before), 1)
    return before_ns, steady_ns(changed, after) * by_end[np.arange(len(changed.steps)) % len(by_end)]


def steady_ns(run: Run, timeline: NodeTimes) -> np.ndarray:
    """The mean step of each trace as in a long run, float64[T] ns: there, what the device does after the
    host's last step is beside a further one; and a stream with more to do than the host sets the pace."""
    found, graph = mean_step_ns(run, timeline), run.graph
    streams, at_position = graph.attribute("stream", -1), np.argsort(graph.position)
    for at, steps in enumerate(run.steps):
        nodes, count = steps.nodes, len(steps.names)
        start, end = timeline.start_ns[nodes], timeline.end_ns[nodes]
        stream, launched = streams[nodes], graph.launched[nodes]
        on_device = steps.on_device & (stream >= 0)
        work = np.flatnonzero(on_device & (launched >= 0))
        if count < 2 or not len(work):
            continue
        given, done = np.zeros((2, count))
        for last, ending in ((given, timeline.end_ns[at_position[launched[work]]]), (done, end[work])):
            np.maximum.at(last, np.maximum(steps.step[work], 0), ending)
        # The host's last step ends as others do, as it may wait for the device there.
        begins = start[steps.first - nodes.start]
        last = min(end[~on_device].max(), given[-1] + begins[-1] - given[-2])
        of_host, of_device = (last - begins[0]) / count, (done[-1] - done[0]) / (count - 1)
        busy = np.bincount(stream[on_device], (end - start)[on_device]).max()
        found[at] = of_device if busy > count * of_host else of_host
    return found


def _own_error(measured: np.ndarray | None, before_ns: float, after_ns: float) -> list[float]:
    """The error of the replay itself, and how much single steps differ, both as parts of the prediction."""
    if measured is None or not before_ns:
        return []
    off = (before_ns / float(np.mean(measured)) - 1) * after_ns if measured.any() else 0.0
    scatter = float(np.std(measured, ddof=1)) * after_ns / before_ns if len(measured) > 1 else 0.0
    return [off, scatter]


def bounds(run: Run, timeline: NodeTimes) -> list[dict[str, float]]:
    """For each trace, the shares (0 to 1) of the kinds of ``KINDS`` in the path that decides when it ends.

    The path runs back from the rank's last node, from each node to what it had to wait for: a dependency, the
    node before it on its thread or stream, or the last member of a collective to arrive, on whichever rank.
    Only what was recorded as a wait for communication that isn't matched counts as ``wait``.
    """
    graph, matched = timeline.setting.graph, run.operation >= 0
    # The node that each node waited for (-1: none), and the last member of its communication (or itself).
    before, last_member = graph.last_before(timeline.end_ns), run.matching.last_members(timeline.start_ns)
    last_member = np.where(last_member >= 0, last_member, np.arange(len(graph)))
    # How long a node holds up the path, and the part of it in which unmatched communication waited.
    lasted = np.where(matched, timeline.lasting_ns, timeline.end_ns - timeline.start_ns)
    wait = np.minimum(run.graph.attribute("wait_micros", 0) * 1000, run.measured.own_ns)
    waited = np.where(matched, 0, wait)
    above, last = before.data, last_member.data  # their elements are Python's integers, which is faster
    # What each node's path took by kind, up to its end: paths of many ranks meet, and go on as one.
    spent = {-1: np.zeros(len(KINDS), np.int64)}
    found = []
    for first, end in zip(run.graph.first[:-1], run.graph.first[1:], strict=True):
        final = node = last[int(first + np.argmax(timeline.end_ns[first:end]))]
        path = []
        while node not in spent:
            path.append(node)
            node = above[node]
            node = node if node < 0 else last[node]
        nodes = np.array(path[::-1], np.int64)
        parts = np.zeros((len(nodes), len(KINDS)), np.int64)
        parts[np.arange(len(nodes)), run.kind[nodes]] = lasted[nodes] - waited[nodes]
        parts[:, KINDS.index("wait")] += waited[nodes]
        spent.update(zip(path[::-1], spent[node] + np.cumsum(parts, axis=0), strict=True))
        by_kind = spent[final].tolist()
        total = max(sum(by_kind), 1)
        found.append({name: by_kind[at] / total for at, name in enumerate(KINDS) if by_kind[at]})
    return found


def describe(shares: Mapping[str, float], most: int = 3) -> str:
    """``operator 71%, transfer 22%``: the largest shares."""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


def figures(before_ms: float, after_ms: float, doubt_ms: float | None) -> tuple[str, str, str, str]:
    """Step time before and after a change, ± and the change, as text."""
    doubt = "–" if doubt_ms is None else f"{doubt_ms:,.3f}"
    change = f"{100 * (after_ms / before_ms - 1):+.1f}%" if before_ms else "-"
    return f"{before_ms:,.3f}", f"{after_ms:,.3f}", doubt, change


def predicted_traces(prediction: Prediction) -> list[ExecutionTrace]:
    """The traces of all ranks with predicted times.

    Names, ids and attributes are those of the run, so that nodes can be compared one by one. Dependencies are
    too, but where ``--overlap`` changed them.
    """
    run, timeline = prediction.changed, prediction.after
    matched = (run.operation >= 0).astype(np.int64)
    columns = (timeline.start_ns, timeline.end_ns, timeline.lasting_ns, matched)
    of_rank = zip(run.graph.traces, *(run.graph.scatter(times) for times in columns), strict=True)
    traces = [_predicted(*each) for each in of_rank]
    if timeline.setting.graph.source is run.graph.source:
        return traces
    return [_with_dependencies(each, at, timeline.setting.graph) for at, each in enumerate(traces)]


def write_traces(traces: Sequence[ExecutionTrace], run: Run, prefix: str | os.PathLike[str]) -> list[Path]:
    """Write ``PREFIX.RANK.et`` and ``PREFIX_comm_groups.json`` of a run; the paths of the former. Raises
    ``TraceError`` where there are files of that name."""
    files, world = run_at(os.fspath(prefix)), max(trace.metadata_int("world_size") or 0 for trace in traces)
    ranks = run.graph.ranks
    write_run(files, zip(ranks, ranks, traces, strict=True), lambda: run.comm_groups, world, {})
    return [files.et_file(rank) for rank in ranks]


def _predicted(
    trace: ExecutionTrace, start: np.ndarray, end: np.ndarray, lasting: np.ndarray, matched: np.ndarray
) -> ExecutionTrace:
    """The trace with new times, µs. All ranks count from the moment 0 of the joint replay."""
    from chakra_et.et.memory import is_memory  # a prediction that isn't written does without

    begin_us, end_us = start // 1000, end // 1000
    duration = end_us - begin_us
    # What the changed run would allocate is not predicted.
    attributes = {name: column for name, column in trace.attributes.items() if not is_memory(name)}
    trace = replace(trace, attributes=attributes)
    rows = np.flatnonzero(matched)
    if len(rows) and "wait_micros" in attributes:
        transfer = np.minimum(lasting // 1000, duration)
        for name, values in (("transfer_micros", transfer), ("wait_micros", duration - transfer)):
            trace = with_integers(trace, name, dict(zip(rows.tolist(), values[rows].tolist(), strict=True)))
    trace = with_metadata(
        trace,
        **dict.fromkeys(("measured_end_micros", "clock_spread_ns", "conversion_report")),
        trace_start_ns=0,
        clock_offset_ns=0,
        predicted=True,
        measured_trace_start_ns=int(trace.metadata.get("trace_start_ns", 0) or 0),
    )
    return replace(
        trace,
        # A start of 0 in all nodes means a file without times.
        start_micros=(begin_us + 1).astype(np.uint64),
        duration_micros=duration.astype(np.uint64),
    )


def _with_dependencies(trace: ExecutionTrace, at: int, graph: ReplayGraph) -> ExecutionTrace:
    """The trace with the dependencies of the changed graph, all of them data dependencies."""
    first, last = graph.first[at], graph.first[at + 1]
    inside = (graph.target >= first) & (graph.target < last)
    source, target = (graph.row[nodes[inside]] for nodes in (graph.source, graph.target))
    deps = Ragged.of_edges(source, target, len(trace))
    deps = Ragged(deps.offsets, trace.ids[deps.values.astype(np.int64) - 1])
    # One letter for each data dependency, which no longer holds.
    attributes = {name: column for name, column in trace.attributes.items() if name != "dep_kinds"}
    return replace(trace, data_deps=deps, ctrl_deps=Ragged.empty(len(trace)), attributes=attributes)
