"""One rank: host trace and device trace in, .et columns and a report out.

The stages, in order: host_trace, device_trace → link → timeline → collectives → causes → graph → emit.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chakra_et.convert import emit
from chakra_et.convert.emit import CommTypes
from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.graph import build as graph_
from chakra_et.graph import causes as causes_
from chakra_et.graph import communication as collectives
from chakra_et.graph import gaps, pairing, timeline
from chakra_et.graph import groups as process_groups
from chakra_et.graph import link as link_
from chakra_et.graph.build import NodeKind
from chakra_et.graph.dependencies import EdgeKind
from chakra_et.graph.gaps import HostGaps
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import KERNEL, SYNC, DeviceTrace
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
    """What one pair became. ``groups``: number in the file → (name, description, ranks)."""

    trace: ExecutionTrace
    report: RankReport
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
    rank, world_size = pairing.rank_and_world(pair.rank, options.world_size, options.ranks_here, host, device)
    linked, warnings = pairing.check(host, device, link_.link(host, device), options.allow_unlinked)
    link_rate = linked.rate(host)
    losses = dict(device.losses)
    if options.step != "all":
        device, linked, cut = _one_step(device, linked, options.step)
        losses |= cut
    on_cpu = collectives.is_communication(device) & (device.category < KERNEL)
    time = timeline.build(device, on_cpu)
    calls = causes_.launch_calls(device)
    talk = collectives.describe(host, device, linked, time.parent, calls, list(options.groups))
    causes = causes_.find(host, device, linked, time, calls, talk.items)
    graph = graph_.build(device, time, causes, talk.items)
    graph, gap_losses = gaps.apply(graph, options.host_gaps)
    if not len(graph):
        raise TraceError(f"{pair.device}: nothing of it is left to convert; was the right step asked for?")

    synchronising = int((device.category == SYNC).sum())
    if synchronising:
        losses["cuda_sync record: became an edge"] = synchronising
    unknown = on_cpu.copy()
    unknown[[item.event for item in talk.items if not item.on_gpu]] = False
    if unknown.any():
        losses["communication of unknown kind on a CPU thread"] = int(unknown.sum())
    report = _report(rank, host, device, linked, link_rate, time, calls, graph, losses)
    report.repairs |= host.repairs | device.repairs | time.repairs
    report.notes |= causes.notes | talk.notes | graph.notes | gap_losses
    report.warnings |= warnings
    unsized = sum(not item.sized and item.collective is not CollectiveType.BARRIER for item in talk.items)
    if unsized:
        report.warnings["communication whose size no trace tells, taken as 1 byte"] = unsized
    alone = int(((linked.host_row < 0) & (device.category < device_trace.RUNTIME)).sum())
    if alone:
        report.notes["operators and annotations without a host node, kept with their times alone"] = alone
    if not report.conserved():
        raise TraceError(
            f"{pair.device}: the conversion lost events without a reason; please report this trace."
        )
    groups = {
        process_groups.group_number(item.group): (item.group.name, item.group.description, item.group.ranks)
        for item in talk.items
        if not item.is_local
    }
    local = sum(item.is_local for item in talk.items)
    if local:
        report.notes["collectives of a group with one rank, kept as compute"] = local
    clock = device.host_name or dict(options.hosts).get(rank, "")
    metadata = _metadata(host, device, time, rank, world_size, clock, graph, report)
    trace = emit.emit(
        graph,
        host,
        device,
        linked,
        time,
        calls,
        talk.items,
        rank,
        metadata,
        options.timestamps,
        options.comm_types,
    )
    return Converted(trace, report, groups, world_size)


def _one_step(
    device: DeviceTrace, linked: link_.Link, step: str
) -> tuple[DeviceTrace, link_.Link, dict[str, int]]:
    """Only what belongs to one ProfilerStep: CPU events that start in it, and the work that they launch."""
    known = dict(timeline.steps(device))
    if not step.isdigit() or int(step) not in known:
        names = ", ".join(str(number) for number in known) or "none"
        raise TraceError(
            f"{device.path}: no ProfilerStep#{step} in it (it has: {names}); choose one, or --step all."
        )
    row = known[int(step)]
    inside = (device.start >= device.start[row]) & (device.start < device.end[row])
    calls = causes_.launch_calls(device)
    keep = np.where(calls >= 0, inside[calls], inside)
    rows = np.flatnonzero(keep)
    cut = {f"outside of ProfilerStep#{step}": int((~keep).sum())}
    return device.select(rows), link_.Link(linked.host_row[rows], linked.unmatched, linked.how), cut


def _report(
    rank: int, host: HostTrace, device: DeviceTrace, linked: link_.Link, link_rate: float,
    time: timeline.Timeline, calls: np.ndarray, graph: graph_.Graph, losses: dict[str, int],
) -> RankReport:  # fmt: skip
    overhead = (graph.kind == NodeKind.HOST_OVERHEAD) | (graph.kind == NodeKind.DEVICE_OVERHEAD)
    stands = (graph.event >= 0) & (graph.segment == 0)
    length = graph.end - graph.start
    on_gpu = (device.category >= KERNEL) & (device.category < SYNC)
    missing: dict[str, int] = {}
    for row in linked.unmatched.tolist():
        name = host.names[host.name[row]]
        missing[name] = missing.get(name, 0) + 1
    return RankReport(
        rank=rank,
        events_in=device.events_in,
        events_kept=int(stands.sum()),
        segments=int((~stands & ~overhead).sum()),
        overhead=int((overhead & ~stands).sum()),
        nodes=len(graph),
        edges=len(graph.source),
        losses=losses,
        nodes_by_kind={
            name: n for k, name in enumerate(emit.KIND_NAMES) if (n := int((graph.kind == k).sum()))
        },
        edges_by_kind={
            kind.name.lower().replace("_", " "): n
            for kind in EdgeKind
            if (n := int((graph.edge_kind == kind).sum()))
        },
        time_ns={name: int(length[graph.kind == k].sum()) for k, name in enumerate(emit.KIND_NAMES)},
        linked_by=linked.how,
        link_rate=link_rate,
        kernel_link_rate=float((calls[on_gpu] >= 0).mean()) if on_gpu.any() else 1.0,
        host_operators_without_record=missing,
        steps_us={
            str(number): float(time.end[row] - time.start[row]) / 1000
            for number, row in timeline.steps(device)
        },
    )


def _metadata(
    host: HostTrace, device: DeviceTrace, time: timeline.Timeline, rank: int, world_size: int, clock: str,
    graph: graph_.Graph, report: RankReport,
) -> dict[str, Any]:  # fmt: skip
    def whole(value: Any) -> int:
        return value if isinstance(value, int) and 0 <= value < 2**63 else 0

    return {
        "schema": str(host.header["schema"]),
        "pid": whole(host.header["pid"]),
        "time": str(host.header["time"]),
        "start_ts": whole(host.header["start_ts"]),
        "finish_ts": whole(host.header["finish_ts"]),
        "rank": rank,
        "world_size": world_size,
        "trace_start_ns": device.origin_ns,
        "clock_domain": clock,
        "measured_end_micros": int(graph.end.max()) // 1000 if len(graph) else 0,
        "lanes": json.dumps(emit.lanes_text(time), separators=(",", ":")),
        "conversion_report": json.dumps(report.as_dict(), separators=(",", ":")),
    }
