"""Files that appear whole or not at all, and what a killed process leaves of them.

Until it is complete, a file has a hidden name in its own folder and is held under a lock, so that what is
being written can be told from what was abandoned.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ABANDONED = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.tmp", re.DOTALL)
# Some cluster file systems keep locks on one machine only: what another one made stays for a day.
OTHER_HOST_SECONDS = 86_400
HOST = f"{zlib.crc32(socket.gethostname().encode()):08x}"


@dataclass
class Temporary:
    """A file under a hidden name in the folder where it is to appear as ``place``."""

    path: Path
    place: Path
    file: IO[bytes]

    def put_in_place(self) -> None:
        """Complete the file on the disk and give it its name, in place of any older file."""
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.path, self.place)
        sync_folder(self.place.parent)


@contextlib.contextmanager
def temporary_file(place: str | Path) -> Iterator[Temporary]:
    """A file to write that becomes ``place`` by ``put_in_place``; without that it is removed at the end."""
    place = Path(place)
    try:
        with _temporary(place, _new_file) as (path, handle), open(handle, "wb", closefd=False) as file:
            yield Temporary(path, place, file)
    except OSError as error:
        # A write that fails knows its handle only.
        error.filename = error.filename or str(place)
        raise


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under ``path`` only once it is complete and on the disk."""
    with temporary_file(path) as temporary:
        yield temporary.file
        temporary.put_in_place()


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last through a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, the whole file or nothing of it. Raises ``OSError``."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people, the whole file or nothing of it. Raises ``OSError``."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def copy(source: Path, target: Path) -> None:
    """Copy a file, the whole of it or nothing."""
    with atomic_file(target) as file, open(source, "rb") as content:
        shutil.copyfileobj(content, file, 1 << 20)


@contextlib.contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """An empty folder in the folder of ``beside``, gone at the end."""
    with _temporary(beside, _new_folder) as (temporary, _):
        yield temporary


@contextlib.contextmanager
def folder_lock(folder: Path, shared: bool, wait: Callable[[], None]) -> Iterator[None]:
    """Hold ``folder`` for this process alone, or together with others that ask for ``shared``.

    ``wait`` is called once if another process holds it. On a file system without locks nobody waits.
    """
    handle = os.open(folder, os.O_RDONLY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(handle, kind)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files in ``folder`` that nobody writes any more."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            found = ABANDONED.fullmatch(path.name)
            if found and not path.is_symlink():
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(path, found["host"] == HOST)


def _remove_if_abandoned(path: Path, ours: bool) -> None:
    if not ours and time.time() - path.stat().st_mtime < OTHER_HOST_SECONDS:
        return
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _temporary(place: Path, make: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """A new file or folder beside ``place`` and its handle; removed at the end if it is still there."""
    while True:
        # Cut by bytes: a name of 255 bytes is the limit, and letters may take four.
        stem = os.fsdecode(os.fsencode(place.name)[:200])
        path = place.with_name(f".{stem}.{HOST}{os.urandom(4).hex()}.tmp")
        handle = make(path)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # Another process may have cleaned up between the making and the lock.
            if not path.exists():
                continue
            yield path, handle
            return
        finally:
            os.close(handle)
            _remove(path)


def _new_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _new_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY)
