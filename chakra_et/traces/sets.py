"""Group the traces in a folder by run and rank.

Files with our tracer's names (see ``names``) are grouped by name, all others by content (see ``discovery``).
``NAME_manifest.json``, if our tracer wrote one, describes the run.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chakra_et.errors import TraceError
from chakra_et.files import is_remote, read_json
from chakra_et.names import RunFiles, parse_trace
from chakra_et.traces.discovery import NO_TRACE, TraceFile, Unusable, look_at, runs_of
from chakra_et.traces.fields import MAX_RANKS

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pair:
    """The traces of one rank.

    ``host``: None if only Kineto's trace was written; ``rank``: -1 if the file names do not contain it.
    """

    rank: int
    host: Path | None
    device: Path

    @property
    def files(self) -> list[Path]:
        """The host trace, if any, and the device trace."""
        return [path for path in (self.host, self.device) if path is not None]


@dataclass(frozen=True)
class Manifest:
    """What our tracer wrote about a run, {} for nothing. Values of other types than expected aren't used."""

    content: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def _ranks(self) -> dict[int, dict[str, Any]]:
        entries = _objects(self.content.get("ranks"))
        return {entry["rank"]: entry for entry in entries if type(entry.get("rank")) is int}

    def of_rank(self, rank: int, name: str, kind: type[Value], missing: Value) -> Value:
        """The value ``name`` of a rank, ``missing`` if it isn't there or of another type."""
        value = self._ranks.get(rank, {}).get(name)
        return value if type(value) is kind else missing

    @property
    def world_size(self) -> int:
        """The world size, 0 if not known."""
        size = self.content.get("world_size")
        return size if type(size) is int and 0 < size <= MAX_RANKS else 0

    def groups(self, rank: int) -> list[dict[str, Any]]:
        """The process groups, with Kineto's field names, and what the entry of ``rank`` has of each."""
        threads, buckets = (self.of_rank(rank, name, dict, {}) for name in ("group_threads", "ddp_buckets"))
        return [
            {
                "pg_name": group["name"],
                "pg_desc": group.get("description"),
                "ranks": group.get("ranks"),
                "threads": threads.get(str(group["name"])),
                "buckets": buckets.get(str(group["name"])),
            }
            for group in _objects(self.content.get("process_groups"))
            if "name" in group
        ]


@dataclass
class TraceSet(RunFiles):
    """The traces of one run; its results are written to ``folder``.

    ``pairs``: by rank. ``incomplete``: one sentence for each rank with only one of its traces; ``problems``:
    one for each other error in the files, ``warnings`` one for what was left out. ``partial``: only device
    traces, of which a single rank of a larger run is no error.
    """

    pairs: dict[int, Pair] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    manifest: Manifest = Manifest()
    incomplete: dict[int, str] = field(default_factory=dict)
    partial: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[int, Path]:
        """Rank → its device trace."""
        return {rank: pair.device for rank, pair in self.pairs.items()}

    @property
    def ranks_here(self) -> int:
        """A lower bound on the number of ranks, from the file names."""
        return max([*self.pairs, *self.incomplete], default=-1) + 1


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def find(folder: Path, pattern: str = "*", output: Path | None = None) -> list[TraceSet]:
    """The runs in ``folder`` whose name matches ``pattern`` (a glob).

    ``output``: the folder for the results (default: ``folder``). Raises ``TraceError`` if the folder does not
    exist, cannot be read or has no matching traces.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; give the folder of the traces with --dir.")
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise TraceError(f"{folder}: can't be read ({error.strerror or error}).") from None
    files: dict[str, dict[int, dict[str, Path]]] = {}
    problems: dict[str, list[str]] = {}
    others = []
    for path in paths:
        named = parse_trace(path.name)
        if named is None or not path.is_file():
            others += [path] if path.name.endswith((".json", ".json.gz")) else []
            continue
        kinds = files.setdefault(named.run, {}).setdefault(named.rank, {})
        other = kinds.setdefault(named.side, path)
        if other != path:
            problems.setdefault(named.run, []).append(
                f"{other} and {path} are both the {named.side} trace of rank {named.rank}; remove one."
            )
    sets = {name: _named_set(folder, name, ranks, problems.get(name, [])) for name, ranks in files.items()}
    found_sets, unusable = _found_sets([look_at(path) for path in others], folder)
    for traces in found_sets:
        known = sets.setdefault(traces.name, traces)
        hosts = files.get(traces.name, {})
        if hosts.keys() == traces.pairs.keys() and all([*kinds] == ["host"] for kinds in hosts.values()):
            # NAME_host.json beside a NAME.pt.trace.json.
            known.pairs = {
                rank: Pair(pair.rank, hosts[rank]["host"], pair.device) for rank, pair in traces.pairs.items()
            }
            known.incomplete = {}
        elif known is not traces:
            left = ", ".join(str(file) for pair in traces.pairs.values() for file in pair.files)
            known.warnings.append(f"{left}: left out, as another run is named {known.name}; rename one.")
    chosen = [traces for name, traces in sets.items() if fnmatch.fnmatchcase(name, pattern)]
    unusable = [file for file in unusable if file.should_be_trace and fnmatch.fnmatchcase(file.run, pattern)]
    if not chosen:
        bad = f" {unusable[0].sentence()}" if unusable else ""
        raise TraceError(
            f"{folder}: no trace matches {pattern!r}: give the folder of NAME_device.json or other files "
            f"of PyTorch's profiler.{bad}"
        )
    chosen[0].problems += [file.sentence() for file in unusable]
    for traces in chosen:
        traces.folder = output or traces.folder
    return chosen


def of_files(paths: Sequence[Path], output: Path | None = None) -> list[TraceSet]:
    """The runs of the given files.

    ``output``: the folder for the results (default: the folder of the first file). Raises ``TraceError`` for
    a file that is not a trace, and for a host trace without its device trace.
    """
    found: list[TraceFile | Unusable | None] = []
    given: dict[str, Path] = {}
    for path in paths:
        # Two patterns of the shell may give a file twice. A link in a circle has no other name.
        given.setdefault(str(path) if is_remote(path) else os.path.realpath(path), path)
    for path in given.values():
        trace = look_at(path)
        if isinstance(trace, TraceFile) or (trace and (trace.broken or trace.named_rank >= 0)):
            found.append(trace)
        elif path.is_dir():
            raise TraceError(f"{path}: is a folder; give files only, or one folder alone.")
        else:
            what = trace.reason if trace else NO_TRACE if path.exists() else "no such file"
            raise TraceError(f"{path}: {what}; give traces of PyTorch's profiler.")
    sets, left = _found_sets(found, output or paths[0].parent)
    if left and not (sets and all(file.should_be_trace for file in left)):
        raise TraceError(left[0].sentence())
    for file in left:
        sets[0].problems.append(file.sentence())
    used = {file for traces in sets for pair in traces.pairs.values() for file in pair.files}
    hosts = (one.path for one in found if isinstance(one, TraceFile) and one.side == "host")
    alone = next((path for path in hosts if path not in used), None)
    if alone is not None:
        raise TraceError(f"{alone}: the device trace of this rank is missing; give it too.")
    return sets


def _named_set(folder: Path, name: str, ranks: dict[int, dict[str, Path]], problems: list[str]) -> TraceSet:
    """A run whose files have our tracer's names."""
    traces = TraceSet(folder, name, problems=problems)
    # A run may have device traces only. If other ranks have a host trace, a missing one is an error.
    device_only = all("host" not in kinds for kinds in ranks.values())
    traces.partial = device_only
    for rank, kinds in sorted(ranks.items()):
        if "device" in kinds and ("host" in kinds or device_only):
            traces.pairs[rank] = Pair(rank, kinds.get("host"), kinds["device"])
        else:
            ((kind, path),) = kinds.items()
            missing = "device" if kind == "host" else "host"
            traces.incomplete[rank] = f"{path}: rank {rank} has no {missing} trace beside it."
    path = traces.manifest_file
    try:
        traces.manifest = Manifest(read_json(path, dict[str, Any]) if path.is_file() else {})
    except (OSError, ValueError) as error:
        why = f"not a readable manifest ({error})"
        traces.problems.append(f"{path}: {why}; remove it to convert without it.")
    return traces


def _found_sets(
    looked: list[TraceFile | Unusable | None], folder: Path
) -> tuple[list[TraceSet], list[Unusable]]:
    """The runs of traces that were found by content, and the unusable files that are of none."""
    found = [one for one in looked if isinstance(one, TraceFile)]
    left = [one for one in looked if isinstance(one, Unusable)]
    hosts = [trace for trace in found if trace.side == "host"]
    sets = []
    for name, run in runs_of(found, left).items():
        traces = TraceSet(folder, name, problems=run.problems, partial=True)
        for trace in sorted(run.traces, key=lambda trace: trace.rank):
            rank = max(trace.rank, 0)
            beside = [
                host for host in hosts if host.rank == trace.rank or (host.rank < 0 and len(run.traces) == 1)
            ]
            # Of several candidates, take the one with the most similar name.
            beside.sort(key=lambda host: -len(os.path.commonprefix([host.path.name, trace.path.name])))
            traces.pairs[rank] = Pair(trace.rank, beside[0].path if beside else None, trace.path)
        traces.incomplete = {rank: file.sentence() for rank, file in run.absent.items()}
        left = [file for file in left if file not in run.absent.values()]
        sets.append(traces)
    return sets, left


def rank_choice(text: str) -> Callable[[int], bool]:
    """A filter for the ranks in ``text``: ``0-7,12``, or ``I/N`` for every Nth rank from I on; "" for all.

    Raises ``ValueError`` for other text.
    """
    if not text:
        return lambda rank: True
    if every_nth := re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text):
        first, every = int(every_nth[1]), int(every_nth[2])
        if first >= every:
            raise ValueError(f"must be I/N with I from 0 to N-1, not {text}")
        return lambda rank: rank % every == first
    spans = []
    for part in text.split(","):
        span = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip())
        if span is None:
            raise ValueError(f"must be ranks such as 0-7,12, or I/N for every Nth rank from I on, not {text}")
        low, high = int(span[1]), int(span[2] or span[1])
        if high < low:
            raise ValueError(f"must have the lower rank first, as {high}-{low}, not {part.strip()}")
        spans.append((low, high))
    return lambda rank: any(low <= rank <= high for low, high in spans)
