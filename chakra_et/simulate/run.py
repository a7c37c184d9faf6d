"""All ranks of a run, read once, and the setting in which it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.sets import RankSet, Skeletons, find_rank_sets, read_comm_groups
from chakra_et.files import read_json
from chakra_et.names import run_at
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.longest_path import Schedule, make_schedule
from chakra_et.simulate.matching import Matching
from chakra_et.simulate.measured_steps import about_steps, measured_times, step_rows
from chakra_et.simulate.time_by_kind import node_kinds
from chakra_et.simulate.timing import Timing, join
from chakra_et.text import with_progress

_PREDICTED = "the run is itself a prediction of chakra-et predict: its times weren't measured"


@dataclass(frozen=True)
class Doubt:
    """One cause of uncertainty: by how many ns each node may last longer, one standard deviation;
    int64[N].
    """

    cause: str
    own_ns: np.ndarray
    lasting_ns: np.ndarray


@dataclass(frozen=True)
class Demand:
    """What the operations of matched communication ask of the network: see ``links.share``.

    ``wire_ns[K]``: the time on a link that nothing else uses; ``fixed_ns[K]``: latency and calls, in which
    the link is free; ``least_ns[K]``: what the ranks themselves need. float64.
    """

    wire_ns: np.ndarray
    fixed_ns: np.ndarray
    least_ns: np.ndarray


@dataclass(frozen=True)
class Setting:
    """What a run depends on. ``graph``: nodes and dependencies; ``own_ns[N]``: how long each node runs;
    ``lasting_ns[N]``: how long a matched communication runs on after its last member has started, int64.
    ``demand``: where the network was changed. ``notes``: what was assumed, one sentence each."""

    graph: ReplayGraph
    own_ns: np.ndarray
    lasting_ns: np.ndarray
    demand: Demand | None = None
    doubts: tuple[Doubt, ...] = ()
    notes: tuple[str, ...] = ()

    def noting(self, sentence: str) -> Setting:
        """The same setting with one more note."""
        return replace(self, notes=(*self.notes, sentence))

    def doubting(
        self, cause: str, own_ns: np.ndarray | None = None, lasting_ns: np.ndarray | None = None
    ) -> Setting:
        """The same setting with one more doubt."""
        none = np.zeros(len(self.graph), np.int64)
        doubt = Doubt(
            cause,
            none if own_ns is None else np.rint(own_ns).astype(np.int64),
            none if lasting_ns is None else np.rint(lasting_ns).astype(np.int64),
        )
        return replace(self, doubts=(*self.doubts, doubt))


@dataclass(frozen=True)
class Steps:
    """The S steps of one trace: ``names``; ``first[S]``: the node with which each begins;
    ``measured_ns[S]``, None where the file holds no start times. A trace without steps has one, from its
    first node on (``first`` is -1)."""

    names: list[str]
    first: np.ndarray
    measured_ns: np.ndarray | None


@dataclass(frozen=True)
class Run:
    """A run as it was measured.

    ``operation[N]``: number of the matched communication that a node belongs to, -1 for none; its members are
    the K lists of ``members``. ``kind[N]``: index into ``replay.shares.KINDS``. ``names``: all node names,
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


def load_run(
    name: str,
    comm_groups: str | None = None,
    allow_missing: bool = False,
    skeletons: Skeletons = "auto",
) -> Run:
    """The run of which ``name`` is the NAME or a file. Raises ``TraceError`` for what can't be replayed, and
    as ``find_rank_sets`` does."""
    sets = find_rank_sets([name], allow_missing, skeletons)
    files = {0 if rank is None else rank: path for rank, path in sets[0].files.items()}
    groups = _comm_groups(sets[0], comm_groups)
    traces = [et_file.read(path) for path in with_progress(files.values(), "reading")]
    run = make_run(name, traces, list(files), groups)
    try:
        manifest = read_json(run_at(sets[0].name).manifest_file)
    except (OSError, ValueError, RecursionError):
        manifest = {}
    return replace(run, devices=devices_of(manifest), notes=sets[0].notes + run.notes)


def devices_of(manifest: Any) -> dict[int, str]:
    """Rank → device, as a capture's manifest tells it: {} where it doesn't, as it only confirms what the user
    says."""
    try:
        return {int(each["rank"]): str(each["device"] or "") for each in manifest["ranks"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _comm_groups(found: RankSet, comm_groups: str | None) -> dict[str, list[int]]:
    """Group id → ranks, from the file given or the one beside the .et files."""
    if comm_groups:
        return read_comm_groups(Path(comm_groups))
    return found.comm_groups() or {}


def together(run: Run) -> Run:
    """The run as if all ranks had begun at the same moment: without the skew of their starts."""
    if not run.release_ns.any():
        return run
    release = np.zeros_like(run.release_ns)
    start, end = run.schedule.run(run.graph.own_ns, run.measured.lasting_ns, release)
    return replace(run, release_ns=release, start_ns=start, end_ns=end)


def make_run(
    name: str,
    traces: Sequence[ExecutionTrace],
    ranks: Sequence[int],
    comm_groups: Mapping[str, Sequence[int]] | None = None,
) -> Run:
    """A run from traces in memory. Raises ``TraceError`` as ``build_graph`` and ``match`` do."""
    graph, matching, times = join(traces, ranks, comm_groups)
    lasting = times.lasting_ns(graph, matching)
    names, name_of = _names(graph)
    schedule = make_schedule(graph, matching)
    release = np.array(times.release_ns, np.int64)[graph.trace_of]
    start, end = schedule.run(graph.own_ns, lasting, release)
    predicted = any(trace.metadata.get("predicted") for trace in traces)
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
        steps=[_steps(graph, at) for at in range(len(traces))],
        operation=matching.operation,
        members=matching.members,
        kind=graph.gather([node_kinds(trace) for trace in graph.traces]),
        names=names,
        name_of=name_of,
        notes=[_PREDICTED] * predicted + matching.notes + times.notes + about_steps(traces),
    )


def _steps(graph: ReplayGraph, at: int) -> Steps:
    """The steps of trace ``at``."""
    trace, first = graph.traces[at], graph.first[at]
    names, rows = step_rows(trace)
    measured, end = measured_times(trace)
    node_of_row = np.empty(len(trace), np.int64)
    node_of_row[graph.row[first : graph.first[at + 1]]] = np.arange(first, graph.first[at + 1])
    if trace.metadata.get("predicted"):
        measured = None  # the file's times are those of an earlier prediction
    if not names:
        return Steps(["all"], np.array([-1]), None if measured is None else np.array([end]))
    bounds = None if measured is None else np.diff(np.append(measured[rows], end))
    return Steps(names, node_of_row[rows], bounds)


def _names(graph: ReplayGraph) -> tuple[list[str], np.ndarray]:
    """All names, and the index of each node's name, int64[N]."""
    known: dict[bytes, int] = {}
    columns = []
    for trace in graph.traces:
        code = np.array([known.setdefault(text, len(known)) for text in trace.names.table], np.int64)
        columns.append(code[trace.names.index])
    return [text.decode("utf-8", "replace") for text in known], graph.gather(columns)
