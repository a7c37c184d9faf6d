"""Repair one trace file: damaged parts are mended or left out, intact parts stay unchanged.

    report = repair_file(Path("outputs/gpt2_2gpu_quick_trace_rank1_host.json"))

A damaged file is read twice, once to find what it holds and once to write the object that is kept. The result
is scanned again before it replaces the original, so that a repaired file never needs repair. The replacement
is atomic and under a lock; the original is kept as ``.backup``.

Buffered writers that append to one file leave it striped: the first block of each, then the second block of
each, and so on. The start of the second object gives the block size. Nothing is guessed: the stripes are
accepted only if each process's blocks, joined, form an object that needs no repair except for a missing end.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from chakra_et.errors import TraceError
from chakra_et.files import folder_lock, open_regular, remove_abandoned, temporary_file
from chakra_et.repair.format import OBJECT_START
from chakra_et.repair.records import Sink
from chakra_et.repair.scan import Scanner
from chakra_et.repair.source import Progress, Read, Text, is_gzip
from chakra_et.repair.types import JsonDocument, Repair, RepairReport
from chakra_et.repair.write import DocumentWriter, backup_of, keep_owner
from chakra_et.traces.records import DEFAULT_LIMITS, Limits

MIN_BLOCK_BYTES = 64
MAX_WRITERS = 8


def repair_file(
    path: Path,
    *,
    write: bool = True,
    output: Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> RepairReport:
    """Repair a host or device trace, plain or gzip.

    Of several objects the last complete one is kept, or, if none is complete, the last that holds anything.

    The result replaces the file, and the original is kept as NAME.backup (NAME.backup.1 … if that exists).
    With ``output`` the result goes there and the original is not touched; with ``write=False`` nothing is
    written and the report lists what would be done. A file that needs no repair is left alone, and ``output``
    is not written. A symbolic link is followed, but a file is changed only within the link's own folder.
    ``progress`` is called with the number of bytes read since its last call.

    Raises ``TraceError`` for a file that cannot be repaired or written; nothing has changed then.
    """
    path = Path(path)
    in_place = write and output is None
    try:
        target = Path(os.path.realpath(path))
        if in_place and path.is_symlink() and target.parent != Path(os.path.realpath(path.parent)):
            raise TraceError(f"{path}: is a link to a file in another folder; repair that file itself.")
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise TraceError(f"{path}: is not a file.")
        # A second repair of this file waits, and then reads the first one's result.
        lock = folder_lock(target.parent, False, _wait) if in_place else contextlib.nullcontext()
        with lock, open_regular(target) as file:
            before = os.fstat(file.fileno())
            report = RepairReport(path)
            readings = _read(file, path, limits, progress, report.repairs)
            reading, document = _choose(readings, path, limits, report.repairs)
            report.kind, report.nodes_kept = document.kind, document.nodes
            report.changed = bool(report.repairs)
            if report.changed and write:
                _write(file, before, target, output, reading, document, limits, report)
            return report
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file.") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be repaired, is unchanged ({error.strerror or error}).") from None


@dataclass
class _Reading:
    """One way to read the file: its text, read anew for each pass, and the first pass's result."""

    text: Callable[[], Read]
    scanner: Scanner
    begin: int = 0  # offset of its text in the file


def _read(
    file: IO[bytes], path: Path, limits: Limits, progress: Progress | None, repairs: list[Repair]
) -> list[_Reading]:
    """Read the file as a whole and, if that shows records of several processes, as stripes."""
    gzip_notes: list[Repair] = []

    def text() -> Read:
        gzip_notes.clear()
        note = lambda *note: gzip_notes.append(Repair(*note))  # noqa: E731
        return Text(file, str(path), limits, note, progress).read

    def scan(read: Read) -> Scanner:
        return _scan(read, path, limits)

    plain = _Reading(text, scan(text()))
    documents = plain.scanner.documents
    broken_into = plain.scanner.lost_records and any(document.left for document in documents)
    if (broken_into or any(document.mixed for document in documents)) and not is_gzip(file):
        stripes = _find_stripes(file, documents, scan)
        if stripes:
            found = f"{len(stripes)} processes wrote in turns of {stripes[0].block} bytes; told apart"
            repairs.append(Repair("interleaved", documents[1].start, found, documents[1].line))
            return [_Reading(s.reader, scan(s.reader()), s.index * s.block) for s in stripes]
    # A broken gzip stream comes first, as it causes the damage to the text.
    repairs.extend([*gzip_notes, *sorted(plain.scanner.repairs, key=lambda repair: repair.offset)])
    return [plain]


def _scan(read: Read, path: Path, limits: Limits, sink: Sink | None = None) -> Scanner:
    scanner = Scanner(read, str(path), limits, sink or Sink())
    scanner.run()
    return scanner


@dataclass
class Stripe:
    """The text of writer ``index`` of ``writers`` that alternate in blocks of ``block`` bytes.

    ``lengths``: the bytes of each writer that has ended. Its last block is shorter, and the others continue
    without it.
    """

    file: IO[bytes]
    size: int
    block: int
    writers: int
    index: int
    lengths: dict[int, int]

    def reader(self) -> Read:
        """Reads it from its start."""
        blocks = self._blocks()
        offset = left = 0

        def read(size: int) -> bytes:
            nonlocal offset, left
            parts: list[bytes] = []
            while size > 0:
                if not left:
                    offset, left = next(blocks, (0, 0))
                if not left:
                    break
                take = min(size, left)
                self.file.seek(offset)
                parts.append(self.file.read(take))
                offset, left, size = offset + take, left - take, size - take
            return b"".join(parts)

        return read

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of this writer's blocks."""
        offset, before, written = 0, -1, [0] * self.writers
        while before < offset < self.size:
            before = offset
            for writer in range(self.writers):
                rest = self.lengths.get(writer, self.size) - written[writer]
                length = min(self.block, rest, self.size - offset)
                if writer == self.index and length:
                    yield offset, length
                offset += length
                written[writer] += length


def _find_stripes(
    file: IO[bytes], documents: list[JsonDocument], scan: Callable[[Read], Scanner]
) -> list[Stripe]:
    """One stripe per process; empty if the file is not striped.

    ``documents`` are those found in the file read as a whole, ``scan`` reads one stripe.
    """
    if len(documents) < 2 or documents[0].left is None:
        return []
    first = documents[0].start
    block = documents[1].start - first
    if block < MIN_BLOCK_BYTES or first >= block:
        return []
    size = os.fstat(file.fileno()).st_size
    writers = 0  # the number of leading blocks that begin with an object
    while writers < MAX_WRITERS:
        file.seek(first + writers * block)
        if not OBJECT_START.match(file.read(200)):
            break
        writers += 1
    # Each text may end with a newline or without one.
    for after_end in (1, 0) if writers > 1 else ():
        lengths: dict[int, int] = {}
        while True:
            stripes = [Stripe(file, size, block, writers, index, lengths) for index in range(writers)]
            scans = {stripe.index: scan(stripe.reader()) for stripe in stripes if stripe.index not in lengths}
            ended = {i: s.documents[0].end + after_end for i, s in scans.items() if _is_clean(s)}
            if not ended:
                break
            lengths = {**lengths, **ended}
        # The only fault of the others may be that their text ends too early.
        if all(
            len(scanner.documents) == 1 and [repair.kind for repair in scanner.repairs] == ["truncated"]
            for scanner in scans.values()
        ):
            return stripes
    return []


def _is_clean(scanner: Scanner) -> bool:
    """Whether the first object is complete and needed no repair."""
    document = scanner.documents[0] if scanner.documents else None
    return (
        document is not None
        and document.complete
        and not any(repair.offset < document.end for repair in scanner.repairs)
    )


def _choose(
    readings: list[_Reading], path: Path, limits: Limits, repairs: list[Repair]
) -> tuple[_Reading, JsonDocument]:
    """The object to keep; records what becomes of each."""
    found = [(reading, document) for reading in readings for document in reading.scanner.documents]
    able = [item for item in found if item[1].nodes >= limits.min_records]
    clear = [item for item in able if not item[1].mixed]
    if not able:
        most = max((document.nodes for _, document in found), default=0)
        what = f"only {most} nodes or events" if most else "no complete node or event"
        raise TraceError(f"{path}: {what} in it, nothing to save; record the trace again.")
    if not clear:
        raise TraceError(
            f"{path}: the writes of several processes are mixed in it and cannot be separated; trace every "
            "rank to a file of its own."
        )
    main = ([item for item in clear if item[1].complete] or clear)[-1]
    for number, item in enumerate(found if len(found) > 1 else (), 1):
        reading, document = item
        state = ", mixed" if document.mixed else "" if document.complete else ", incomplete"
        fate = "kept" if item is main else "left out"
        detail = f"object {number} of {len(found)}, {document.nodes} nodes or events{state}: {fate}"
        line = 0 if reading.begin else document.line
        repairs.append(Repair("concatenated", reading.begin + document.start, detail, line))
    return main


def _write(
    file: IO[bytes],
    before: os.stat_result,
    target: Path,
    output: Path | None,
    reading: _Reading,
    document: JsonDocument,
    limits: Limits,
    report: RepairReport,
) -> None:
    """Write the chosen object to ``output``, or else in place of ``target``, which was as ``before`` when it
    was opened as ``file``."""
    path, place = report.path, output or target
    remove_abandoned(place.parent)
    with temporary_file(place) as part:
        keep_owner(part, like=target)
        with DocumentWriter(document.index, part.file, is_gzip(file), report.repairs) as writer:
            _scan(reading.text(), path, limits, writer)
        _verify(part.path, document, path, limits)
        after = os.stat(target)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise TraceError(f"{path}: changes while it is read; repair it when its run has ended.")
        if output is None:
            report.backup = backup_of(target)
        part.put_in_place()


def _verify(result: Path, document: JsonDocument, path: Path, limits: Limits) -> None:
    """Refuse a result that would itself need repair."""
    notes: list[tuple[str, int, str]] = []
    with open(result, "rb") as file:
        text = Text(file, str(result), limits, lambda *note: notes.append(note))
        scanner = _scan(text.read, path, limits)
    if notes or scanner.repairs or [found.nodes for found in scanner.documents] != [document.nodes]:
        raise TraceError(f"{path}: damaged in a way that cannot be repaired; it is unchanged.")


def _wait() -> None:
    print("waiting for another repair or conversion in this folder …", file=sys.stderr, flush=True)
