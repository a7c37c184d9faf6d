"""The predicted run as .et files, which every command reads as it reads measured ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, Ragged
from chakra_et.et.memory import is_memory
from chakra_et.et.node_attributes import with_integers, with_metadata
from chakra_et.et.record import commit
from chakra_et.files import scratch_folder, write_json
from chakra_et.names import RunFiles, run_at
from chakra_et.predict.predict import Prediction
from chakra_et.simulate.joint import ReplayGraph


def check_output(prefix: str | os.PathLike[str]) -> None:
    """Raises ``TraceError`` where PREFIX names a run already: its files may be measured ones, or those of
    more ranks than would be replaced."""
    files = run_at(str(prefix))
    known = [path for _, path in files.et_files()]
    known += [path for path in (files.first_et_file, files.groups_file) if path.exists()]
    if known:
        raise TraceError(
            f"--output {prefix}: {known[0]} is there already: choose another name, or remove the files"
        )


def write_prediction(prediction: Prediction, prefix: str | os.PathLike[str]) -> list[Path]:
    """Write ``PREFIX.RANK.et`` with predicted times, and ``PREFIX_comm_groups.json``; the paths of the
    former.

    Names, ids and attributes are those of the run, so that nodes can be compared one by one. Dependencies are
    too, but where ``--overlap`` changed them. Raises ``TraceError`` where there are files of that name.
    """
    run = prediction.changed
    return write_traces(predicted_traces(prediction), run.graph.ranks, run.comm_groups, prefix)


def predicted_traces(prediction: Prediction) -> list[ExecutionTrace]:
    """The traces of all ranks with predicted times."""
    run, timeline = prediction.changed, prediction.after
    matched = (run.operation >= 0).astype(np.int64)
    columns = (timeline.start_ns, timeline.end_ns, timeline.lasting_ns, matched)
    of_rank = zip(run.graph.traces, *(run.graph.scatter(times) for times in columns), strict=True)
    traces = [_predicted(*each) for each in of_rank]
    if timeline.setting.graph.source is run.graph.source:
        return traces
    return [_with_dependencies(each, at, timeline.setting.graph) for at, each in enumerate(traces)]


def write_traces(
    traces: Sequence[ExecutionTrace],
    ranks: Sequence[int],
    comm_groups: Mapping[str, Sequence[int]],
    prefix: str | os.PathLike[str],
) -> list[Path]:
    """Write ``PREFIX.RANK.et`` and ``PREFIX_comm_groups.json``; the paths of the former. Raises
    ``TraceError`` where there are files of that name."""
    check_output(prefix)
    files = run_at(os.fspath(prefix))
    files.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(files.folder / files.name) as scratch:
        hidden = RunFiles(scratch, files.name)
        for rank, trace in zip(ranks, traces, strict=True):
            et_file.write(hidden.et_file(rank), trace)
        if comm_groups:
            write_json(hidden.groups_file, {name: list(ranks) for name, ranks in comm_groups.items()})
        commit(scratch, files, max(trace.metadata_int("world_size") or 0 for trace in traces), {})
    return [files.et_file(rank) for rank in ranks]


def _predicted(
    trace: ExecutionTrace, start: np.ndarray, end: np.ndarray, lasting: np.ndarray, matched: np.ndarray
) -> ExecutionTrace:
    """The trace with new times, µs. All ranks count from the moment 0 of the joint replay."""
    begin_us, end_us = start // 1000, end // 1000
    duration = end_us - begin_us
    # What the changed run would allocate is not predicted.
    attributes = {name: column for name, column in trace.attributes.items() if not is_memory(name)}
    trace = replace(trace, attributes=attributes)
    rows = np.flatnonzero(matched)
    if len(rows) and "wait_micros" in attributes:
        transfer = np.minimum(lasting // 1000, duration)
        for name, values in (("transfer_micros", transfer), ("wait_micros", duration - transfer)):
            trace = with_integers(trace, name, dict(zip(rows.tolist(), values[rows].tolist(), strict=True)))
    trace = with_metadata(
        trace,
        **dict.fromkeys(("measured_end_micros", "clock_spread_ns", "conversion_report")),
        trace_start_ns=0,
        clock_offset_ns=0,
        predicted=True,
        measured_trace_start_ns=int(trace.metadata.get("trace_start_ns", 0) or 0),
    )
    return replace(
        trace,
        # A start of 0 in all nodes means a file without times.
        start_micros=(begin_us + 1).astype(np.uint64),
        duration_micros=duration.astype(np.uint64),
    )


def _with_dependencies(trace: ExecutionTrace, at: int, graph: ReplayGraph) -> ExecutionTrace:
    """The trace with the dependencies of the changed graph, all of them data dependencies."""
    first, last = graph.first[at], graph.first[at + 1]
    inside = (graph.target >= first) & (graph.target < last)
    target, source = np.unique(
        np.stack([graph.row[graph.target[inside]], graph.row[graph.source[inside]]]), axis=1
    )
    offsets = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=len(trace)))))
    none = Ragged(np.zeros(len(trace) + 1, np.int64), np.zeros(0, np.uint64))
    # One letter for each data dependency, which no longer holds.
    attributes = {name: column for name, column in trace.attributes.items() if name != "dep_kinds"}
    deps = Ragged(offsets.astype(np.int64), trace.ids[source])
    return replace(trace, data_deps=deps, ctrl_deps=none, attributes=attributes)
