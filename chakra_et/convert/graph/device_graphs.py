"""Identify the kernels of a CUDA or HIP graph from a trace of the process that captured the graph.

A graph launch starts hundreds of kernels without enclosing operators. During the capture, operators launch
them one by one, but nothing runs: the launch calls, in order, are the kernels of the graph.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_et.arrays import coded_pairs
from chakra_et.convert.graph.launches import is_call
from chakra_et.convert.graph.linked import LinkedRank, link_rank
from chakra_et.convert.graph.operators import (
    Hierarchy,
    divided,
    find_hierarchy,
    operator_around,
    work_of,
)
from chakra_et.convert.graph.timeline import named
from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.traces import device as device_trace
from chakra_et.traces.device import operators_of
from chakra_et.traces.records import DEFAULT_LIMITS, Limits

BEGIN = re.compile(r"(cuda|hip|cu)StreamBeginCapture\w*")
END = re.compile(r"(cuda|hip|cu)StreamEndCapture\w*")
LAUNCH = re.compile(
    r"(cuda|hip|cu)\w*(LaunchKernel|LaunchCooperativeKernel|Memcpy\w*Async|Memset\w*Async)\w*"
)
GRAPH_LAUNCH = "GraphLaunch"


@dataclass(eq=False, repr=False)
class Captures:
    """The graphs captured in one trace. ``graphs``: the rows of each graph's launch calls, in order."""

    rank: LinkedRank
    hierarchy: Hierarchy
    graphs: list[list[int]]

    def operator(self, launch: int) -> int:
        """The row of the operator around a launch call, -1 for none."""
        return operator_around(self.rank, self.hierarchy.parent, launch)

    def arguments(self, launch: int) -> tuple[bytes, ...]:
        """The arguments of the operator around a launch call."""
        operator = self.operator(launch)
        row = int(self.rank.link.host_row[operator])
        return tuple(column[row] for column in self.rank.host.inputs) if operator >= 0 else ()


@dataclass(eq=False, repr=False)
class Captured:
    """The kernels of a rank's graphs and what launched them. ``row[i]``: row of the launch call of device row
    i in ``captures``, or -1; ``certain[i]``: whether all captures that fit agree on its arguments."""

    captures: Captures
    row: np.ndarray
    certain: np.ndarray

    def operators(self, rows: np.ndarray) -> np.ndarray:
        """int64[rows]: the row of the operator in the capture that launched each device row, -1 for none."""
        launches = self.row[rows].tolist()
        found = [self.captures.operator(launch) if launch >= 0 else -1 for launch in launches]
        return np.array(found, dtype=np.int64)


def load_captures(path: Path, limits: Limits = DEFAULT_LIMITS) -> Captures:
    """Read the device trace of a capture. Raises ``TraceError`` if it contains no capture."""
    device = device_trace.load(path, limits, operators=True)
    rank = link_rank(operators_of(device), device, allow_unlinked=True)
    graphs: list[list[int]] = []
    begins, ends, launching = (named(device, pattern.fullmatch) for pattern in (BEGIN, END, LAUNCH))
    calls = np.flatnonzero(is_call(device) & (begins | ends | launching))
    for thread in np.unique(device.thread[calls]).tolist():
        launches: list[int] | None = None
        last_end = -1
        for row in calls[device.thread[calls] == thread].tolist():
            if begins[row]:
                launches = []
            elif launches is None:
                continue
            elif ends[row]:
                graphs.append(launches)
                launches = None
            elif device.start[row] >= last_end:
                launches.append(row)  # a driver call within a runtime call is the same launch
                last_end = int(device.end[row])
    graphs = [launches for launches in graphs if launches]
    if not graphs:
        raise TraceError(
            f"{path}: contains no graph capture: give a trace of the process that covers the captures, from "
            "before cudaStreamBeginCapture to after cudaStreamEndCapture."
        )
    return Captures(rank, find_hierarchy(rank), graphs)


def match_captures(rank: LinkedRank, captures: Captures | None) -> tuple[Captured | None, Findings]:
    """Find the capture of each graph that the rank launched.

    A capture matches if it has as many launches as the graph has kernels and copies, with the same kernel
    names if the capture records them (HIP does, CUDA does not).
    """
    device, findings = rank.device, Findings()
    of_launch: dict[int, list[int]] = defaultdict(list)
    launching = named(device, lambda name: GRAPH_LAUNCH in name)
    rows = np.flatnonzero((rank.calls >= 0) & launching[rank.calls])
    for row in rows.tolist():
        of_launch[int(rank.calls[row])].append(row)
    if captures is None:
        findings.add("graph-kernel", len(rows))
        return None, findings
    found = Captured(captures, np.full(len(device), -1, dtype=np.int64), np.zeros(len(device), dtype=bool))
    for kernels in of_launch.values():
        matches = [_paired(rank, kernels, captures, launches) for launches in captures.graphs]
        fitting = [pairs for pairs in matches if pairs]
        if not fitting:
            findings.add("graph-not-captured")
            continue
        for row, launch in fitting[0].items():
            found.row[row] = launch
            texts = captures.arguments(launch) if len(fitting) > 1 else ()
            found.certain[row] = all(captures.arguments(pairs[row]) == texts for pairs in fitting[1:])
        findings.add("graph-captured", len(kernels))
        findings.add("graph-ambiguous", int((~found.certain[kernels]).sum()))
    return found, findings


def _paired(
    rank: LinkedRank, kernels: list[int], captures: Captures, launches: list[int]
) -> dict[int, int] | None:
    """Row of the rank → row of its launch call in the capture; None if the two do not match."""
    if len(kernels) != len(launches):
        return None
    device, recorded = rank.device, captures.rank.device.launched
    names = [device.names[device.name[row]] for row in kernels]
    if not all(row in recorded for row in launches):
        fits = all(recorded.get(launch, name) == name for launch, name in zip(launches, names, strict=True))
        return dict(zip(kernels, launches, strict=True)) if fits else None
    if Counter(names) != Counter(recorded[row] for row in launches):
        return None
    # Match by name: streams of a graph run concurrently, not in the order of the capture.
    of_name = defaultdict(list)
    for row in reversed(launches):
        of_name[recorded[row]].append(row)
    return {row: of_name[name].pop() for row, name in zip(kernels, names, strict=True)}


def add_captured(
    rank: LinkedRank, hierarchy: Hierarchy, work: tuple[np.ndarray, np.ndarray], captured: Captured
) -> None:
    """Add the modules, phases and work of captured kernels to ``hierarchy`` and ``work``."""
    source, other = captured.captures.rank, captured.captures.hierarchy
    rows = np.flatnonzero(captured.row >= 0)
    launch = captured.row[rows]
    module = other.module[launch]
    hierarchy.module[rows] = np.where(module >= 0, module + len(hierarchy.modules), -1)
    hierarchy.modules += other.modules
    hierarchy.phase[rows] = other.phase[launch]

    rows = rows[captured.certain[rows]]
    operator = other.parent[captured.row[rows]]
    rows, operator = rows[operator >= 0], operator[operator >= 0]
    # One operator of a capture launches once for each launch of the graph.
    launched, of = coded_pairs(rank.calls[rows], operator)
    works = [work_of(source, other.parent, operator) or (0, 0) for _, operator in launched]
    length = (rank.device.end - rank.device.start)[rows]
    work[0][rows], work[1][rows] = divided(np.array(works, dtype=np.int64).reshape(-1, 2), of, length)
