"""When each rank begins, and how long matched communication takes once all members have arrived.

Ranks on one host share a clock; clocks of different hosts differ by milliseconds or more. But all members of
an all-reduce, all-gather, reduce-scatter, all-to-all or barrier end within microseconds of each other. So the
clock offset of two ranks is the median difference between the ends of their common collectives, and its
uncertainty is the spread around that median.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching

# Collectives that end at the same time on all ranks. A broadcast's root or a reduce's leaf may end earlier.
SYMMETRIC = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.BARRIER,
)
# Ranks of one run synchronise in every step, so a larger skew means different runs.
_LONGEST_SKEW_NS = 3600 * 10**9
# A start skew of less is no news.
LEAST_SKEW_NS = 50_000


@dataclass(frozen=True)
class Timing:
    """``release_ns[T]``: when each rank's first node may start, 0 for the earliest rank. ``transfer_ns``,
    int64[N]: how long each node lasts once the last member of its operation has arrived. ``shortest``:
    nothing tells it, so that it is the shortest duration of all members."""

    release_ns: list[int]
    transfer_ns: np.ndarray
    notes: list[str] = field(default_factory=list)
    shortest: bool = False


def timing(graph: ReplayGraph, matching: Matching) -> Timing:
    """The timing of a replay, from what the files record.

    A recorded duration includes the wait for the last rank. The converter stores the transfer part when it
    converts a whole run; otherwise it is computed from recorded start times, on clocks aligned by the ends of
    common collectives. Without start times, the shortest duration is used
    for all members. Raises ``TraceError`` if the traces of two ranks begin more than an hour apart.
    """
    if len(graph.traces) == 1:
        return Timing([0], graph.duration_ns)
    local, clocks = graph.local_start_ns, graph.clock_ns
    starts = aligned = None
    release, notes = [0] * len(graph.traces), []
    if local is not None and clocks is None and matching.channels:
        aligned = align(graph, matching, local)
        if aligned is not None:
            clocks = aligned.offset_ns
            notes.append(
                f"clocks aligned by {aligned.matched} collectives; the uncertainty of the offsets is up to "
                f"{int(aligned.spread_ns.max()) / 1000:.0f} µs"
            )
    if local is not None and clocks is not None:
        starts = local + clocks[graph.trace_of]
        begins = np.minimum.reduceat(starts, graph.first[:-1])
        release = (begins - begins.min()).tolist()
        if max(release) > _LONGEST_SKEW_NS:
            raise TraceError(
                f"the ranks' traces begin {max(release) / 1e9:.0f} s apart: give the files of one run"
            )
        planned = any("planned_step_micros" in trace.metadata for trace in graph.traces)
        notes += [] if planned else _skew(graph, release, aligned)  # a plan has no clocks
    if not matching.channels:
        return Timing(release, graph.duration_ns, notes)
    if graph.transfer is not None:
        return Timing(release, np.rint(graph.duration_ns * graph.transfer).astype(np.int64), notes)
    if starts is None:
        shortest = "each collective takes its shortest recorded duration on all ranks"
        lacking = "the files have no start times, or too few common collectives to align their clocks"
        transfer = graph.duration_ns.copy()
        for nodes in matching.members:
            transfer[nodes] = transfer[nodes].min()
        return Timing(release, transfer, [*notes, f"{shortest}: {lacking}"], True)
    return Timing(release, graph.duration_ns - waits(matching, starts, graph.duration_ns), notes)


@dataclass(frozen=True)
class Alignment:
    """Clock offsets of T traces, int64[T]: add ``offset_ns`` to the recorded times of each trace.

    ``spread_ns``, int64[T], is the median absolute deviation of the collectives' ends around the offset,
    ``matched`` the number of collectives compared.
    """

    offset_ns: np.ndarray
    spread_ns: np.ndarray
    matched: int


def align(graph: ReplayGraph, matching: Matching, starts_ns: np.ndarray) -> Alignment | None:
    """The clock offsets of all ranks; None if some rank has no collective in common with the others.

    ``starts_ns`` int64[N]: recorded start times, each on the clock of its rank.
    """
    ends = starts_ns + graph.duration_ns
    nodes = matching.complete()
    kind = graph.attribute("comm_type", -1)
    nodes = nodes[(graph.types[nodes] == NodeType.COMM_COLL) & np.isin(kind[nodes], SYMMETRIC)]
    nodes = nodes[np.argsort(matching.operation[nodes], kind="stable")]
    operations = np.split(nodes, np.flatnonzero(np.diff(matching.operation[nodes])) + 1)
    operations = sorted((each for each in operations if len(each) > 1), key=lambda each: int(each[0]))
    differences: dict[tuple[int, int], list[int]] = {}
    for members in operations:
        first, *others = graph.trace_of[members].tolist()
        later = (ends[members[0]] - ends[members[1:]]).tolist()
        for trace, difference in zip(others, later, strict=True):
            differences.setdefault((first, trace), []).append(difference)
    offset: dict[int, tuple[int, int]] = {0: (0, 0)}
    # Go from rank to rank, starting with the pairs that have most collectives in common.
    pairs = sorted(differences, key=lambda pair: -len(differences[pair]))
    while len(offset) < len(graph.traces):
        link = next((pair for pair in pairs if (pair[0] in offset) != (pair[1] in offset)), None)
        if link is None:
            return None
        values = np.array(differences[link])
        middle = int(np.median(values))
        spread = int(np.median(np.abs(values - middle)))
        known, new, sign = (link[0], link[1], 1) if link[0] in offset else (link[1], link[0], -1)
        base, before = offset[known]
        offset[new] = (base + sign * middle, max(before, spread))
    columns = np.array([offset[trace] for trace in range(len(graph.traces))], dtype=np.int64)
    return Alignment(columns[:, 0], columns[:, 1], len(operations))


def waits(matching: Matching, starts_ns: np.ndarray, lasted_ns: np.ndarray) -> np.ndarray:
    """int64[N]: ns that each matched node waited for the last member of its operation, 0 for other nodes.

    ``starts_ns`` int64[N]: start times on a common clock; ``lasted_ns`` int64[N]: the time of each node.
    """
    wait = np.zeros(len(starts_ns), dtype=np.int64)
    last = matching.last_members(starts_ns)
    nodes = np.flatnonzero(last >= 0)
    wait[nodes] = np.clip(starts_ns[last[nodes]] - starts_ns[nodes], 0, lasted_ns[nodes])
    return wait


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
