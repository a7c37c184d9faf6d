"""Compare a replay with the measurement: step times and start times, as values, text and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et import text
from chakra_et.et.columns import ExecutionTrace
from chakra_et.simulate.replays import ReplayResult
from chakra_et.simulate.time_by_kind import Shares, shares

_STEP_NAME = re.compile(rb"ProfilerStep#(\d+)")


@dataclass
class StepTime:
    """The time of one training step, ns; ``measured_ns`` is None if the file has no start times."""

    name: str
    simulated_ns: int
    measured_ns: int | None

    @property
    def error_percent(self) -> float | None:
        """Signed error in percent, positive if the replay is slower; None without a measurement."""
        return (
            100 * (self.simulated_ns / self.measured_ns - 1)
            if self.measured_ns and self.measured_ns > 0
            else None
        )


@dataclass
class RankReplay:
    """The replay of one rank. ``total`` runs from the start of the first step to the end of the trace.

    ``start_error_us``: median and 95th percentile of |simulated - measured start| over all nodes, with starts
    relative to the rank's first node; ``shares``: measured time by kind. Both are None without start times.
    """

    rank: int
    nodes: int
    total: StepTime
    steps: list[StepTime]
    start_error_us: tuple[float, float] | None
    shares: Shares | None = None

    @property
    def worst_step_percent(self) -> float | None:
        """The step error with the largest magnitude, in percent."""
        errors = [step.error_percent for step in self.steps if step.error_percent is not None]
        return max(errors, key=abs, default=None)

    def as_json(self) -> dict[str, Any]:
        """Times in µs, errors in percent; None without a measurement."""
        median, p95 = self.start_error_us or (None, None)
        return {
            "rank": self.rank,
            "nodes": self.nodes,
            **_step_json(self.total),
            "steps": [{"name": step.name, **_step_json(step)} for step in self.steps],
            "start_error_us": {"median": median, "p95": p95},
            "critical_path_us": self.shares.path if self.shares else {},
            "busy_us": self.shares.busy if self.shares else {},
        }


def report(traces: list[ExecutionTrace], ranks: list[int], result: ReplayResult) -> list[RankReplay]:
    """Compare a replay of ``traces`` with the start times and durations in them."""
    return [
        _rank_report(trace, rank, result, index)
        for index, (trace, rank) in enumerate(zip(traces, ranks, strict=True))
    ]


def _rank_report(trace: ExecutionTrace, rank: int, result: ReplayResult, index: int) -> RankReplay:
    simulated = result.start_ns[index] - result.release_ns[index]
    simulated_end = int(result.end_ns[index].max()) - result.release_ns[index]
    measured, measured_end = measured_times(trace)

    names, rows = step_rows(trace)
    simulated_bounds = [*simulated[rows].tolist(), simulated_end]
    measured_bounds = None if measured is None else [*measured[rows].tolist(), measured_end]
    steps = [
        StepTime(
            name,
            simulated_bounds[i + 1] - simulated_bounds[i],
            None if measured_bounds is None else measured_bounds[i + 1] - measured_bounds[i],
        )
        for i, name in enumerate(names)
    ]
    total = StepTime(
        "total",
        simulated_end - (simulated_bounds[0] if steps else 0),
        None if measured_bounds is None else measured_end - (measured_bounds[0] if steps else 0),
    )
    error = None
    if measured is not None:
        median, p95 = np.percentile(np.abs(simulated - measured), [50, 95]) / 1000
        error = (float(median), float(p95))
    return RankReplay(rank, len(trace), total, steps, error, shares(trace))


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
    numbers = {
        index: int(found[1])
        for index, name in enumerate(trace.names.table)
        if (found := _STEP_NAME.fullmatch(name))
    }
    rows = np.flatnonzero(np.isin(trace.names.index, list(numbers)))
    first: dict[int, int] = {}
    for row in rows[np.lexsort((trace.ids[rows], trace.start_micros[rows]))].tolist():
        first.setdefault(numbers[int(trace.names.index[row])], row)
    return [f"ProfilerStep#{number}" for number in sorted(first)], np.array(
        [first[n] for n in sorted(first)], np.int64
    )


def about_steps(traces: Sequence[ExecutionTrace]) -> list[str]:
    """A sentence on the steps of a run with and without recording, if its conversion knew of them."""
    of_graph = []
    for trace in traces:
        measured, end = measured_times(trace)
        rows = step_rows(trace)[1]
        if measured is None or not len(rows) or trace.metadata.get("predicted"):
            return []
        of_graph.append(float(np.median(np.diff(np.append(measured[rows], end)))) / 1000)
    return steps_sentence([trace.metadata for trace in traces], of_graph)


def steps_sentence(metadata: Sequence[Mapping[str, Any]], graph_us: Sequence[float]) -> list[str]:
    """``about_steps`` from the metadata of the ranks' files and the median step of each. Means over ranks."""
    known = [json.loads(str(of["steps_micros"])) for of in metadata if "steps_micros" in of]
    if not known or len(known) != len(graph_us):
        return []

    def mean_ms(values: Sequence[float | None]) -> float | None:
        given = [value for value in values if value is not None]
        return sum(given) / len(given) / 1000 if len(given) == len(values) else None

    graph, untraced = mean_ms(graph_us), mean_ms([facts["untraced"] for facts in known])
    traced = mean_ms([facts.get("traced") for facts in known]) or graph
    cost = mean_ms([of.get("recording_cost_ns") for of in metadata])
    if cost is None:
        of_graph = "its times hold the cost of recording"
    else:
        how = " with PyTorch's observer" if any(facts.get("observed") for facts in known) else ""
        off = f"{cost:.2f} µs per operator taken off for recording{how}"
        of_graph = f"that of the graph {graph:,.3f} ms ({off})"
    if untraced is None:
        return [f"no untraced step was measured; the traced step takes {traced:,.3f} ms, {of_graph}"]
    ratio = f"ratio {(traced or 0) / untraced:.2f}" if untraced else "ratio not known"
    return [
        f"the untraced step takes {untraced:,.3f} ms (median of {known[0]['untraced_steps']}), the traced "
        f"step {traced:,.3f} ms ({ratio}), {of_graph}"
    ]


def table(reports: dict[str, list[RankReplay]]) -> list[str]:
    """Lines of text: one row per semantics and rank, followed by one row per step if there are several.

    Transfer and wait are measured over all communication, overhead along the measured critical path.
    """
    rows = [
        (
            "semantics",
            "rank",
            "nodes",
            "measured ms",
            "simulated ms",
            "error %",
            "worst step %",
            "start error µs (p95)",
            "transfer ms",
            "wait ms",
            "overhead %",
        )
    ]
    for semantics, ranks in reports.items():
        for rank in ranks:
            rows.append(
                (
                    semantics,
                    str(rank.rank),
                    f"{rank.nodes:,}",
                    *_cells(rank.total),
                    _signed(rank.worst_step_percent),
                    "-" if rank.start_error_us is None else "{:,.1f} ({:,.1f})".format(*rank.start_error_us),
                    *_share_cells(rank.shares),
                )
            )
            if len(rank.steps) > 1:
                rows += [("", "", step.name, *_cells(step), "", "", "", "", "") for step in rank.steps]
    return text.table(rows, right=range(1, len(rows[0])))


def _step_json(step: StepTime) -> dict[str, Any]:
    measured = None if step.measured_ns is None else step.measured_ns / 1000
    return {
        "measured_us": measured,
        "simulated_us": step.simulated_ns / 1000,
        "error_percent": step.error_percent,
    }


def _cells(step: StepTime) -> tuple[str, str, str]:
    measured = "-" if step.measured_ns is None else f"{step.measured_ns / 1e6:,.3f}"
    return measured, f"{step.simulated_ns / 1e6:,.3f}", _signed(step.error_percent)


def _share_cells(found: Shares | None) -> tuple[str, str, str]:
    """Transfer and wait of all communication, ms, and overhead in percent of the critical path."""
    if found is None:
        return ("-", "-", "-")
    transfer, wait = (f"{found.busy[kind] / 1000:,.3f}" for kind in ("transfer", "wait"))
    return transfer, wait, f"{found.overhead:.1%}".rstrip("%")


def _signed(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:+.2f}"
