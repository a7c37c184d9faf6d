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
from chakra_et.et.columns import FOR_ALL, CollectiveType, NodeType
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.matching import Matching

# Collectives that end at the same time on all ranks. A broadcast's root or a reduce's leaf may end earlier.
SYMMETRIC = (*FOR_ALL, CollectiveType.BARRIER)
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
    local, clocks, starts = graph.local_start_ns, graph.clock_ns, None
    release, notes = [0] * len(graph.traces), []
    spread = max(trace.metadata_int("clock_spread_ns") or 0 for trace in graph.traces)
    found = None if local is None or clocks is not None else align(graph, matching, local)
    if found is not None:
        clocks, spreads, matched = found
        spread = int(spreads.max())
        notes.append(
            f"clocks aligned by {matched} collectives; the uncertainty of the offsets is up to "
            f"{spread / 1000:.0f} µs"
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
        notes += [] if planned else _skew(graph, release, spread)  # a plan has no clocks
    if not matching.channels:
        return Timing(release, graph.duration_ns, notes)
    if any("wait_micros" in trace.attributes for trace in graph.traces):
        part, wait = (graph.attribute(of, 0).astype(float) for of in ("transfer_micros", "wait_micros"))
        share = np.divide(part, part + wait, out=np.ones(len(part)), where=part + wait > 0)
        return Timing(release, np.rint(graph.duration_ns * share).astype(np.int64), notes)
    if starts is None:
        shortest = "each collective takes its shortest recorded duration on all ranks"
        lacking = "the files have no start times, or too few common collectives to align their clocks"
        transfer = graph.duration_ns.copy()
        for nodes in matching.members:
            transfer[nodes] = transfer[nodes].min()
        return Timing(release, transfer, [*notes, f"{shortest}: {lacking}"], True)
    return Timing(release, graph.duration_ns - waits(matching, starts, graph.duration_ns), notes)


def align(
    graph: ReplayGraph, matching: Matching, starts_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """What to add to the recorded times of each trace, and the median absolute deviation of the collectives'
    ends around that, int64[T] ns; the number of collectives compared. None if some rank has no collective in
    common with the others.

    ``starts_ns`` int64[N]: recorded start times, each on the clock of its rank.
    """
    ends, usable = starts_ns + graph.duration_ns, np.zeros(len(graph), bool)
    usable[matching.complete()] = True
    usable &= (graph.types == NodeType.COMM_COLL) & np.isin(graph.attribute("comm_type", -1), SYMMETRIC)
    chosen = (each for each in matching.members if len(each) > 1 and usable[each].all())
    operations = sorted(chosen, key=lambda each: int(each[0]))
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
    return columns[:, 0], columns[:, 1], len(operations)


def waits(matching: Matching, starts_ns: np.ndarray, lasted_ns: np.ndarray) -> np.ndarray:
    """int64[N]: ns that each matched node waited for the last member of its operation, 0 for other nodes.

    ``starts_ns`` int64[N]: start times on a common clock; ``lasted_ns`` int64[N]: the time of each node.
    """
    wait = np.zeros(len(starts_ns), dtype=np.int64)
    last = matching.last_members(starts_ns)
    nodes = np.flatnonzero(last >= 0)
    wait[nodes] = np.clip(starts_ns[last[nodes]] - starts_ns[nodes], 0, lasted_ns[nodes])
    return wait


def _skew(graph: ReplayGraph, release: list[int], spread: int) -> list[str]:
    """A sentence about ranks that begin at different times, and how well the clocks, whose offsets have a
    ``spread`` in ns, tell it.

    A clock that is off moves the ends of common collectives too, by which clocks are aligned; a late start
    doesn't.
    """
    last, first = int(np.argmax(release)), int(np.argmin(release))
    if release[last] < LEAST_SKEW_NS:
        return []
    known = (
        f"agree to {spread / 1e3:.0f} µs by the ends of common collectives" if spread else "are one host's"
    )
    doubt = ", which may be all of it" if spread >= release[last] else ""
    return [
        f"start skew: rank {graph.ranks[last]} begins {release[last] / 1e6:,.2f} ms after rank "
        f"{graph.ranks[first]}, which no rank's work explains; the clocks {known}{doubt}"
    ]
