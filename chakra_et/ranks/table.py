"""Where the time of each rank and step went, as one table, read rank by rank.

polars.DataFrame(step_table("outputs/gpt2")).sort("total_ns")
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import Skeletons, find_rank_sets
from chakra_et.ranks.cluster import each_rank
from chakra_et.simulate.breakdown import ACTIVITIES, HOST, activity
from chakra_et.simulate.measured_steps import measured_times, steps_of


def step_table(
    name: str, allow_missing: bool = False, skeletons: Skeletons = "auto", cluster: str = ""
) -> dict[str, np.ndarray]:
    """The steps of all ranks of run ``name``, a row for each rank and step, ordered by both; int64 columns.

    ``rank``; ``step``: its number, 0 in a run without steps; ``total_ns``, as recorded: see
    ``measured_steps.Steps``; and the parts that it is made of, see ``simulate.breakdown``: ``compute_ns``,
    ``memory_ns``, ``communication_ns`` (that nothing hides), ``wait_ns`` (for other ranks) and ``rest_ns``,
    in which the device is idle or only the host works. From skeletons, parts differ by some µs, as successive
    work counts as done without a gap. Holds one rank at a time in memory, or on each worker of ``cluster``.
    Raises ``TraceError`` as ``find_rank_sets`` does, and for files without start times.
    """
    found = find_rank_sets([name], allow_missing, skeletons)[0]
    parts = each_rank(_steps, list(found.files.items()), "reading", cluster)
    names = ["rank", "step", "total_ns", *(f"{part}_ns" for part in ACTIVITIES[:HOST]), "rest_ns"]
    return dict(zip(names, np.concatenate(parts).T, strict=True))


def _steps(file: tuple[int, Path]) -> np.ndarray:
    """Number, time and its parts of each step of a rank, int64[S, 8], the rank first."""
    rank, path = file
    trace = et_file.read(path)
    (start, _), steps = measured_times(trace), steps_of(trace)
    if start is None or steps.recorded_ns is None:
        raise TraceError(f"{path}: has no start times: convert it with --timestamps")
    numbers = [int(each.partition("#")[2] or 0) for each in steps.names]
    begin, until = steps.recorded_ns[:-1], steps.recorded_ns[1:]
    lasting = trace.duration_micros.astype(np.int64) * 1000
    wait = np.minimum(trace.column("wait_micros").astype(np.int64) * 1000, lasting)
    shares = activity(trace, start, start + lasting, wait).parts(begin, until)
    return np.column_stack(
        [np.full(len(numbers), rank), numbers, until - begin, shares[:, :HOST], shares[:, HOST:].sum(axis=1)]
    )
