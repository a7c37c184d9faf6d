"""Repair one trace file: damaged parts are mended or left out, intact parts stay unchanged.

    report = repair_file(Path("outputs/gpt2_2gpu_quick_trace_rank1_host.json"))

The result is scanned again before it replaces the original, so that a repaired file never needs repair. The
replacement is atomic and under a lock; the original is kept as ``.backup``. The file is mapped, not loaded; a
compressed one is unpacked into a temporary file first.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from chakra_et import files
from chakra_et.errors import TraceError
from chakra_et.redact import GONE, redacted_json
from chakra_et.repair.format import Buffer, JsonDocument, Repair, RepairReport, value_end
from chakra_et.repair.scan import Scanner
from chakra_et.traces.fields import MAX_LISTED_REPAIRS, REPAIRS, recorded_repairs
from chakra_et.traces.records import MAX_BYTES, TextMeter

GZIP_MAGIC = b"\x1f\x8b"
PIECE = 64 << 10
CUT = ("truncated", "gz-truncated")
FURTHER = "further repairs, not listed one by one"
_FIELD = re.compile(rb',\s*"%s"\s*:\s*' % REPAIRS.encode())


def repair_file(
    path: Path,
    *,
    write: bool = True,
    output: Path | None = None,
    max_bytes: int = MAX_BYTES,
) -> RepairReport:
    """Repair a host or device trace, plain or gzip.

    Of several objects the last complete one is kept, or, if none is complete, the last that holds anything.

    The result replaces the file, and the original is kept as NAME.backup (NAME.backup.1 … if that exists).
    With ``output`` the result goes there and the original is not touched; with ``write=False`` nothing is
    written and the report lists what would be done. A file that needs no repair is left alone, and ``output``
    is not written. A symbolic link is followed, but a file is changed only within the link's own folder.

    Raises ``TraceError`` for a file that cannot be repaired or written; nothing has changed then.
    """
    path, output = files.path_of(path), output and files.path_of(output)
    in_place = write and output is None
    try:
        if files.is_remote(path) or files.is_remote(output or path):
            return _repair_remote(path, write, output, max_bytes)
        target = Path(os.path.realpath(path))
        if in_place and path.is_symlink() and target.parent != Path(os.path.realpath(path.parent)):
            raise TraceError(f"{path}: is a link to a file in another folder; repair that file itself.")
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise TraceError(f"{path}: is not a file.")
        # A second repair of this file waits, and then reads the first one's result.
        say = "waiting for another repair or conversion in this folder …"
        wait = partial(print, say, file=sys.stderr, flush=True)
        lock = files.folder_lock(target.parent, False, wait) if in_place else contextlib.nullcontext()
        with lock, files.open_regular(target) as file:
            before = os.fstat(file.fileno())
            report = RepairReport(path)
            # A broken gzip stream comes first, as it causes the damage to the text.
            with _text(file, str(path), max_bytes, report.repairs) as data:
                scanner = Scanner(data, str(path)).run()
                report.repairs += sorted(scanner.repairs, key=lambda repair: repair.offset)
                document = _choose(scanner, report)
                report.kind, report.nodes_kept = document.kind, document.nodes
                report.changed = bool(report.repairs)
                if report.changed and write:
                    _write(file, before, target, output, data, document, max_bytes, report)
            return report
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file.") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be repaired, is unchanged ({error.strerror or error}).") from None


def _repair_remote(path: Path, write: bool, output: Path | None, max_bytes: int) -> RepairReport:
    """``repair_file`` where a file is at a URL: on a copy, as reading goes back and forth."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, path.name)
        files.copy(path, local)
        try:
            report = repair_file(local, write=write, max_bytes=max_bytes)
        except TraceError as error:
            raise TraceError(str(error).replace(str(local), str(path))) from None
        report.path, report.backup = path, None
        if report.changed and write:
            if output is None:
                report.backup = _backup_of(path)
            files.copy(local, output or path)
    return report


@contextlib.contextmanager
def _text(file: IO[bytes], name: str, max_bytes: int, repairs: list[Repair]) -> Iterator[Buffer]:
    """The text of ``file``; of a gzip file as far as it decompresses, and ``repairs`` has why no further."""
    with contextlib.ExitStack() as stack:
        meter = TextMeter(name, max_bytes)
        if _is_gzip(file):
            text: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            for part in _unpacked(file, meter, repairs):
                text.write(part)
            text.flush()
        else:
            text = file
            size = os.fstat(file.fileno()).st_size
            meter.add(size, size)
        size = os.fstat(text.fileno()).st_size
        # An empty file can't be mapped.
        yield stack.enter_context(mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""


def _is_gzip(file: IO[bytes]) -> bool:
    """Whether the file begins as gzip does, whatever its name; reading then begins at its start."""
    file.seek(0)
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return magic == GZIP_MAGIC


def _unpacked(file: IO[bytes], meter: TextMeter, repairs: list[Repair]) -> Iterator[bytes]:
    """The text of a gzip file, whose members may be concatenated and padded with zeros."""
    inflate, waiting, taken = zlib.decompressobj(wbits=31), b"", 0
    while True:
        if not waiting:
            waiting = file.read(PIECE)
            taken += len(waiting)
        if inflate.eof:
            waiting = waiting.lstrip(b"\0")
            if waiting and not GZIP_MAGIC.startswith(waiting[:2]):
                detail = "bytes after the end of the gzip stream"
                repairs.append(Repair("gz-garbage", taken - len(waiting), detail))
                return
            if waiting:
                inflate = zlib.decompressobj(wbits=31)
            elif file.tell() == os.fstat(file.fileno()).st_size:
                return
            continue
        before = inflate.copy()
        try:
            # Even without new input, text may be left over from the last piece.
            part = inflate.decompress(waiting, PIECE << 4)
        except zlib.error as error:
            # zlib drops the text of a call that fails, so this passes one byte at a time.
            parts, good = [], 0
            with contextlib.suppress(zlib.error):
                for good in range(len(waiting)):
                    parts.append(before.decompress(waiting[good : good + 1]))
            checksum = "the checksum does not match, so some of the text up to here may be wrong"
            other = f"the gzip stream can't be read from here on ({error})"
            detail = checksum if "check" in str(error) else other
            repairs.append(Repair("gz-damaged", taken - len(waiting) + good, detail))
            yield b"".join(parts)
            return
        if not part and not waiting and not inflate.eof:
            repairs.append(Repair("gz-truncated", taken, f"the gzip stream stops after {taken} bytes"))
            return
        meter.add(len(part), taken)
        waiting = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        yield part


def _choose(scanner: Scanner, report: RepairReport) -> JsonDocument:
    """The object to keep; the report lists what becomes of each."""
    path, documents = report.path, scanner.documents
    able = [document for document in documents if document.nodes]
    if not able:
        raise TraceError(f"{path}: no complete node or event in it, nothing to save; record the trace again.")
    if scanner.mixed:
        raise TraceError(
            f"{path}: the writes of several processes are mixed in it and cannot be separated; trace every "
            "rank to a file of its own."
        )
    kept = ([document for document in able if document.complete] or able)[-1]
    for number, document in enumerate(documents if len(documents) > 1 else (), 1):
        state = "" if document.complete else ", incomplete"
        fate = "kept" if document is kept else "left out"
        detail = f"object {number} of {len(documents)}, {document.nodes} nodes or events{state}: {fate}"
        report.repairs.append(Repair("concatenated", document.start, detail))
    return kept


def _write(
    file: IO[bytes], before: os.stat_result, target: Path, output: Path | None,
    data: Buffer, document: JsonDocument, max_bytes: int, report: RepairReport,
) -> None:  # fmt: skip
    """Write ``document`` to ``output``, or over ``target``, which was ``before`` when opened (``file``)."""
    path, place = report.path, output or target
    files.remove_abandoned(place.parent)
    with files.atomic_file(place) as part:
        shutil.copymode(target, part.name)
        with contextlib.suppress(OSError):  # only root may give files away
            os.chown(part.name, before.st_uid, before.st_gid)
        # No name and no time in the gzip header, so that the same repair gives the same bytes.
        packed = gzip.GzipFile("", "wb", 6, part, mtime=0) if _is_gzip(file) else None
        stream: IO[bytes] = packed or part  # type: ignore[assignment]
        _write_document(stream, data, document, report.repairs)
        if packed:
            packed.close()
        part.flush()
        _verify(part.name, document, path, max_bytes)
        after = os.stat(target)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise TraceError(f"{path}: changes while it is read; repair it when its run has ended.")
        if output is None:
            report.backup = _backup_of(target)


def _write_document(stream: IO[bytes], data: Buffer, document: JsonDocument, repairs: list[Repair]) -> None:
    """Write ``document`` without secrets, and with the list of ``repairs`` in its last field."""
    found = False

    def without_secrets(text: bytes) -> bytes:
        nonlocal found
        kept = redacted_json(text)
        found |= kept is not text
        return kept

    stream.write(without_secrets(document.header))
    for number, run in enumerate(document.runs(data)):
        stream.write(b"," * (number > 0) + without_secrets(run))
    footer = without_secrets(document.footer)
    if found:
        repairs.append(Repair("secret", 0, f"values that look like secrets are {GONE} now"))
    stream.write(_marked(footer, document, repairs))


def _marked(footer: bytes, document: JsonDocument, repairs: Iterable[Repair]) -> bytes:
    """``footer`` with the repairs of its document, after those of an earlier repair."""
    listed, found, without = dict[str, int](), _FIELD.search(footer), footer
    end = value_end(footer.decode("latin-1"), found.end()) if found else None
    if found and end is not None:
        listed = recorded_repairs(msgspec.json.decode(footer[found.end() : end]))
        without = footer[: found.start()] + footer[end:]
    # An object that is whole is not cut off, whatever else was in its file. A cut comes first, as it counts.
    own = [repair for repair in repairs if not (document.whole and repair.kind in CUT)]
    for repair in sorted(own, key=lambda repair: repair.kind not in CUT):
        text = str(repair)
        if text not in listed and len(listed) >= MAX_LISTED_REPAIRS - 1:
            text = FURTHER
        listed[text] = listed.get(text, 0) + 1
    if not listed:
        return footer
    end = without.rindex(b"}")
    field = f',\n  "{REPAIRS}": {json.dumps(listed)}\n'
    return without[:end].rstrip() + field.encode() + without[end:]


def _verify(result: str, document: JsonDocument, path: Path, max_bytes: int) -> None:
    """Refuse a result that would itself need repair."""
    repairs: list[Repair] = []
    with open(result, "rb") as file, _text(file, result, max_bytes, repairs) as data:
        scanner = Scanner(data, str(path)).run()
    if repairs or scanner.repairs or [found.nodes for found in scanner.documents] != [document.nodes]:
        raise TraceError(f"{path}: damaged in a way that cannot be repaired; it is unchanged.")


def _backup_of(path: Path) -> Path:
    """Give the file the name NAME.backup, or the next free NAME.backup.N, too, and return that path.

    A backup that already is this very file (an earlier repair was killed after this step) is reused.
    """
    for number in itertools.count():
        backup = path.with_name(path.name + (f".backup.{number}" if number else ".backup"))
        if not backup.exists():
            files.link(path, backup)
        elif files.is_remote(path) or not backup.samefile(path):
            continue
        break
    return backup
