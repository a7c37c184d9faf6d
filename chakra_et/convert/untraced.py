"""Take the cost of recording off a rank's host times, so that the graph's step is the untraced step.

Recording costs CPU time per operator and per runtime call. It is what the traced steps took longer than the
untraced ones of the same run, within a factor of ``_PLAUSIBLE`` of what the tracer measured before the
training, or that alone if the run has fewer than two untraced steps. The device keeps its times, and whatever
waited for the host starts earlier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from chakra_et.convert.emit_columns import whole_micros
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Strings
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.longest_path import make_schedule
from chakra_et.simulate.matching import match
from chakra_et.traces.device_format import Recording

_PLAUSIBLE = 2.5
_ON_HOST = (b"operator", b"annotation", b"runtime", b"host-overhead")


def take_off_cost(trace: ExecutionTrace, recording: Recording, measured_ns: float) -> None:
    """Change start times and durations of ``trace``, in place, to those without recording.

    ``measured_ns``: the cost per operator by the tracer's measurement. Nodes keep ``recorded_micros`` where
    the duration changes; communication keeps ``recorded_start_micros``, from which the waits of the ranks for
    each other follow.
    """
    kinds, kind = _codes(trace, "kind")
    once = trace.column("segment") == 0
    operator = once & np.isin(kind, [kinds.index(name) for name in _ON_HOST[:2] if name in kinds])
    call = once & (kind == kinds.index(b"runtime")) if b"runtime" in kinds else np.zeros(len(trace), bool)
    per_launch = recording.added_us("launches") * 1000 / recording.launches
    per_call = max(per_launch / max(measured_ns, 1.0) - 1.0, 0.0)  # in units of the cost per operator
    per_operator = _per_operator(recording, measured_ns, int(operator.sum()) + per_call * int(call.sum()))
    cost = (operator + call * per_call) * per_operator
    on_host = np.isin(kind, [kinds.index(name) for name in _ON_HOST if name in kinds])
    graph = build_graph(trace, [trace.metadata_int("rank") or 0])  # nodes are rows: ids ascend
    own = graph.own_ns.copy()
    lane = trace.column("lane", -1)
    for number in np.unique(lane[on_host]).tolist():
        rows = np.flatnonzero(on_host & (lane == number))
        # What a node is too short for is taken from the nodes after it.
        left = np.maximum.accumulate(np.maximum(np.cumsum(own[rows] - np.rint(cost[rows])), 0))
        own[rows] = np.diff(left, prepend=0).astype(np.int64)
    begin = int(trace.start_micros.min()) * 1000
    start, end = make_schedule(graph, match(graph)).run(own, own, np.full(len(trace), begin))
    # Overhead in front of device work lasts from what it depends on to that work.
    ready = np.full(len(trace), begin)
    np.maximum.at(ready, graph.target, end[graph.source])
    overhead = kind == kinds.index(b"device-overhead") if b"device-overhead" in kinds else call & False
    start = np.where(overhead, np.minimum(ready, start), start)
    duration = whole_micros(lane, end - start)
    messages = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
    _keep(trace, "recorded_start_micros", messages, trace.start_micros)
    changed = np.flatnonzero(duration != trace.duration_micros.astype(np.int64))
    _keep(trace, "recorded_micros", changed, trace.duration_micros)
    if trace.start_micros.any():
        trace.start_micros = (start // 1000).astype(np.uint64)
    trace.duration_micros = duration.astype(np.uint64)
    trace.metadata["recorded_end_micros"] = trace.metadata["measured_end_micros"]
    trace.metadata["measured_end_micros"] = int(end.max()) // 1000
    trace.metadata["recording_cost_ns"] = round(per_operator, 1)


def step_facts(recording: Recording | None, untraced_us: Sequence[float]) -> str:
    """The metadata ``steps_micros``: medians over the ``untraced`` and ``traced`` steps, by the host's clock.

    ``untraced_us``: untraced steps in the manifest of a capture whose traces don't tell them.
    """
    facts: dict[str, Any] = {}
    if recording is not None:
        untraced_us = [wall for wall, _ in recording.untraced_us]
        facts["traced"] = median(wall for wall, _ in recording.timed_us) if recording.timed_us else None
        facts["observed"] = recording.structure_step == len(recording.step_us) - 1
    facts["untraced"] = median(untraced_us) if untraced_us else None
    facts["untraced_steps"] = len(untraced_us)
    return json.dumps(facts)


def _per_operator(recording: Recording, measured_ns: float, operators: float) -> float:
    """ns that recording took per operator, of which there are ``operators`` in the timed steps."""
    timed, untraced = recording.timed_us, recording.untraced_us
    if len(untraced) < 2 or not timed or not operators:
        return measured_ns
    added_us = median(cpu for _, cpu in timed) - median(cpu for _, cpu in untraced)
    found = added_us * 1000 * len(timed) / operators
    return float(np.clip(found, measured_ns / _PLAUSIBLE, measured_ns * _PLAUSIBLE))


def _codes(trace: ExecutionTrace, name: str) -> tuple[list[bytes], np.ndarray]:
    """The table of a text attribute that all nodes have, and the index of each node's text."""
    values = trace.attributes[name].values
    assert isinstance(values, Strings)
    return list(values.table), values.index


def _keep(trace: ExecutionTrace, name: str, rows: np.ndarray, column: np.ndarray) -> None:
    if len(rows):
        trace.attributes[name] = Attribute("int64", rows, column[rows].astype(np.int64))
