"""The cost of recording, taken off: the graph's step is the untraced step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.convert.emit import whole_micros
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Strings
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.longest_path import make_schedule
from chakra_et.simulate.matching import match
from chakra_et.simulate.measured_steps import find_steps, step_rows
from chakra_et.traces.device_format import Recording

_PLAUSIBLE = 5.0
_MOST_GAP = 1500
"""ns that a GPU needs at most to note the end of one kernel and the begin of the next."""
_AHEAD = 0.9
"""Where untraced steps take the host less than this part of their time, it is ahead of the device: how much
longer its own time is when traced then tells what recording costs it, and the graph's step doesn't."""
_CLOSE, _TRIES = 0.002, 12
_ON_HOST = (b"operator", b"annotation", b"runtime", b"host-overhead")


def take_off_cost(trace: ExecutionTrace, recording: Recording, measured_ns: float) -> ExecutionTrace:
    """The trace with start times and durations by which its step is the untraced step.

    Recording costs time per operator and per runtime call, and between steps. It is what the traced steps
    took longer than the untraced ones of the same run, within a factor of ``_PLAUSIBLE`` of what the tracer
    measured before the training, or that alone if the run has fewer than two untraced steps. With a GPU,
    which works beside the host, it is the cost by which the graph takes as long as the untraced steps, of
    which one is enough; if the graph is still longer, up to ``_MOST_GAP`` is taken off between kernels.
    Kernels keep their durations, and whatever waited for the host starts earlier.

    ``measured_ns``: the cost per operator by the tracer's measurement. Nodes keep ``recorded_micros`` where
    the duration changes; communication keeps ``recorded_start_micros``, from which the waits of the ranks for
    each other follow.
    """
    once = trace.column("segment") == 0
    operator, call = once & _of_kind(trace, *_ON_HOST[:2]), once & _of_kind(trace, b"runtime")
    per_launch = recording.added_us("launches") * 1000 / recording.launches
    per_call = max(per_launch / max(measured_ns, 1.0) - 1.0, 0.0)  # in units of the cost per operator
    weight, between = operator + call * per_call, _of_kind(trace, b"device-overhead")
    graph = build_graph(trace, [trace.metadata_int("rank") or 0])  # nodes are rows: ids ascend
    recorded = graph.own_ns.copy()
    recorded[recorder_rows(trace)] = 0
    lane = trace.column("lane", -1)
    lanes = rows_by_value(lane, np.flatnonzero(_of_kind(trace, *_ON_HOST))).values()
    begin = int(trace.start_micros.min()) * 1000
    at_begin, in_rounds = np.full(len(trace), begin), make_schedule(graph, match(graph))

    def schedule(per_operator: float, gap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        own = np.where(between, np.maximum(recorded - int(gap), 0), recorded)
        for rows in lanes:
            # What a node is too short for is taken from the nodes after it.
            left = np.cumsum(own[rows] - np.rint(weight[rows] * per_operator))
            own[rows] = np.diff(np.maximum.accumulate(np.maximum(left, 0)), prepend=0).astype(np.int64)
        return in_rounds.run(own, own, at_begin)

    steps, untraced, gap = len(step_rows(trace)[1]), recording.untraced_us, 0.0
    per_operator = _per_operator(recording, measured_ns, float(weight.sum()), steps)
    if recording.untraced_total_us and steps:
        alone = median(wall for wall, _ in recording.untraced_alone_us or untraced)
        ahead = alone < _AHEAD * untraced[0][0]
        least, most = per_operator if ahead else measured_ns / _PLAUSIBLE, measured_ns * _PLAUSIBLE
        wanted = untraced[0][0] * 1000 * steps

        before = find_steps(graph).step < 0

        def beyond(per_operator: float, gap: float = 0.0) -> float:
            end = schedule(per_operator, gap)[1]
            return int(end.max() - end[before].max(initial=begin)) / wanted - 1

        per_operator = _root(beyond, least, most, per_operator)
        gap = _root(lambda gap: beyond(per_operator, gap), 0.0, _MOST_GAP, 0.0)
    start, end = schedule(per_operator, gap)
    # Overhead in front of device work lasts from what it depends on to that work.
    ready = at_begin.copy()
    np.maximum.at(ready, graph.target, end[graph.source])
    start = np.where(between, np.minimum(ready, start), start)
    duration = whole_micros(lane, end - start)
    messages = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
    changed = np.flatnonzero(duration != trace.duration_micros.astype(np.int64))
    trace = replace(trace, attributes=dict(trace.attributes), metadata=dict(trace.metadata))
    for name, rows, column in (
        ("recorded_start_micros", messages, trace.start_micros),
        ("recorded_micros", changed, trace.duration_micros),
    ):
        if len(rows):
            trace.attributes[name] = Attribute("int64", rows, column[rows].astype(np.int64))
    for name in ("stream_gap_ns", "launch_latency_ns"):  # the latter lasts until after the gap
        if gap and (of := trace.attributes.get(name)):
            shorter = np.minimum(int(gap), np.maximum(trace.column("stream_gap_ns", 0)[of.rows], 0))
            trace.attributes[name] = Attribute("int64", of.rows, of.values - shorter)
    if trace.start_micros.any():
        trace.start_micros = (start // 1000).astype(np.uint64)
    trace.duration_micros = duration.astype(np.uint64)
    trace.metadata["recorded_end_micros"] = trace.metadata["measured_end_micros"]
    trace.metadata["measured_end_micros"] = int(end.max()) // 1000
    trace.metadata["recording_cost_ns"] = round(per_operator, 1)
    return trace


def _of_kind(trace: ExecutionTrace, *names: bytes) -> np.ndarray:
    kinds = trace.attributes["kind"].values
    assert isinstance(kinds, Strings)
    return np.isin(kinds.index, [code for code, name in enumerate(kinds.table) if name in names])


def recorder_rows(trace: ExecutionTrace) -> np.ndarray:
    """The host's time between two steps, in which the profiler ends one and begins the next, and after the
    last one, until it synchronises the device in order to end."""
    lane, idle = trace.column("lane", -1), _of_kind(trace, b"host-overhead")
    steps = step_rows(trace)[1]
    ends = np.array([name.endswith(b"DeviceSynchronize") for name in trace.names.table])[trace.names.index]
    ends &= (trace.column("parent", -1) < 0) & np.isin(lane, lane[steps[-1:]])
    order = np.argsort(lane, kind="stable")
    same = np.diff(lane[order]) == 0
    before = np.full(len(lane), -1)  # on its lane
    before[order[1:][same]] = order[:-1][same]
    found = before[np.concatenate((steps[1:], np.flatnonzero(ends)))]
    return found[(found >= 0) & idle[found]]


def _root(beyond: Callable[[float], float], least: float, most: float, usual: float) -> float:
    """Where a function that doesn't rise is 0 or, without such a place, the first where it is nearest to it;
    ``usual`` where it is close to 0 there, or doesn't change."""
    if abs(above := beyond(usual)) < _CLOSE:
        return usual
    low, high = (usual, most) if above > 0 else (least, usual)
    at_low, at_high = (above, beyond(most)) if above > 0 else (beyond(least), above)
    if at_low - at_high < _CLOSE:
        return usual
    wanted = min(max(0.0, at_high + _CLOSE), at_low)
    for _ in range(_TRIES):
        middle = (low + high) / 2
        at = beyond(middle) - wanted
        if abs(at) < _CLOSE / 2:
            return middle
        low, high = (middle, high) if at > 0 else (low, middle)
    return (low + high) / 2


def step_facts(recording: Recording | None, graph_us: float = 0.0) -> str:
    """The metadata ``steps_micros``, by the host's clock: the median of the ``untraced`` steps, and the mean
    of the ``traced`` ones, as that is the step of the graph. With a GPU both have its work, which takes the
    recorded graph ``graph_us`` for all steps."""
    if recording is None:
        return json.dumps({"untraced": None})
    untraced, timed = ([wall for wall, _ in steps] for steps in (recording.untraced_us, recording.timed_us))
    with_device = graph_us if recording.untraced_total_us else 0.0
    facts = {
        "traced": max(fmean(timed), with_device / len(timed)) if timed else None,
        "observed": recording.structure_step == len(recording.step_us) - 1,
        "untraced": median(untraced) if untraced else None,
        "untraced_steps": len(untraced),
    }
    return json.dumps(facts)


def _per_operator(recording: Recording, measured_ns: float, operators: float, steps: int) -> float:
    """ns that recording took per operator, of which there are ``operators`` in the ``steps`` of the trace."""
    timed, untraced = recording.timed_us, recording.untraced_alone_us
    if not timed or not operators or len(untraced) < 2:
        return measured_ns
    longer = median(cpu for _, cpu in timed) - median(cpu for _, cpu in untraced)
    found = longer * 1000 * steps / operators
    return float(np.clip(found, measured_ns / _PLAUSIBLE, measured_ns * _PLAUSIBLE))
