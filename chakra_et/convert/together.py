"""Times that need all ranks of a run: clock offsets, and the wait of each communication node."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.time_by_kind import shares
from chakra_et.simulate.timing import align, waits


@dataclass(frozen=True)
class JointTimes:
    """The joint times of one rank.

    ``offset_ns``: to be added to its clock, with the uncertainty ``spread_ns``. ``wait_micros``, int64: the
    wait of each communication node in the order of the file, -1 if a member is missing.
    """

    offset_ns: int
    spread_ns: int
    wait_micros: np.ndarray


@dataclass(frozen=True)
class Finish:
    """A rank's file and the times to add, as passed to a worker process."""

    path: Path
    times: JointTimes
    report: RankReport


def joint_times(
    communication: Mapping[int, ExecutionTrace], groups: Mapping[str, Sequence[int]]
) -> dict[int, JointTimes]:
    """The joint times by rank. ``communication``: traces with the communication nodes are enough.

    Empty if the clocks cannot be compared: without start times, or without a common symmetric collective.
    """
    ranks = sorted(rank for rank, trace in communication.items() if len(trace))
    traces = [communication[rank] for rank in ranks]
    if len(traces) < 2 or not all(trace.start_micros.any() for trace in traces):
        return {}
    # Waits follow from the times as recorded.
    traces = [_as_recorded(trace) for trace in traces]
    try:
        graph = build_graph(traces, ranks)
        matching = match(graph, groups)
    except TraceError:
        return {}  # the checks across ranks report the error
    assert graph.local_start_ns is not None
    origins = [trace.metadata_int("trace_start_ns") or 0 for trace in traces]
    offsets = spread = np.zeros(len(ranks), dtype=np.int64)
    domains = {trace.metadata.get("clock_domain") for trace in traces}
    if len(domains) != 1 or domains & {None, ""}:
        starts = graph.local_start_ns + np.array(origins, dtype=np.int64)[graph.trace_of]
        aligned = align(graph, matching, starts)
        if aligned is None:
            return {}
        offsets, spread = aligned.offset_ns, aligned.spread_ns
    absolute = np.array(origins, dtype=np.int64) + offsets
    starts = graph.local_start_ns + absolute[graph.trace_of]
    wait = waits(graph, matching, starts)
    micros = np.where(matching.channel >= 0, (wait + 500) // 1000, -1)
    by_trace = graph.scatter(micros.tolist())
    return {
        rank: JointTimes(int(offsets[at]), int(spread[at]), by_trace[at]) for at, rank in enumerate(ranks)
    }


def _as_recorded(trace: ExecutionTrace) -> ExecutionTrace:
    if "recorded_start_micros" not in trace.attributes:
        return trace
    starts = trace.column("recorded_start_micros").astype(np.uint64)
    return dataclasses.replace(trace, start_micros=starts)


def finish_rank(job: Finish) -> RankReport:
    """Add the joint times to a rank's file, and return its report with the resulting shares.

    A file that already has these times is not written again.
    """
    trace = et_file.read(job.path)
    rows = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
    known = job.times.wait_micros >= 0
    wait = np.minimum(job.times.wait_micros[known], trace.duration_micros[rows[known]].astype(np.int64))
    transfer = trace.duration_micros[rows[known]].astype(np.int64) - wait
    before = dict(trace.attributes), dict(trace.metadata)
    for name, values in (("transfer_micros", transfer), ("wait_micros", wait)):
        trace.attributes.pop(name, None)
        if len(values):
            trace.attributes[name] = Attribute("int64", rows[known], values)
    trace.metadata["clock_offset_ns"] = job.times.offset_ns
    trace.metadata["clock_spread_ns"] = job.times.spread_ns
    job.report.add_shares(shares(trace))
    trace.metadata["conversion_report"] = json.dumps(job.report.as_dict(), separators=(",", ":"))
    if not _same(before, (trace.attributes, trace.metadata)):
        et_file.write(job.path, trace)
    return job.report


_Content = tuple[dict[str, Attribute], dict[str, int | str | bool | float]]


def _same(before: _Content, after: _Content) -> bool:
    """Whether the joint times and the metadata are the same."""
    names = ("transfer_micros", "wait_micros")
    columns = [[attributes.get(name) for name in names] for attributes, _ in (before, after)]
    if before[1] != after[1] or [c is None for c in columns[0]] != [c is None for c in columns[1]]:
        return False
    return all(
        a is None or (np.array_equal(a.rows, b.rows) and np.array_equal(a.values, b.values))
        for a, b in zip(*columns, strict=True)
    )
