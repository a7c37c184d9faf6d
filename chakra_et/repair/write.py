"""Write the chosen documents, and name backups so that a killed repair leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from chakra_et.files import Temporary, copy, sync_folder
from chakra_et.repair.documents import JsonDocument
from chakra_et.repair.mark import marked
from chakra_et.repair.types import Repair


class NoSink:
    """Discards everything."""

    def open(self, document: JsonDocument, header: bytes) -> None: ...

    def add(self, document: JsonDocument, records: bytes) -> None: ...

    def close(self, document: JsonDocument, footer: bytes) -> None: ...


@dataclass
class DocumentWriter:
    """Writes each chosen document to its own file, with the list of ``repairs`` in it.

    A context manager; leaving it flushes the files.
    """

    documents: dict[int, Temporary]
    compress: bool
    repairs: Sequence[Repair] = ()
    _streams: dict[int, IO[bytes] | gzip.GzipFile] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    def __enter__(self) -> DocumentWriter:
        for index, part in self.documents.items():
            # No name and no time in the gzip header, so that the same repair gives the same bytes.
            self._streams[index] = (
                gzip.GzipFile("", "wb", 6, part.file, mtime=0) if self.compress else part.file
            )
        return self

    def __exit__(self, *_: object) -> None:
        for index, part in self.documents.items():
            if self.compress:
                self._streams[index].close()
            part.file.flush()

    def open(self, document: JsonDocument, header: bytes) -> None:
        if document.index in self.documents:
            self._streams[document.index].write(header)

    def add(self, document: JsonDocument, records: bytes) -> None:
        if document.index in self.documents:
            if document.index in self._begun:
                self._streams[document.index].write(b",")
            self._begun.add(document.index)
            self._streams[document.index].write(records)

    def close(self, document: JsonDocument, footer: bytes) -> None:
        if document.index in self.documents:
            self._streams[document.index].write(marked(footer, document, self.repairs))


def keep_owner(part: Temporary, like: Path) -> None:
    """Give the new file the permissions of ``like`` and, where allowed, its owner."""
    shutil.copymode(like, part.path)
    owner = os.stat(like)
    with contextlib.suppress(OSError):  # only root may give files away
        os.chown(part.path, owner.st_uid, owner.st_gid)


def backup_of(path: Path) -> Path:
    """Link the file as NAME.backup, or the next free NAME.backup.N, and return that path.

    A backup that already is this very file (an earlier repair was killed after this step) is reused.
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
            copy(path, backup)
            shutil.copystat(path, backup)
        sync_folder(path.parent)
        return backup


def free_names(place: Path, count: int) -> list[Path]:
    """The first ``count`` free names among NAME.1.json, NAME.2.json …"""
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
