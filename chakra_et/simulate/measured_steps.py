"""The steps of a trace, and its recorded times."""

from __future__ import annotations

import re

import numpy as np

from chakra_et.et.columns import ExecutionTrace

_STEP_NAME = re.compile(rb"ProfilerStep#(\d+)")


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
