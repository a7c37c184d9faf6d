"""Finds the runs that command-line arguments name.

An argument is the NAME of a run, one of its files, a folder, or any trace that PyTorch's profiler wrote, so
``outputs/NAME*`` means the run NAME. A run with .et files is read from them; traces alone are converted to a
temporary folder first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import glob
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.et.sets import find_rank_sets
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
    """One run: its .et files by rank (None: a file whose name has no rank), or the traces to convert.

    ``notes``: see ``RankSet``.
    """

    files: RunFiles
    ranks: dict[int | None, Path] = field(default_factory=dict)
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
    found = _Found(allow_missing)
    for word in words:
        found.add(word)
    runs = found.runs()
    if not runs:
        raise TraceError("no run is named: give NAME of NAME.0.et, NAME.1.et, …, or its files")
    return runs


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


class _Found:
    """The words so far, by run: (folder, name), where None stands for traces known by their content."""

    def __init__(self, allow_missing: bool) -> None:
        self.allow_missing = allow_missing
        self.et: dict[tuple[Path, str | None], list[str]] = {}
        self.sets: dict[tuple[Path, str | None], TraceSet] = {}
        self.others: dict[Path, list[Path]] = {}

    def add(self, word: str) -> None:
        path = Path(word)
        if path.is_dir():
            self._folder(path)
        elif not path.is_file():
            self._name(word)
        elif path.suffix == ".et":
            parsed = parse_et(path.name)
            self._words(path.parent, parsed[0] if parsed else path.stem).append(word)
        elif found := BESIDE.fullmatch(path.name):
            self._words(path.parent, found["run"])
        elif named := parse_trace(path.name):
            self._words(path.parent, named.run)
        elif path.name.endswith((".json", ".json.gz")):
            self._words(path.parent, None)
            self.others.setdefault(path.parent, []).append(path)
        else:
            raise TraceError(f"{path}: neither an .et file nor a trace; give files of a run, or its NAME")

    def _words(self, folder: Path, name: str | None) -> list[str]:
        return self.et.setdefault((folder, name), [])

    def _name(self, word: str) -> None:
        run = run_at(word)
        if not _has_et(run) and not _has_traces(run):
            raise TraceError(
                f"{word}: neither a file nor the NAME of a run with NAME.0.et or NAME_device.json: "
                "check the path"
            )
        self._words(run.folder, run.name)

    def _folder(self, folder: Path) -> None:
        names = {parsed[0] if (parsed := parse_et(path.name)) else path.stem for path in folder.glob("*.et")}
        for name in sorted(names):
            self._words(folder, name)
        if not names:
            for traces in trace_sets.find(folder):
                self._words(folder, traces.name)
                self.sets[folder, traces.name] = traces

    def runs(self) -> list[RunInput]:
        return [run for key, words in self.et.items() for run in self._runs(*key, words)]

    def _runs(self, folder: Path, name: str | None, words: list[str]) -> list[RunInput]:
        if name is None:
            return [RunInput(traces, traces=traces) for traces in trace_sets.of_files(self.others[folder])]
        files = RunFiles(folder, name)
        if words or _has_et(files):
            ranks: dict[int | None, Path] = {}
            notes: dict[str, None] = {}
            for group in find_rank_sets(words or [str(folder / name)], self.allow_missing):
                ranks |= group.files
                if None not in group.files or len(words) == 1:
                    notes |= dict.fromkeys(group.notes)
            return [RunInput(files, _without_copies(ranks), notes=list(notes))]
        traces = self.sets.get((folder, name)) or trace_sets.find(folder, glob.escape(name))[0]
        return [RunInput(files, traces=traces)]


def _has_et(run: RunFiles) -> bool:
    return bool(run.et_files()) or run.first_et_file.is_file()


def _has_traces(run: RunFiles) -> bool:
    beside = run.folder.glob(f"{glob.escape(run.name)}_*device.json*")
    return any((named := parse_trace(path.name)) and named.run == run.name for path in beside)


def _without_copies(ranks: dict[int | None, Path]) -> dict[int | None, Path]:
    """Without NAME.et, which holds rank 0's bytes for those who want one file."""
    single = ranks.get(None)
    if single is None or 0 not in ranks:
        return ranks
    if not filecmp.cmp(single, ranks[0], shallow=False):
        raise TraceError(
            f"{single} and {ranks[0]} differ, and one should be a copy of the other: give one of them"
        )
    return {rank: path for rank, path in ranks.items() if rank is not None}
