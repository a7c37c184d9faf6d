"""The completion record of a run, and the check of it by which every reader opens the run.

``NAME_conversion.json`` says which files belong together: {schema_version, version, complete, world_size,
files: [{ranks, bytes, sha256}], skeletons: the same of these, comm_groups: sha256 or null, checksum: of all
other fields}, with more of the conversion between. It is written last: until then ``complete`` is false.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from chakra_et import __version__
from chakra_et.errors import TraceError, reason
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.files import identity, move, read_json, scratch_folder, sha256, sync_folder, write_json
from chakra_et.names import SKELETON, RunFiles
from chakra_et.text import list_ranks

Rank = TypeVar("Rank")
SCHEMA_VERSION = 3
"""The schema version of NAME_conversion.json; 2 had no files."""
REMEDY = "convert again, or use --allow-missing-ranks to go on with the files that are there"
_HEAD = {"schema_version": SCHEMA_VERSION, "version": __version__}


def commit(
    scratch: Path, run: RunFiles, world: int, report: Mapping[str, Any], known: Mapping[int, str] = {}
) -> None:
    """Move all files of ``scratch`` to the folder of ``run``, then write the record, followed by ``report``.
    ``known``: SHA-256 of the .et files of ranks, where they have been taken already.

    Raises ``OSError``; what has been moved by then is a run that isn't complete.
    """
    hidden = RunFiles(scratch, run.name)
    files, skeletons = _entries(hidden.et_files(), known), _entries(hidden.et_files(SKELETON), {})
    world = max(world, 1 + max((rank for entry in files for rank in entry["ranks"]), default=0))
    begin(scratch, run)
    groups = sha256(run.groups_file) if run.groups_file.is_file() else None
    record = {**_HEAD, "complete": True, "world_size": world, "files": files, "comm_groups": groups}
    record |= {"skeletons": skeletons} if skeletons else {}
    document = json.loads(json.dumps({**record, **report}))  # with keys as they are read back
    write_json(run.report_file, {**document, "checksum": _checksum(document)})


def refuse_existing(run: RunFiles) -> None:
    """Raises ``TraceError`` where the name is a run's already: its files may be measured ones, or those of
    more ranks than would be replaced."""
    known = [path for _, path in run.et_files()]
    known += [path for path in (run.first_et_file, run.groups_file) if path.exists()]
    if known:
        raise TraceError(f"{known[0]}: is there already: choose another output, or remove the files")


def write_run(
    run: RunFiles,
    ranks: Iterable[tuple[int, object, ExecutionTrace | None]],
    groups: Callable[[], Mapping[str, Sequence[int]]],
    world: int,
    report: Mapping[str, Any],
) -> None:
    """Write a new run from ranks as ``write_files`` takes them, and ``groups`` as they are after the last.
    Raises ``TraceError`` where there are files of that name."""
    refuse_existing(run)
    run.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(run.folder / run.name) as scratch:
        hidden = RunFiles(scratch, run.name)
        count = write_files(hidden, ranks)
        if groups():
            write_json(hidden.groups_file, {name: list(members) for name, members in groups().items()})
        commit(scratch, run, world, {**report, "different_files": count})


def write_files(run: RunFiles, ranks: Iterable[tuple[int, object, ExecutionTrace | None]]) -> int:
    """Write the file of each (rank, key, trace), or a hard link to the first one with its key, which then
    needs no trace; returns how many files differ."""
    files: dict[object, Path] = {}
    for rank, key, trace in ranks:
        path = run.et_file(rank)
        if key in files:
            os.link(files[key], path)
        elif trace is not None:
            et_file.write(path, trace)
            files[key] = path
    return len(files)


def begin(scratch: Path, run: RunFiles) -> None:
    """Move all files of ``scratch`` to the folder of ``run``, which isn't complete from then on."""
    write_json(run.report_file, {**_HEAD, "complete": False})
    for path in sorted(scratch.iterdir()) if scratch.is_dir() else ():
        move(path, run.folder / path.name)
    sync_folder(run.folder)


def check(
    run: RunFiles, files: Mapping[int, Path], allow: bool = False, alone: bool = False
) -> tuple[int, list[str]]:
    """(number of ranks that the run had, one sentence for each thing to know about ``files``).

    ``files``: those to read, by rank; ``alone``: one without a rank in its name, rank 0's second name or a
    file of its own. Raises ``TraceError`` for files that are missing, changed, of several conversions, or of
    one that hasn't finished, unless ``allow``.
    """
    contracted = any(path.name.endswith(SKELETON) for path in files.values())
    where, there = run.folder / run.name, dict(run.et_files(SKELETON if contracted else ".et"))
    problems, notes = [], []
    try:
        report = read_json(run.report_file) if run.report_file.exists() else {}
        listed, world = _listed(report | {"files": report["skeletons"]} if contracted else report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"{run.report_file} {reason(error)}")
        report, listed, world = {}, {}, 0
    if report and report.get("complete") is False:
        problems.append(f"{where}: its conversion hasn't finished")
    elif report and report.pop("checksum", None) not in (None, _checksum(report)):
        problems.append(f"{run.report_file} isn't what the conversion wrote")
    elif "files" in report:
        problems += _changed(run, files, listed, report.get("comm_groups"))
    else:
        if report:
            earlier = "an earlier version converted it, so that changed files aren't noticed: convert again"
            notes.append(f"{run.name}: {earlier}")
        heads = {path: et_file.read_metadata(path) for path, _ in contents(files.items())}
        if not (report or alone or problems) and any("conversion_options" in head for head in heads.values()):
            lacks = f"there is no {run.report_file} (removed, or an earlier version wrote the run)"
            notes.append(f"{lacks}, so that changed and missing files aren't noticed")
        worlds = [head.get("world_size") for head in heads.values()]
        world = max([world, *(size for size in worlds if type(size) is int)])
        first, *others = ((path, head.get("conversion_options")) for path, head in heads.items())
        for path, options in others:
            if options != first[1]:
                problems.append(f"{first[0]} and {path} are of different conversions")
                break
    if gone := sorted(set(listed) - set(there)):
        problems.append(f"{where}: the files of rank {list_ranks(gone)} have gone since the conversion")
    if problems and not allow:
        raise TraceError(f"{problems[0]}: {REMEDY}")
    world = max(world, 1) if alone else max(world, *(rank + 1 for rank in there), 1)
    if len(files) < world:
        absent = list_ranks([rank for rank in range(min(world, 1 << 16)) if rank not in files])
        without = "" if alone else f" (without {absent})"
        counts = "waiting for the others counts as communication"
        notes.append(f"{run.name}: {len(files)} of {world} ranks{without}: {counts}")
    return world, problems + notes


def _changed(run: RunFiles, files: Mapping[int, Path], listed: Mapping[int, Any], groups: Any) -> list[str]:
    """A sentence for the first file that isn't what the record says."""
    known: dict[tuple[int, int] | str, tuple[int, str]] = {}
    for rank, path in files.items():
        size, place = path.stat().st_size, identity(path)
        expected = listed.get(rank)
        if expected and size == expected[0] and place not in known:
            known[place] = size, sha256(path)
        if expected is None or known.get(place) != expected:
            return [f"{path} isn't the file that the conversion wrote"]
    there = sha256(run.groups_file) if run.groups_file.is_file() else None
    return [] if there == groups else [f"{run.groups_file} isn't the file that the conversion wrote"]


def _checksum(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _listed(report: Mapping[str, Any]) -> tuple[dict[int, tuple[int, str]], int]:
    """(rank → size and hash of its file; the world size), from the ranks alone for an earlier version's."""
    if "files" not in report:
        ranks = report.get("ranks", {}).items()
        return {int(rank): (0, "") for rank, entry in ranks if "error" not in entry}, 0
    listed = ((int(rank), entry) for entry in report["files"] for rank in entry["ranks"])
    return {rank: (entry["bytes"], entry["sha256"]) for rank, entry in listed}, int(report["world_size"])


def contents(files: Iterable[tuple[Rank, Path]]) -> list[tuple[Path, list[Rank]]]:
    """The files that differ, each with its ranks: hard links share one."""
    found: dict[tuple[int, int] | str, tuple[Path, list[Rank]]] = {}
    for rank, path in files:
        found.setdefault(identity(path), (path, []))[1].append(rank)
    return list(found.values())


def _entries(files: Iterable[tuple[int, Path]], known: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {"ranks": ranks, "bytes": path.stat().st_size, "sha256": known.get(ranks[0]) or sha256(path)}
        for path, ranks in contents(files)
    ]
