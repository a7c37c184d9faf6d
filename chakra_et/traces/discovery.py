"""Find traces with arbitrary names by their content, and group them by run.

PyTorch and its frameworks use many names (``worker0.1700.pt.trace.json.gz``, ``rank3_trace.json``,
``rank-0_et.json``). A JSON object with ``traceEvents`` is a Kineto device trace, one with ``schema`` and
``nodes`` is a host trace. Rank and world size come from Kineto's distributedInfo, or else from the file name.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et.names import Side
from chakra_et.traces.fields import MAX_RANKS
from chakra_et.traces.records import open_trace

HEAD_BYTES = 1 << 18
EMPTY, NO_TRACE = "is empty", "is neither a Kineto device trace nor a host trace"
_DEVICE = re.compile(rb'"(traceEvents|deviceProperties|traceName|baseTimeNanoseconds)"\s*:')
_HOST = re.compile(rb'"schema"\s*:\s*"\d')
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]*?"rank"\s*:\s*(\d{1,20})(?![\d.eE])')
_WORLD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]*?"world_size"\s*:\s*(\d{1,20})(?![\d.eE])')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})(?!\d)')
_TIME = re.compile(rb'"ts"\s*:\s*"?(\d{1,17}(?:\.\d{1,9})?)')
_RANK_IN_NAME = re.compile(r"(?:^|(?<=[._-]))(?:rank|worker|r)[._-]?(\d{1,6})(?=[._-]|$)", re.IGNORECASE)
_ENDINGS = re.compile(r"(?<=.)(?:\.(?:gz|json|trace|pt|chrome|kineto|device|host))+\Z", re.DOTALL)
_TRACE_ENDINGS = (".pt.trace.json", ".pt.trace.json.gz")
# Other files that we write to the same folder.
_OURS = ("_manifest.json", "_conversion.json", "_comm_groups.json", "_merged.json", "_scaled.json")


@dataclass(frozen=True)
class Named:
    """A file that may be a trace, by its name."""

    path: Path

    @property
    def stem(self) -> str:
        """The name without endings and rank, alike for most ranks of a run; "" for ``rank0.json``."""
        without = _RANK_IN_NAME.sub("", _ENDINGS.sub("", self.path.name))
        return re.sub(r"([._-])[._-]+", r"\1", without).strip("._- ")

    @property
    def named_rank(self) -> int:
        """The rank in the name, -1 for none."""
        found = _RANK_IN_NAME.search(self.path.name)
        return int(found[1]) if found else -1

    @property
    def run(self) -> str:
        """The name of a run of this file alone."""
        return self.stem or _ENDINGS.sub("", self.path.name)


@dataclass(frozen=True)
class TraceFile(Named):
    """A trace. ``rank`` is -1 and ``world`` 0 if neither the file nor its name has them.

    ``moment``: about when its first events are from, in µs.
    """

    side: Side
    rank: int
    world: int
    moment: float = 0.0


@dataclass(frozen=True)
class Unusable(Named):
    """A file that is not a trace, and why: ``is empty``. ``broken``: nobody could read it, trace or not."""

    reason: str
    broken: bool

    @property
    def should_be_trace(self) -> bool:
        """Whether it is probably a damaged trace, and not one of the other JSON files that folders have."""
        by_name = self.named_rank >= 0 and self.reason == EMPTY or self.path.name.endswith(_TRACE_ENDINGS)
        return self.broken or by_name

    def sentence(self) -> str:
        """What is wrong with the trace, and what to do."""
        return f"{self.path}: {self.reason}; copy or record it again, or remove it."


@dataclass
class TracedRun:
    """The device traces of one run, of distinct ranks. ``problems``: one sentence each.

    ``absent``: rank → the file that is its trace by name, but is none.
    """

    traces: list[TraceFile]
    problems: list[str] = field(default_factory=list)
    absent: dict[int, Unusable] = field(default_factory=dict)


def look_at(path: Path) -> TraceFile | Unusable | None:
    """Identify ``path`` by its first bytes; None if it is no file or one that we write."""
    if not path.is_file() or path.name.endswith(_OURS):
        return None
    head, damage = b"", ""
    try:
        with open_trace(path) as file:
            # Piece by piece, as a damaged file gives what comes before the damage.
            while len(head) < HEAD_BYTES and (piece := file.read1(1 << 14)):
                head += piece
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            return Unusable(path, f"can't be read ({error.strerror or error})", True)
        damage = f"is a damaged gzip file ({error})"
    if _DEVICE.search(head):
        side: Side = "device"
    elif _HOST.search(head) and b'"nodes"' in head:
        side = "host"
    else:
        return Unusable(path, damage or (NO_TRACE if head else EMPTY), bool(damage))
    rank, world = _RANK.search(head), _WORLD.search(head)
    number = int(rank[1]) if rank else Named(path).named_rank
    base = _BASE.search(head)
    times = sorted(float(found[1]) for found in itertools.islice(_TIME.finditer(head), 200))
    return TraceFile(
        path,
        side,
        number if number < MAX_RANKS else -1,  # the conversion reports a number that is no rank
        int(world[1]) if world else 0,
        (times[len(times) // 2] if times else 0.0) + (int(base[1]) / 1000 if base else 0.0),
    )


def runs_of(traces: list[TraceFile], unusable: Iterable[Unusable] = ()) -> dict[str, TracedRun]:
    """The device traces by run.

    Traces belong together if their names differ only in the rank, or if they have the same world size above 1
    and distinct ranks. Where such traces have each rank several times, they are recordings one after another,
    and so several runs. A second trace of a rank is left out with a problem. Files among ``unusable`` that
    are the trace of a missing rank by name are in ``TracedRun.absent``. The names of runs are made unique.
    """
    of_world: dict[int, list[list[TraceFile]]] = {}
    for part in _by_stem([found for found in traces if found.side == "device"]):
        of_world.setdefault(max(found.world for found in part), []).append(part)
    parts: list[TracedRun] = []
    for world, named_alike in of_world.items():
        named = [run for part in named_alike for run in _of_one_name(part)]
        parts += _of_world(named) if world > 1 else named
    for file in unusable:
        for run in parts:
            ranks, stems = ({getattr(found, name) for found in run.traces} for name in ("rank", "stem"))
            if file.named_rank >= 0 and file.named_rank not in ranks and file.stem in stems:
                run.absent[file.named_rank] = file
                break
    runs: dict[str, TracedRun] = {}
    for run in parts:
        name = base = _run_name(run.traces)
        number = 2
        while name in runs:
            name, number = f"{base}_{number}", number + 1
        runs[name] = run
    return runs


def _by_stem(devices: list[TraceFile]) -> list[list[TraceFile]]:
    """Traces whose names differ only in the rank. One without a world size is with those that have one."""
    groups: dict[tuple[str, int], list[TraceFile]] = {}
    for found in devices:
        groups.setdefault((found.stem, found.world), []).append(found)
    for stem in {stem for stem, world in groups if world == 0}:
        worlds = [world for other, world in groups if other == stem and world]
        if len(worlds) == 1 and all(found.rank >= 0 for found in groups[stem, 0]):
            groups[stem, worlds[0]] += groups.pop((stem, 0))
    return list(groups.values())


def _of_world(runs: list[TracedRun]) -> list[TracedRun]:
    """The runs of traces with one world size, from the ``runs`` by name."""
    everything = [found for run in runs for found in run.traces]
    if _distinct(everything):
        runs = [TracedRun(everything, [problem for run in runs for problem in run.problems])]
    else:
        alone = [run for run in runs if len(run.traces) == 1 and not run.problems]
        runs = [run for run in runs if run not in alone]
        runs += [TracedRun(cycle) for cycle in _cycles([run.traces[0] for run in alone])]
    return runs


def _of_one_name(traces: list[TraceFile]) -> list[TracedRun]:
    """The runs of traces with one name: one, with a problem for each second trace of a rank."""
    if _distinct(traces):
        return [TracedRun(traces)]
    if any(found.rank < 0 or found.world == 1 for found in traces):
        # Processes of world size 1, such as replicas, are all rank 0.
        return [TracedRun([found]) for found in traces]
    first: dict[int, TraceFile] = {}
    problems = []
    for found in sorted(traces, key=lambda found: found.rank != found.named_rank):
        other = first.setdefault(found.rank, found)
        if other is not found:
            problems.append(
                f"{other.path} and {found.path} are both the device trace of rank {found.rank}, and only "
                "the first was converted; remove one."
            )
    return [TracedRun(list(first.values()), problems)]


def _cycles(traces: list[TraceFile]) -> list[list[TraceFile]]:
    """Traces of one world size as runs of distinct ranks, by when they were recorded."""
    if not traces or _distinct(traces):
        return [traces] if traces else []
    of_rank: dict[int, list[TraceFile]] = {}
    for found in traces:
        of_rank.setdefault(found.rank, []).append(found)
    counts = set(map(len, of_rank.values()))
    cycles: list[list[TraceFile]]
    if len(counts) == 1:
        # In the order of each rank, as hosts may have different clocks.
        by_rank = [sorted(own, key=lambda found: found.moment) for own in of_rank.values()]
        cycles = [list(cycle) for cycle in zip(*by_rank, strict=True)]
    else:
        ordered = sorted(traces, key=lambda found: found.moment)
        gaps = [after.moment - before.moment for before, after in itertools.pairwise(ordered)]
        largest = sorted(range(len(gaps)), key=lambda at: -gaps[at])[: max(counts) - 1]
        cuts = [0, *sorted(at + 1 for at in largest), len(ordered)]
        cycles = [ordered[start:end] for start, end in itertools.pairwise(cuts)]
    return cycles if -1 not in of_rank and all(map(_distinct, cycles)) else [[found] for found in traces]


def _distinct(part: list[TraceFile]) -> bool:
    ranks = [found.rank for found in part]
    return len(part) == 1 or (min(ranks) >= 0 and len(set(ranks)) == len(ranks))


def _run_name(part: list[TraceFile]) -> str:
    if len(part) == 1:
        return part[0].run
    stems = {found.stem for found in part}
    if len(stems) == 1 and "" not in stems:
        return stems.pop()
    shared = os.path.commonprefix([found.path.name for found in part]).strip("._- ")
    return shared if len(shared) > 2 else part[0].path.resolve().parent.name or "run"
