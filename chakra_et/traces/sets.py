"""The traces of a folder: which files are the host and device traces of which rank of which run.

Files named as our tracer names them (``names``) go by their names; all others by what they contain
(``discovery``). ``NAME_manifest.json`` adds what our tracer knows of the run, where it wrote one.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.names import RunFiles, parse_trace
from chakra_et.traces.discovery import Found, look_at, look_for, runs_of
from chakra_et.traces.fields import MAX_RANKS

MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Pair:
    """The traces of one rank; ``host`` is None where only Kineto's trace was written. ``rank`` is -1 where
    only the traces themselves can tell."""

    rank: int
    host: Path | None
    device: Path

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.host, self.device) if path is not None]


@dataclass
class TraceSet(RunFiles):
    """The traces of one run, which is written to ``folder``. ``pairs`` by rank; ``incomplete``: a sentence
    for
    each rank that has only one of its traces; ``problems``: one for anything else that is wrong with the
    files. ``partial``: ranks may be missing, as nobody promised all of them.
    """

    pairs: dict[int, Pair] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    incomplete: dict[int, str] = field(default_factory=dict)
    partial: bool = False

    @property
    def ranks_here(self) -> int:
        """How many ranks there are at least, as the files are named."""
        return max([*self.pairs, *self.incomplete], default=-1) + 1

    @property
    def world_size(self) -> int:
        """As the manifest says, 0 where there is none."""
        size = self.manifest.get("world_size")
        return size if type(size) is int and 0 < size <= MAX_RANKS else 0

    @property
    def groups(self) -> tuple[dict[str, Any], ...]:
        """The manifest's process groups, with the field names that Kineto uses."""
        return tuple(
            {"pg_name": group["name"], "pg_desc": group.get("description"), "ranks": group.get("ranks")}
            for group in _objects(self.manifest.get("process_groups"))
            if "name" in group
        )

    @property
    def hosts(self) -> tuple[tuple[int, str], ...]:
        """(rank, its host) as the manifest says; ranks of one host share a clock."""
        pairs = [(rank.get("rank"), rank.get("host")) for rank in _objects(self.manifest.get("ranks"))]
        return tuple((rank, host) for rank, host in pairs if type(rank) is int and isinstance(host, str))

    @property
    def processes(self) -> dict[int, int]:
        """Rank → process id, as the manifest says."""
        pairs = [(rank.get("rank"), rank.get("pid")) for rank in _objects(self.manifest.get("ranks"))]
        return {rank: pid for rank, pid in pairs if type(rank) is int and type(pid) is int}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def find(folder: Path, pattern: str = "*", output: Path | None = None) -> list[TraceSet]:
    """The runs in ``folder`` whose name fits ``pattern`` (a glob), to be written to ``output`` (default:
    ``folder``).

    Raises ``TraceError`` if the folder is not there, can't be read or holds none.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; give the one with the traces by --dir.")
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise TraceError(f"{folder}: can't be read ({error.strerror or error}).") from None
    files: dict[str, dict[int, dict[str, Path]]] = {}
    problems: dict[str, list[str]] = {}
    for path in paths:
        found = parse_trace(path.name)
        if found is None or not path.is_file() or not fnmatch.fnmatchcase(found.run, pattern):
            continue
        kinds = files.setdefault(found.run, {}).setdefault(found.rank, {})
        other = kinds.setdefault(found.side, path)
        if other != path:
            problems.setdefault(found.run, []).append(
                f"{other} and {path} are both rank {found.rank}'s {found.side} trace; remove one of them."
            )
    sets = [_named_set(folder, name, ranks, problems.get(name, [])) for name, ranks in files.items()]
    named = {path for ranks in files.values() for kinds in ranks.values() for path in kinds.values()}
    others = [path for path in paths if path not in named and path.name.endswith((".json", ".json.gz"))]
    taken = {traces.name for traces in sets}
    sets += [
        traces
        for traces in _found_sets(look_for(others), folder)
        if fnmatch.fnmatchcase(traces.name, pattern) and traces.name not in taken
    ]
    if not sets:
        raise TraceError(
            f"{folder}: no trace whose name fits {pattern!r}: neither a NAME_device.json nor any other file "
            "that PyTorch's profiler writes."
        )
    if output is not None:
        for traces in sets:
            traces.folder = output
    return sets


def of_files(paths: Sequence[Path], output: Path | None = None) -> list[TraceSet]:
    """The runs that the given files belong to, to be written to ``output`` (default: the first file's
    folder).

    Raises ``TraceError`` for a file that is no trace, and a host trace without its device trace.
    """
    found = []
    for path in paths:
        trace = look_at(path)
        if trace is None:
            why = "no such file" if not path.exists() else "neither a Kineto device trace nor a host trace"
            raise TraceError(f"{path}: {why}; give traces that PyTorch's profiler wrote.")
        found.append(trace)
    sets = _found_sets(found, output or paths[0].parent)
    used = {file for traces in sets for pair in traces.pairs.values() for file in pair.files}
    alone = next((trace.path for trace in found if trace.path not in used), None)
    if alone is not None:
        raise TraceError(f"{alone}: a trace without a device trace of its rank; give that too.")
    return sets


def of_pair(host: Path, device: Path, output: Path | None = None) -> TraceSet:
    """The run of one named pair. Raises ``TraceError`` for files that are not these traces."""
    for path, side in ((host, "host"), (device, "device")):
        trace = look_at(path)
        if trace is None or trace.side != side:
            what = "is not there" if not path.exists() else f"is no {side} trace"
            raise TraceError(f"{path}: {what}; give the host trace by --host, the device trace by --device.")
    found = look_at(device)
    assert found is not None
    rank = max(found.rank, 0)
    named = parse_trace(device.name)
    name = named.run if named else found.stem
    return TraceSet(output or device.parent, name, {rank: Pair(found.rank, host, device)}, partial=True)


def _named_set(folder: Path, name: str, ranks: dict[int, dict[str, Path]], problems: list[str]) -> TraceSet:
    """A run whose files are named as our tracer names them."""
    traces = TraceSet(folder, name, problems=problems)
    # Device traces alone are a run of their own kind; one rank without its host trace is a lost file.
    device_only = all("host" not in kinds for kinds in ranks.values())
    traces.partial = device_only
    for rank, kinds in sorted(ranks.items()):
        if "device" in kinds and ("host" in kinds or device_only):
            traces.pairs[rank] = Pair(rank, kinds.get("host"), kinds["device"])
        else:
            ((kind, path),) = kinds.items()
            missing = "device" if kind == "host" else "host"
            traces.incomplete[rank] = f"{path}: rank {rank} has no {missing} trace beside it."
    try:
        traces.manifest = _manifest(traces.manifest_file)
    except TraceError as error:
        traces.problems.append(str(error))
    return traces


def _found_sets(found: list[Found], folder: Path) -> list[TraceSet]:
    """The runs of traces that go by their content."""
    hosts = [trace for trace in found if trace.side == "host"]
    sets = []
    for name, devices in runs_of(found).items():
        traces = TraceSet(folder, name, partial=True)
        for trace in sorted(devices, key=lambda trace: trace.rank):
            rank = max(trace.rank, 0)
            beside = [
                host for host in hosts if host.rank == trace.rank or (host.rank < 0 and len(devices) == 1)
            ]
            # Of several candidates the one whose name is most alike.
            beside.sort(key=lambda host: -len(os.path.commonprefix([host.path.name, trace.path.name])))
            traces.pairs[rank] = Pair(trace.rank, beside[0].path if beside else None, trace.path)
        sets.append(traces)
    return sets


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest, {} where there is none. Raises ``TraceError`` where it can't be read."""
    without = "remove it to convert without it"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise TraceError(f"{path}: too large for a manifest ({MAX_MANIFEST_BYTES} bytes); {without}.")
        manifest = json.loads(path.read_bytes())
    except (OSError, RecursionError) as error:
        raise TraceError(f"{path}: not a readable manifest ({error}); {without}.") from None
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: not a readable manifest ({error}); {without}.") from None
    if not isinstance(manifest, dict):
        raise TraceError(f"{path}: not a manifest (no JSON object); {without}.")
    return manifest


def rank_choice(text: str) -> Callable[[int], bool]:
    """Which ranks ``text`` means: ``0-7,12``, or ``I/N`` for every N-th from I on; all where it is empty.

    Raises ``ValueError`` for any other text.
    """
    if not text:
        return lambda rank: True
    if part := re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text):
        first, every = int(part[1]), int(part[2])
        if first >= every:
            raise ValueError(f"{text} makes no sense: in I/N, I is 0 to N-1")
        return lambda rank: rank % every == first
    spans = [re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", span.strip()) for span in text.split(",")]
    if not all(spans):
        raise ValueError(f"{text} makes no sense: give ranks such as 0-7,12, or I/N for every N-th from I on")
    limits = [(int(span[1]), int(span[2] or span[1])) for span in spans]
    return lambda rank: any(low <= rank <= high for low, high in limits)
