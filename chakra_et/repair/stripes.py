"""Separate the output of processes that wrote to one file in alternating blocks of equal size.

Buffered writers that append to one file leave it striped: the first block of each, then the second block of
each, and so on. The start of the second object gives the block size. Nothing is guessed: the stripes are
accepted only if each process's blocks, joined, form an object that needs no repair except for a missing end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from chakra_et.repair.documents import JsonDocument
from chakra_et.repair.format import OBJECT_START
from chakra_et.repair.scan import Scanner

MIN_BLOCK_BYTES = 64
MAX_WRITERS = 8

ScanStripe = Callable[["Stripe"], Scanner]


@dataclass
class Stripe:
    """The text of writer ``index`` of ``writers`` that alternate in blocks of ``block`` bytes, as a source.

    ``lengths``: the bytes of each writer that has ended. Its last block is shorter, and the others continue
    without it.
    """

    file: IO[bytes]
    size: int
    block: int
    writers: int
    index: int
    lengths: dict[int, int]

    def __post_init__(self) -> None:
        self._pieces = self._places()
        self._left = (0, 0)

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            offset, length = self._left if self._left[1] else next(self._pieces, (0, 0))
            if not length:
                break
            take = min(size, length)
            self.file.seek(offset)
            parts.append(self.file.read(take))
            size -= take
            self._left = (offset + take, length - take)
        return b"".join(parts)

    def _places(self) -> Iterator[tuple[int, int]]:
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


def find_stripes(file: IO[bytes], size: int, documents: list[JsonDocument], scan: ScanStripe) -> list[Stripe]:
    """One stripe per process; empty if the file is not striped.

    ``documents`` are those found in the file read as a whole, ``scan`` reads one stripe.
    """
    if len(documents) < 2 or documents[0].left is None:
        return []
    block = documents[1].start - documents[0].start
    if block < MIN_BLOCK_BYTES or documents[0].start >= block:
        return []
    writers = _count_writers(file, block, documents[0].start)
    if writers < 2:
        return []
    # Each text may end with a newline or without one.
    for after_end in (1, 0):
        lengths = _lengths(file, size, block, writers, scan, after_end)
        if lengths is not None:
            return [Stripe(file, size, block, writers, index, lengths) for index in range(writers)]
    return []


def _lengths(
    file: IO[bytes], size: int, block: int, writers: int, scan: ScanStripe, after_end: int
) -> dict[int, int] | None:
    """The bytes that each writer wrote, for those that have ended; None if the file is not striped this way.

    ``after_end``: bytes after the last bracket of each.
    """
    lengths: dict[int, int] = {}
    while len(lengths) < writers:
        rest = [index for index in range(writers) if index not in lengths]
        scans = {index: scan(Stripe(file, size, block, writers, index, lengths)) for index in rest}
        ended = {
            i: scanner.documents[0].end + after_end for i, scanner in scans.items() if _is_clean(scanner)
        }
        if not ended:
            return lengths if all(_only_breaks_off(scanner) for scanner in scans.values()) else None
        lengths = {**lengths, **ended}
    return lengths


def _count_writers(file: IO[bytes], block: int, first: int) -> int:
    """The number of leading blocks that begin with an object."""
    for writer in range(MAX_WRITERS):
        file.seek(first + writer * block)
        if not OBJECT_START.match(file.read(200)):
            return writer
    return MAX_WRITERS


def _is_clean(scanner: Scanner) -> bool:
    """Whether the first object is complete and needed no repair."""
    document = scanner.documents[0] if scanner.documents else None
    return (
        document is not None
        and document.complete
        and not any(repair.offset < document.end for repair in scanner.repairs)
    )


def _only_breaks_off(scanner: Scanner) -> bool:
    """Whether the only fault of the text is that it ends too early."""
    return len(scanner.documents) == 1 and [repair.kind for repair in scanner.repairs] == ["truncated"]
