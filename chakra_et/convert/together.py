"""All ranks of a run together: one run with the same groups, recorded at the same time; and joint times.

Joint times are those that need all ranks: clock offsets, and the wait of each communication node.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chakra_et import files
from chakra_et.convert.graph.communication import BY_STREAM, Group, group_number
from chakra_et.convert.pair import add_report
from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import set_integers, texts, with_metadata, with_texts
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.timing import align, waits
from chakra_et.text import list_ranks
from chakra_et.validate import check as validate

if TYPE_CHECKING:
    from chakra_et.convert.runs import SetResult

# Findings of ranks whose groups were guessed, so that collectives may be in the wrong one.
GUESSED_GROUP = ("group-default", "group-by-stream")
DAY_SECONDS = 86_400
AFTER_2001_NS = 10**18
"""Start times above this are times of day; some traces have the time since their host started."""
LEAST_START_NS = 10**9
"""No program begins a recording sooner after its start, so two runs are further apart."""
# Rules of ``validate`` that are checked here instead, with the names of the traces.
CHECKED_HERE = ("rank-missing", "rank-twice", "world-size")

BY_OVERLAP = "by size, order and overlap in time"
LEAST_ALIKE = 0.9
"""Of two communicators that are one, the least part of collectives of one kind and size, and that overlap."""
TOGETHER_US, TOGETHER = 20, 0.1
"""How far apart their ends are at most, typically; the latter as a part of a collective's duration."""


def check_ranks(result: SetResult, world: int, allow_missing: bool) -> None:
    """Check that all ranks are there, each once, and that they belong to one run."""
    traces, converted, problems = result.traces, result.good, result.problems
    absent = [rank for rank in range(world) if rank not in traces.pairs and rank not in traces.incomplete]
    if absent:
        sentence = f"{result.prefix}: of {world} ranks, the traces of {list_ranks(absent)} are missing"
        if allow_missing:
            result.notes.append(f"{sentence}.")
        else:
            problems.append(f"{sentence}; add them, or use --allow-missing-ranks.")
    first_of: dict[tuple[str, int, int], int] = {}
    for rank, r in converted.items():
        here, lowest = traces.pairs[rank].device, next(iter(converted))
        if r.world_size != converted[lowest].world_size:
            problems.append(
                f"{here} is from a run of {r.world_size} ranks, {traces.pairs[lowest].device} from a run of "
                f"{converted[lowest].world_size}; convert traces of one run together."
            )
        other = first_of.setdefault(r.process, rank) if r.process[1] else rank
        if other != rank:
            problems.append(
                f"{here} and {traces.pairs[other].device} are traces of the same process, {r.process[1]}; "
                f"one of them is not the trace of its rank."
            )
        listed = traces.manifest.of_rank(rank, "pid", int, 0)
        if listed and r.process[1] and listed != r.process[1]:
            first = traces.pairs[rank].files[0]
            problems.append(
                f"{traces.manifest_file} lists process {listed} for rank {rank}, but {first} is from process "
                f"{r.process[1]}; remove the manifest if it belongs to another run."
            )


def groups_of(result: SetResult) -> dict[str, list[int]]:
    """The process groups of the run: group id → ranks."""
    groups: dict[int, tuple[int, tuple[int, ...]]] = {}  # and the first rank that has it
    for rank, r in result.good.items():
        for number, (name, _, ranks) in sorted(r.groups.items()):
            members = tuple(sorted(ranks)) or tuple(range(r.world_size))
            first, known = groups.setdefault(number, (rank, members))
            if known != members:
                here, other = (result.traces.pairs[each].device for each in (rank, first))
                result.problems.append(
                    f"process group {name!r} has ranks {list_ranks(members)} in {here} and "
                    f"{list_ranks(known)} in {other}; the traces are not from one run."
                )
    return {str(number): list(ranks) for number, (_, ranks) in sorted(groups.items())}


def check_together(result: SetResult, groups: dict[str, list[int]]) -> None:
    """Check the ranks against each other: their collectives, and that they were recorded at the same time."""
    communication = result.communication
    names = {rank: str(result.traces.et_file(rank)) for rank in communication}
    found = [
        problem
        for problem in validate.check_together(communication, groups, names)
        if problem.severity == "error" and problem.rule not in CHECKED_HERE
    ]
    wrong = [problem for problem in found if problem.rule.startswith("collective-")]
    guessed = any(key in r.report.warnings for r in result.good.values() for key in GUESSED_GROUP)
    excused = wrong if guessed else []
    if excused:
        result.warnings.append(
            f"{result.prefix}: {len(excused)} collectives do not match between "
            "ranks, as their groups are not recorded and the guess is wrong; simulators would wait for ever. "
            "Record the run with chakra_et.capture, which names them."
        )
    result.problems += [str(each).removeprefix("error: ") for each in found if each not in excused]
    _check_times(result, not wrong)


def _check_times(result: SetResult, agree: bool) -> None:
    """Check that the ranks were recorded at the same time. ``agree``: all their collectives match."""
    # Hosts may have different clocks, so a gap between them alone is a warning, unless no clock is so wrong.
    windows = {rank: r.window for rank, r in result.good.items() if r.window[0] > AFTER_2001_NS}

    def later(a: int, b: int) -> int:
        """The one of two ranks whose recording ended later."""
        return b if windows[b][1] > windows[a][1] else a

    clocks = {result.good[rank].process[0] for rank in windows} - {""}
    on_one = [[rank for rank in windows if result.good[rank].process[0] == clock] for clock in sorted(clocks)]
    for ranks, one_clock in [*((ranks, True) for ranks in on_one), (list(windows), False)]:
        # The longest time in which no rank was recorded, between the others.
        ordered = sorted(ranks, key=lambda rank: windows[rank])
        latest = itertools.accumulate(ordered, later)
        gaps = [(windows[b][0] - windows[a][1], a, b) for a, b in zip(latest, ordered[1:], strict=False)]
        widest, before, after = max(gaps, default=(0, -1, -1))
        if widest <= (LEAST_START_NS if agree else 0):
            continue
        seconds = widest / 1e9
        apart = f"{seconds:.3g} s" if seconds < DAY_SECONDS else f"{seconds / DAY_SECONDS:.0f} days"
        where, on_host = (result.traces.pairs[rank].device for rank in (before, after)), " on the same host"
        named = f"{' and '.join(map(str, where))} were recorded {apart} apart{on_host * one_clock}"
        if one_clock or not agree or seconds > DAY_SECONDS:
            why = "" if agree else ", and their collectives differ"
            result.problems.append(
                f"{named}{why}: they are not of one run; convert the traces of each run in a folder of "
                "its own."
            )
            return
        result.warnings.append(f"{named}: they are of two runs, or the clocks of their hosts differ.")


# ---- groups that no trace records: which communicator of one rank is which of another's ----
#
# A rank tells its unnamed communicators apart by their streams, and ranks may use theirs in another order.
# The collectives of one communicator have the same kinds and sizes in the same order on all of its ranks,
# each overlaps in time with itself on the others, and all end together.


@dataclass(eq=False)
class _Communicator:
    """An unnamed communicator of a rank: type and size of its collectives, and their times in µs."""

    rank: int
    number: int
    clock: str
    kinds: np.ndarray
    start: np.ndarray
    end: np.ndarray


def match_groups(result: SetResult, world: int) -> dict[int, dict[str, Group]]:
    """Give the communicators without a record the same group on all ranks of a run, with a warning.

    Changes groups and communication of the ranks that have another guess so far; returns, for these ranks,
    the group in place of each id in their files. Of the members that were assumed, the ranks whose traces are
    here and don't have the group are none. ``world``: the number of all ranks.
    """
    found = [each for rank in result.good for each in _communicators(result, rank)]
    groups: list[list[_Communicator]] = []
    for rank in sorted({each.rank for each in found}):
        own = [each for each in found if each.rank == rank]
        pairs = [(_likeness(g[0], c), a, b) for a, g in enumerate(groups) for b, c in enumerate(own)]
        of_own: dict[int, int] = {}
        for likeness, at, number in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):
            if likeness and at not in of_own.values():
                of_own.setdefault(number, at)
        for number, each in enumerate(own):
            if number in of_own:
                groups[of_own[number]].append(each)
            else:
                groups.append([each])
    renamed: dict[int, dict[str, Group]] = {}
    for at, members in enumerate(groups):
        for each in members:
            _, _, ranks = result.good[each.rank].groups[each.number]
            if len(result.good) < world or len(members) > 1:
                have = {member.rank for member in members}
                ranks = tuple(rank for rank in ranks if rank in have or rank not in result.good)
            group = Group(f"communicator {at}", BY_OVERLAP, ranks)
            if group_number(group) != each.number:
                renamed.setdefault(each.rank, {})[str(each.number)] = group
    for rank, changes in renamed.items():
        r = result.good[rank]
        kept = {number: group for number, group in r.groups.items() if str(number) not in changes}
        new = {group_number(g): (g.name, g.description, g.ranks) for g in changes.values()}
        r.groups = dict(sorted((kept | new).items()))
        if r.communication is not None:
            r.communication = with_groups(r.communication, changes)
    if renamed:
        count = sum(len(each.kinds) for members in groups if len(members) > 1 for each in members)
        result.warnings.append(
            f"{result.prefix}: {count} collectives without a recorded group were matched between ranks by "
            "size, order and overlap in time. Record the run with chakra_et.capture, which names the groups."
        )
    return renamed


def with_groups(trace: ExecutionTrace, changes: Mapping[str, Group]) -> ExecutionTrace:
    """``trace`` with other groups in its attributes and metadata. ``changes``: id → the new group."""
    ids, index = texts(trace, "pg_name")
    new = {row: changes[ids[at]] for row, at in enumerate(index.tolist()) if at >= 0 and ids[at] in changes}
    trace = with_texts(trace, "pg_name", {row: str(group_number(group)) for row, group in new.items()})
    trace = with_texts(trace, "pg_original_name", {row: group.name for row, group in new.items()})
    trace = with_texts(trace, "pg_description", {row: group.description for row, group in new.items()})
    if known := json.loads(trace.metadata_str("process_groups") or "{}"):
        for number, group in changes.items():
            known.pop(number, None)
            known[str(group_number(group))] = (group.name, group.description, group.ranks)
        trace = with_metadata(trace, process_groups=json.dumps(known, separators=(",", ":")))
    return trace


def _communicators(result: SetResult, rank: int) -> list[_Communicator]:
    """Those of a rank whose groups aren't recorded, in the order of their first collectives."""
    r = result.good[rank]
    trace = r.communication
    guessed = {number for number, group in r.groups.items() if group[1] in (BY_STREAM, BY_OVERLAP)}
    if trace is None or not guessed or not trace.start_micros.any():
        return []
    kinds = trace.column("comm_type", -1) * (1 << 51) + trace.column("comm_size", 0)
    start = trace.start_micros.astype(np.int64) + (trace.metadata_int("trace_start_ns") or 0) // 1000
    end = start + trace.duration_micros.astype(np.int64)
    ids, index = texts(trace, "pg_name")
    of_row = np.array([int(text) for text in ids])[index]
    found = []
    for number in dict.fromkeys(of_row.tolist()):
        if number in guessed:
            rows = np.flatnonzero(of_row == number)
            found.append(_Communicator(rank, number, r.process[0], kinds[rows], start[rows], end[rows]))
    return found


def _likeness(one: _Communicator, other: _Communicator) -> float:
    """How much two communicators are one: the part (0 to 1) of their collectives that are alike and overlap
    in time; 0 below the limits."""
    common = min(len(one.kinds), len(other.kinds))
    part = (one.kinds[:common] == other.kinds[:common]).sum() / max(len(one.kinds), len(other.kinds))
    apart = one.end[:common] - other.end[:common]
    offset = 0 if one.clock and one.clock == other.clock else int(np.median(apart))
    first = np.maximum(one.start[:common], other.start[:common] + offset)
    last = np.minimum(one.end[:common], other.end[:common] + offset)
    overlap = float((first < last).mean())
    typical = float(np.median((one.end - one.start)[:common]))
    if np.median(np.abs(apart - offset)) > max(TOGETHER_US, TOGETHER * typical):
        return 0.0
    return float(part) * overlap if min(float(part), overlap) >= LEAST_ALIKE else 0.0


# ---- joint times ----

JointTimes = tuple[int, int, np.ndarray]
"""ns to be added to a rank's clock, their uncertainty, and in µs the wait of each communication node in the
order of the file, -1 if a member is missing (int64)."""
_JOINT = "transfer_micros", "wait_micros"


def joint_times(
    communication: Mapping[int, ExecutionTrace], groups: Mapping[str, Sequence[int]]
) -> dict[int, JointTimes]:
    """The joint times by rank. ``communication``: traces with the communication nodes are enough.

    Empty if the clocks cannot be compared: without start times, or without a common symmetric collective.
    """
    ranks = sorted(rank for rank, trace in communication.items() if len(trace))
    traces = [communication[rank] for rank in ranks]
    if len(traces) < 2 or not all(trace.start_micros.any() for trace in traces):
        return {}
    for at, trace in enumerate(traces):  # waits follow from the times as recorded
        if "recorded_start_micros" in trace.attributes:
            starts = trace.column("recorded_start_micros").astype(np.uint64)
            traces[at] = dataclasses.replace(trace, start_micros=starts)
    try:
        graph = build_graph(traces, ranks)
        matching = match(graph, groups)
    except TraceError:
        return {}  # the checks across ranks report the error
    assert graph.local_start_ns is not None
    origins = np.array([trace.metadata_int("trace_start_ns") or 0 for trace in traces], dtype=np.int64)
    offsets = spread = np.zeros(len(ranks), dtype=np.int64)
    domains = {trace.metadata.get("clock_domain") for trace in traces}
    if len(domains) != 1 or domains & {None, ""}:
        aligned = align(graph, matching, graph.local_start_ns + origins[graph.trace_of])
        if aligned is None:
            return {}
        offsets, spread, _ = aligned
    wait = waits(matching, graph.local_start_ns + (origins + offsets)[graph.trace_of], graph.duration_ns)
    micros = np.where(matching.channel >= 0, (wait + 500) // 1000, -1)
    by_trace = graph.scatter(micros.tolist())
    return {rank: (int(offsets[at]), int(spread[at]), by_trace[at]) for at, rank in enumerate(ranks)}


def finish_rank(
    job: tuple[Path, RankReport, JointTimes | None, dict[str, Group]],
) -> tuple[RankReport, str]:
    """Add joint times, if there are any, and groups in place of those with these ids to the file of a rank;
    returns its report with the resulting shares, and the SHA-256 of the file.

    A file that already has these times is not written again.
    """
    path, report, times, groups = job
    given = et_file.read(path)
    trace = with_groups(given, groups) if groups else given
    if times is not None:
        trace = with_times(trace, times)
        add_report(trace, report)
    old, new = (np.stack([each.column(name, -1) for name in _JOINT]) for each in (given, trace))
    if groups or trace.metadata != given.metadata or not np.array_equal(old, new):
        et_file.write(path, trace)
    return report, files.sha256(path)


def with_times(trace: ExecutionTrace, times: JointTimes) -> ExecutionTrace:
    """The trace with its joint times in place of any others."""
    offset, spread, each = times
    rows, known = np.flatnonzero(trace.types >= NodeType.COMM_SEND)[each >= 0], np.zeros(len(trace), bool)
    known[rows] = True
    wait, lasting = np.zeros(len(trace), np.int64), trace.duration_micros.astype(np.int64)
    wait[rows] = np.minimum(each[each >= 0], lasting[rows])
    for name, values in zip(_JOINT, (lasting - wait, wait), strict=True):
        trace = set_integers(trace, name, "int64", values, known)
    return with_metadata(trace, clock_offset_ns=offset, clock_spread_ns=spread)
