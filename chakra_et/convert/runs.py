"""Convert whole runs: every rank of every run in a folder is converted, checked and written.

    for result in chakra_et.convert("outputs"):
        print(result.prefix, sorted(result.good), result.problems, result.warnings)

A rank that fails does not stop the others. A run's files are written to a scratch folder beside their place,
and moved there together once all ranks are done (see ``et.record``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chakra_et import files, jobs
from chakra_et.convert import together
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import Engine, RankJob, RankResult, convert_rank, options_text
from chakra_et.errors import TraceError
from chakra_et.et import record
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.sets import Skeletons
from chakra_et.names import RunFiles
from chakra_et.ranks.contract import write_skeletons
from chakra_et.traces.sets import TraceSet


@dataclass(frozen=True)
class RunOptions:
    """Options for the conversion of runs.

    ``workers``: number of processes; ``ranks``: convert only these ranks, and write no files of the run as a
    whole. ``keep``: keep files of an earlier conversion that are valid and newer than their traces.
    ``skeletons``: whether to write them, see ``chakra_et.ranks``. ``cluster``: where ``jobs`` run, see
    ``ranks.cluster``.
    """

    engine: Engine = "native"
    workers: int = 1
    allow_missing_ranks: bool = False
    ranks: Callable[[int], bool] | None = None
    keep: bool = False
    skeletons: Skeletons = "auto"
    cluster: str = ""
    jobs: jobs.Jobs = jobs.run


@dataclass(eq=False, repr=False)
class SetResult:
    """The result for one run.

    ``scratch``: its files until all are done. ``options``: of its ranks. ``ranks``: the result or error of
    each. ``problems``, ``warnings``, ``notes``: of the run as a whole, one sentence each.
    """

    traces: TraceSet
    scratch: RunFiles
    options: PairOptions
    ranks: dict[int, RankResult | TraceError] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> dict[int, RankResult]:
        """The ranks that were converted, by rank."""
        return {rank: r for rank, r in sorted(self.ranks.items()) if isinstance(r, RankResult)}

    @property
    def communication(self) -> dict[int, ExecutionTrace]:
        """The communication nodes of the ranks that have them."""
        return {rank: r.communication for rank, r in self.good.items() if r.communication is not None}

    @property
    def prefix(self) -> Path:
        """``folder/NAME``, by which every command and ``chakra_et.load`` find the run."""
        return self.traces.folder / self.traces.name

    @property
    def failed(self) -> bool:
        """Whether a rank or the run as a whole has an error."""
        return bool(self.problems) or any(
            isinstance(result, TraceError) or result.problems for result in self.ranks.values()
        )


def convert_sets(
    sets: Iterable[TraceSet],
    options: PairOptions,
    run: RunOptions = RunOptions(),
    progress: Callable[[], None] = lambda: None,
) -> list[SetResult]:
    """Convert the ranks of ``sets``; ``progress`` is called after each rank."""
    sets, results = list(sets), []
    with contextlib.ExitStack() as stack:
        if run.cluster:
            from chakra_et.ranks.cluster import jobs_on

            run = replace(run, jobs=stack.enter_context(jobs_on(run.cluster, run.workers)))
        for folder in sorted({traces.folder for traces in sets}):
            say = f"{folder}: waiting for another conversion in this folder"
            wait = functools.partial(print, say, file=sys.stderr, flush=True)
            # Parts of a run may be converted at the same time, whole runs may not.
            stack.enter_context(files.folder_lock(folder, run.ranks is not None, wait))
            stack.callback(files.remove_abandoned, folder)
        two_each = 2 * sum(len(traces.pairs) for traces in sets) <= run.workers and not run.cluster
        options = replace(options, two_processes=two_each and jobs.forks())
        for traces in sets:
            folder = stack.enter_context(files.scratch_folder(traces.folder / traces.name))
            scratch = RunFiles(folder, traces.name)
            of_run = replace(options, manifest=traces.manifest, ranks_here=traces.ranks_here)
            problems, warnings = list(traces.problems), list(traces.warnings)
            results.append(SetResult(traces, scratch, of_run, problems=problems, warnings=warnings))
        wanted = run.ranks or (lambda rank: True)
        work: list[tuple[SetResult, int, RankJob]] = []
        for result in results:
            traces, folder = result.traces, result.scratch.folder
            for rank, pair in traces.pairs.items():
                if wanted(rank):
                    job = RankJob(pair, traces.et_file(rank), folder, result.options, run.engine, run.keep)
                    work.append((result, rank, job))
            absent = {rank: sentence for rank, sentence in traces.incomplete.items() if wanted(rank)}
            if run.allow_missing_ranks:
                result.notes += absent.values()
            else:
                result.ranks |= {rank: TraceError(sentence) for rank, sentence in absent.items()}
        # MLCommons' tools run as processes, which only end with us if a worker runs them.
        in_workers = len(work) > 1 or run.engine == "mlcommons"
        outcomes = run.jobs(convert_rank, [job for _, _, job in work], run.workers if in_workers else 0)
        left = Counter(result for result, _, _ in work)
        for result in results:
            if not left[result]:
                _finish(result, run)
        with contextlib.closing(outcomes):  # ends the workers also by an exception
            for number, outcome in outcomes:
                result, rank, job = work[number]
                if isinstance(outcome, TraceError):
                    text = str(outcome)
                    if not any(str(path) in text for path in job.pair.files):
                        text = f"{job.pair.files[0]}: {text}"
                    if job.output.exists():
                        text += f" {job.output.name} is from an earlier conversion."
                    outcome = TraceError(text)
                result.ranks[rank] = outcome
                progress()
                left -= Counter([result])
                if not left[result]:
                    _finish(result, replace(run, workers=0 if left else run.workers))
    return results


def _finish(result: SetResult, run: RunOptions) -> None:
    """The run as a whole: the checks across ranks, the groups, and all files in their place."""
    traces, scratch, good = result.traces, result.scratch, result.good
    try:
        if run.ranks is None:
            recorded = [r.world_size for r in good.values()]
            world = max([traces.ranks_here, traces.manifest.world_size, *recorded])
            _check_and_add(result, world, run)
            good = result.good
        if 0 in good:
            files.link(scratch.et_file(0), scratch.first_et_file)
        if run.ranks is None:
            known = {rank: done.sha256 for rank, done in good.items() if done.sha256}
            record.commit(scratch.folder, traces, world, _summary(result, run), known)
        elif good:
            record.begin(scratch.folder, traces)
        if run.ranks is None and len(good) == len(traces.pairs):
            # Files of an earlier, larger run with this name, which simulators would take for this run's.
            for rank, path in traces.et_files():
                if rank >= world:
                    path.unlink()
    except OSError as error:
        result.problems.append(f"{error.filename or traces.folder}: {error.strerror or error}.")


def _check_and_add(result: SetResult, world: int, run: RunOptions) -> None:
    """Check the ranks of a run against each other; add its groups, joint times and skeletons."""
    traces, scratch, good = result.traces, result.scratch, result.good
    # People publish a single rank's Kineto trace on purpose; several ranks without the others are a mistake.
    single = traces.partial and len(traces.pairs) + len(traces.incomplete) == 1
    together.check_ranks(result, world, run.allow_missing_ranks or single)
    if run.engine == "native" and good:
        renamed = together.match_groups(result, world)
        groups = together.groups_of(result)
        files.write_json(scratch.groups_file, groups)
        if len(good) > 1:
            together.check_together(result, groups)
            times = together.joint_times(result.communication, groups)
            ranks = sorted({*times, *renamed})
            work = [
                (scratch.et_file(rank), good[rank].report, times.get(rank), renamed.get(rank, {}))
                for rank in ranks
            ]
            with contextlib.closing(run.jobs(together.finish_rank, work, run.workers)) as outcomes:
                for number, outcome in outcomes:
                    rank = ranks[number]
                    if isinstance(outcome, TraceError):  # its times are those of its own clock
                        result.ranks[rank] = TraceError(f"{traces.et_file(rank)}: {outcome}")
                        scratch.et_file(rank).unlink()
                    else:
                        good[rank].report, good[rank].sha256 = outcome
                        good[rank].bytes = scratch.et_file(rank).stat().st_size
    result.notes += write_skeletons(scratch, traces, run.skeletons, run.jobs, run.workers)


def _summary(result: SetResult, run: RunOptions) -> dict[str, Any]:
    """The report of the run, without the path of its folder."""
    folder = re.compile(rf"(?<![^\s'\"(]){re.escape(str(result.traces.folder))}{os.sep}")

    def short(texts: list[str]) -> list[str]:
        return [folder.sub("", text) for text in texts]

    return {
        "name": result.traces.name,
        "engine": run.engine,
        "options": options_text(result.options),
        "problems": short(result.problems),
        "notes": short(result.warnings + result.notes),
        "device_traces": {
            str(rank): {
                "path": os.path.relpath(str(result.traces.pairs[rank].device), str(result.traces.folder)),
                "sha256": good.device_sha256 or files.sha256(result.traces.pairs[rank].device),
            }
            for rank, good in sorted(result.good.items())
        },
        "ranks": {
            str(rank): {"error": short([str(r)])[0]}
            if isinstance(r, TraceError)
            else r.report.as_json() | {"problems": short(r.problems)}
            for rank, r in sorted(result.ranks.items())
        },
    }
