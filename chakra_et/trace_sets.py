"""The traces of a folder: which files are the host and device traces of which rank of which run.

``NAME_host.json`` and ``NAME_device.json`` are rank 0, ``NAME_rank1_host.json`` … the others, each also
as ``.json.gz``; ``NAME_manifest.json`` says more where our tracer wrote it.
"""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chakra_et.convert import Pair
from chakra_et.errors import TraceError

TRACE_FILE = re.compile(
    r"(?P<name>.+?)(?:_rank(?P<rank>\d+))?_(?P<kind>host|device)\.json(?:\.gz)?", re.DOTALL
)


@dataclass
class TraceSet:
    """The traces of one run. ``pairs`` by rank; ``problems``: a sentence for each file without a partner."""

    folder: Path
    name: str
    pairs: dict[int, Pair] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    def et_file(self, rank: int) -> Path:
        """The name that simulators look for."""
        return self.folder / f"{self.name}.{rank}.et"

    @property
    def first_et_file(self) -> Path:
        """Rank 0's bytes, under the name that users look for."""
        return self.folder / f"{self.name}.et"

    @property
    def groups_file(self) -> Path:
        return self.folder / f"{self.name}_comm_groups.json"

    @property
    def report_file(self) -> Path:
        return self.folder / f"{self.name}_conversion.json"

    def merged_file(self, rank: int) -> Path:
        return self.folder / (
            f"{self.name}_merged.json" if rank == 0 else f"{self.name}_rank{rank}_merged.json"
        )

    @property
    def world_size(self) -> int:
        """As the manifest says, 0 where there is none."""
        size = self.manifest.get("world_size")
        return size if isinstance(size, int) and size > 0 else 0

    @property
    def hosts(self) -> tuple[tuple[int, str], ...]:
        """(rank, its host) as the manifest says; ranks of one host share a clock."""
        ranks = self.manifest.get("ranks")
        known = [rank for rank in (ranks if isinstance(ranks, list) else []) if isinstance(rank, dict)]
        pairs = [(rank.get("rank"), rank.get("host")) for rank in known]
        return tuple((rank, host) for rank, host in pairs if isinstance(rank, int) and isinstance(host, str))

    @property
    def groups(self) -> tuple[dict[str, Any], ...]:
        """The manifest's process groups, with the field names that Kineto uses."""
        groups = self.manifest.get("process_groups")
        return tuple(
            {"pg_name": group["name"], "pg_desc": group.get("description"), "ranks": group.get("ranks")}
            for group in (groups if isinstance(groups, list) else [])
            if isinstance(group, dict) and "name" in group
        )


def find(folder: Path, pattern: str = "*") -> list[TraceSet]:
    """The runs in ``folder`` whose name fits ``pattern`` (a glob), by name.

    Raises ``TraceError`` if the folder is not there or holds none.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; give the one with the traces by --dir.")
    files: dict[str, dict[int, dict[str, Path]]] = {}
    problems: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        match = TRACE_FILE.fullmatch(path.name)
        if match is None or not path.is_file() or not fnmatch.fnmatchcase(match["name"], pattern):
            continue
        rank = int(match["rank"] or 0)
        kinds = files.setdefault(match["name"], {}).setdefault(rank, {})
        other = kinds.setdefault(match["kind"], path)
        if other != path:
            problems.setdefault(match["name"], []).append(
                f"{other} and {path} are both rank {rank}'s {match['kind']} trace; remove one of them."
            )
    sets = []
    for name, ranks in files.items():
        traces = TraceSet(folder, name, problems=problems.get(name, []), manifest=_manifest(folder, name))
        for rank, kinds in sorted(ranks.items()):
            if len(kinds) == 2:
                traces.pairs[rank] = Pair(rank, kinds["host"], kinds["device"])
            else:
                ((kind, path),) = kinds.items()
                missing = "device" if kind == "host" else "host"
                traces.problems.append(f"{path}: rank {rank} has no {missing} trace beside it.")
        traces.problems += _missing_ranks(traces)
        sets.append(traces)
    if not sets:
        raise TraceError(
            f"{folder}: no trace NAME_host.json with a NAME_device.json whose name fits {pattern!r}."
        )
    return sets


def _missing_ranks(traces: TraceSet) -> list[str]:
    size = max(traces.world_size, max(traces.pairs, default=-1) + 1)
    missing = [rank for rank in range(size) if rank not in traces.pairs]
    if not missing or not traces.pairs:
        return []
    return [
        f"{traces.folder / traces.name}: of {size} ranks, the traces of rank {', '.join(map(str, missing))} "
        f"are missing."
    ]


def _manifest(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}_manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}: not a readable manifest ({error}); remove it to convert without it."
        ) from None
    return manifest if isinstance(manifest, dict) else {}
