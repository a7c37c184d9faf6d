"""A network as dimensions: GPUs within a node, then nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from chakra_et.cost.nccl import NcclNode

Kind = Literal["Switch", "Ring", "FullyConnected"]
# What a message loses of the bandwidth between two nodes, and between two GPUs of a node, where nothing else
# is known: measured by the authors of FASOP (HPDC 2024).
INTER_LOSS, INTRA_LOSS = 1.05, 3.5
# Seconds until a collective begins, and ns per hop of its ring, where no latency is given: from NCCL
# all-reduces of 2, 4 and 8 A100 over NVSwitch (trace/a100/AR_GPU*_LUT of VIA-Research/vTrain, MIT), whose
# times are 32 µs + 2(n−1) · 4 µs plus what 190 to 228 GB/s take.
COLLECTIVE_START, HOP_NS = 32e-6, 4000.0


def divisor(ranks: int) -> int:
    """The largest divisor up to the square root, for as many equal rows of ranks; 0 for a prime number."""
    return next((size for size in range(math.isqrt(ranks), 1, -1) if ranks % size == 0), 0)


@dataclass(frozen=True)
class Dimension:
    """``size`` ranks with links between them.

    ``bandwidth``: bytes per second of one rank, per direction; ``latency_ns``: end-to-end cost per message.
    """

    size: int
    bandwidth: float
    latency_ns: float
    kind: Kind = "Switch"


@dataclass(frozen=True)
class Topology:
    """``dimensions``, innermost first: ranks 0 to ``dimensions[0].size`` - 1 share a node.

    ``reduce_bandwidth``: bytes per second at which a rank reduces received data. ``call_ns``: fixed cost of a
    collective call. ``peak``: operations per second of one rank, None if not given. ``notes``: assumptions
    made in parsing, one sentence each. ``nccl``: what NCCL takes within a node, None where no GPU is named.
    ``effective``: the links are unequal, and bytes of messages stand for what differs.
    """

    dimensions: tuple[Dimension, ...]
    reduce_bandwidth: float = math.inf
    call_ns: float = 0.0
    name: str = ""
    peak: float | None = None
    notes: tuple[str, ...] = ()
    nccl: NcclNode | None = None
    effective: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(dimension.size for dimension in self.dimensions)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank, one per dimension, innermost first."""
        place = []
        for dimension in self.dimensions:
            rank, at = divmod(rank, dimension.size)
            place.append(at)
        return tuple(place)
