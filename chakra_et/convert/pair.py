"""One rank: host trace and device trace in, .et columns and a report out.

The stages, in order: traces → link, timeline, communication (one ``LinkedRank``) → dependencies → graph →
columns.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from typing import Any

from chakra_et.convert.emit import CommTypes, emit, lanes_text
from chakra_et.convert.report import RankReport, make_report
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.graph import gaps, pairing
from chakra_et.graph.build import Graph, build
from chakra_et.graph.find import find_dependencies
from chakra_et.graph.gaps import HostGaps
from chakra_et.graph.groups import group_number
from chakra_et.graph.linked import LinkedRank, link_rank
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.host import HostTrace
from chakra_et.traces.limits import DEFAULT_LIMITS, Limits
from chakra_et.traces.sets import Pair


@dataclass(frozen=True)
class PairOptions:
    """How one pair is converted.

    ``step``: "all" or the number of one ProfilerStep. ``groups``, ``world_size`` and ``hosts`` (rank, its
    host) come from the run's manifest; without one the traces must tell. ``ranks_here``: how many ranks there
    are at least. ``allow_unlinked``: go on although host and device trace hardly match, or are of two
    processes.
    """

    step: str = "all"
    host_gaps: HostGaps = "node"
    timestamps: bool = True
    comm_types: CommTypes = "schema"
    allow_unlinked: bool = False
    groups: tuple[dict[str, Any], ...] = ()
    world_size: int = 0
    ranks_here: int = 0
    limits: Limits = DEFAULT_LIMITS
    hosts: tuple[tuple[int, str], ...] = ()


@dataclass
class Converted:
    """One rank's conversion. ``groups``: number in the file → (name, description, ranks)."""

    trace: ExecutionTrace
    report: RankReport
    rank: LinkedRank
    groups: dict[int, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    world_size: int = 1


def convert_pair(pair: Pair, options: PairOptions = PairOptions()) -> Converted:
    """Convert one rank's traces. Raises ``TraceError`` naming what is wrong."""
    collecting = gc.isenabled()
    gc.disable()  # millions of short-lived records that refer to nothing
    try:
        host = host_trace.load(pair.host, options.limits)
        device = device_trace.load(pair.device, options.limits)
        return _convert(pair, host, device, options)
    finally:
        if collecting:
            gc.enable()


def _convert(pair: Pair, host: HostTrace, device: DeviceTrace, options: PairOptions) -> Converted:
    number, world_size = pairing.rank_and_world(
        pair.rank, options.world_size, options.ranks_here, host, device
    )
    rank = link_rank(host, device, options.groups, options.step, options.allow_unlinked)
    found = find_dependencies(rank)
    graph, gap_losses = gaps.apply(build(rank, found), options.host_gaps)
    if not len(graph):
        raise TraceError(f"{pair.device}: nothing of it is left to convert; was the right step asked for?")
    report = make_report(number, rank, graph, found.notes | gap_losses)
    if not report.conserved():
        raise TraceError(
            f"{pair.device}: the conversion lost events without a reason; please report this trace."
        )
    groups = {
        group_number(item.group): (item.group.name, item.group.description, item.group.ranks)
        for item in rank.communication.items
        if not item.is_local
    }
    clock = rank.device.host_name or dict(options.hosts).get(number, "")
    metadata = _metadata(rank, graph, number, world_size, clock)
    metadata["conversion_report"] = json.dumps(report.as_dict(), separators=(",", ":"))
    trace = emit(rank, graph, number, metadata, options.timestamps, options.comm_types)
    return Converted(trace, report, rank, groups, world_size)


def _metadata(rank: LinkedRank, graph: Graph, number: int, world_size: int, clock: str) -> dict[str, Any]:
    def whole(value: Any) -> int:
        return value if isinstance(value, int) and 0 <= value < 2**63 else 0

    header = rank.host.header
    return {
        "schema": str(header["schema"]),
        "pid": whole(header["pid"]),
        "time": str(header["time"]),
        "start_ts": whole(header["start_ts"]),
        "finish_ts": whole(header["finish_ts"]),
        "rank": number,
        "world_size": world_size,
        "trace_start_ns": rank.device.origin_ns,
        "clock_domain": clock,
        "measured_end_micros": int(graph.end.max()) // 1000,
        "lanes": json.dumps(lanes_text(graph.lanes), separators=(",", ":")),
    }
