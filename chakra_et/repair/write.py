"""Write what the scanner hands on, and put files in place so that a kill leaves the old or the new one."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from chakra_et.files import Temporary, sync_folder, temporary_file
from chakra_et.repair.documents import Document

BUFFER_BYTES = 1 << 20


class NoSink:
    """Takes everything and keeps nothing."""

    def open(self, document: Document, header: bytes) -> None: ...

    def add(self, document: Document, records: bytes) -> None: ...

    def close(self, document: Document, footer: bytes) -> None: ...


@dataclass
class DocumentWriter:
    """Writes the chosen documents, each to its own file; a context manager that completes them on disk."""

    documents: dict[int, Temporary]
    compress: bool
    _streams: dict[int, IO[bytes]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def __enter__(self) -> DocumentWriter:
        for index, part in self.documents.items():
            # No name and no time in the gzip header: the same repair gives the same bytes.
            self._streams[index] = (
                gzip.GzipFile("", "wb", 6, part.file, mtime=0) if self.compress else part.file
            )
        return self

    def __exit__(self, *_: object) -> None:
        for index, part in self.documents.items():
            if self.compress:
                self._streams[index].close()
            part.file.flush()

    def open(self, document: Document, header: bytes) -> None:
        if document.index in self.documents:
            self._streams[document.index].write(header)

    def add(self, document: Document, records: bytes) -> None:
        if document.index in self.documents:
            if document.index in self._begun:
                self._streams[document.index].write(b",")
            self._begun.add(document.index)
            self._streams[document.index].write(records)

    def close(self, document: Document, footer: bytes) -> None:
        if document.index in self.documents:
            self._streams[document.index].write(footer)


def keep_owner(part: Temporary, like: Path) -> None:
    """Give the new file the permissions and, where that is allowed, the owner of ``like``."""
    shutil.copymode(like, part.path)
    owner = os.stat(like)
    with contextlib.suppress(OSError):  # only root may give files away
        os.chown(part.path, owner.st_uid, owner.st_gid)


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
        sync_folder(path.parent)
        return backup


def _copy(path: Path, backup: Path) -> None:
    with temporary_file(backup) as part, open(path, "rb") as file:
        shutil.copyfileobj(file, part.file, BUFFER_BYTES)
        keep_owner(part, like=path)
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
