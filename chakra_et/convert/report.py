"""The report of a conversion: what went in, what came out, and every loss by its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
