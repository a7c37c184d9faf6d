"""The report of a conversion: events in, nodes out, and every loss with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.nodes import KIND_NAMES, EdgeKind, Graph, NodeKind
from chakra_et.convert.graph.timeline import named
from chakra_et.findings import Findings, Kind, joined, listed
from chakra_et.simulate.measured_steps import Steps
from chakra_et.simulate.time_by_kind import overhead_part
from chakra_et.traces.device_format import RUNTIME, SYNC

# Name in NAME_conversion.json → kind.
_KINDS: dict[str, Kind] = {
    "losses": "loss", "repairs": "repair", "warnings": "warning", "notes": "note",
}  # fmt: skip


@dataclass
class RankReport:
    """The conversion of one rank. Values are counts unless noted.

    - ``events_in`` = ``events_kept`` + sum of ``losses``; ``nodes`` = ``events_kept`` + ``segments`` +
      ``overhead``, where ``segments`` are further nodes of events that are split, and ``overhead`` includes
      work from before the recording
    - ``link_rate``: part (0 to 1) of the host operators with a device record
    - ``steps_us``: measured µs by step number
    - ``critical_path_us``, ``busy_us``, ``unexplained_us``: µs along the critical path and of all nodes, by
      kind, and of the path what nothing explains, as in ``time_by_kind.shares``; empty without start times
    - ``clocks``: device → its clock against the host's, see ``launches.Clock``
    - ``findings``: every loss, repair, warning and note by key, see ``chakra_et.findings``
    """

    rank: int
    events_in: int = 0
    events_kept: int = 0
    segments: int = 0
    overhead: int = 0
    nodes: int = 0
    edges: int = 0
    nodes_by_kind: dict[str, int] = field(default_factory=dict)
    edges_by_kind: dict[str, int] = field(default_factory=dict)
    link_rate: float = 0.0
    steps_us: dict[str, float] = field(default_factory=dict)
    critical_path_us: dict[str, int] = field(default_factory=dict)
    busy_us: dict[str, int] = field(default_factory=dict)
    unexplained_us: int = 0
    clocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    losses = property(lambda self: self.findings.of("loss"))
    repairs = property(lambda self: self.findings.of("repair"))
    warnings = property(lambda self: self.findings.of("warning"))
    notes = property(lambda self: self.findings.of("note"))

    @property
    def overhead_share(self) -> float | None:
        """The part (0 to 1) of the critical path that is overhead; None without start times."""
        return overhead_part(self.critical_path_us) if self.critical_path_us else None

    def times_of(self, steps: Steps) -> None:
        """Take ``steps_us`` from the steps of the trace, where these have times."""
        if steps.measured_ns is not None and steps.marked:
            numbers = [name.partition("#")[2] for name in steps.names]
            self.steps_us = dict(zip(numbers, (steps.measured_ns / 1000).tolist(), strict=True))

    def conserved(self) -> bool:
        """Whether the counts add up, see the class."""
        events = self.events_kept + sum(self.losses.values())
        nodes = self.events_kept + self.segments + self.overhead
        return self.events_in == events and self.nodes == nodes

    def as_dict(self) -> dict[str, Any]:
        """The fields as a dict with keys in a fixed order, so that equal conversions give equal bytes."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RankReport:
        """The inverse of ``as_dict``. Raises ``TypeError`` or ``KeyError`` for other dicts."""
        return cls(**fields | {"findings": Findings(fields["findings"])})

    def as_json(self) -> dict[str, Any]:
        """For NAME_conversion.json: the findings by kind, each with its id, count and sentence."""
        fields = self.as_dict()
        findings = Findings(fields.pop("findings"))
        return fields | {name: listed(findings.of(kind)) for name, kind in _KINDS.items()}


def make_report(number: int, rank: LinkedRank, graph: Graph, later: Findings) -> RankReport:
    """The report of rank ``number``. ``later``: the findings of the dependencies and later stages."""
    device, time, items = rank.device, rank.timeline, rank.communication.items
    overhead = np.isin(graph.kind, (NodeKind.HOST_OVERHEAD, NodeKind.DEVICE_OVERHEAD))
    before = np.isin(graph.event, rank.before)
    stands = graph.is_first & ~before

    findings = joined(rank.findings, graph.findings, later)
    findings.add("sync-record", int((device.category == SYNC).sum()))
    unknown = rank.communication_rows.cpu.copy()
    unknown[[item.event for item in items if not item.on_gpu]] = False
    findings.add("unknown-cpu-communication", int(unknown.sum()))
    findings.add(
        "unknown-events", sum(n for key, n in findings.items() if key.startswith("unknown-category"))
    )
    findings.add("unusable-events", findings.get("bad-time", 0) + findings.get("bad-field", 0))
    findings.add("no-host-node", int(((rank.host_row < 0) & (device.category < RUNTIME)).sum()))
    findings.add("memory-event", len(device.memory))
    launching = named(device, lambda name: "GraphLaunch" in name)
    findings.add("graph-kernel", int((launching[rank.calls] & (rank.calls >= 0)).sum()))
    findings.add("group-local", sum(item.is_local for item in items))

    edges = {kind.name.lower().replace("_", " "): int((graph.edge_kind == kind).sum()) for kind in EdgeKind}
    nodes = {name: int((graph.kind == k).sum()) for k, name in enumerate(KIND_NAMES)}
    return RankReport(
        rank=number,
        events_in=device.events_in,
        events_kept=int(stands.sum()),
        segments=int((~stands & ~overhead & ~before).sum()),
        overhead=int(((overhead | before) & ~stands).sum()),
        nodes=len(graph),
        edges=len(graph.source),
        nodes_by_kind={name: count for name, count in nodes.items() if count},
        edges_by_kind={name: count for name, count in edges.items() if count},
        link_rate=rank.link_rate,
        steps_us={str(n): float(time.end[row] - time.start[row]) / 1000 for n, row in time.steps},
        clocks={str(clock.device): vars(clock) for clock in rank.clocks},
        findings=findings,
    )
