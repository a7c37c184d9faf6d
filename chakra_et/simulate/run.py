"""All ranks of a run as one value, and when its nodes start and end: as it was measured, or in another
setting, where transfers that overlap on a link share it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.simulate.joint import ReplayGraph, build_graph
from chakra_et.simulate.longest_path import Schedule, make_schedule
from chakra_et.simulate.matching import Matching, match
from chakra_et.simulate.measured_steps import Steps, about_steps, find_steps
from chakra_et.simulate.time_by_kind import KINDS, node_kinds
from chakra_et.simulate.timing import Timing, timing
from chakra_et.text import plural

_TIMELESS = "no node has a duration: every time is 0; chakra-et astra simulates what has operations and bytes"
_PREDICTED = "the run is itself a prediction of chakra-et predict: its times weren't measured"
_SKELETONS = (
    "read from the skeletons of {}: nodes are segments of like work, without the names of operators "
    "(--skeletons off reads the whole ranks)"
)
_ATTEMPTS = 50


@dataclass(frozen=True)
class Setting:
    """What a run depends on. ``graph``: nodes and dependencies; ``own_ns[N]``: how long each node runs;
    ``lasting_ns[N]``: how long a matched communication runs on after its last member has started, int64.
    ``demand``, where the network was changed, of the K operations of matched communication, float64 ns: what
    each takes on a link that nothing else uses (see ``share``); its latency and calls, during which the link
    is free; and the least that the ranks themselves need. ``doubts``: by how much each node may last longer
    for one cause (of ``own_ns``, of ``lasting_ns``), one standard deviation. ``notes``: what was assumed, one
    sentence each."""

    graph: ReplayGraph
    own_ns: np.ndarray
    lasting_ns: np.ndarray
    demand: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    doubts: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    notes: tuple[str, ...] = ()

    def noting(self, sentence: str) -> Setting:
        """The same setting with one more note."""
        return replace(self, notes=(*self.notes, sentence))

    def doubting(self, own_ns: np.ndarray | None = None, lasting_ns: np.ndarray | None = None) -> Setting:
        """The same setting with one more doubt."""
        none = np.zeros(len(self.graph))
        own, lasting = (np.rint(none if of is None else of).astype(np.int64) for of in (own_ns, lasting_ns))
        return replace(self, doubts=(*self.doubts, (own, lasting)))


@dataclass(frozen=True)
class Run:
    """A run as it was measured.

    ``operation[N]``: number of the matched communication that a node belongs to, -1 for none; its members are
    the K lists of ``members``. ``kind[N]``: index into ``time_by_kind.KINDS``. ``names``: all node names,
    and ``name[N]`` the index of each node's. ``start_ns``, ``end_ns``: as
    replayed; ``steps`` of each trace. ``devices``: rank → the name of its GPU or CPU, where the capture's
    manifest tells it.
    """

    name: str
    graph: ReplayGraph
    matching: Matching
    comm_groups: Mapping[str, Sequence[int]]
    timing: Timing
    release_ns: np.ndarray
    schedule: Schedule
    measured: Setting
    start_ns: np.ndarray
    end_ns: np.ndarray
    steps: list[Steps]
    operation: np.ndarray
    members: list[np.ndarray]
    kind: np.ndarray
    names: list[str]
    name_of: np.ndarray
    notes: list[str] = field(default_factory=list)
    devices: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_communication(self) -> np.ndarray:
        """bool[N]."""
        return self.graph.types >= NodeType.COMM_SEND

    @property
    def on_devices(self) -> np.ndarray:
        """Kernels, copies and memsets of devices, communication left out, bool[N]."""
        kinds = KINDS.index("kernel"), KINDS.index("copy")
        return np.isin(self.kind, kinds) & ~self.graph.is_cpu & ~self.is_communication

    def named(self, test: Callable[[str], object]) -> np.ndarray:
        """bool[N]: the nodes whose name passes."""
        return np.array([bool(test(name)) for name in self.names])[self.name_of]

    @cached_property
    def alike(self) -> np.ndarray:
        """Equal for nodes of one name and kind, of skeletons also of one step and communication; int64[N]."""
        code: np.ndarray = self.name_of * len(KINDS) + self.kind
        for name in ("step_index", "comm_ordinal"):
            values = self.graph.attribute(name, -1) + 1
            code = code * (int(values.max(initial=0)) + 1) + values
        return code

    def step_times(self, start_ns: np.ndarray, end_ns: np.ndarray) -> list[list[int]]:
        """How long each step of each trace lasts where nodes have these times, ns: see ``Steps``."""
        times = ((start_ns[each.nodes], end_ns[each.nodes]) for each in self.steps)
        return [np.diff(of.bounds_ns(*at)).tolist() for of, at in zip(self.steps, times, strict=True)]


def devices_of(manifest: Any) -> dict[int, str]:
    """Rank → device, as a capture's manifest tells it: {} where it doesn't, as it only confirms what the user
    says."""
    try:
        return {int(each["rank"]): str(each["device"] or "") for each in manifest["ranks"]}
    except (ValueError, KeyError, TypeError):
        return {}


def make_run(
    name: str,
    traces: Sequence[ExecutionTrace],
    ranks: Sequence[int],
    comm_groups: Mapping[str, Sequence[int]] | None = None,
    apart: bool = False,
) -> Run:
    """A run from traces in memory; ``apart``: no rank waits for another one. Raises ``TraceError`` as
    ``build_graph``, ``match``, ``timing`` and ``make_schedule`` do."""
    graph = build_graph(traces, ranks)
    alone = np.full(len(graph), -1)
    matching = Matching(alone, alone, graph.position) if apart else match(graph, comm_groups)
    times = Timing([0] * len(traces), graph.duration_ns) if apart else timing(graph, matching)
    lasting = np.where(matching.operation >= 0, times.transfer_ns, 0)
    schedule = make_schedule(graph, matching)
    release = np.array(times.release_ns, np.int64)[graph.trace_of]
    start, end = schedule.run(graph.own_ns, lasting, release)
    name_of, names = graph.names
    predicted = any(trace.metadata.get("predicted") for trace in traces)
    contracted = any("skeleton" in trace.metadata for trace in traces)
    steps = [find_steps(graph, at) for at in range(len(traces))]
    return Run(
        name=name,
        graph=graph,
        matching=matching,
        comm_groups=comm_groups or {},
        timing=times,
        release_ns=release,
        schedule=schedule,
        measured=Setting(graph, graph.own_ns, lasting),
        start_ns=start,
        end_ns=end,
        steps=steps,
        operation=matching.operation,
        members=matching.members,
        kind=graph.gather([node_kinds(trace) for trace in traces]),
        names=names,
        name_of=name_of,
        notes=[_SKELETONS.format(plural(len(traces), "rank"))] * contracted
        + [_PREDICTED] * predicted
        + [_TIMELESS] * (not graph.duration_ns.any())
        + [*matching.notes, *times.notes, *about_steps(traces, steps)],
    )


def together(run: Run) -> Run:
    """The run as if all ranks had begun at the same moment: without the skew of their starts."""
    if not run.release_ns.any():
        return run
    release = np.zeros_like(run.release_ns)
    start, end = run.schedule.run(run.graph.own_ns, run.measured.lasting_ns, release)
    return replace(run, release_ns=release, start_ns=start, end_ns=end)


@dataclass(frozen=True)
class NodeTimes:
    """``start_ns[N]`` and ``end_ns[N]`` of each node; ``lasting_ns[N]``: the transfer of matched
    communication with what other transfers on its links cost it; int64."""

    setting: Setting
    start_ns: np.ndarray
    end_ns: np.ndarray
    lasting_ns: np.ndarray


def solve(run: Run, setting: Setting) -> NodeTimes:
    """The timeline of a setting, in which transfers at the same time share their links. Raises ``TraceError``
    where its dependencies let ranks wait for ever."""
    if setting is run.measured:
        return NodeTimes(setting, run.start_ns, run.end_ns, setting.lasting_ns)
    same = setting.graph is run.graph
    schedule = run.schedule if same else make_schedule(setting.graph, run.matching)
    demand, lasting = setting.demand, setting.lasting_ns
    start, end = schedule.run(setting.own_ns, lasting, run.release_ns)
    if demand is None or not run.members:
        return NodeTimes(setting, start, end, lasting)
    # How long a transfer lasts depends on which others run beside it, and when these begin depends on how
    # long earlier ones last. Each attempt gets right at least the transfers that depend on none that was
    # wrong before, so that the attempts end where nothing changes.
    matched = np.flatnonzero(run.operation >= 0)
    operation = run.operation[matched]
    wire_ns, fixed_ns, least_ns = demand
    first = np.array([nodes[0] for nodes in run.members])
    users = [list(set(run.graph.trace_of[nodes].tolist())) for nodes in run.members]
    for _ in range(_ATTEMPTS):
        begin = np.zeros(len(first), np.int64)
        np.maximum.at(begin, operation, start[matched])
        done = share(begin, wire_ns, users) - begin + fixed_ns
        needed = np.rint(np.maximum(done, least_ns)).astype(np.int64)
        if (np.abs(needed - lasting[first]) <= 1).all():
            return NodeTimes(setting, start, end, lasting)
        lasting = lasting.copy()
        lasting[matched] = needed[operation]
        start, end = schedule.run(setting.own_ns, lasting, run.release_ns)
    raise TraceError(
        f"the transfers that share links don't settle in {_ATTEMPTS} attempts: predict with --no-contention"
    )


def share(begin_ns: np.ndarray, wire_ns: np.ndarray, users: Sequence[Sequence[int]]) -> np.ndarray:
    """When each of K transfers is done, float64[K].

    ``begin_ns[K]``: when each is ready; ``wire_ns[K]``: its time on links that nothing else uses; ``users``:
    the ranks whose links each of them occupies. A transfer goes on at the rate of its most crowded link,
    where n transfers get 1/n each (processor sharing, as TCP flows on one bottleneck do).
    """
    end, left = begin_ns.astype(np.float64), wire_ns.tolist()
    arrivals = sorted(((float(end[at]), at) for at in np.flatnonzero(wire_ns > 0).tolist()), reverse=True)
    # Of each: how many run on its most crowded link (``crowd``), on how many of its ranks (``most``),
    # and its crowd when its ending was found last (``pace``, ``since``), which is the one that counts.
    crowd, most, pace, found = ([0] * len(left) for _ in range(4))
    since = [0.0] * len(left)
    on_rank: dict[int, list[int]] = defaultdict(list)
    links = [[on_rank[rank] for rank in ranks] for ranks in users]
    endings: list[tuple[float, int, int]] = []
    while arrivals or endings:
        arriving = bool(arrivals) and (not endings or arrivals[-1][0] <= endings[0][0])
        now, at, number = (*arrivals.pop(), 0) if arriving else heapq.heappop(endings)
        if number != found[at]:
            continue
        touched = {at} if arriving else set()
        for beside in links[at]:
            if arriving:
                beside.append(at)
                size = len(beside)
                for other in beside:
                    if crowd[other] < size:
                        crowd[other], most[other] = size, 1
                        touched.add(other)
                    elif crowd[other] == size:
                        most[other] += 1
            else:
                size = len(beside)
                beside.remove(at)
                for other in beside:
                    if crowd[other] == size:
                        most[other] -= 1
                        touched.add(other)
        if not arriving:
            end[at] = now
        for other in touched:
            if not most[other]:
                sizes = list(map(len, links[other]))
                crowd[other] = max(sizes)
                most[other] = sizes.count(crowd[other])
            if crowd[other] != pace[other]:
                if pace[other]:
                    left[other] -= (now - since[other]) / pace[other]
                pace[other], since[other] = crowd[other], now
                found[other] += 1
                heapq.heappush(endings, (now + max(left[other], 0.0) * pace[other], other, found[other]))
    return end
