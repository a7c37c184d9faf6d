"""Group the .et files of a run: ``NAME.0.et``, ``NAME.1.et``, … and ``NAME_comm_groups.json``.

(run,) = find_rank_sets(["outputs/gpt2_2gpu_quick_trace"])
traces = {rank: chakra_et.et.file.read(path) for rank, path in run.files.items()}
"""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from chakra_et.errors import TraceError, reason
from chakra_et.et import file as et_file
from chakra_et.et import record
from chakra_et.files import path_of, read_json
from chakra_et.names import SKELETON, RunFiles, parse_et, run_at

MANY_RANKS = 64
"""Of more ranks than these, joint questions read skeletons where all ranks have one."""
Skeletons = Literal["auto", "on", "off"]
Groups = dict[str, list[int]]
GROUP_ID = re.compile(r"[1-9][0-9]{0,8}")


@dataclass
class RankSet:
    """The files of one run.

    ``name``: the folder and NAME. ``files``: rank → path, in order of rank; ``alone``: the only file has no
    rank in its name, but in its metadata. ``by_name``: the user gave the name of the run, not of its files,
    and so means all of them. ``world``: ranks that the run had; ``groups``: number → ranks, of the comm-group
    file, empty without one; ``notes``: what ``record.check`` says, one sentence each.
    """

    name: str
    files: dict[int, Path] = field(default_factory=dict)
    alone: bool = False
    by_name: bool = False
    world: int = 1
    groups: Groups = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunFiles:
        return run_at(self.name)

    @property
    def title(self) -> str:
        """The NAME, or the file that is alone."""
        return str(*self.files.values()) if self.alone else self.name

    @property
    def is_run(self) -> bool:
        """Whether to treat the files as the ranks of one run."""
        return not self.alone and (self.by_name or len(self.files) > 1)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.files]

    @property
    def lacks(self) -> str:
        """``7 of 8 ranks have no file (1, 2, 3, 4, 5, …)``."""
        first = ", ".join(map(str, self.missing[:5])) + (", …" if len(self.missing) > 5 else "")
        return f"{len(self.missing)} of {self.world} ranks have no file ({first})"


def find_rank_sets(
    names: Iterable[str], allow_missing: bool = False, skeletons: Skeletons = "off"
) -> list[RankSet]:
    """Group files by run. A name is a file, or the NAME of a run for all its files, or its ``skeletons``.

    NAME.et beside NAME.0.et is left out where it is a copy, as the converter writes it. Raises ``TraceError``
    for a name that is neither, for two files of the same rank of a run, for a damaged comm-group file, and
    unless ``allow_missing`` for files that are not those of one finished conversion (see ``record.check``).
    """
    sets: dict[str, RankSet] = {}
    for name in names:
        paths = [path_of(name)] if path_of(name).is_file() else _files_of_run(name, skeletons)
        for path in paths:
            key, rank = parse_et(path) or (str(path), -1)
            alone = rank < 0
            if alone:
                held = et_file.read_metadata(path).get("rank")
                rank = held if type(held) is int and held >= 0 else 0
            group = sets.setdefault(key, RankSet(str(path.with_suffix("")) if alone else key, alone=alone))
            group.by_name |= path != path_of(name)
            known = group.files.setdefault(rank, path)
            if known != path:
                raise TraceError(f"{known} and {path} are both rank {rank} of {key}: give only one of them")
    found = []
    for group in sets.values():
        first = sets[group.name].files.get(0) if group.name in sets else None
        if group.alone and first is not None and filecmp.cmp(group.title, first, shallow=False):
            continue  # NAME.et beside NAME.0.et
        found.append(group)
        group.files = dict(sorted(group.files.items()))
        group.world, group.notes = record.check(group.run, group.files, allow_missing, group.alone)
        if group.run.groups_file.is_file():
            group.groups = read_comm_groups(group.run.groups_file)
    return found


def read_set(name: str, allow_missing: bool = False) -> RankSet:
    """The run NAME with all that its capture knew of it: a folder and a name, as ``outputs/gpt2``. Raises
    ``TraceError`` where it can't be used."""
    found = find_rank_sets([name.removesuffix(".0.et")], allow_missing)[0]
    if found.alone:
        raise TraceError(f"{name}: is one file: give the NAME of NAME.0.et, NAME.1.et, …")
    for group in found.groups:
        if not GROUP_ID.fullmatch(group):
            where = found.run.groups_file
            raise TraceError(f"{where}: group {group[:40]!r} isn't a positive number: convert again")
    path = found.run.manifest_file
    try:
        manifest = read_json(path, dict[str, Any]) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {reason(error)}: correct it, or remove it") from None
    members = (rank + 1 for ranks in found.groups.values() for rank in ranks)
    recorded = manifest.get("world_size")
    found.world = max(found.world, *found.files, recorded if type(recorded) is int else 0, *members)
    return found


def _files_of_run(name: str, skeletons: Skeletons) -> list[Path]:
    run = run_at(name)
    paths = [path for _, path in run.et_files()]
    contracted = [] if skeletons == "off" else [path for _, path in run.et_files(SKELETON)]
    if contracted and (skeletons == "on" or len(contracted) > max(MANY_RANKS, len(paths) - 1) or not paths):
        return contracted
    if not paths and run.first_et_file.is_file():
        paths = [run.first_et_file]
    if not paths and path_of(name).is_dir():
        runs = sorted({found[0] for path in path_of(name).glob("*.et") if (found := parse_et(path))})
        if len(runs) == 1:
            return _files_of_run(runs[0], skeletons)
        if not runs:
            raise TraceError(f"{name}: a folder without .et files: convert its traces, or check the path")
        which = f"{len(runs)} runs: give the NAME of one, such as {runs[0]}"
        raise TraceError(f"{name}: a folder with .et files of {which}")
    if not paths:
        raise TraceError(f"{name}: neither a file nor the NAME of NAME.0.et, NAME.1.et, …: check the path")
    return paths


def read_comm_groups(path: Path) -> Groups:
    """Read a comm-group file, a JSON object of group id → ranks. Raises ``TraceError`` for anything else."""
    try:
        groups: Groups = read_json(path)
        for ranks in groups.values():
            if not isinstance(ranks, list) or not ranks or any(type(rank) is not int for rank in ranks):
                raise TypeError
        return groups
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: {reason(error)}: correct it or convert the traces again") from error
