"""Compare a replay with the measurement: step times and start times, as JSON values and text."""

from __future__ import annotations

from typing import Any

import numpy as np

from chakra_et import text
from chakra_et.simulate.measured_steps import measured_times
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import overhead_part, shares


def report(run: Run, start_ns: np.ndarray, end_ns: np.ndarray) -> list[dict[str, Any]]:
    """What a replay of the run, with these times of its nodes, int64[N], is against what was recorded.

    Of each rank: ``rank``, ``nodes``; from the start of its first step to the end of the trace
    ``measured_us``, ``simulated_us`` and ``error_percent`` (positive if the replay is slower); the same of
    each of its ``steps``, with their ``name``; ``start_error_us``: ``median`` and ``p95`` of |simulated -
    measured start| over all nodes, with starts relative to the rank's first node; measured time by kind as
    ``critical_path_us`` and ``busy_us``, and ``unexplained_us`` of the former. In a file without start times,
    measured figures are None, 0 or {}.
    """
    found, starts = [], run.graph.scatter(start_ns - run.release_ns)
    for at, simulated in enumerate(run.step_times(start_ns, end_ns)):
        trace, of, off, total = run.graph.traces[at], run.steps[at], [None, None], None
        measured, _ = measured_times(trace)
        taken: list[Any] = [None] * len(simulated)
        if measured is not None and of.recorded_ns is not None:
            taken = np.diff(of.recorded_ns).tolist()
            total = sum(taken)
            off = (np.percentile(np.abs(starts[at] - measured), [50, 95]) / 1000).tolist()
        steps = zip(of.names, simulated, taken, strict=True) if of.marked else ()
        path, busy, unexplained = shares(trace) or ({}, {}, 0)
        found.append(
            {
                "rank": run.graph.ranks[at],
                "nodes": len(trace),
                **_compared(sum(simulated), total),
                "steps": [{"name": name, **_compared(*times)} for name, *times in steps],
                "start_error_us": dict(zip(("median", "p95"), off, strict=True)),
                "critical_path_us": path,
                "busy_us": busy,
                "unexplained_us": unexplained,
            }
        )
    return found


def _compared(simulated_ns: int, measured_ns: int | None) -> dict[str, float | None]:
    return {
        "measured_us": None if measured_ns is None else measured_ns / 1000,
        "simulated_us": simulated_ns / 1000,
        "error_percent": 100 * (simulated_ns / measured_ns - 1) if measured_ns and measured_ns > 0 else None,
    }


def table(reports: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Lines of text: one row per semantics and rank, followed by one row per step if there are several.

    Transfer and wait are measured over all communication, overhead along the measured critical path.
    """
    rows: list[tuple[str, ...]] = [
        ("semantics", "rank", "nodes", "measured ms", "simulated ms", "error %", "worst step %",
         "start error µs (p95)", "transfer ms", "wait ms", "overhead %")
    ]  # fmt: skip
    for semantics, ranks in reports.items():
        for rank in ranks:
            steps, busy = rank["steps"], rank["busy_us"]
            errors = [step["error_percent"] for step in steps if step["error_percent"] is not None]
            worst, off, shown = _signed(max(errors, key=abs, default=None)), "-", ("-", "-", "-")
            if busy:
                off = "{median:,.1f} ({p95:,.1f})".format(**rank["start_error_us"])
                transfer, wait = (f"{busy[kind] / 1000:,.3f}" for kind in ("transfer", "wait"))
                shown = transfer, wait, f"{100 * overhead_part(rank['critical_path_us']):.1f}"
            nodes = f"{rank['nodes']:,}"
            rows.append((semantics, str(rank["rank"]), nodes, *_cells(rank), worst, off, *shown))
            if len(steps) > 1:
                rows += [("", "", step["name"], *_cells(step), "", "", "", "", "") for step in steps]
    return text.table(rows, right=range(1, len(rows[0])))


def _cells(of: dict[str, Any]) -> tuple[str, str, str]:
    measured = "-" if of["measured_us"] is None else f"{of['measured_us'] / 1e3:,.3f}"
    return measured, f"{of['simulated_us'] / 1e3:,.3f}", _signed(of["error_percent"])


def _signed(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:+.2f}"
