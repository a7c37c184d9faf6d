"""A set of .et files as the commands of this package read it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError, reason
from chakra_et.et.record import contents
from chakra_et.et.sets import find_rank_sets, read_comm_groups
from chakra_et.files import read_json
from chakra_et.names import RunFiles, run_at

_GROUP = re.compile(r"[1-9][0-9]{0,8}")
Groups = dict[str, list[int]]


@dataclass(frozen=True)
class InputSet:
    """``files``: rank → path, in order of rank. ``groups``: number → ranks, of the comm-group file (empty:
    there is none). ``manifest``: the capture's, or None. ``world``: ranks that the run had, at least as many
    as ``files``. ``notes``: see ``RankSet``."""

    run: RunFiles
    files: Mapping[int, Path]
    groups: Groups
    manifest: dict[str, Any] | None
    world: int
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.files]

    @property
    def lacks(self) -> str:
        """``7 of 8 ranks have no file (1, 2, 3, 4, 5, …)``."""
        first = ", ".join(map(str, self.missing[:5])) + (", …" if len(self.missing) > 5 else "")
        return f"{len(self.missing)} of {self.world} ranks have no file ({first})"

    def contents(self) -> list[tuple[Path, list[int]]]:
        """The files that differ, each with its ranks: hard links share one."""
        return contents(self.files.items())


def read_set(name: str, allow_missing: bool = False) -> InputSet:
    """The set NAME: a folder and a name, as ``outputs/gpt2``. Raises ``TraceError`` where it can't be
    used."""
    prefix = name.removesuffix(".0.et") if name.endswith(".0.et") else name
    runs = find_rank_sets([prefix], allow_missing)
    files = {rank: path for rank, path in runs[0].files.items() if rank is not None}
    if len(runs) != 1 or not files:
        raise TraceError(f"{name}: is one file: give the NAME of NAME.0.et, NAME.1.et, …")
    run = run_at(prefix)
    groups = read_comm_groups(run.groups_file) if run.groups_file.is_file() else {}
    for name in groups:
        if not _GROUP.fullmatch(name):
            raise TraceError(
                f"{run.groups_file}: group {name[:40]!r} isn't a number from 1 on: convert again"
            )
    manifest = _manifest(run.manifest_file)
    known = max(files) + 1
    members = max((rank + 1 for ranks in groups.values() for rank in ranks), default=0)
    recorded = manifest.get("world_size") if manifest else None
    world = max(known, runs[0].world, members, recorded if type(recorded) is int else 0)
    return InputSet(run, files, groups, manifest, world, runs[0].notes)


def _manifest(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        loaded = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {reason(error)}: correct it, or remove it") from None
    if not isinstance(loaded, dict):
        raise TraceError(f"{path}: isn't a manifest: correct it, or remove it")
    return loaded
