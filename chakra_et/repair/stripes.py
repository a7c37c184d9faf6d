"""Separate the output of processes that wrote to one file in alternating blocks of equal size.

Buffered writers that append to one file leave it striped: the first block of each, then the second block of
each, and so on. The start of the second object gives the block size. Nothing is guessed: the stripes are
accepted only if each process's blocks, joined, form an object that needs no repair except for a missing end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from chakra_et.repair.format import OBJECT_START
from chakra_et.repair.scan import Scanner
from chakra_et.repair.source import Read
from chakra_et.repair.types import JsonDocument

MIN_BLOCK_BYTES = 64
MAX_WRITERS = 8


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


def find_stripes(
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
