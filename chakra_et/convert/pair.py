"""Convert one rank in memory: host and device trace in, .et columns and a report out.

The stages in order: traces → link, timeline, communication (one ``LinkedRank``) → dependencies → graph →
columns → what recording cost taken off their times.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from chakra_et import files, jobs
from chakra_et.arrays import give_back
from chakra_et.convert.emit import emit
from chakra_et.convert.graph import link
from chakra_et.convert.graph.build import build
from chakra_et.convert.graph.communication import group_number
from chakra_et.convert.graph.dependencies import find_dependencies
from chakra_et.convert.graph.linked import check_complete, link_rank
from chakra_et.convert.recording_cost import step_facts, take_off_cost
from chakra_et.convert.report import RankReport, make_report
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.findings import joined
from chakra_et.simulate.measured_steps import steps_of
from chakra_et.simulate.time_by_kind import shares
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import operators_of
from chakra_et.traces.records import MAX_BYTES
from chakra_et.traces.sets import Manifest, Pair


@dataclass(frozen=True)
class PairOptions:
    """Options for the conversion of one rank.

    ``step``: "all" or the number of one ProfilerStep. ``manifest``: of the run; what it doesn't tell is taken
    from the traces. ``ranks_here``: a lower bound on the number of ranks. ``allow_unlinked``: continue if
    host and device trace hardly match or come from two processes. ``comm_kernels``: file with a user's table
    of communication kernels. ``two_processes``: read and write a large rank by several at once.
    """

    step: str = "all"
    timestamps: bool = True
    allow_unlinked: bool = False
    manifest: Manifest = Manifest()
    ranks_here: int = 0
    max_bytes: int = MAX_BYTES
    comm_kernels: str = ""
    allow_truncated: bool = False
    two_processes: bool = False


class Converted(NamedTuple):
    """The result for one rank. ``groups``: group id in the file → (name, description, ranks);
    ``device_sha256``: of the device trace, empty where no process took it meanwhile."""

    trace: ExecutionTrace
    report: RankReport
    groups: dict[int, tuple[str, str, tuple[int, ...]]]
    device_sha256: str = ""


def convert_pair(pair: Pair, options: PairOptions = PairOptions()) -> Converted:
    """Convert the traces of one rank. Raises ``TraceError``."""
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived records without reference cycles
    try:
        converted = _convert(pair, options)
    finally:
        if collecting:
            gc.enable()
    give_back(len(converted.trace))  # the linked rank is as large as the trace
    add_report(converted.trace, converted.report)
    return converted


def add_report(trace: ExecutionTrace, report: RankReport) -> None:
    """Add the shares of the critical path to the report, and the report to the file's metadata."""
    if (found := shares(trace)) is not None:
        report.critical_path_us, report.busy_us, report.unexplained_us = found
    trace.metadata["conversion_report"] = json.dumps(report.as_dict(), separators=(",", ":"))


def _convert(pair: Pair, options: PairOptions) -> Converted:
    manifest = options.manifest

    def load(path: Path) -> Any:
        if path == pair.host:
            return host_trace.load(path, options.max_bytes)
        return device_trace.load(path, options.max_bytes, operators=pair.host is None)

    digest = ""
    if options.two_processes and min(path.stat().st_size for path in pair.files) > jobs.LARGE:
        reads = [*(partial(load, path) for path in pair.files[::-1]), partial(files.sha256, pair.device)]
        device, *hosts, digest = jobs.together(reads)
    else:
        device, *hosts = map(load, pair.files[::-1])
    host = hosts.pop() if hosts else operators_of(device)
    recording = device.recording
    number, world_size = link.rank_and_world(pair.rank, manifest.world_size, options.ranks_here, host, device)
    cut = manifest.of_rank(number, "unfinished_step", int, -1)
    rank = link_rank(
        host, device, manifest.groups(number), options.step, options.allow_unlinked, options.comm_kernels, cut
    )
    del host, device
    give_back(len(rank.device))
    dependencies = find_dependencies(rank)
    graph = build(rank, dependencies)
    if not len(graph):
        raise TraceError(f"{pair.device}: there is nothing to convert; check --step.")
    findings = joined(dependencies.findings, check_complete(rank))
    del dependencies  # as large as the graph, and the memory is needed below
    give_back(len(graph))
    report = make_report(number, rank, graph, findings)
    if not report.conserved():
        raise TraceError(
            f"{pair.device}: the conversion lost events without a reason; please report this trace."
        )
    used = [item.group for item in rank.communication.items if not item.is_local]
    listed = [group for group in rank.communication.groups.values() if group.ranks]
    groups = {group_number(group): (group.name, group.description, group.ranks) for group in (*listed, *used)}

    def whole(value: Any) -> int:
        return value if isinstance(value, int) and 0 <= value < 2**63 else 0

    header = rank.host.header
    lanes = [{"kind": lane.kind, "label": lane.label} for lane in graph.lanes]
    metadata = {
        "schema": str(header["schema"]),
        "pid": whole(header["pid"]),
        "time": str(header["time"]),
        "start_ts": whole(header["start_ts"]),
        "finish_ts": whole(header["finish_ts"]),
        "rank": number,
        "world_size": world_size,
        "trace_start_ns": rank.device.origin_ns,
        "clock_domain": rank.device.host_name or manifest.of_rank(number, "host", str, ""),
        "measured_end_micros": int(graph.end.max()) // 1000,
        "lanes": json.dumps(lanes, separators=(",", ":")),
        **({"device_name": rank.device.device_name} if rank.device.device_name else {}),
    }
    trace = emit(rank, graph, number, metadata, options.timestamps)
    steps = steps_of(trace)
    lasted = 0 if steps.measured_ns is None else steps.measured_ns.sum()
    trace.metadata["steps_micros"] = step_facts(recording, lasted / 1000)
    if recording is not None:
        trace = take_off_cost(trace, recording, rank.per_operator_ns)
        steps = steps_of(trace)
    report.times_of(steps)
    return Converted(trace, report, groups, digest)
