"""The traces of a folder: which files are the host and device traces of which rank of which run.

``NAME_manifest.json`` adds what our tracer knows of the run, where it wrote one; ``names`` has all names.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.names import RunFiles, parse_trace
from chakra_et.traces.device import MAX_RANKS

MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Pair:
    """The two traces of one rank. ``rank`` is -1 where only the traces themselves can tell."""

    rank: int
    host: Path
    device: Path


@dataclass
class TraceSet(RunFiles):
    """The traces of one run. ``pairs`` by rank; ``incomplete``: a sentence for each rank that has only one of
    its traces; ``problems``: one for anything else that is wrong with the files."""

    pairs: dict[int, Pair] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    incomplete: dict[int, str] = field(default_factory=dict)

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


def find(folder: Path, pattern: str = "*") -> list[TraceSet]:
    """The runs in ``folder`` whose name fits ``pattern`` (a glob), by name.

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
    sets = []
    for name, ranks in files.items():
        traces = TraceSet(folder, name, problems=problems.get(name, []))
        for rank, kinds in sorted(ranks.items()):
            if len(kinds) == 2:
                traces.pairs[rank] = Pair(rank, kinds["host"], kinds["device"])
            else:
                ((kind, path),) = kinds.items()
                missing = "device" if kind == "host" else "host"
                traces.incomplete[rank] = f"{path}: rank {rank} has no {missing} trace beside it."
        try:
            traces.manifest = _manifest(traces.manifest_file)
        except TraceError as error:
            traces.problems.append(str(error))
        sets.append(traces)
    if not sets:
        raise TraceError(
            f"{folder}: no trace NAME_host.json with a NAME_device.json whose name fits {pattern!r}."
        )
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
