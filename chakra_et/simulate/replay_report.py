"""Compare a replay with the measurement: step times and start times, as values, text and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et import text
from chakra_et.simulate.measured_steps import measured_times, step_times
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import Shares, shares


@dataclass
class StepTime:
    """The time of one training step, ns; ``measured_ns`` is None if the file has no start times."""

    name: str
    simulated_ns: int
    measured_ns: int | None

    @property
    def error_percent(self) -> float | None:
        """Signed error in percent, positive if the replay is slower; None without a measurement."""
        if self.measured_ns is None or self.measured_ns <= 0:
            return None
        return 100 * (self.simulated_ns / self.measured_ns - 1)


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


def report(run: Run, start_ns: np.ndarray, end_ns: np.ndarray) -> list[RankReplay]:
    """Compare a replay of the run, with these times of its nodes, int64[N], with what was recorded."""
    found, starts = [], run.graph.scatter(start_ns - run.release_ns)
    for at, simulated in enumerate(run.step_times(start_ns, end_ns)):
        trace, off = run.graph.traces[at], None
        (measured, end), (names, rows, lasted) = measured_times(trace), step_times(trace)
        taken = [None] * len(rows) if lasted is None else lasted.tolist()
        steps = [StepTime(*each) for each in zip(names, simulated, taken, strict=False)]
        total = StepTime("total", sum(simulated), None)
        if measured is not None and lasted is not None:
            total.measured_ns = int(lasted.sum()) if steps else end
            median, p95 = np.percentile(np.abs(starts[at] - measured), [50, 95]) / 1000
            off = float(median), float(p95)
        found.append(RankReplay(run.graph.ranks[at], len(trace), total, steps, off, shares(trace)))
    return found


def table(reports: dict[str, list[RankReplay]]) -> list[str]:
    """Lines of text: one row per semantics and rank, followed by one row per step if there are several.

    Transfer and wait are measured over all communication, overhead along the measured critical path.
    """
    rows: list[tuple[str, ...]] = [
        ("semantics", "rank", "nodes", "measured ms", "simulated ms", "error %", "worst step %",
         "start error µs (p95)", "transfer ms", "wait ms", "overhead %")
    ]  # fmt: skip
    for semantics, ranks in reports.items():
        for rank in ranks:
            errors = [step.error_percent for step in rank.steps if step.error_percent is not None]
            worst, error, shares = _signed(max(errors, key=abs, default=None)), "-", ("-", "-", "-")
            if rank.start_error_us is not None:
                error = "{:,.1f} ({:,.1f})".format(*rank.start_error_us)
            if rank.shares is not None:
                transfer, wait = (f"{rank.shares.busy[kind] / 1000:,.3f}" for kind in ("transfer", "wait"))
                shares = transfer, wait, f"{100 * rank.shares.overhead:.1f}"
            nodes = f"{rank.nodes:,}"
            rows.append((semantics, str(rank.rank), nodes, *_cells(rank.total), worst, error, *shares))
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


def _signed(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:+.2f}"
