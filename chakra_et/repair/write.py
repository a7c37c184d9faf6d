"""Write the chosen document, and name backups so that a killed repair leaves the old file or the new one.

A repaired trace lists its repairs in its last field, see ``traces.fields``.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec

from chakra_et.files import Temporary, copy, sync_folder
from chakra_et.redact import GONE, redacted_json
from chakra_et.repair.format import value_end
from chakra_et.repair.records import Sink
from chakra_et.repair.types import JsonDocument, Repair
from chakra_et.traces.fields import MAX_LISTED_REPAIRS, REPAIRS, recorded_repairs

CUT = ("truncated", "gz-truncated")
FURTHER = "further repairs, not listed one by one"
_FIELD = re.compile(rb',\s*"%s"\s*:\s*' % REPAIRS.encode())


class DocumentWriter(Sink):
    """Writes the chosen document (number ``index``) to ``file``, with the list of ``repairs`` in it.

    A context manager; leaving it flushes the file.
    """

    def __init__(self, index: int, file: IO[bytes], compress: bool, repairs: list[Repair]) -> None:
        self.index, self.file, self.repairs = index, file, repairs
        self.begun = self.redacted = False
        # No name and no time in the gzip header, so that the same repair gives the same bytes.
        self.stream = gzip.GzipFile("", "wb", 6, file, mtime=0) if compress else file

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stream is not self.file:
            self.stream.close()
        self.file.flush()

    def open(self, document: JsonDocument, header: bytes) -> None:
        self._write(document, header)

    def add(self, document: JsonDocument, records: bytes) -> None:
        if document.index == self.index:
            self._write(document, b"," * self.begun)
            self.begun = True
            self._write(document, records)

    def close(self, document: JsonDocument, footer: bytes) -> None:
        if document.index == self.index:
            footer = redacted_json(footer)
            self._write(document, marked(footer, document, self.repairs))

    def _write(self, document: JsonDocument, text: bytes) -> None:
        if document.index == self.index:
            kept = redacted_json(text)
            if kept is not text and not self.redacted:
                self.redacted = True
                self.repairs.append(Repair("secret", 0, f"values that look like secrets are {GONE} now"))
            self.stream.write(kept)


def marked(footer: bytes, document: JsonDocument, repairs: Iterable[Repair]) -> bytes:
    """``footer`` with the repairs of its document, after those of an earlier repair."""
    try:
        fields = msgspec.json.decode(b'{"_": [%b' % footer, type=dict[str, msgspec.Raw])
        listed = recorded_repairs(msgspec.json.decode(fields[REPAIRS]))
    except (msgspec.DecodeError, KeyError, RecursionError):
        listed = {}
    # An object that is whole is not cut off, whatever else was in its file. A cut comes first, as it counts.
    own = [repair for repair in repairs if not (document.whole and repair.kind in CUT)]
    for repair in sorted(own, key=lambda repair: repair.kind not in CUT):
        text = str(repair)
        if text not in listed and len(listed) >= MAX_LISTED_REPAIRS - 1:
            text = FURTHER
        listed[text] = listed.get(text, 0) + 1
    if not listed:
        return footer
    found = _FIELD.search(footer)
    value = value_end(footer.decode("latin-1"), found.end()) if found else None
    if found and value is not None:
        footer = footer[: found.start()] + footer[value:]
    end = footer.rindex(b"}")
    field = f',\n  "{REPAIRS}": {json.dumps(listed)}\n'
    return footer[:end].rstrip() + field.encode() + footer[end:]


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
