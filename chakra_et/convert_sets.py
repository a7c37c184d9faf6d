"""Whole runs: every rank of every run in a folder, converted, checked and written.

A rank that fails does not stop the others. Files appear complete or not at all; a rank's file of an
earlier conversion stays until the new one is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chakra_et import convert, et_file, jobs
from chakra_et.convert import Pair, PairOptions
from chakra_et.errors import TraceError
from chakra_et.execution_trace import ExecutionTrace
from chakra_et.report import RankReport
from chakra_et.trace_sets import TraceSet

Engine = Literal["native", "mlcommons"]
ReplaySummary = dict[str, float]


@dataclass(frozen=True)
class RankJob:
    """One rank's conversion, as it is handed to a worker process."""

    pair: Pair
    output: Path
    options: PairOptions
    engine: Engine = "native"
    merged: Path | None = None


@dataclass
class RankResult:
    """``problems``: what the validator found wrong with the file, one sentence each. ``communication``: its
    communication nodes, to hold against the other ranks'."""

    report: RankReport
    communication: ExecutionTrace | None = None
    groups: dict[int, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    world_size: int = 1
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class SetResult:
    """One run. ``ranks``: the result, or the error, of each rank; ``problems``: of the run as a whole."""

    traces: TraceSet
    ranks: dict[int, RankResult | TraceError] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.problems) or any(
            isinstance(result, TraceError) or result.problems for result in self.ranks.values()
        )


def convert_rank(job: RankJob) -> RankResult:
    """Convert one pair and write its file. Traces that can't be read are repaired into a copy first.

    Raises ``TraceError``; then the output is as it was.
    """
    if job.engine == "mlcommons":
        from chakra_et import mlcommons

        mlcommons.convert(job.pair, job.output, job.merged)
        return RankResult(RankReport(max(job.pair.rank, 0)), bytes=job.output.stat().st_size)
    try:
        converted = convert.convert_pair(job.pair, job.options)
    except TraceError as error:
        converted = _convert_repaired(job, error)
    from chakra_et import validate

    groups = {str(number): list(ranks) for number, (_, _, ranks) in converted.groups.items() if ranks}
    problems = validate.check(converted.trace, groups or None, job.output.name)
    et_file.write(job.output, converted.trace)
    if job.merged:
        from chakra_et import merged

        merged.write(job.merged, job.pair)
    return RankResult(
        converted.report,
        converted.trace.communication(),
        converted.groups,
        converted.world_size,
        job.output.stat().st_size,
        [str(problem) for problem in problems if problem.severity == "error"],
    )


def _convert_repaired(job: RankJob, error: TraceError) -> convert.Converted:
    """Try again on repaired copies; the originals stay as they are."""
    from chakra_et import repair

    with tempfile.TemporaryDirectory(prefix="chakra-repair-") as folder:
        copies: dict[str, Path] = {}
        repairs: dict[str, int] = {}
        for kind in ("host", "device"):
            original = getattr(job.pair, kind)
            copy = Path(folder) / f"{kind}.json"
            report = repair.repair_file(original, output=copy)
            if report.changed:
                copies[kind] = copy
            for change in report.repairs:
                text = f"{kind} trace, {change.kind}"
                repairs[text] = repairs.get(text, 0) + 1
        if not copies:
            raise error
        try:
            converted = convert.convert_pair(dataclasses.replace(job.pair, **copies), job.options)
        except TraceError as second:
            text = str(second)
            for kind, copy in copies.items():
                text = text.replace(str(copy), f"{getattr(job.pair, kind)} (repaired)")
            raise TraceError(text) from None
        converted.report.repairs |= repairs
        converted.trace.metadata["conversion_report"] = json.dumps(
            converted.report.as_dict(), separators=(",", ":")
        )
        return converted


def convert_sets(
    sets: Iterable[TraceSet],
    options: PairOptions,
    engine: Engine = "native",
    workers: int = 1,
    keep_merged: bool = False,
    timeout: float = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[SetResult]:
    """Convert all ranks of ``sets``; ``workers`` processes, each rank within ``timeout`` s (0: no limit)."""
    results = [SetResult(traces, problems=list(traces.problems)) for traces in sets]
    work: list[tuple[SetResult, int, RankJob]] = []
    for result in results:
        traces = result.traces
        of_run = dataclasses.replace(
            options, groups=traces.groups, world_size=traces.world_size, hosts=traces.hosts
        )
        for rank, pair in traces.pairs.items():
            merged = traces.merged_file(rank) if keep_merged else None
            work.append((result, rank, RankJob(pair, traces.et_file(rank), of_run, engine, merged)))
    for number, outcome in jobs.run(convert_rank, [job for _, _, job in work], workers, timeout):
        result, rank, job = work[number]
        if isinstance(outcome, TraceError) and not any(
            str(p) in str(outcome) for p in (job.pair.host, job.pair.device)
        ):
            outcome = TraceError(f"{job.pair.host}: {outcome}")
        result.ranks[rank] = outcome
        progress()
    for result in results:
        _finish(result, engine)
    return results


def _finish(result: SetResult, engine: Engine) -> None:
    """What belongs to the run as a whole: rank 0's bytes under the users' name, groups, report, checks."""
    traces = result.traces
    good = {rank: r for rank, r in sorted(result.ranks.items()) if isinstance(r, RankResult)}
    if not good:
        return
    if 0 in good:
        _copy(traces.et_file(0), traces.first_et_file)
    if engine == "native":
        _write_groups(result, good)
        if len(good) > 1:
            result.problems += _check_together(traces, good)
    if len(good) == len(traces.pairs):
        _remove_stale(traces)
    summary = {
        "name": traces.name,
        "engine": engine,
        "problems": result.problems,
        "ranks": {
            str(rank): {"error": str(r)}
            if isinstance(r, TraceError)
            else r.report.as_dict() | {"problems": r.problems}
            for rank, r in sorted(result.ranks.items())
        },
    }
    _write_json(traces.report_file, summary)


def _write_groups(result: SetResult, good: dict[int, RankResult]) -> None:
    groups: dict[int, tuple[int, ...]] = {}
    names: dict[int, str] = {}
    for rank, r in good.items():
        for number, (name, _, ranks) in sorted(r.groups.items()):
            members = tuple(sorted(ranks)) or tuple(range(r.world_size))
            if groups.setdefault(number, members) != members:
                result.problems.append(
                    f"{result.traces.pairs[rank].device}: process group {name!r} has ranks {list(members)} "
                    f"here, {list(groups[number])} on another rank; the traces are not of one run."
                )
            names[number] = name
    _write_json(
        result.traces.groups_file, {str(number): list(ranks) for number, ranks in sorted(groups.items())}
    )


def _check_together(traces: TraceSet, good: dict[int, RankResult]) -> list[str]:
    """The ranks against each other."""
    from chakra_et import validate

    talk = {rank: r.communication for rank, r in good.items() if r.communication is not None}
    groups = json.loads(traces.groups_file.read_bytes())
    names = {rank: traces.et_file(rank).name for rank in talk}
    return [str(p) for p in validate.check_together(talk, groups, names) if p.severity == "error"]


def _remove_stale(traces: TraceSet) -> None:
    """Files of ranks that an earlier, larger run of this name had: simulators would take them for ours."""
    for path in traces.folder.glob(f"{_escape(traces.name)}.*.et"):
        rank = path.name[len(traces.name) + 1 : -3]
        if rank.isdigit() and int(rank) not in traces.pairs:
            path.unlink()


def _escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _copy(source: Path, target: Path) -> None:
    with et_file.atomic_file(target) as file, open(source, "rb") as content:
        shutil.copyfileobj(content, file)


def _write_json(path: Path, content: Any) -> None:
    with et_file.atomic_file(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def default_workers(jobs_to_do: int) -> int:
    """One for each core that this process may use, no more than there is to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, jobs_to_do))


def is_converted(traces: TraceSet) -> bool:
    """Whether every rank's file is there, newer than its traces, and the last report tells of no failure."""
    try:
        report = json.loads(traces.report_file.read_bytes())
        bad = report["problems"] or any(
            "error" in rank or rank.get("problems") for rank in report["ranks"].values()
        )
        fresh = all(
            traces.et_file(rank).stat().st_mtime_ns
            >= max(pair.host.stat().st_mtime_ns, pair.device.stat().st_mtime_ns)
            for rank, pair in traces.pairs.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    same_ranks = set(report["ranks"]) == {str(rank) for rank in traces.pairs}
    return not bad and fresh and same_ranks and traces.first_et_file.exists()
