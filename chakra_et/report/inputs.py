"""Finds the runs that command-line arguments name.

An argument is the NAME of a run, one of its files, a folder, or any trace that PyTorch's profiler wrote, so
``outputs/NAME*`` means the run NAME. A run with .et files is read from them; traces alone are converted to a
temporary folder first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et.errors import TraceError, reason
from chakra_et.et.sets import find_rank_sets
from chakra_et.files import is_remote, path_of, read_json, sha256
from chakra_et.names import RunFiles, parse_et, parse_trace, run_at
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.sets import TraceSet

# Files that belong to a run but don't have to be named: they are found beside its .et files.
BESIDE = re.compile(
    r"(?P<run>.+?)(_comm_groups\.json|_conversion\.json|_manifest\.json|(_rank\d+)?_merged\.json"
    r"|_stacks\.txt|_report\.html)",
    re.DOTALL,
)


@dataclass
class RunInput:
    """One run: its .et files by rank, or the traces to convert.

    ``notes``: see ``RankSet``.
    """

    files: RunFiles
    ranks: dict[int, Path] = field(default_factory=dict)
    traces: TraceSet | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.files.name


def find_run(words: Iterable[str], allow_missing: bool = False) -> RunInput:
    """The one run that ``words`` name. Raises ``TraceError`` if there is none, or more than one."""
    runs = find_runs(words, allow_missing)
    if len(runs) > 1:
        names = ", ".join(str(run.files.folder / run.name) for run in runs[:5])
        raise TraceError(
            f"these are files of {len(runs)} runs ({names}{', …' if len(runs) > 5 else ''}): give "
            "one of them, or look at them side by side with `chakra-et compare`"
        )
    return runs[0]


def find_runs(words: Iterable[str], allow_missing: bool = False) -> list[RunInput]:
    """The runs, in the order in which they are named.

    Raises ``TraceError`` for a word that is not a file of a run, a folder with runs, or the NAME of a run,
    and as ``find_rank_sets`` does.
    """
    # (folder, name of the run) → its .et files that are named. None: traces known by their content.
    named: dict[tuple[Path, str | None], list[str]] = {}
    sets: dict[tuple[Path, str | None], TraceSet] = {}
    for word in words:
        path = path_of(word)
        if path.is_dir():
            files = path.glob("*.et")
            names = {parsed[0] if (parsed := parse_et(file.name)) else file.stem for file in files}
            if not names:
                sets |= {(path, traces.name): traces for traces in trace_sets.find(path)}
            for key in sorted((path, name) for name in names) or sets:
                named.setdefault(key, [])
        elif path.is_file():
            name = _run_of(path)
            of_run = named.setdefault((path.parent, name), [])
            if path.suffix == ".et" or name is None:
                of_run.append(word)
        else:
            run = run_at(word)
            if not _has_et(run) and not _has_traces(run):
                raise TraceError(
                    f"{word}: neither a file nor the NAME of a run with NAME.0.et or NAME_device.json: "
                    "check the path"
                )
            named.setdefault((run.folder, run.name), [])
    runs = []
    for (folder, name), given in named.items():
        if name is None:
            runs += [RunInput(each, traces=each) for each in trace_sets.of_files(list(map(path_of, given)))]
        elif given or _has_et(RunFiles(folder, name)):
            runs.append(_of_et_files(RunFiles(folder, name), given, allow_missing))
        else:
            traces = sets.get((folder, name)) or trace_sets.find(folder, glob.escape(name))[0]
            runs.append(RunInput(RunFiles(folder, name), traces=traces))
    if not runs:
        raise TraceError("no run is named: give NAME of NAME.0.et, NAME.1.et, …, or its files")
    return runs


def device_traces(run: RunInput) -> tuple[dict[int, Path], list[str]]:
    """(rank → its device trace, one sentence for each that is gone or has changed since the conversion)."""
    if run.traces is not None:
        return {rank: pair.device for rank, pair in run.traces.pairs.items()}, []
    report, folder = run.files.report_file, run.files.folder
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
def with_et_files(run: RunInput) -> Iterator[tuple[RunInput, list[str]]]:
    """The run with .et files, and a sentence for each rank that can't be converted.

    Files converted for this are deleted at the end. Raises ``TraceError`` if no rank can be converted.
    """
    if run.traces is None:
        yield run, []
        return
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import RunOptions, convert_sets, default_workers

    with tempfile.TemporaryDirectory(prefix="chakra-et-") as folder:
        traces = dataclasses.replace(run.traces, folder=Path(folder))
        options = RunOptions(workers=default_workers(), allow_missing_ranks=True)
        (result,) = convert_sets([traces], PairOptions(allow_truncated=True), options)
        errors = [outcome for outcome in result.ranks.values() if isinstance(outcome, TraceError)]
        if not result.good:
            raise errors[0] if errors else TraceError(f"{run.name}: " + " ".join(result.problems))
        (found,) = find_rank_sets([str(Path(folder) / run.name)], allow_missing=True)
        yield RunInput(traces, found.files, notes=found.notes), [str(error) for error in errors]


def _run_of(path: Path) -> str | None:
    """The run that a file belongs to by its name; None for a trace with another name."""
    if path.suffix == ".et":
        parsed = parse_et(path.name)
        return parsed[0] if parsed else path.stem
    if found := BESIDE.fullmatch(path.name):
        return found["run"]
    if named := parse_trace(path.name):
        return named.run
    if path.name.endswith((".json", ".json.gz")):
        return None
    raise TraceError(f"{path}: neither an .et file nor a trace; give files of a run, or its NAME")


def _of_et_files(files: RunFiles, given: list[str], allow_missing: bool) -> RunInput:
    """The run, from the .et files that are ``given``, or else from all."""
    found, *other = find_rank_sets(given or [str(files.folder / files.name)], allow_missing)
    if other:
        raise TraceError(
            f"{files.first_et_file} and {files.et_file(0)} differ, and one should be a copy of the other: "
            "give one of them"
        )
    return RunInput(files, found.files, notes=found.notes)


def _has_et(run: RunFiles) -> bool:
    return bool(run.et_files()) or run.first_et_file.is_file()


def _has_traces(run: RunFiles) -> bool:
    beside = run.folder.glob(f"{glob.escape(run.name)}_*device.json*")
    return any((named := parse_trace(path.name)) and named.run == run.name for path in beside)
