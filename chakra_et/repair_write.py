"""Write what the scanner hands on, and put files in place so that a kill leaves the old or the new one."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from chakra_et.repair_lanes import Lane

BUFFER_BYTES = 1 << 20


class NoSink:
    """Takes everything and keeps nothing."""

    def open(self, lane: Lane, header: bytes) -> None: ...

    def add(self, lane: Lane, records: bytes) -> None: ...

    def close(self, lane: Lane, footer: bytes) -> None: ...


@dataclass
class Temporary:
    """A file under a temporary name in the folder where it is to appear."""

    path: Path
    place: Path
    file: IO[bytes]

    def put_in_place(self) -> None:
        os.replace(self.path, self.place)
        _sync_folder(self.place.parent)


@dataclass
class LaneWriter:
    """Writes the chosen lanes, each to its own file; a context manager that leaves them complete on disk."""

    lanes: dict[int, Temporary]
    compress: bool
    _streams: dict[int, IO[bytes]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def __enter__(self) -> LaneWriter:
        for index, part in self.lanes.items():
            # No name and no time in the gzip header: the same repair gives the same bytes.
            self._streams[index] = (
                gzip.GzipFile("", "wb", 6, part.file, mtime=0) if self.compress else part.file
            )
        return self

    def __exit__(self, *_: object) -> None:
        for index, part in self.lanes.items():
            if self.compress:
                self._streams[index].close()
            part.file.flush()
            os.fsync(part.file.fileno())

    def open(self, lane: Lane, header: bytes) -> None:
        if lane.index in self.lanes:
            self._streams[lane.index].write(header)

    def add(self, lane: Lane, records: bytes) -> None:
        if lane.index in self.lanes:
            if lane.index in self._begun:
                self._streams[lane.index].write(b",")
            self._begun.add(lane.index)
            self._streams[lane.index].write(records)

    def close(self, lane: Lane, footer: bytes) -> None:
        if lane.index in self.lanes:
            self._streams[lane.index].write(footer)


@contextlib.contextmanager
def temporary_file(place: Path, like: Path) -> Iterator[Temporary]:
    """A temporary file that is to become ``place``, with the permissions of ``like``.

    Removed at the end if it has not been put in place. Held under a lock while in use, so that what a killed
    process left behind can be told from what another is writing, and is removed.
    """
    prefix, suffix = f".{place.name}.", ".repair-tmp"
    for name in place.parent.iterdir():
        if name.name.startswith(prefix) and name.name.endswith(suffix):
            _remove_if_abandoned(name)
    handle, name = tempfile.mkstemp(suffix, prefix, place.parent)
    path = Path(name)
    try:
        with open(handle, "wb", BUFFER_BYTES) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.copymode(like, path)
            owner = os.stat(like)
            with contextlib.suppress(OSError):  # only root may give files away
                os.chown(path, owner.st_uid, owner.st_gid)
            yield Temporary(path, place, file)
    finally:
        path.unlink(missing_ok=True)


def _remove_if_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def backup_of(path: Path) -> Path:
    """Give the file a second name, NAME.backup or the next free NAME.backup.N, and return it.

    A backup that is this very file (a repair was killed between this step and the next) is used again.
    """
    number = 0
    while True:
        backup = path.with_name(path.name + (f".backup.{number}" if number else ".backup"))
        number += 1
        if backup.exists() and backup.samefile(path):
            return backup
        try:
            os.link(path, backup)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            if os.path.lexists(backup):
                continue
            _copy(path, backup)
        _sync_folder(path.parent)
        return backup


def _copy(path: Path, backup: Path) -> None:
    with temporary_file(backup, like=path) as part, open(path, "rb") as file:
        shutil.copyfileobj(file, part.file, BUFFER_BYTES)
        part.file.flush()
        os.fsync(part.file.fileno())
        shutil.copystat(path, part.path)
        part.put_in_place()


def free_names(place: Path, count: int) -> list[Path]:
    """The first ``count`` names NAME.1.json, NAME.2.json … that are not taken."""
    stem, ending = place.name, ""
    for part in (".gz", ".json"):
        if stem.endswith(part):
            stem, ending = stem.removesuffix(part), part + ending
    names: list[Path] = []
    number = 1
    while len(names) < count:
        name = place.with_name(f"{stem}.{number}{ending}")
        if not os.path.lexists(name):
            names.append(name)
        number += 1
    return names


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
