"""Check a run's ranks against each other: all there, recorded together, with the same groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chakra_et.text import list_ranks
from chakra_et.validate import check as validate

if TYPE_CHECKING:
    from chakra_et.convert.runs import SetResult

# Findings of ranks whose groups were guessed, so that collectives may be in the wrong one.
GUESSED_GROUP = ("group-default", "group-by-stream", "group-by-thread")
DAY_SECONDS = 86_400
AFTER_2001_NS = 10**18
"""Start times above this are times of day; some traces have the time since their host started."""
# Rules of ``validate`` that are checked here instead, with the names of the traces.
CHECKED_HERE = ("rank-missing", "rank-twice", "world-size")


def check_ranks(result: SetResult, world: int, allow_missing: bool) -> None:
    """Check that all ranks are there, each once, and that they belong to one run."""
    traces, converted = result.traces, result.good
    absent = [rank for rank in range(world) if rank not in traces.pairs and rank not in traces.incomplete]
    if absent:
        sentence = (
            f"{traces.folder / traces.name}: of {world} ranks, the traces of {list_ranks(absent)} are missing"
        )
        if allow_missing:
            result.notes.append(f"{sentence}.")
        else:
            result.problems.append(f"{sentence}; add them, or use --allow-missing-ranks.")
    first_of: dict[tuple[str, int, int], int] = {}
    for rank, r in converted.items():
        here, lowest = traces.pairs[rank].device, next(iter(converted))
        if r.world_size != converted[lowest].world_size:
            result.problems.append(
                f"{here} is from a run of {r.world_size} ranks, {traces.pairs[lowest].device} from a run of "
                f"{converted[lowest].world_size}; convert traces of one run together."
            )
        other = first_of.setdefault(r.process, rank) if r.process[1] else rank
        if other != rank:
            result.problems.append(
                f"{here} and {traces.pairs[other].device} are traces of the same process, {r.process[1]}; "
                f"one of them is not the trace of its rank."
            )
        listed = traces.processes.get(rank)
        if listed and r.process[1] and listed != r.process[1]:
            first = traces.pairs[rank].files[0]
            result.problems.append(
                f"{traces.manifest_file} lists process {listed} for rank {rank}, but {first} is from process "
                f"{r.process[1]}; remove the manifest if it belongs to another run."
            )


def groups_of(result: SetResult) -> dict[str, list[int]]:
    """The process groups of the run: group id → ranks."""
    groups: dict[int, tuple[int, ...]] = {}
    first: dict[int, int] = {}
    for rank, r in result.good.items():
        for number, (name, _, ranks) in sorted(r.groups.items()):
            members = tuple(sorted(ranks)) or tuple(range(r.world_size))
            if groups.setdefault(number, members) != members:
                other = result.traces.pairs[first[number]].device
                result.problems.append(
                    f"process group {name!r} has ranks {list_ranks(list(members))} in "
                    f"{result.traces.pairs[rank].device} and {list_ranks(list(groups[number]))} in {other}; "
                    "the traces are not from one run."
                )
            first.setdefault(number, rank)
    return {str(number): list(ranks) for number, ranks in sorted(groups.items())}


def check_together(result: SetResult, groups: dict[str, list[int]]) -> tuple[list[str], bool]:
    """Check the ranks against each other: problems, and whether all collectives match, guessed ones too."""
    communication = {rank: r.communication for rank, r in result.good.items() if r.communication is not None}
    names = {rank: str(result.traces.et_file(rank)) for rank in communication}
    found = [
        problem
        for problem in validate.check_together(communication, groups, names)
        if problem.severity == "error" and problem.rule not in CHECKED_HERE
    ]
    guessed = any(key in r.report.warnings for r in result.good.values() for key in GUESSED_GROUP)
    wrong = [problem for problem in found if guessed and problem.rule.startswith("collective-")]
    if wrong:
        result.warnings.append(
            f"{result.traces.folder / result.traces.name}: {len(wrong)} collectives do not match between "
            "ranks, as their groups are not recorded and the guess is wrong; simulators would wait for ever. "
            "Record the run with chakra_et.capture, which names them."
        )
    problems = [str(problem).removeprefix("error: ") for problem in found if problem not in wrong]
    return problems, not any(problem.rule.startswith("collective-") for problem in found)


def check_times(result: SetResult, agree: bool) -> None:
    """Check that the ranks were recorded at the same time. ``agree``: all their collectives match.

    Hosts may have different clocks, so a gap between them alone is a warning, unless no clock is so wrong.
    """
    windows = {rank: r.window for rank, r in result.good.items() if r.window[0] > AFTER_2001_NS}
    clocks = {result.good[rank].process[0] for rank in windows} - {""}
    on_one = [[rank for rank in windows if result.good[rank].process[0] == clock] for clock in sorted(clocks)]
    for ranks, one_clock in [*((ranks, True) for ranks in on_one), (list(windows), False)]:
        gap = _widest_gap({rank: windows[rank] for rank in ranks})
        if gap is None:
            continue
        before, after, seconds = gap
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


def _widest_gap(windows: dict[int, tuple[int, int]]) -> tuple[int, int, float] | None:
    """The longest time in which no rank was recorded, between the others: (rank before, rank after, s)."""
    found = None
    last = -1
    for rank in sorted(windows, key=lambda rank: windows[rank]):
        if last >= 0 and (gap := windows[rank][0] - windows[last][1]) > 0:
            found = max(found or (0, 0, 0), (gap, last, rank))
        if last < 0 or windows[rank][1] > windows[last][1]:
            last = rank
    return None if found is None else (found[1], found[2], found[0] / 1e9)
