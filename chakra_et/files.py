"""Files on disks and at URLs: atomic writes, and the removal of what killed processes left behind.

An incomplete file has a hidden name in its final folder and is locked. A hidden file without a lock has been
abandoned. On Windows, which renames no open file, nothing is locked and nothing counts as abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from chakra_et.errors import TraceError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ABANDONED = re.compile(r"\..+\.(?P<host>[0-9a-f]{8})[0-9a-f]{8}\.tmp", re.DOTALL)
# Some cluster file systems lock per machine only, so keep other machines' files for a day.
OTHER_HOST_SECONDS = 86_400
MOST_BYTES = 64 << 20
"""Size of the largest file that is read whole, but for .et files."""
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_NODE = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
HOST = f"{zlib.crc32(_NODE.encode()):08x}"


def path_of(name: str | Path) -> Path:
    """The path, or of a URL such as s3://bucket/folder what fsspec finds there, which answers as a path does.

    Nothing locks or syncs it, and what is written is there once it is whole. Raises ``TraceError`` where the
    library for it isn't installed or doesn't know the URL.
    """
    if "://" not in str(name) or is_remote(name):
        return Path(name) if isinstance(name, str) else name
    try:
        from upath import UPath

        found: Any = UPath(name)
        local = found.fs.protocol == ("file", "local")
    except (ImportError, ValueError, OSError) as error:
        raise TraceError(f"{name}: {error}: pip install universal-pathlib, and what fsspec needs") from None
    return Path(found.path) if local else cast(Path, found)


def is_remote(path: Any) -> bool:
    """Whether ``path`` is that of a URL, from ``path_of``."""
    return not isinstance(path, (str, Path))


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes ``path`` on exit, once it is on disk. Raises ``OSError``.

    Until then its ``name`` is that of a hidden file beside ``path``, which an error removes.
    """
    path = path_of(path)
    if is_remote(path):
        fs = path.fs  # type: ignore[attr-defined]
        with fs.transaction, fs.open(path.path, "wb") as file:  # type: ignore[attr-defined]
            yield file
        return
    _remove_abandoned_once(path.parent)
    with _temporary(path, lambda hidden: hidden.touch(exist_ok=False)) as hidden:
        with open(hidden, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
        sync_folder(path.parent)


def open_regular(path: str | Path) -> io.BufferedReader:
    """A regular file for reading. Raises ``OSError``, also for a pipe or device, as these may not end."""
    path = path_of(path)
    if is_remote(path):
        return io.BufferedReader(cast(Any, path.open("rb")))
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises ``OSError``."""
    with open_regular(path) as file:
        if file.seek(0, os.SEEK_END) > most:
            raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", str(path))
        file.seek(0)
        return file.read()


def read_json(path: str | Path, kind: Any = Any) -> Any:
    """The value in a JSON file, of type ``kind``. Raises ``OSError``, and ``ValueError`` for others."""
    try:
        found = json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if kind is Any:
        return found
    import msgspec  # settings of megatron_lm are read where nothing is installed

    return msgspec.convert(found, kind)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power failure."""
    if is_remote(folder):
        return
    with _handle(folder) as handle:
        if handle is not None:
            os.fsync(handle)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically. Raises ``OSError``."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically. Raises ``OSError``."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises ``OSError``."""
    import hashlib  # OpenSSL's start-up takes longer than many commands need

    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def copy(source: Path, target: Path) -> None:
    """Copy the content of a file atomically. Raises ``OSError``."""
    import shutil  # imports all compressions, which few conversions need

    with atomic_file(target) as file, open_regular(source) as content:
        shutil.copyfileobj(content, file, 1 << 20)


def move(source: Path, target: Path) -> None:
    """Give a file another name in the same file system, replacing an older file."""
    if is_remote(source):
        source.fs.mv(source.path, target.path)  # type: ignore[attr-defined]
    else:
        os.replace(source, target)


def identity(path: Path) -> tuple[int, int] | str:
    """The same for all names of one file."""
    status = path.stat()
    return str(path) if is_remote(path) else (status.st_dev, status.st_ino)


def link(source: Path, target: Path) -> None:
    """Give a file a second name atomically; where the file system has no hard links, copy it."""
    if is_remote(source):
        source.fs.copy(source.path, target.path)  # type: ignore[attr-defined]
        return
    try:
        with _temporary(target, lambda path: os.link(source, path)) as path:
            os.replace(path, target)  # changes nothing if both already are the same file
        sync_folder(target.parent)
    except OSError:
        copy(source, target)


@contextlib.contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """A new folder in the same folder as ``beside``, removed on exit, as are those of killed processes."""
    if is_remote(beside):
        folder: Any = beside.with_name(f".{beside.name}.{HOST}{os.urandom(4).hex()}.tmp")
        try:
            yield folder
        finally:
            with contextlib.suppress(FileNotFoundError):
                folder.fs.rm(folder.path, recursive=True)
        return
    remove_abandoned(beside.parent)
    with _temporary(beside, Path.mkdir) as temporary:
        yield temporary


@contextlib.contextmanager
def folder_lock(folder: Path, shared: bool, wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock on ``folder``, exclusive or ``shared``.

    ``wait`` is called once if another process holds it. File systems without locks are not waited for.
    """
    with contextlib.nullcontext() if is_remote(folder) else _handle(folder) as handle:
        if handle is not None:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(handle, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    wait()
                    fcntl.flock(handle, kind)
        yield


def remove_abandoned(folder: Path) -> None:
    """Remove the incomplete files in ``folder`` that no process is writing."""
    if is_remote(folder):
        return
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            found = ABANDONED.fullmatch(path.name)
            if not found or path.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if found["host"] != HOST and time.time() - path.stat().st_mtime < OTHER_HOST_SECONDS:
                    continue
                with _handle(path) as handle:
                    if handle is not None:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _remove(path)


# Before the first file that a process writes to a folder: a large run would list it thousands of times.
_remove_abandoned_once = functools.cache(remove_abandoned)


def _remove(path: Path) -> None:
    if path.is_dir():
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _handle(path: Path) -> Iterator[int | None]:
    """A handle to lock or sync a file or folder by; None on Windows."""
    handle = os.open(path, os.O_RDONLY | _NO_WAIT) if fcntl else None
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


@contextlib.contextmanager
def _temporary(place: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """A file or folder that ``make`` makes beside ``place``; removed on exit unless it was renamed."""
    while True:
        # File names are limited to 255 bytes, and a character may take four.
        stem = os.fsdecode(os.fsencode(place.name)[:200])
        path = place.with_name(f".{stem}.{HOST}{os.urandom(4).hex()}.tmp")
        with contextlib.ExitStack() as stack:
            stack.callback(_remove, path)
            with _blamed_on(place, path):
                make(path)
                try:
                    handle = stack.enter_context(_handle(path))
                except FileNotFoundError:
                    continue  # another process has removed it, as it wasn't locked yet
            with contextlib.suppress(OSError):
                if handle is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX)
            if not path.exists():
                continue
            with _blamed_on(place, path):
                yield path
            return


@contextlib.contextmanager
def _blamed_on(place: Path, hidden: Path) -> Iterator[None]:
    """Errors name ``place``, not the hidden file, nor no file at all as those of failed writes do."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename) == str(hidden):
            error.filename, error.filename2 = str(place), None
        raise
