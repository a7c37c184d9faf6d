"""Group the .et files of a run: ``NAME.0.et``, ``NAME.1.et``, … and ``NAME_comm_groups.json``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chakra_et.errors import TraceError, reason
from chakra_et.et import record
from chakra_et.files import path_of, read_json
from chakra_et.names import SKELETON, parse_et, run_at
from chakra_et.text import plural

MANY_RANKS = 64
"""Of more ranks than these, joint questions read skeletons where all ranks have one."""
Skeletons = Literal["auto", "on", "off"]


@dataclass
class RankSet:
    """The files of one run. ``files``: rank → path; None is a file without a rank in its name, the only one.

    ``by_name``: the user gave the name of the run, not of its files, and so means all of them. ``world``:
    ranks that the run had; ``notes``: what ``record.check`` says, one sentence each.
    """

    name: str
    files: dict[int | None, Path] = field(default_factory=dict)
    by_name: bool = False
    world: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        """Whether to treat the files as the ranks of one run."""
        return None not in self.files and (self.by_name or len(self.files) > 1)

    def comm_groups(self) -> dict[str, list[int]] | None:
        """The groups in the comm-group file (group id → ranks); None if there is no such file."""
        path = self.groups_file
        return None if path is None else read_comm_groups(path)

    @property
    def groups_file(self) -> Path | None:
        """The comm-group file in the same folder; None if there is none."""
        path = run_at(self.name).groups_file
        return path if path.is_file() else None


def find_rank_sets(
    names: Iterable[str], allow_missing: bool = False, skeletons: Skeletons = "off"
) -> list[RankSet]:
    """Group files by run. A name is a file, or the NAME of a run for all its files, or its ``skeletons``.

    Raises ``TraceError`` for a name that is neither, for two files of the same rank of a run, and unless
    ``allow_missing`` for files that are not those of one finished conversion (see ``record.check``).
    """
    sets: dict[str, RankSet] = {}
    for name in names:
        paths = [path_of(name)] if path_of(name).is_file() else _files_of_run(name, skeletons)
        for path in paths:
            found = parse_et(path)
            key, rank = found or (str(path), None)
            group = sets.setdefault(key, RankSet(key if found else str(path.with_suffix(""))))
            group.by_name |= path != path_of(name)
            known = group.files.setdefault(rank, path)
            if known != path:
                raise TraceError(f"{known} and {path} are both rank {rank} of {key}: give only one of them")
    for group in sets.values():
        group.files = dict(sorted(group.files.items(), key=lambda item: (item[0] is not None, item[0])))
        group.world, group.notes = record.check(run_at(group.name), group.files, allow_missing)
        if any(path.name.endswith(SKELETON) for path in group.files.values()):
            group.notes.append(
                f"read from the skeletons of {plural(len(group.files), 'rank')}: nodes are segments of like "
                "work, without the names of operators (--skeletons off reads the whole ranks)"
            )
    return list(sets.values())


def _files_of_run(name: str, skeletons: Skeletons) -> list[Path]:
    run = run_at(name)
    paths = [path for _, path in run.et_files()]
    contracted = [] if skeletons == "off" else [path for _, path in run.et_files(SKELETON)]
    if contracted and (skeletons == "on" or len(contracted) > max(MANY_RANKS, len(paths) - 1) or not paths):
        return contracted
    if not paths and run.first_et_file.is_file():
        paths = [run.first_et_file]
    if not paths:
        raise TraceError(f"{name}: neither a file nor the NAME of NAME.0.et, NAME.1.et, …: check the path")
    return paths


def read_comm_groups(path: Path) -> dict[str, list[int]]:
    """Read a comm-group file, a JSON object of group id → ranks. Raises ``TraceError`` for anything else."""
    try:
        groups: dict[str, list[int]] = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {reason(error)}: correct it or convert the traces again") from error
    whole = isinstance(groups, dict) and all(
        isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)
        for ranks in groups.values()
    )
    if not whole:
        raise TraceError(
            f"{path}: must be a JSON object of group id → list of ranks: correct it or convert again"
        )
    return groups
