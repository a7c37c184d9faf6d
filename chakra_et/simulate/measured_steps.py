"""The steps of a trace, and its recorded times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from chakra_et.et.columns import ExecutionTrace

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


def step_times(trace: ExecutionTrace) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """``step_rows``, and how long each step lasted as recorded, int64[S] ns, from its beginning to that of
    the next, or to the end of the trace; None for a file without start times."""
    names, rows = step_rows(trace)
    measured, end = measured_times(trace)
    return names, rows, None if measured is None else np.diff(measured[rows], append=end)


def about_steps(traces: Sequence[ExecutionTrace]) -> list[str]:
    """Sentences on a run's steps: those left out, and what they take with and without recording, if known."""
    of_graph = []
    for trace in traces if any("steps_micros" in trace.metadata for trace in traces) else ():
        _, rows, lasted = step_times(trace)
        if lasted is None or not len(rows) or trace.metadata.get("predicted"):
            return []
        of_graph.append(float(np.mean(lasted)) / 1000)
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
        of_graph = "the times hold the cost of recording"
    else:
        how = " with PyTorch's observer" if any(facts.observed for facts in known) else ""
        off = f"{cost:.2f} µs per operator taken off for recording{how}"
        of_graph = f"the step of the graph takes {graph:,.3f} ms ({off})"
    if not traced:
        return ["no step is marked in the trace; its times hold the cost of recording"]
    if not untraced:
        return [f"no untraced step was measured; {of_graph}"]
    early = "; if the untraced steps, which come first, weren't warm yet, record later (more wait steps)"
    return [
        f"the untraced step takes {untraced:,.3f} ms (median of {known[0].untraced_steps}), the traced "
        f"step {traced:,.3f} ms (ratio {traced / untraced:.2f}{early * (traced < untraced)}), {of_graph}"
    ]
