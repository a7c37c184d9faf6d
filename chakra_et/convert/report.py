"""The report of a conversion: what went in, what came out, and every loss by its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chakra_et.et.columns import CollectiveType
from chakra_et.graph.build import KIND_NAMES, Graph, NodeKind
from chakra_et.graph.communication import is_communication
from chakra_et.graph.dependencies import EdgeKind
from chakra_et.graph.linked import LinkedRank
from chakra_et.traces.device import KERNEL, RUNTIME, SYNC


@dataclass
class RankReport:
    """One rank's conversion. Counts unless a name says otherwise.

    ``events_in`` = ``events_kept`` + the sum of ``losses``; ``nodes`` = ``events_kept`` + ``segments`` +
    ``overhead``. ``link_rate``: part of the host operators with a device record; ``kernel_link_rate``: part
    of the device work with a launching call. ``time_ns``: ns by kind of node. ``warnings``: what makes
    the file differ from what happened. ``steps_us``: measured µs by step number.
    """

    rank: int
    events_in: int = 0
    events_kept: int = 0
    segments: int = 0
    overhead: int = 0
    nodes: int = 0
    edges: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    nodes_by_kind: dict[str, int] = field(default_factory=dict)
    edges_by_kind: dict[str, int] = field(default_factory=dict)
    time_ns: dict[str, int] = field(default_factory=dict)
    linked_by: str = ""
    link_rate: float = 0.0
    kernel_link_rate: float = 1.0
    host_operators_without_record: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    steps_us: dict[str, float] = field(default_factory=dict)

    def conserved(self) -> bool:
        """Whether the counts add up."""
        kept_and_lost = self.events_kept + sum(self.losses.values())
        return (
            self.events_in == kept_and_lost and self.nodes == self.events_kept + self.segments + self.overhead
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; keys in a fixed order, so that the same conversion gives the same bytes."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    def text(self) -> str:
        """For people."""
        left_out = sum(self.losses.values())
        lines = [
            f"rank {self.rank}: {self.events_in} events in = {self.events_kept} kept + {left_out} left out; "
            f"{self.nodes} nodes = {self.events_kept} events + {self.segments} further stretches of them + "
            f"{self.overhead} overhead; {self.edges} edges",
            f"  linked by {self.linked_by}: {self.link_rate:.2%} of the host operators, "
            f"{self.kernel_link_rate:.2%} of the device work",
        ]
        for title, table in (
            ("left out", self.losses),
            ("host operators without a device record", self.host_operators_without_record),
            ("repairs", self.repairs),
            ("warnings", self.warnings),
            ("notes", self.notes),
            ("nodes", self.nodes_by_kind),
            ("edges", self.edges_by_kind),
        ):
            if table:
                lines.append(
                    f"  {title}: " + ", ".join(f"{name} {count}" for name, count in sorted(table.items()))
                )
        return "\n".join(lines)


def make_report(number: int, rank: LinkedRank, graph: Graph, notes: dict[str, int]) -> RankReport:
    """The report of rank ``number``; ``notes`` are those of the dependencies and of later stages."""
    host, device, time, items = rank.host, rank.device, rank.timeline, rank.communication.items
    overhead = (graph.kind == NodeKind.HOST_OVERHEAD) | (graph.kind == NodeKind.DEVICE_OVERHEAD)
    stands = (graph.event >= 0) & (graph.segment == 0)
    length = graph.end - graph.start
    on_gpu = (device.category >= KERNEL) & (device.category < SYNC)
    missing: dict[str, int] = {}
    for row in rank.link.unmatched.tolist():
        name = host.names[host.name[row]]
        missing[name] = missing.get(name, 0) + 1

    losses = dict(rank.losses)
    if synchronising := int((device.category == SYNC).sum()):
        losses["cuda_sync record: became an edge"] = synchronising
    unknown = is_communication(device) & (device.category < KERNEL)
    unknown[[item.event for item in items if not item.on_gpu]] = False
    if unknown.any():
        losses["communication of unknown kind on a CPU thread"] = int(unknown.sum())
    warnings = dict(rank.warnings)
    unsized = sum(not item.sized and item.collective is not CollectiveType.BARRIER for item in items)
    if unsized:
        warnings["communication whose size no trace tells, taken as 1 byte"] = unsized
    notes = notes | rank.communication.notes | graph.notes
    alone = int(((rank.link.host_row < 0) & (device.category < RUNTIME)).sum())
    if alone:
        notes["operators and annotations without a host node, kept with their times alone"] = alone
    if local := sum(item.is_local for item in items):
        notes["collectives of a group with one rank, kept as compute"] = local

    return RankReport(
        rank=number,
        events_in=device.events_in,
        events_kept=int(stands.sum()),
        segments=int((~stands & ~overhead).sum()),
        overhead=int((overhead & ~stands).sum()),
        nodes=len(graph),
        edges=len(graph.source),
        losses=losses,
        nodes_by_kind={name: n for k, name in enumerate(KIND_NAMES) if (n := int((graph.kind == k).sum()))},
        edges_by_kind={
            kind.name.lower().replace("_", " "): n
            for kind in EdgeKind
            if (n := int((graph.edge_kind == kind).sum()))
        },
        time_ns={name: int(length[graph.kind == k].sum()) for k, name in enumerate(KIND_NAMES)},
        linked_by=rank.link.how,
        link_rate=rank.link_rate,
        kernel_link_rate=float((rank.calls[on_gpu] >= 0).mean()) if on_gpu.any() else 1.0,
        host_operators_without_record=missing,
        repairs=host.repairs | device.repairs | time.repairs,
        warnings=warnings,
        notes=notes,
        steps_us={str(n): float(time.end[row] - time.start[row]) / 1000 for n, row in time.steps},
    )
