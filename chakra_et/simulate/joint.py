"""The nodes of all ranks as one graph, the input of both replays.

Nodes are numbered by (rank, id), so "lowest id first" is "lowest number first" within a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from chakra_et.arrays import coded
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType, Strings
from chakra_et.et.edges import edges_of, find_cycle, topological_order
from chakra_et.et.node_attributes import texts

EVERY_RANK = "0"
"""The group of all ranks: what ASTRA-sim uses if ``pg_name`` is "", "0" or missing."""

_LIMIT_NS = 2**62


@dataclass(frozen=True)
class Lanes:
    """``lane[N]``: the lane of each node. ``nodes[N]``: all nodes, by lane and then by position; node i is
    at ``spot[i]`` of these, and lane L begins at spot ``first[L]``. A node that is on no thread, stream or
    communicator has a lane to itself."""

    lane: np.ndarray
    nodes: np.ndarray
    spot: np.ndarray
    first: np.ndarray


@dataclass
class ReplayGraph:
    """The N nodes and E dependencies of T traces. Arrays are int64 unless noted.

    - ``first[T + 1]``: the number of each trace's first node
    - ``trace_of[N]``: index of the node's trace; ``row[N]``: its row there; ``in_rows``: takes columns of
      the traces, one after another, into the order of nodes
    - ``types[N]`` uint8; ``is_cpu[N]`` bool; ``duration_ns[N]``
    - ``group[N]``: index into ``groups``, the names of process groups
    - ``source[E]``, ``target[E]``: node numbers
    - ``position[N]``: topological order, lowest ready id first
    - ``local_start_ns[N]``: recorded start times, each on its rank's clock; None if a file has none
    - ``clock_ns[T]``: what to add to each rank's clock; None if the files do not have it
    - ``lag_ns[E]``, ``own_ns[N]``: a node ends ``own_ns`` after the latest end + ``lag_ns`` of its
      dependencies. ``lag_ns`` is 0 and ``own_ns`` is ``duration_ns`` except for device work and the overhead
      in front of it, as a launch latency overlaps with earlier kernels (``launch_latency_ns``,
      ``stream_gap_ns``).
    """

    traces: list[ExecutionTrace]
    ranks: list[int]
    first: np.ndarray
    trace_of: np.ndarray
    row: np.ndarray
    in_rows: np.ndarray | slice
    types: np.ndarray
    is_cpu: np.ndarray
    group: np.ndarray
    groups: list[str]
    duration_ns: np.ndarray
    source: np.ndarray
    target: np.ndarray
    position: np.ndarray
    local_start_ns: np.ndarray | None
    clock_ns: np.ndarray | None
    lag_ns: np.ndarray
    own_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def attribute(self, name: str, default: int) -> np.ndarray:
        """Integer attribute ``name`` of all nodes, int64[N]."""
        return self.gather([trace.column(name, default) for trace in self.traces])

    @cached_property
    def names(self) -> tuple[np.ndarray, list[str]]:
        """The name of each node as an index, int64[N], into the names of all nodes."""
        known: dict[bytes, int] = {}
        codes = []
        for trace in self.traces:
            code = np.array([known.setdefault(text, len(known)) for text in trace.names.table], np.int64)
            codes.append(code[trace.names.index])
        return self.gather(codes), [text.decode("utf-8", "replace") for text in known]

    def codes(self, attribute: str, known: Sequence[str] = ()) -> tuple[np.ndarray, list[str]]:
        """A text attribute of all nodes as (index int64[N], -1 for none; texts). The texts are ``known``, or
        where that is empty, those that occur."""
        table = {text: at for at, text in enumerate(known)}
        found = []
        for trace in self.traces:
            values, index = texts(trace, attribute)
            codes = [table.get(text, -1) if known else table.setdefault(text, len(table)) for text in values]
            found.append(np.array([*codes, -1], dtype=np.int64)[index])
        return self.gather(found), list(table)

    def gather(self, columns: list[np.ndarray]) -> np.ndarray:
        """One column per trace, in row order, as one array in node order."""
        return np.concatenate(columns)[self.in_rows]

    def scatter(self, values: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Values in node order as one int64 array per trace, in row order."""
        flat = np.empty(len(self), dtype=np.int64)
        flat[self.in_rows] = values
        return [flat[a:b] for a, b in zip(self.first[:-1], self.first[1:], strict=True)]

    def rank(self, node: int) -> int:
        """The rank of a node."""
        return self.ranks[int(self.trace_of[node])]

    @property
    def world_size(self) -> int:
        """How many ranks the files say that the run had, 0 where they don't say."""
        return max(trace.metadata_int("world_size") or 0 for trace in self.traces)

    def describe(self, node: int) -> str:
        """``node 12 'aten::mm'``, for messages."""
        trace, row = self.traces[int(self.trace_of[node])], int(self.row[node])
        return f"node {trace.ids[row]} {trace.names[row][:80]!r}"

    @cached_property
    def launched(self) -> np.ndarray:
        """When each node was launched, int64[N]: the position of a host node, of others that of the last one
        that leads to them; -1 for none, as of work that was launched before the recording, which hangs on the
        gap with which that begins."""
        found = np.where(self.is_cpu, self.position, -1).tolist()
        gap = self.codes("kind", ("host-overhead",))[0] == 0
        of_gpu = self.attribute("stream", -1) >= 0  # gloo may take up a call in a gap between operators
        before = gap[self.source] & of_gpu[self.target]
        chosen = np.flatnonzero(~self.is_cpu[self.target] & ~before)
        chosen = chosen[np.argsort(self.position[self.target[chosen]], kind="stable")]
        for source, target in zip(self.source[chosen].tolist(), self.target[chosen].tolist(), strict=True):
            found[target] = max(found[target], found[source])
        return np.array(found, np.int64)

    def last_before(self, end_ns: np.ndarray) -> np.ndarray:
        """What each node starts after, of its dependencies and the node before it on its lane: the one that
        ends last, a dependency where both do; -1 for none; int64[N]. ``end_ns``: of all nodes."""
        lane, order = self.in_lanes.lane, self.in_lanes.nodes
        linked = lane[order[1:]] == lane[order[:-1]]
        source, target = np.append(order[:-1][linked], self.source), np.append(order[1:][linked], self.target)
        free = end_ns[source] + np.append(np.zeros(len(source) - len(self.source), np.int64), self.lag_ns)
        latest, before = np.full(len(self), np.iinfo(np.int64).min), np.full(len(self), -1)
        np.maximum.at(latest, target, free)
        last = free == latest[target]
        before[target[last]] = source[last]
        return before

    @cached_property
    def in_lanes(self) -> Lanes:
        """The nodes by lane.

        A lane is the attribute ``lane`` if the file has it. Otherwise the thread of a CPU node, the stream of
        a device node, or the group of a collective without a stream. A send or receive without a stream has
        no lane, as a receive must not block the nodes after it.
        """
        lanes, order, count = [], [], 0
        for trace, low, high in zip(self.traces, self.first[:-1], self.first[1:], strict=True):
            own = slice(low, high)
            types, row = self.types[own], self.row[own]
            lane, tid, stream = (trace.column(name, -1)[row] for name in ("lane", "tid", "stream"))
            is_message = (types >= NodeType.COMM_SEND) & (types != NodeType.COMM_COLL)
            choices = [lane >= 0, self.is_cpu[own], stream >= 0, is_message, types == NodeType.COMM_COLL]
            kind = np.select(choices, [0, 1, 2, 3, 4], default=5)
            chosen = [lane, tid, stream, np.arange(len(row)), self.group[own]]
            values, code = coded(np.select(choices, chosen, default=0))
            _, lane = coded(kind * len(values) + code)
            lanes.append(lane + count)
            order.append(np.lexsort((self.position[own], lane)) + low)
            count += int(lane.max()) + 1
        lane, nodes = np.concatenate(lanes), np.concatenate(order)
        spot = np.empty(len(nodes), np.int64)
        spot[nodes] = np.arange(len(nodes))
        return Lanes(lane, nodes, spot, np.append(0, np.cumsum(np.bincount(lane))))


def build_graph(
    traces: ExecutionTrace | Sequence[ExecutionTrace], ranks: Sequence[int] | None = None
) -> ReplayGraph:
    """Join the traces of ``ranks`` (default: 0, 1, …) into one graph.

    Raises ``TraceError`` for traces that no simulator can run: no nodes, a duplicate id, a dependency on an
    absent node, a cycle, times that add up to 2^62 ns or more, and for traces of other ranks or of two runs.
    """
    traces = [traces] if isinstance(traces, ExecutionTrace) else list(traces)
    ranks = list(range(len(traces))) if ranks is None else list(ranks)
    if not traces or len(ranks) != len(traces) or len(set(ranks)) != len(ranks):
        raise TraceError(f"{len(traces)} traces do not match ranks {ranks}: give one trace per rank")
    _check_ranks(traces, ranks)
    first = np.concatenate(([0], np.cumsum([len(trace) for trace in traces], dtype=np.int64)))
    parts = []
    for rank, start, trace in zip(ranks, first, traces, strict=False):
        _check_times(trace, rank, _LIMIT_NS // len(traces))
        row, source, target = _edges(trace, rank)
        parts.append((row, source + start, target + start))
    row, source, target = map(np.concatenate, zip(*parts, strict=True))
    trace_of = np.repeat(np.arange(len(traces)), np.diff(first))
    place = first[trace_of] + row
    in_rows = slice(None) if (np.diff(place) == 1).all() else place

    def gather(columns: list[np.ndarray]) -> np.ndarray:
        return np.asarray(np.concatenate(columns)[in_rows])

    is_cpu = gather([trace.column("is_cpu_op") for trace in traces]) != 0
    duration = gather([trace.duration_micros for trace in traces]).astype(np.int64) * 1000
    latency = gather([trace.column("launch_latency_ns", -1) for trace in traces])
    gap = gather([trace.column("stream_gap_ns", -1) for trace in traces])
    launched = (latency >= 0)[target] & is_cpu[source]
    timed = all(trace.start_micros.any() for trace in traces)
    groups: dict[str, int] = {}
    graph = ReplayGraph(
        traces=traces,
        ranks=ranks,
        first=first,
        trace_of=trace_of,
        row=row,
        in_rows=in_rows,
        types=gather([trace.types for trace in traces]),
        is_cpu=is_cpu,
        group=gather([_group_column(trace, groups) for trace in traces]),
        groups=list(groups),
        duration_ns=duration,
        source=source,
        target=target,
        position=np.arange(first[-1]),
        local_start_ns=gather([t.start_micros for t in traces]).astype(np.int64) * 1000 if timed else None,
        clock_ns=_clocks(traces),
        lag_ns=np.where(launched, (latency - np.maximum(gap, 0))[target], 0),
        own_ns=np.where(gap >= 0, gap, duration),
    )
    if np.any(source >= target):
        order = topological_order(len(graph), source, target)
        if len(order) < len(graph):
            cycle = find_cycle(len(graph), source, target)
            names = ", ".join(map(graph.describe, cycle[:4])) + (", …" if len(cycle) > 4 else "")
            raise TraceError(
                f"the dependencies of rank {graph.rank(cycle[0])} form a cycle of {len(cycle)} nodes "
                f"({names}), which no simulator can finish: convert the trace again"
            )
        graph.position[order] = np.arange(len(graph))
    return graph


def _check_ranks(traces: Sequence[ExecutionTrace], ranks: Sequence[int]) -> None:
    """Several traces must be those of their ranks, and of one run, as far as they say it."""
    worlds: dict[int, int] = {}
    for rank, trace in zip(ranks, traces, strict=True) if len(traces) > 1 else ():
        held, world = trace.metadata_int("rank"), trace.metadata_int("world_size")
        if held is not None and held != rank:
            raise TraceError(
                f"the file of rank {rank} holds rank {held}: give the files of one run, NAME.0.et for rank 0 "
                "and so on"
            )
        if world is not None and world > 0:
            worlds.setdefault(world, rank)
    if len(worlds) > 1:
        (world, rank), (other_world, other) = list(worlds.items())[:2]
        raise TraceError(
            f"the file of rank {rank} is from a run of {world} ranks and that of rank {other} from a run of "
            f"{other_world}: give the files of one run"
        )


def _check_times(trace: ExecutionTrace, rank: int, limit_ns: int) -> None:
    if not len(trace):
        raise TraceError(f"the trace of rank {rank} has no nodes: convert it again")
    total = float(trace.start_micros.max()) + float(np.sum(trace.duration_micros, dtype=np.float64))
    if total * 1000 >= limit_ns:
        longest = int(np.argmax(trace.duration_micros))
        raise TraceError(
            f"the times of rank {rank} add up to more than {limit_ns} ns (node {trace.ids[longest]} lasts "
            f"{trace.duration_micros[longest]} µs): convert the trace again"
        )


def _edges(trace: ExecutionTrace, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in id order, and source and target of each dependency as numbers in that order."""
    order = np.argsort(trace.ids, kind="stable")
    ids = trace.ids[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        raise TraceError(
            f"rank {rank} has two nodes with id {ids[twice[0]]}: ids must be unique, so convert it again"
        )
    edges = edges_of(trace)
    absent = np.flatnonzero(edges.parent < 0)
    if len(absent):
        raise TraceError(
            f"node {trace.ids[edges.child[absent[0]]]} of rank {rank} depends on node "
            f"{edges.dependency[absent[0]]}, which is not in the file: check the file with "
            "`chakra-et validate`"
        )
    number = np.empty(len(ids), np.int64)
    number[order] = np.arange(len(ids))
    return order, number[edges.parent], number[edges.child]


def _group_column(trace: ExecutionTrace, groups: dict[str, int]) -> np.ndarray:
    """int64[rows]: ``pg_name`` as indices into ``groups``, to which new names are added."""
    column = np.full(len(trace), groups.setdefault(EVERY_RANK, len(groups)), dtype=np.int64)
    attribute = trace.attributes.get("pg_name")
    if attribute is None:
        return column
    if isinstance(attribute.values, Strings):
        names, index = texts(trace, "pg_name")[0], attribute.values.index
    else:
        values, index = np.unique(attribute.values, return_inverse=True)
        names = [str(value) for value in values.tolist()]
    codes = [groups.setdefault(name or EVERY_RANK, len(groups)) for name in names]
    column[attribute.rows] = np.array(codes, dtype=np.int64)[index]
    return column


def _clocks(traces: list[ExecutionTrace]) -> np.ndarray | None:
    """``ReplayGraph.clock_ns`` from ``trace_start_ns`` and ``clock_offset_ns``, which the converter writes.

    Without the latter, all ranks must have the same ``clock_domain``: clocks of two hosts can differ by more
    than one step time.
    """
    if len(traces) == 1:
        return np.zeros(1, np.int64)
    origins = [trace.metadata_int("trace_start_ns") for trace in traces]
    offsets = [trace.metadata_int("clock_offset_ns") for trace in traces]
    if None in offsets:
        domains = {trace.metadata.get("clock_domain") for trace in traces}
        if len(domains) != 1 or domains & {None, ""}:
            return None
        offsets = [0] * len(traces)
    return None if None in origins else np.array(origins, np.int64) + np.array(offsets, np.int64)
