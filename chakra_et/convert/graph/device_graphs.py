"""Identify the kernels of a CUDA or HIP graph from a trace of the process that captured the graph.

A graph launch starts hundreds of kernels without enclosing operators. During the capture, operators launch
them one by one, but nothing runs: the launch calls, in order, are the kernels of the graph.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et.arrays import coded_pairs, unique
from chakra_et.convert.graph.linked import LinkedRank, link_rank
from chakra_et.convert.graph.operator_hierarchy import Hierarchy, find_hierarchy
from chakra_et.convert.graph.work import Work, divided, operator_around, work_of
from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.traces import device as device_trace
from chakra_et.traces.device_format import DRIVER, RUNTIME
from chakra_et.traces.operators import operators_of
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


@dataclass(eq=False, repr=False)
class Captured:
    """The kernels of a rank's graphs and what launched them. ``row[i]``: row of the launch call of device row
    i
    in ``captures``, or -1; ``certain[i]``: whether all captures that fit agree on its arguments."""

    captures: Captures | None
    row: np.ndarray
    certain: np.ndarray
    findings: Findings


def load_captures(path: Path, limits: Limits = DEFAULT_LIMITS) -> Captures:
    """Read the device trace of a capture. Raises ``TraceError`` if it contains no capture."""
    device = device_trace.load(path, limits, operators=True)
    rank = link_rank(operators_of(device), device, allow_unlinked=True)
    graphs: list[list[int]] = []
    of_name = {code: _role(name) for code, name in enumerate(device.names)}
    calls = np.flatnonzero((device.category == RUNTIME) | (device.category == DRIVER))
    for thread in unique(device.thread[calls]).tolist():
        launches: list[int] | None = None
        last_end = -1
        for row in calls[device.thread[calls] == thread].tolist():
            role = of_name[int(device.name[row])]
            if role == "begin":
                launches = []
            elif role == "end" and launches is not None:
                graphs.append(launches)
                launches = None
            elif role == "launch" and launches is not None and device.start[row] >= last_end:
                launches.append(row)  # a driver call within a runtime call is the same launch
                last_end = int(device.end[row])
    graphs = [launches for launches in graphs if launches]
    if not graphs:
        raise TraceError(
            f"{path}: contains no graph capture: give a trace of the process that covers the captures, from "
            "before cudaStreamBeginCapture to after cudaStreamEndCapture."
        )
    return Captures(rank, find_hierarchy(rank), graphs)


def _role(name: str) -> str:
    for role, pattern in (("begin", BEGIN), ("end", END), ("launch", LAUNCH)):
        if pattern.fullmatch(name):
            return role
    return ""


def match_captures(rank: LinkedRank, captures: Captures | None) -> Captured:
    """Find the capture of each graph that the rank launched.

    A capture matches if it has as many launches as the graph has kernels and copies, with the same kernel
    names if the capture records them (HIP does, CUDA does not).
    """
    device = rank.device
    found = Captured(
        captures, np.full(len(device), -1, dtype=np.int64), np.zeros(len(device), dtype=bool), Findings()
    )
    of_launch: dict[int, list[int]] = defaultdict(list)
    launching = np.array([GRAPH_LAUNCH in name for name in device.names], dtype=bool)
    rows = np.flatnonzero(rank.calls >= 0)
    rows = rows[launching[device.name[rank.calls[rows]]]]
    for row in rows.tolist():
        of_launch[int(rank.calls[row])].append(row)
    if captures is None:
        found.findings.add("graph-kernel", len(rows))
        return found
    for kernels in of_launch.values():
        fitting = [
            pairs for launches in captures.graphs if (pairs := _paired(rank, kernels, captures, launches))
        ]
        if not fitting:
            found.findings.add("graph-not-captured")
            continue
        for row, launch in fitting[0].items():
            found.row[row] = launch
            found.certain[row] = all(
                _arguments(captures, pairs[row]) == _arguments(captures, launch) for pairs in fitting[1:]
            )
        found.findings.add("graph-captured", len(kernels))
        found.findings.add("graph-ambiguous", int((~found.certain[kernels]).sum()))
    return found


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


def _arguments(captures: Captures, launch: int) -> tuple[bytes, ...]:
    rank = captures.rank
    operator = operator_around(rank, captures.hierarchy.parent, launch)
    if operator < 0:
        return ()
    row = int(rank.link.host_row[operator])
    return tuple(column[row] for column in rank.host.inputs)


def with_captured_work(rank: LinkedRank, work: Work, captured: Captured) -> Work:
    """``work``, with the work of captured kernels added."""
    if captured.captures is None:
        return work
    operations, moved = work.operations.copy(), work.bytes.copy()
    source, parent = captured.captures.rank, captured.captures.hierarchy.parent
    rows = np.flatnonzero((captured.row >= 0) & captured.certain)
    operator = parent[captured.row[rows]]
    rows, operator = rows[operator >= 0], operator[operator >= 0]
    # One operator of a capture launches once for each launch of the graph.
    launched, of = coded_pairs(rank.calls[rows], operator)
    works = [work_of(source, parent, operator) or (0, 0) for _, operator in launched]
    length = (rank.device.end - rank.device.start)[rows]
    operations[rows], moved[rows] = divided(np.array(works, dtype=np.int64).reshape(-1, 2), of, length)
    return replace(work, operations=operations, bytes=moved)


def with_captured_modules(hierarchy: Hierarchy, captured: Captured) -> Hierarchy:
    """``hierarchy``, with the modules and phases of captured kernels added."""
    if captured.captures is None:
        return hierarchy
    other = captured.captures.hierarchy
    rows = np.flatnonzero(captured.row >= 0)
    launch = captured.row[rows]
    module, phase = hierarchy.module.copy(), hierarchy.phase.copy()
    module[rows] = np.where(other.module[launch] >= 0, other.module[launch] + len(hierarchy.modules), -1)
    phase[rows] = other.phase[launch]
    return replace(hierarchy, module=module, modules=[*hierarchy.modules, *other.modules], phase=phase)


def captured_operators(captured: Captured, rows: np.ndarray) -> np.ndarray:
    """int64[rows]: the row of the operator in the capture that launched each device row, -1 for none."""
    found = np.full(len(rows), -1, dtype=np.int64)
    if captured.captures is not None:
        rank, parent = captured.captures.rank, captured.captures.hierarchy.parent
        for at in np.flatnonzero(captured.row[rows] >= 0).tolist():
            found[at] = operator_around(rank, parent, int(captured.row[rows[at]]))
    return found
