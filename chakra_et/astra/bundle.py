"""Write the folder that ASTRA-sim runs: prepared ranks, groups, network, system, script and expectation."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from chakra_et.astra import bundle_texts, network_dimensions
from chakra_et.astra.prepare import Keep, Ranks, larger_sizes, prepared, trimmed, with_dependencies
from chakra_et.cost.topology import Topology
from chakra_et.cost.topology_text import read_topology
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et import record
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts, with_metadata
from chakra_et.et.sets import Groups
from chakra_et.files import scratch_folder, write_json, write_text
from chakra_et.names import RunFiles
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.measured_steps import measured_times
from chakra_et.simulate.replays import astra_replay, missing_order
from chakra_et.simulate.timing import Timing
from chakra_et.validate.astra import check_sizes, group_file_problems
from chakra_et.validate.check import Problem, check, check_together

Traces = Mapping[int, ExecutionTrace]
"""By rank; ranks whose files are links to one have one trace."""
Expected = dict[str, dict[int, "float | None"]]
"""What a simulation should answer, µs by rank from the rank's start to the end of its last node; empty where
that wasn't computed. ``measured``: recorded, None without start times. ``simulated``: nodes issued as
ASTRA-sim does, communication with the times of its analytical network, all ranks starting together."""
EXPECTED_FILE = "expected.json"
PLANNED_PERCENT = 3.0
"""How far a planned set's bundle on the plan's network may be from the planned step."""


def write_bundle(ranks: Ranks, network: str, folder: Path, keep: Keep) -> list[str]:
    """Write the bundle as ``folder`` and return its notes, one sentence each.

    ``network``: the text that names a topology. Nothing is written where that doesn't fit, a file can't be
    read or the set isn't valid: raises ``TraceError``, in one sentence.
    """
    name, groups, count = ranks.set.run.name, ranks.set.groups, len(ranks.set.files)
    topology = read_topology(network, count)
    for problem in group_file_problems(name, groups):
        raise TraceError(f"{name}: {problem}")
    if folder.is_dir() and not (folder / EXPECTED_FILE).is_file() and any(folder.iterdir()):
        raise TraceError(f"{folder}: holds other files: give a new folder, or that of an older bundle")
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"{folder}: is a file: give a folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder) as scratch:
        notes = _fill(scratch, ranks, topology, keep)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    return notes


def _fill(scratch: Path, ranks: Ranks, topology: Topology, keep: Keep) -> list[str]:
    name, groups, count = ranks.set.run.name, ranks.set.groups, len(ranks.set.files)
    several = sum(1 < len(members) < count for members in groups.values()) > 1
    simulated = network_dimensions.simulated_dimensions(topology, several)
    traces, changed = _prepared(ranks, keep)
    if topology.effective:
        simulated = network_dimensions.with_shorter_messages(traces, groups, simulated)
        traces = _each(traces, partial(network_dimensions.effective_sizes, groups=groups, topology=simulated))
    talk = _each(traces, lambda trace, _: trace.communication())
    _refuse(name, check_together(talk, groups, {rank: f"rank {rank}" for rank in talk}))
    notes = [*simulated.notes, *_notes(simulated, groups, talk)]
    answer: Expected = {"measured": {}, "simulated": {}}
    all_modelled = all(map(_modelled, traces.values()))
    traces, added = _ordered(traces, groups)
    if all_modelled:
        notes.append("the compute nodes have no durations, so that expected.json has no times")
    else:
        answer = expected(traces, groups, simulated)
        notes += _planned(talk, answer, simulated)
    changed = [*ranks.steps, *added, *changed]
    times = [time for time in answer["simulated"].values() if time is not None]
    record.write_files(RunFiles(scratch, name), ((rank, id(trace), trace) for rank, trace in traces.items()))
    write_json(scratch / f"{name}_comm_groups.json", groups)
    write_text(scratch / "network.yml", bundle_texts.network_yml(simulated))
    write_json(scratch / "system.json", bundle_texts.system_json(simulated, all_modelled))
    write_json(scratch / "memory.json", bundle_texts.MEMORY)
    bundle_texts.write_script(scratch, name, count)
    protocol = {
        "sends": "rendezvous",
        "handshake_bytes": network_dimensions.HANDSHAKE_BYTES,
        "handshake": [network_dimensions.handshake(dimension) / 1000 for dimension in simulated.dimensions],
    }
    about = {"bundle_version": 1, "name": name, "ranks": count, "topology": simulated.name, "unit": "us"}
    write_json(scratch / EXPECTED_FILE, {**about, "protocol": protocol, **answer, "notes": notes})
    text = bundle_texts.readme(name, count, simulated, keep, all_modelled, times, changed, notes)
    write_text(scratch / "README.md", text)
    return [*changed, *notes]


def _each(traces: Traces, change: Callable[[ExecutionTrace, int], ExecutionTrace]) -> Traces:
    """The traces as ``change`` makes them, by each different one and the first rank that has it."""
    made: dict[int, ExecutionTrace] = {}
    for rank, trace in traces.items():
        if id(trace) not in made:
            made[id(trace)] = change(trace, rank)
    return {rank: made[id(trace)] for rank, trace in traces.items()}


def _prepared(ranks: Ranks, keep: Keep) -> tuple[Traces, list[str]]:
    """The traces by rank, as ASTRA-sim runs them, and sentences on what was changed."""
    groups, count = ranks.set.groups, len(ranks.set.files)
    contents, lost, changes = record.contents(ranks.set.files.items()), 0, Counter[str]()
    read: dict[int, ExecutionTrace] = {}
    for path, members in contents:
        trace, cut = et_file.read(path), 0
        if ranks.captured is not None:
            trace, cut = trimmed(trace, ranks.captured)
        lost += cut * len(members)
        # Without the record of a conversion there are no options of one: the folder is whole as it is.
        rank = None if len(members) > 1 else members[0]
        trace = with_metadata(trace, rank=rank, world_size=count, conversion_options=None)
        read |= dict.fromkeys(members, trace)
    larger = larger_sizes(_each(dict(sorted(read.items())), lambda trace, _: trace.communication()), groups)
    traces: dict[int, ExecutionTrace] = {}
    for path, members in contents:
        try:
            trace, counts = prepared(read[members[0]], groups, count, keep, larger.get(members[0], {}))
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        changes.update({key: changed * len(members) for key, changed in counts.items()})
        _refuse(ranks.set.run.name, check(trace, groups, str(path)))
        for large in check_sizes(trace, groups, count):
            raise TraceError(f"{path}: node {trace.ids[large.rows[0]]} {large.message}")
        traces |= dict.fromkeys(members, trace)
    cut_off = f"{lost:,} messages to and from absent ranks run as compute, for their recorded durations"
    counted = [f"{count:,} {what}" for what, count in sorted(changes.items())]
    return dict(sorted(traces.items())), [cut_off] * (lost > 0) + counted


def _refuse(name: str, problems: Sequence[Problem]) -> None:
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise TraceError(f"{name} doesn't validate: {str(errors[0]).removeprefix('error: ')}{more}")


def _modelled(trace: ExecutionTrace) -> bool:
    """Whether the computing has no durations, but what ASTRA-sim's roofline model needs."""
    compute = (trace.types == NodeType.COMP) & (trace.column("is_cpu_op") == 0)
    has_work = (trace.column("num_ops") > 0) & (trace.column("tensor_size") > 0)
    return bool(compute.any() and has_work[compute].all() and not trace.duration_micros[compute].any())


def _ordered(traces: Traces, groups: Groups) -> tuple[Traces, list[str]]:
    """The traces with one order of collectives and sends on all ranks, and a sentence on it."""
    graph = build_graph(list(traces.values()), list(traces))
    pairs = missing_order(graph, match(graph, groups))
    if not len(pairs):
        return traces, []
    trace_of = graph.trace_of[pairs[:, 0]]
    made, ordered = dict(traces), {}
    for at in np.unique(trace_of).tolist():
        rank, rows = graph.ranks[at], graph.row[pairs[trace_of == at]]
        like = id(traces[rank]), rows.tobytes()
        if like not in ordered:
            ordered[like] = with_dependencies(traces[rank], rows[:, 0], rows[:, 1])
        made[rank] = ordered[like]
    return made, [
        f"{len(pairs):,} dependencies were added: they keep collectives and sends in one order on all ranks, "
        "without which ranks can wait for each other, as ASTRA-sim has one under way per rank"
    ]


def _notes(topology: Topology, groups: Groups, talk: Mapping[int, ExecutionTrace]) -> Iterator[str]:
    if not topology.effective:
        yield from network_dimensions.crossings(talk, groups, topology)
    kinds = (trace.column("comm_type", -1) for trace in talk.values())
    if broadcasts := sum(int((kind == CollectiveType.BROADCAST).sum()) for kind in kinds):
        yield f"{broadcasts:,} broadcasts last as recorded and wait for nobody"
    if uneven := sum(int((texts(trace, "comm_in_split")[1] >= 0).sum()) for trace in talk.values()):
        yield f"{uneven:,} all-to-alls have uneven splits: ASTRA-sim has every member send equal shares"
    used = {name for trace in talk.values() for name in texts(trace, "pg_name")[0]}
    if unused := len(set(groups) - used):
        yield f"{unused} groups of the group file aren't used by any node"


def expected(traces: Traces, groups: Groups, topology: Topology) -> Expected:
    """What a simulation of a bundle should answer, from the prepared ``traces`` of all ranks. Raises
    ``TraceError`` where the ranks wait for ever."""
    ranks = list(traces)
    graph = build_graph(list(traces.values()), ranks)
    network = network_dimensions.network_times(graph, groups, topology)
    at_once = Timing([0] * len(ranks), graph.duration_ns)
    _, end = astra_replay(graph, match(graph, groups), at_once, network)
    simulated = (np.maximum.reduceat(end, graph.first[:-1]) / 1000).tolist()
    measured = zip(ranks, map(measured_times, traces.values()), strict=True)
    return {
        "measured": {rank: None if nodes is None else end / 1000 for rank, (nodes, end) in measured},
        "simulated": dict(zip(ranks, simulated, strict=True)),
    }


def _planned(talk: Mapping[int, ExecutionTrace], answer: Expected, topology: Topology) -> Iterator[str]:
    """How far ASTRA-sim's network is from what a planned set was planned with. Raises ``TraceError`` where
    the network is the plan's and can't express it."""
    planned = max((trace.metadata_int("planned_step_micros") or 0 for trace in talk.values()), default=0)
    if planned:
        expects = max(time or 0 for time in answer["simulated"].values())
        error = 100 * (expects / planned - 1)
        times = f"{planned / 1000:,.3f} ms for the step, and {expects / 1000:,.3f} ms ({error:+.1f}%)"
        if topology.effective and abs(error) > PLANNED_PERCENT:
            raise TraceError(
                f"the planner has {times} are expected of ASTRA-sim, which has one message or collective of "
                "a rank under way at a time: it can't simulate this plan"
            )
        yield f"the planner has {times} are expected on this network"
