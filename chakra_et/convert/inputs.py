"""Finds the run that command-line arguments name, and reads it; PyTorch traces are converted first.

run = find_run(["outputs/gpt2"])
with with_et_files(run) as (files, failed):
    print(files.files, failed)
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chakra_et.arrays import keep_memory
from chakra_et.errors import TraceError, reason
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.sets import MANY_RANKS, RankSet, Skeletons, find_rank_sets
from chakra_et.files import is_remote, path_of, read_json, sha256
from chakra_et.names import RunFiles, parse_et, run_at
from chakra_et.simulate.joint import EVERY_RANK
from chakra_et.simulate.run import Run, devices_of, make_run
from chakra_et.text import progress_bar

if TYPE_CHECKING:
    from chakra_et.traces.sets import TraceSet


def find_run(
    words: Iterable[str], allow_missing: bool = False, skeletons: Skeletons = "off"
) -> RankSet | TraceSet:
    """As ``find_runs``, of one run. Raises ``TraceError`` for files of several ones."""
    found = find_runs(words, allow_missing, skeletons)
    if len(found) > 1:
        several = ", ".join(files_of(each).name for each in found[:5]) + (", …" if len(found) > 5 else "")
        raise TraceError(f"these are files of {len(found)} runs ({several}): give one, or `compare` them")
    return found[0]


def find_runs(
    words: Iterable[str], allow_missing: bool = False, skeletons: Skeletons = "off"
) -> list[RankSet | TraceSet]:
    """The runs of which each of ``words`` is the NAME, the folder, an .et file or a trace. Of a NAME or
    folder without .et files, the traces are taken. Raises ``TraceError`` for anything else, and as
    ``find_rank_sets`` does.
    """
    names: list[str] = []
    traces: list[Path] = []
    folders: list[tuple[Path, str]] = []  # of traces, and a pattern of their names
    for word in words:
        path, run = path_of(word), run_at(word)
        is_et = path.is_file() or run.et_files() or run.first_et_file.is_file()
        if path.is_dir():
            files = sorted(path.glob("*.et"))
            names += dict.fromkeys(str((parse_et(file) or (file.with_suffix(""), 0))[0]) for file in files)
            folders += [] if files else [(path, "*")]
        elif path.is_file() and path.suffix != ".et":
            traces.append(path)
        elif not is_et and any(run.folder.glob(f"{glob.escape(run.name)}_*device.json*")):
            folders.append((run.folder, glob.escape(run.name)))
        else:  # of .et files or skeletons, or nothing of this name
            names.append(word)
    found: list[RankSet | TraceSet] = [*find_rank_sets(names, allow_missing, skeletons)]
    if folders or traces:
        from chakra_et.traces import sets as trace_sets  # .et files do without

        found[:0] = [each for folder in folders for each in trace_sets.find(*folder)]
        found += trace_sets.of_files(traces) if traces else []
    return found


def files_of(run: RankSet | TraceSet) -> RunFiles:
    """The names of the run's files; of traces, beside them."""
    return run.run if isinstance(run, RankSet) else run


def device_traces(run: RankSet | TraceSet) -> tuple[dict[int, Path], list[str]]:
    """(rank → its device trace, one sentence for each that is gone or has changed since the conversion)."""
    if not isinstance(run, RankSet):
        return run.files, []
    report, folder = run.run.report_file, run.run.folder
    try:
        known = read_json(report).get("device_traces", {})
        listed = {int(rank): (folder / entry["path"], entry["sha256"]) for rank, entry in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"{report} {reason(error)}"]
    found, notes = {}, []
    for rank, (path, digest) in sorted(listed.items()):
        path = path.resolve() if is_remote(path) else path  # stores take ".." for a name
        if path.is_file() and sha256(path) == digest:
            found[rank] = path
        else:
            what = "has changed since the conversion" if path.is_file() else "is gone"
            notes.append(f"the device trace of rank {rank}, {path}, {what}")
    return found, notes


@contextlib.contextmanager
def with_et_files(run: RankSet | TraceSet) -> Iterator[tuple[RankSet, list[str]]]:
    """The .et files of the run, and a sentence for each rank that can't be converted.

    Files converted for this are deleted at the end. Raises ``TraceError`` if no rank can be converted.
    """
    if isinstance(run, RankSet):
        yield run, []
        return
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import RunOptions, convert_sets
    from chakra_et.jobs import default_workers

    with tempfile.TemporaryDirectory(prefix="chakra-et-") as folder:
        traces = dataclasses.replace(run, folder=Path(folder))
        options = RunOptions(workers=default_workers(), allow_missing_ranks=True)
        (result,) = convert_sets([traces], PairOptions(allow_truncated=True), options)
        errors = [outcome for outcome in result.ranks.values() if isinstance(outcome, TraceError)]
        if not result.good:
            raise errors[0] if errors else TraceError(f"{run.name}: " + " ".join(result.problems))
        (found,) = find_rank_sets([str(Path(folder) / run.name)], allow_missing=True)
        yield found, [str(error) for error in errors]


def read_ranks(run: RankSet, skeletons: Skeletons, cluster: str = "") -> list[ExecutionTrace]:
    """The ranks of a run, in the order of its files; ``skeletons`` "on" makes those that no conversion wrote,
    on ``cluster`` or here. Raises ``TraceError`` for one that can't be read."""
    if len(run.files) > MANY_RANKS:
        keep_memory()
    paths, traces = list(run.files.values()), []
    if skeletons == "on" or cluster:  # most commands do without
        from chakra_et.ranks.cluster import each_rank
        from chakra_et.ranks.contract import skeleton

        return each_rank(skeleton if skeletons == "on" else et_file.read, paths, "reading", cluster)
    with progress_bar(len(paths), "reading") as progress:
        for path in paths:
            traces.append(et_file.read(path))
            progress()
    return traces


def load_run(
    name: str,
    allow_missing: bool = False,
    skeletons: Skeletons = "auto",
    cluster: str = "",
    among_given: bool = False,
) -> Run:
    """The run of which ``name`` is the NAME, the folder, an .et file or a trace, as ``read_ranks`` reads it;
    ``among_given``: of a group whose members aren't all there, those that are wait for each other. Raises
    ``TraceError`` for what can't be replayed, and as ``find_run`` does."""
    chosen = find_run([name], allow_missing, skeletons)
    with with_et_files(chosen) as (found, notes):
        traces = read_ranks(found, skeletons, cluster)
    ranks, groups = list(found.files), found.groups
    if among_given and found.missing:
        there = {name: [rank for rank in members if rank in ranks] for name, members in groups.items()}
        groups = {EVERY_RANK: ranks, **there}
    run = make_run(name, traces, ranks, groups)
    manifest = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = read_json(files_of(chosen).manifest_file)
    return dataclasses.replace(run, devices=devices_of(manifest), notes=[*notes, *found.notes, *run.notes])
