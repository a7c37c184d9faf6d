"""The steps of a trace, and its recorded times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.simulate.joint import ReplayGraph, build_graph

_CUT = re.compile(r'"steps-unfinished:(\d{1,18})"')
_STEP_NAME = re.compile(rb"ProfilerStep#(\d{1,18})")


class _StepFacts(msgspec.Struct):
    """The metadata ``steps_micros``, see ``convert.recording_cost.step_facts``."""

    untraced: float | None
    untraced_steps: int = 0
    traced: float | None = None
    observed: bool = False


def measured_times(trace: ExecutionTrace) -> tuple[np.ndarray | None, int]:
    """Recorded start of each node, int64[N], and the end of the trace, in ns after the first node's start.

    The end is ``measured_end_micros`` of the metadata (on the clock of ``start_micros``), or else the end
    of the last node. (None, 0) for a file without start times.
    """
    if not trace.start_micros.any():
        return None, 0
    starts = trace.start_micros.astype(np.int64)
    end = trace.metadata.get("measured_end_micros")
    if type(end) is not int:
        end = int((starts + trace.duration_micros.astype(np.int64)).max())
    first = int(starts.min())
    return (starts - first) * 1000, (end - first) * 1000


def step_rows(trace: ExecutionTrace) -> tuple[list[str], np.ndarray]:
    """The names ``ProfilerStep#K`` in the order of K, and the row where each step begins, int64.

    A step may have several nodes (its self time before, between and after its operators): use the first.
    """
    named = (_STEP_NAME.fullmatch(name) for name in trace.names.table)
    number = np.array([int(found[1]) if found else -1 for found in named], np.int64)[trace.names.index]
    rows = np.flatnonzero(number >= 0)
    rows = rows[np.lexsort((trace.ids[rows], trace.start_micros[rows]))]
    steps, first = np.unique(number[rows], return_index=True)
    return [f"ProfilerStep#{step}" for step in steps.tolist()], rows[first]


@dataclass(frozen=True)
class Steps:
    """The S steps of a trace with n nodes in a graph.

    ``names``: "all" for a trace without steps, which counts as one. ``first[S]``: the node with which each
    begins, -1 for the first one of the trace. ``nodes``: those of the trace. ``step[n]``: the step of each,
    from 0: what the host does belongs to the step in which it begins, a device's work to that of its launch
    where its stream has any, -1 before the first. ``on_device`` bool[n]. ``recorded_ns[S + 1]``: the
    ``bounds_ns`` of the file, from the trace's first node on, None where it holds no start times;
    ``measured_ns[S]``: how long each step lasts by these, None for a prediction as well."""

    names: list[str]
    first: np.ndarray
    nodes: slice
    step: np.ndarray
    on_device: np.ndarray
    recorded_ns: np.ndarray | None = None
    measured_ns: np.ndarray | None = None

    @property
    def marked(self) -> bool:
        return bool(self.first[0] >= 0)

    def bounds_ns(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """When each step begins and, last, when the trace ends, int64[S + 1], where its nodes have these
        times, int64[n].

        A step begins when the host begins it, or when the device has finished the steps before it, whichever
        is later. A host that runs ahead of its device leaves a step long before the step's work ends.
        """
        begins = start_ns[self.first - self.nodes.start] if self.marked else start_ns.min(keepdims=True)
        done = np.repeat(begins[:1], len(begins) + 1)
        np.maximum.at(done, self.step[self.on_device] + 1, end_ns[self.on_device])
        return np.append(np.maximum(begins, np.maximum.accumulate(done)[:-1]), end_ns.max())


def find_steps(graph: ReplayGraph, at: int = 0) -> Steps:
    """The steps of trace ``at``. Skeletons know the step of each node."""
    trace, nodes = graph.traces[at], slice(int(graph.first[at]), int(graph.first[at + 1]))
    names, rows = step_rows(trace)
    row, launched, on_device = graph.row[nodes], graph.launched[nodes], ~graph.is_cpu[nodes]
    first = nodes.start + np.argsort(row)[rows] if names else np.array([-1])
    if "step_index" in trace.attributes:
        step = np.clip(trace.column("step_index")[row], -1, len(names or [""]) - 1)
    else:
        lane, position = graph.in_lanes.lane[nodes], graph.position[nodes]
        told = np.isin(lane, lane[launched >= 0])
        began = position[on_device & (launched >= 0)]
        before = position < (began.min() if len(began) else 0)
        # Streams without any launch go by when work begins, but for what was there before launched work.
        launched = np.where(told | before, launched, position)
        begins = np.sort(graph.position[first]) if names else np.array([-1])
        step = np.searchsorted(begins, launched, side="right") - 1
        step = np.where(on_device, step, np.maximum(step, 0))
    steps = Steps(names or ["all"], first, nodes, step, on_device)
    start, end = measured_times(trace)
    if start is None:
        return steps
    bounds = steps.bounds_ns(start[row], start[row] + graph.duration_ns[nodes])
    bounds[-1] = end
    measured = None if trace.metadata.get("predicted") else np.diff(bounds)
    return replace(steps, recorded_ns=bounds, measured_ns=measured)


def steps_of(trace: ExecutionTrace) -> Steps:
    """The steps of one trace. Raises ``TraceError`` as ``build_graph`` does."""
    return find_steps(build_graph(trace, [trace.metadata_int("rank") or 0]))


def about_steps(traces: Sequence[ExecutionTrace], steps: Sequence[Steps]) -> list[str]:
    """Sentences on a run's steps: those left out, and what they take with and without recording, if known."""
    of_graph = []
    for each in steps if any("steps_micros" in trace.metadata for trace in traces) else ():
        if each.measured_ns is None or not each.marked:
            return []
        of_graph.append(float(np.mean(each.measured_ns)) / 1000)
    metadata = [trace.metadata for trace in traces]
    cut = {step for of in metadata for step in _CUT.findall(str(of.get("conversion_report")))}
    left_out = [f"ProfilerStep#{step} is left out, as its recording was cut" for step in sorted(cut, key=int)]
    return left_out + steps_sentence(metadata, of_graph)


def steps_sentence(metadata: Sequence[Mapping[str, Any]], graph_us: Sequence[float]) -> list[str]:
    """``about_steps`` from the metadata of the ranks' files and the mean step of each; of the slowest
    rank."""
    try:
        decode = msgspec.json.Decoder(_StepFacts).decode
        known = [decode(str(of["steps_micros"])) for of in metadata if "steps_micros" in of]
    except (msgspec.MsgspecError, UnicodeError):
        return ["steps_micros of a file's metadata can't be read: what untraced steps take isn't known"]
    if not known or len(known) != len(graph_us):
        return []

    def slowest_ms(values: Sequence[float | None]) -> float | None:
        given = [value for value in values if value is not None]
        return max(given) / 1000 if len(given) == len(values) else None

    graph, untraced = slowest_ms(graph_us), slowest_ms([facts.untraced for facts in known])
    traced = slowest_ms([facts.traced for facts in known]) or graph
    cost = slowest_ms([of.get("recording_cost_ns") for of in metadata])
    if cost is None:
        of_graph = "the times include the cost of recording"
    else:
        how = " with PyTorch's observer" if any(facts.observed for facts in known) else ""
        off = f"{cost:.2f} µs per operator taken off for recording{how}"
        of_graph = f"the step of the graph takes {graph:,.3f} ms ({off})"
    if not traced:
        return ["no step is marked in the trace; its times include the cost of recording"]
    if not untraced:
        return [f"no untraced step was measured; {of_graph}"]
    early = "; if the untraced steps, which come first, weren't warm yet, record later (more wait steps)"
    return [
        f"the untraced step takes {untraced:,.3f} ms (median of {known[0].untraced_steps}), the traced "
        f"step {traced:,.3f} ms (ratio {traced / untraced:.2f}{early * (traced < untraced)}), {of_graph}"
    ]
