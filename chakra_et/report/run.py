"""One run in memory: its ranks' traces, joined, replayed, and laid out on one clock."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from chakra_et.convert.inputs import files_of, read_ranks, with_et_files
from chakra_et.diagnose.rates import KernelClass, Rates, find_rates, kernel_classes
from chakra_et.diagnose.verdict import Diagnosis, diagnose
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import kinds_of_edges, parents
from chakra_et.et.sets import RankSet
from chakra_et.files import read_json
from chakra_et.redact import redacted
from chakra_et.simulate.critical_path import CriticalPath, critical_path
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.measured_steps import about_steps
from chakra_et.simulate.run import Run, devices_of, make_run, together
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.simulate.timing import align, waits
from chakra_et.traces.sets import TraceSet

PHASES = ("forward", "backward", "optimizer")
NODE_KINDS = (*KINDS[:-2], "host overhead", "device overhead", "annotation", "python")
ANNOTATION = NODE_KINDS.index("annotation")
COMM_NAMES = (*(kind.name.lower().replace("_", "-") for kind in CollectiveType), "send", "receive", "unknown")
LONGEST_NAME = 1000
Base = Literal["measured", "replayed", "planned", "predicted"]


@dataclass(frozen=True)
class ReportRun:
    """The N nodes of a run, numbered as in ``graph``.

    ``start_ns``, ``end_ns`` int64[N]: the times that are shown, the earliest node at 0; ``base`` says whether
    they were measured, replayed (a file without start times), planned or predicted. ``wait_ns`` int64[N]: the
    part of a communication, at its start, in which it waited for other ranks. ``job``: the run as predictions
    take it; ``path``: its critical path where all ranks begin together. ``apart``: why the ranks can't be
    replayed together, so that ``job`` has each by itself. ``arrivals``: ``matching.last_members`` and starts
    (int64[N], ns) where all begin together, so that nobody's late recording makes others wait.
    ``manifest`` and ``conversion``: the files of these names, {} where there are none. ``lacks``: one
    sentence per thing that is missing.
    """

    job: Run
    start_ns: np.ndarray
    end_ns: np.ndarray
    wait_ns: np.ndarray
    base: Base
    path: CriticalPath
    arrivals: tuple[np.ndarray, np.ndarray]
    manifest: Mapping[str, Any]
    conversion: Mapping[str, Any]
    lacks: list[str]
    apart: str

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def graph(self) -> ReplayGraph:
        return self.job.graph

    @property
    def traces(self) -> list[ExecutionTrace]:
        return self.graph.traces

    @property
    def ranks(self) -> list[int]:
        return self.graph.ranks

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What bounds the run; None where the ranks can't be replayed together."""
        return None if self.apart else diagnose(self.job)

    @cached_property
    def rates(self) -> Rates:
        """How fast kernels are, against the GPU's peak and what is usual."""
        return find_rates(self.job)

    @property
    def kernel_classes(self) -> list[KernelClass]:
        """Device work by class."""
        return [] if self.base == "planned" else kernel_classes(self.job, self.rates)

    @cached_property
    def ids(self) -> np.ndarray:
        """The nodes' ids in their files, int64[N]."""
        return self.graph.gather([trace.ids.astype(np.int64) for trace in self.traces])

    @cached_property
    def parent(self) -> np.ndarray:
        """The node of the enclosing operator of each node, int64[N], -1 for none."""
        nodes = self.graph.scatter(np.arange(len(self.graph)))
        rows = [np.where(trace.column("parent", -1) >= 0, parents(trace), -1) for trace in self.traces]
        found = [np.where(row >= 0, node[row], -1) for row, node in zip(rows, nodes, strict=True)]
        return self.graph.gather(found)

    @cached_property
    def names(self) -> tuple[np.ndarray, list[str]]:
        """The name of each node as an index, int64[N], into the names of the run."""
        return self.job.name_of, [text[:LONGEST_NAME] for text in self.job.names]

    @cached_property
    def node_kinds(self) -> np.ndarray:
        """Index into ``NODE_KINDS`` of each node, int64[N]."""
        kind = self.job.kind.copy()
        kind[self.graph.codes("kind", ("annotation",))[0] == 0] = ANNOTATION
        return kind

    @cached_property
    def edge_kinds(self) -> np.ndarray:
        """Index into ``EDGE_NAMES`` of each dependency of the run's graph, int64[E]."""
        return np.concatenate([kinds_of_edges(trace) for trace in self.traces])

    @cached_property
    def comm_types(self) -> np.ndarray:
        """Index into ``COMM_NAMES`` of each node, int64[N]; "unknown" for what is no communication."""
        graph = self.graph
        kind = graph.attribute("comm_type", -1)
        unknown = len(COMM_NAMES) - 1
        known = (graph.types == NodeType.COMM_COLL) & (kind >= 0) & (kind < len(CollectiveType))
        choices = [graph.types == NodeType.COMM_SEND, graph.types == NodeType.COMM_RECV, known]
        return np.select(choices, [unknown - 2, unknown - 1, kind], unknown)


def load(chosen: RankSet | TraceSet) -> ReportRun:
    """Read a run; traces are converted first. Raises ``TraceError`` for what can't be read or joined."""
    files = files_of(chosen)
    with with_et_files(chosen) as (run, lacks):
        print(*(f"warning: {note}\n" for note in run.notes), sep="", end="", file=sys.stderr)
        lacks += run.notes
        traces = read_ranks(run, "off")
        conversion = _json(run.run.report_file, lacks)
    manifest = redacted(_json(files.manifest_file, lacks))
    return assemble(files.name, traces, list(run.files), run.groups, manifest, conversion, lacks)


def _json(path: Path, lacks: list[str]) -> dict[str, Any]:
    """A JSON object from beside the .et files; {} where there is none, with a sentence if it is damaged."""
    if not path.is_file():
        return {}
    try:
        return read_json(path, dict[str, Any])
    except (OSError, ValueError) as error:
        lacks.append(f"{path.name} can't be read: {error}")
        return {}


def assemble(
    name: str,
    traces: list[ExecutionTrace],
    ranks: list[int],
    groups: Mapping[str, Sequence[int]],
    manifest: Mapping[str, Any],
    conversion: Mapping[str, Any],
    lacks: Iterable[str] = (),
) -> ReportRun:
    """Join, replay and lay out the traces of one run. Raises ``TraceError`` for what can't be joined."""
    notes, apart = [*lacks], ""
    try:
        job = make_run(name, traces, ranks, groups)
    except TraceError as error:
        try:
            job = make_run(name, traces, ranks, groups, apart=True)
        except TraceError as broken:
            raise TraceError(f"{name}: {broken}") from None
        apart = f"the ranks can't be replayed together: {error}"
        notes.append(apart)
    job = replace(job, devices=devices_of(manifest))
    graph, matching, aligned = job.graph, job.matching, together(job)
    notes += [*about_steps(traces, job.steps), *matching.notes, *job.timing.notes]
    arrivals = matching.last_members(aligned.start_ns), aligned.start_ns
    path = critical_path(graph, *arrivals, aligned.end_ns)
    base: Base = "measured"
    if graph.local_start_ns is not None:
        start, wait = _measured(job, graph.local_start_ns, notes)
        end = start + graph.duration_ns
        if any(trace.metadata.get("schema") == "fasop" for trace in traces):
            base = "planned"
        elif any(trace.metadata.get("predicted") for trace in traces):  # by `chakra-et predict --output`
            base = "predicted"
    else:
        base, start, end = "replayed", job.start_ns, job.end_ns
        wait = waits(matching, start, end - start)
    wait = np.clip(wait, 0, end - start)
    start, end = start - start.min(), end - start.min()
    return ReportRun(job, start, end, wait, base, path, arrivals, manifest, conversion, notes, apart)


def _measured(job: Run, start: np.ndarray, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Recorded starts on one clock, and what of each communication's time was waiting; ns."""
    graph = job.graph
    clocks = graph.clock_ns
    if clocks is None and job.matching.channels:
        aligned = align(graph, job.matching, start)
        clocks = None if aligned is None else aligned[0]
    if clocks is None:
        clocks = -np.minimum.reduceat(start, graph.first[:-1])
        notes.append("the ranks' clocks can't be compared, so each rank is shown from its own first node on")
    wait = graph.attribute("wait_micros", 0) * 1000
    if not wait.any():
        wait = graph.duration_ns - job.timing.transfer_ns
    return start + clocks[graph.trace_of], wait
