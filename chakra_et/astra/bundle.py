"""Write the folder that ASTRA-sim runs: prepared ranks, groups, network, system, script and expectation."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chakra_et.astra import bundle_texts
from chakra_et.astra.expected import Expected, expected
from chakra_et.astra.network_dimensions import Crossings, crossings, effective_sizes, simulated_dimensions
from chakra_et.astra.prepare import Keep, prepared, sentences, with_dependencies
from chakra_et.astra.trim_ranks import trimmed, trimmed_groups
from chakra_et.cost.network_sources import read_topology
from chakra_et.cost.topology import Topology
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts as string_column
from chakra_et.et.node_attributes import with_metadata
from chakra_et.files import scratch_folder, write_json, write_text
from chakra_et.job.sets import Groups, InputSet
from chakra_et.names import RunFiles
from chakra_et.simulate.collective_order import missing_order
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.replays import LARGEST_REPLAY
from chakra_et.validate.check import check, check_together

EXPECTED_FILE = "expected.json"
PLANNED_PERCENT = 3.0
"""How far a planned set's bundle on the plan's network may be from the planned step."""


@dataclass(frozen=True)
class Ranks:
    """What goes into a bundle. ``sources``: rank → file; ranks whose files are hard links to one share it."""

    name: str
    sources: Mapping[int, Path]
    groups: Groups
    steps: Sequence[str] = field(default_factory=tuple)
    captured: Sequence[int] | None = None
    """The captured numbers of the ranks, in order, where ranks were left out."""


def ranks_of(found: InputSet, trim: bool = False) -> Ranks:
    """The ranks of a set. Raises ``TraceError`` where some are missing and ``trim`` is False."""
    if not found.missing:
        return Ranks(found.name, found.files, found.groups)
    absent = ", ".join(map(str, found.missing[:5])) + (", …" if len(found.missing) > 5 else "")
    if not trim:
        raise TraceError(
            f"{found.name}: {len(found.missing)} of {found.world} ranks have no file ({absent}): convert "
            "them, or use --trim to leave them out or --fill to make them from their like"
        )
    there = list(found.files)
    step = (
        f"{len(found.missing)} of {found.world} ranks have no file ({absent}) and were left out (--trim): "
        f"the others are ranks 0 to {len(there) - 1}, groups are cut to them, sizes are as recorded"
    )
    sources = {at: found.files[rank] for at, rank in enumerate(there)}
    return Ranks(found.name, sources, trimmed_groups(found.groups, there), (step,), there)


def write_bundle(ranks: Ranks, network: str | Topology, folder: Path, keep: Keep = "all") -> list[str]:
    """Write the bundle as ``folder`` and return its notes, one sentence each.

    ``network``: a topology, or the text that names one.

    Nothing is written where the topology doesn't fit, a file can't be read or the set isn't valid: raises
    ``TraceError``, in one sentence.
    """
    count = len(ranks.sources)
    topology = read_topology(network, count) if isinstance(network, str) else network
    if "empty" in ranks.name:
        raise TraceError(
            f"{ranks.name}: ASTRA-sim ignores a group file whose name has 'empty' in it: rename the set"
        )
    if not ranks.groups:
        raise TraceError(f"{ranks.name}: no comm-group file, which ASTRA-sim needs: convert the traces again")
    _check_groups(ranks, count)
    _check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder) as scratch:
        notes = _fill(scratch, ranks, topology, keep)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    return notes


def _check_groups(ranks: Ranks, count: int) -> None:
    for name, members in ranks.groups.items():
        beyond = [rank for rank in members if rank >= count]
        if beyond:
            raise TraceError(
                f"{ranks.name}: group {name} names rank {beyond[0]}, and the set has {count} ranks: "
                "convert the missing ranks, or use --trim or --fill"
            )


def _check_folder(folder: Path) -> None:
    if folder.is_dir() and not (folder / EXPECTED_FILE).is_file() and any(folder.iterdir()):
        raise TraceError(f"{folder}: holds other files: give a new folder, or that of an older bundle")
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"{folder}: is a file: give a folder")


def _fill(scratch: Path, ranks: Ranks, topology: Topology, keep: Keep) -> list[str]:
    run = RunFiles(scratch, ranks.name)
    count = len(ranks.sources)
    several = sum(1 < len(members) < count for members in ranks.groups.values()) > 1
    simulated = simulated_dimensions(topology, several)
    changes: Counter[str] = Counter()
    talk: dict[int, ExecutionTrace] = {}
    whole: dict[int, ExecutionTrace] = {}
    nodes, lost, all_modelled = 0, 0, True
    for members, trace, cut in _prepared(ranks, keep, changes):
        if topology.effective:
            trace = effective_sizes(trace, members[0], ranks.groups, simulated)
        lost += cut * len(members)
        nodes += len(trace) * len(members)
        all_modelled &= _modelled(trace)
        talk |= dict.fromkeys(members, trace.communication())
        if nodes <= LARGEST_REPLAY:
            whole |= dict.fromkeys(members, trace)
        et_file.write(run.et_file(members[0]), trace)
        for member in members[1:]:
            os.link(run.et_file(members[0]), run.et_file(member))
    talk = dict(sorted(talk.items()))
    _refuse(ranks.name, check_together(talk, ranks.groups, {rank: f"rank {rank}" for rank in talk}))
    topology = simulated
    notes = [*topology.notes, *_notes(topology, ranks.groups, talk)]
    answer = Expected({}, {}, {})
    steps = list(ranks.steps)
    if len(whole) == count:
        whole = dict(sorted(whole.items()))
        steps += _ordered(run, whole, ranks.groups)
    else:
        notes.append(f"more than {LARGEST_REPLAY:,} nodes: groups that overlap have no order of collectives")
    if all_modelled:
        notes.append("the compute nodes have no durations, so that expected.json has no times")
    elif len(whole) < count:
        notes.append(f"more than {LARGEST_REPLAY:,} nodes: expected.json has no times")
    else:
        answer = expected(whole, ranks.groups, topology)
        notes += _planned(talk, answer, topology)
    if lost:
        steps.append(
            f"{lost:,} messages to and from absent ranks run as compute, for their recorded durations"
        )
    span = [each / 1000 for each in answer.simulated.values()]
    facts = bundle_texts.Facts(
        ranks.name,
        count,
        topology,
        keep,
        steps,
        sentences(changes),
        notes,
        all_modelled,
        (min(span), max(span)) if span else None,
    )
    write_json(run.groups_file, ranks.groups)
    write_text(scratch / "network.yml", bundle_texts.network_yml(topology))
    write_json(scratch / "system.json", bundle_texts.system_json(topology, all_modelled))
    write_json(scratch / "memory.json", bundle_texts.MEMORY)
    write_text(scratch / "run.sh", bundle_texts.run_sh(ranks.name, count))
    (scratch / "run.sh").chmod(0o755)
    content = bundle_texts.expected_json(facts, answer.measured, answer.replayed, answer.simulated)
    write_json(scratch / EXPECTED_FILE, content)
    write_text(scratch / "README.md", bundle_texts.readme(facts))
    return [*steps, *sentences(changes), *notes]


def _ordered(run: RunFiles, whole: dict[int, ExecutionTrace], groups: Groups) -> list[str]:
    """Give the files of all ranks one order of collectives and sends; ``whole`` is changed, too."""
    graph = build_graph(list(whole.values()), list(whole))
    pairs = missing_order(graph, match(graph, groups))
    trace_of, given = graph.trace_of[pairs[:, 0]], dict(whole)
    written: dict[tuple[int, bytes], int] = {}
    for at in np.unique(trace_of).tolist():
        rank, rows = graph.ranks[at], graph.row[pairs[trace_of == at]]
        file = run.et_file(rank)
        like = written.setdefault((id(given[rank]), rows.tobytes()), rank)
        if like == rank:
            whole[rank] = with_dependencies(given[rank], rows[:, 0], rows[:, 1])
            et_file.write(file, whole[rank])
        else:
            whole[rank] = whole[like]
            file.unlink()
            os.link(run.et_file(like), file)
    if not len(pairs):
        return []
    return [
        f"{len(pairs):,} dependencies were added: they keep collectives and sends in one order on all ranks, "
        "without which ranks can wait for each other, as ASTRA-sim has one under way per rank"
    ]


def _prepared(
    ranks: Ranks, keep: Keep, changes: Counter[str]
) -> Iterator[tuple[list[int], ExecutionTrace, int]]:
    """Each different file, prepared and checked, with the ranks that have it before and the number of
    messages to absent ranks after it."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, file in ranks.sources.items():
        status = file.stat()
        alike.setdefault((status.st_dev, status.st_ino), []).append(number)
    for members in alike.values():
        path = ranks.sources[members[0]]
        trace = et_file.read(path)
        cut = 0
        if ranks.captured is not None:
            trace, cut = trimmed(trace, ranks.captured)
        try:
            trace, counts = prepared(trace, ranks.groups, len(ranks.sources), keep)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        for key, changed in counts.items():
            changes[key] += changed * len(members)
        rank = None if len(members) > 1 else members[0]
        trace = with_metadata(trace, rank=rank, world_size=len(ranks.sources))
        _refuse(ranks.name, check(trace, ranks.groups, str(path), bundle_texts.DATASET_SPLITS))
        yield members, trace, cut


def _refuse(name: str, problems: Sequence[object]) -> None:
    errors = [problem for problem in problems if getattr(problem, "severity", "") == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise TraceError(f"{name} doesn't validate: {str(errors[0]).removeprefix('error: ')}{more}")


def _modelled(trace: ExecutionTrace) -> bool:
    """Whether the computing has no durations, but what ASTRA-sim's roofline model needs."""
    compute = (trace.types == NodeType.COMP) & (trace.column("is_cpu_op") == 0)
    has_work = (trace.column("num_ops") > 0) & (trace.column("tensor_size") > 0)
    return bool(compute.any() and has_work[compute].all() and not trace.duration_micros[compute].any())


def _planned(talk: Mapping[int, ExecutionTrace], answer: Expected, topology: Topology) -> Iterator[str]:
    """How far ASTRA-sim's network is from what a planned set was planned with. Raises ``TraceError`` where
    the network is the plan's and can't express it."""
    planned = max((trace.metadata_int("planned_step_micros") or 0 for trace in talk.values()), default=0)
    if planned:
        expects = max(answer.simulated.values())
        error = 100 * (expects / planned - 1)
        times = f"{planned / 1000:,.3f} ms for the step, and {expects / 1000:,.3f} ms ({error:+.1f}%)"
        if topology.effective and abs(error) > PLANNED_PERCENT:
            raise TraceError(
                f"the planner has {times} are expected of ASTRA-sim, which has one message or collective of "
                "a rank under way at a time: it can't simulate this plan; --no-bundle writes the set alone"
            )
        yield f"the planner has {times} are expected on this network"


def _notes(topology: Topology, groups: Groups, talk: Mapping[int, ExecutionTrace]) -> Iterator[str]:
    found = Crossings(0, ()) if topology.effective else crossings(talk, groups, topology)
    if found.messages:
        yield (
            f"{found.messages:,} messages go to another node and another place in it: ASTRA-sim gives them "
            "the links within a node, which are too fast"
        )
    if found.groups:
        names = ", ".join(found.groups[:5]) + (", …" if len(found.groups) > 5 else "")
        yield (
            f"the rings of groups {names} have hops to another node and another place in it: ASTRA-sim gives "
            "those the links within a node, which are too fast"
        )
    broadcasts = 0
    for trace in talk.values():
        broadcasts += int(((trace.types == NodeType.COMM_COLL) & (trace.column("comm_type", -1) == 5)).sum())
    if broadcasts:
        yield f"{broadcasts:,} broadcasts last as recorded and wait for nobody"
    table = {name for trace in talk.values() for name in string_column(trace, "pg_name")[0]}
    unused = len(set(groups) - table)
    if unused:
        yield f"{unused} groups of the group file aren't used by any node"
