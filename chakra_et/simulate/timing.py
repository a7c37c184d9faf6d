"""When each rank begins, and how long matched communication takes once all members have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching

if TYPE_CHECKING:
    from chakra_et.simulate.alignment import Alignment

# Ranks of one run synchronise in every step, so a larger skew means different runs.
_LONGEST_SKEW_NS = 3600 * 10**9
# A start skew of less is no news.
LEAST_SKEW_NS = 50_000


@dataclass(frozen=True)
class Timing:
    """Release and transfer times of a replay, ns.

    ``release_ns[T]``: when each rank's first node may start, 0 for the earliest rank. ``transfer_ns``,
    int64[N]: how long each communication node lasts once the last member of its operation has arrived; None
    if not known, and then the shortest duration of an operation is used for all its members.
    ``ends``: (members, when each starts) → when each ends, in place of both.
    """

    release_ns: list[int]
    transfer_ns: np.ndarray | None
    notes: list[str] = field(default_factory=list)
    ends: Callable[[list[int], list[int]], list[int]] | None = None

    def ended(self, graph: ReplayGraph, nodes: list[int], starts: list[int]) -> list[int]:
        """When each of the matched ``nodes`` ends."""
        if self.ends is not None:
            return self.ends(nodes, starts)
        return [max(starts) + length for length in self.durations(graph, nodes)]

    def durations(self, graph: ReplayGraph, nodes: list[int]) -> list[int]:
        """How long each of the matched ``nodes`` runs after the last of them has started, ns."""
        if self.transfer_ns is None:
            return [int(graph.duration_ns[nodes].min())] * len(nodes)
        return [int(each) for each in self.transfer_ns[nodes]]

    def lasting_ns(
        self, graph: ReplayGraph, operation: np.ndarray, members: Sequence[np.ndarray]
    ) -> np.ndarray:
        """How long each node of an operation runs on after its last member has started, else 0; int64[N]."""
        lasting = np.zeros(len(graph), np.int64)
        if self.transfer_ns is not None:
            lasting[operation >= 0] = self.transfer_ns[operation >= 0]
            return lasting
        for nodes in members:
            lasting[nodes] = graph.duration_ns[nodes].min()
        return lasting


def timing(graph: ReplayGraph, matching: Matching, own_transfer: bool = True) -> Timing:
    """The timing of a replay, from what the files record.

    A recorded duration includes the wait for the last rank. The converter stores the transfer part when it
    converts a whole run; otherwise it is computed from recorded start times, on clocks aligned by the ends of
    common collectives. If ``own_transfer`` is False, or there are no start times, the shortest duration is
    used for all members. Raises ``TraceError`` if the traces of two ranks begin more than an hour apart.
    """
    count = len(graph.traces)
    if count == 1:
        return Timing([0], graph.duration_ns)
    clocks = graph.clock_ns
    starts = aligned = None
    notes: list[str] = []
    if graph.local_start_ns is not None and clocks is None and matching.channels:
        from chakra_et.simulate.alignment import align  # converted runs have their clocks

        aligned = align(graph, matching, graph.local_start_ns)
        if aligned is not None:
            clocks = aligned.offset_ns.tolist()
            notes.append(
                f"clocks aligned by {aligned.matched} collectives; the uncertainty of the offsets is up to "
                f"{int(aligned.spread_ns.max()) / 1000:.0f} µs"
            )
    release = [0] * count
    if graph.local_start_ns is not None and clocks is not None:
        starts = graph.local_start_ns + np.array(clocks, dtype=np.int64)[graph.trace_of]
        release = _releases(graph, starts)
        notes += _skew(graph, release, aligned)
    if not own_transfer or not matching.channels:
        if matching.channels:
            notes.append(
                "each collective takes its shortest recorded duration on all ranks (--transfer shortest)"
            )
        return Timing(release, None, notes)
    if graph.transfer is not None:
        return Timing(release, np.rint(graph.duration_ns * graph.transfer).astype(np.int64), notes)
    if starts is None:
        notes.append(
            "each collective takes its shortest recorded duration on all ranks: the files have no start "
            "times, or too few common collectives to align their clocks"
        )
        return Timing(release, None, notes)
    from chakra_et.simulate.alignment import waits

    return Timing(release, graph.duration_ns - waits(graph, matching, starts), notes)


def _releases(graph: ReplayGraph, starts: np.ndarray) -> list[int]:
    begins = [int(starts[graph.trace_of == trace].min()) for trace in range(len(graph.traces))]
    skew = max(begins) - min(begins)
    if skew > _LONGEST_SKEW_NS:
        raise TraceError(
            f"the ranks' traces begin {skew / 1e9:.0f} s apart: give the files of one run, or replay each "
            "rank with --alone"
        )
    return [begin - min(begins) for begin in begins]


def _skew(graph: ReplayGraph, release: list[int], aligned: Alignment | None) -> list[str]:
    """A sentence about ranks that begin at different times, and how well the clocks tell it.

    A clock that is off moves the ends of common collectives too, by which clocks are aligned; a late start
    doesn't.
    """
    last, first = int(np.argmax(release)), int(np.argmin(release))
    if release[last] < LEAST_SKEW_NS:
        return []
    spreads = [trace.metadata_int("clock_spread_ns") or 0 for trace in graph.traces]
    spread = max(spreads) if aligned is None else int(aligned.spread_ns.max())
    known = (
        f"agree to {spread / 1e3:.0f} µs by the ends of common collectives" if spread else "are one host's"
    )
    doubt = ", which may be all of it" if spread >= release[last] else ""
    return [
        f"start skew: rank {graph.ranks[last]} begins {release[last] / 1e6:,.2f} ms after rank "
        f"{graph.ranks[first]}, which no rank's work explains; the clocks {known}{doubt}"
    ]
