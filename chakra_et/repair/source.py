"""The text of a trace, plain or gzip, as a sliding window."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import IO, Protocol

from chakra_et.traces.limits import Limits, TextMeter

READ_BYTES = 1 << 20
GZIP_PIECE = 64 << 10
GZIP_MAGIC = b"\x1f\x8b"

Note = Callable[[str, int, str], None]
Progress = Callable[[int], None]


class Source(Protocol):
    """Text that is read once, front to back."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end."""


class _Counted:
    """A file that reports the number of bytes read."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress = file, progress

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data


class PlainSource:
    """Reads an uncompressed file."""

    def __init__(self, file: Source, name: str, limits: Limits) -> None:
        self._file, self._meter, self._taken = file, TextMeter(name, limits), 0

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._taken += len(data)
        self._meter.add(len(data), self._taken)
        return data


class GzipSource:
    """Reads a gzip file as far as it decompresses; calls ``note`` with where and why it ends early."""

    def __init__(self, file: Source, name: str, limits: Limits, note: Note) -> None:
        self._file, self._meter, self._note = file, TextMeter(name, limits), note
        self._inflate = zlib.decompressobj(wbits=31)
        self._waiting = b""
        self._taken = 0
        self._ended = False

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size > 0 and not self._ended:
            part = self._next(size)
            self._meter.add(len(part), self._taken)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _next(self, size: int) -> bytes:
        if self._inflate.eof and not self._next_member():
            return b""
        if not self._waiting:
            self._waiting = self._file.read(GZIP_PIECE)
            self._taken += len(self._waiting)
        before = self._inflate.copy()
        try:
            # Even without new input, text may be left over from the last piece.
            text = self._inflate.decompress(self._waiting, size)
        except zlib.error as error:
            return self._up_to_damage(before, str(error))
        if not text and not self._waiting and not self._inflate.eof:
            self._end("gz-truncated", f"the gzip stream stops after {self._taken} bytes")
        self._waiting = self._inflate.unconsumed_tail
        return text

    def _up_to_damage(self, inflate: zlib._Decompress, reason: str) -> bytes:
        """zlib drops the text of a call that fails, so this passes one byte at a time."""
        parts, good = [], 0
        try:
            for good in range(len(self._waiting)):
                parts.append(inflate.decompress(self._waiting[good : good + 1]))
        except zlib.error:
            pass
        at = self._taken - len(self._waiting) + good
        checksum = "the checksum does not match, so some of the text up to here may be wrong"
        detail = checksum if "check" in reason else f"the gzip stream can't be read from here on ({reason})"
        self._end("gz-damaged", detail, at)
        return b"".join(parts)

    def _next_member(self) -> bool:
        """gzip files may be concatenated and padded with zeros."""
        rest = self._inflate.unused_data
        while not rest.strip(b"\0"):
            rest = self._file.read(GZIP_PIECE)
            self._taken += len(rest)
            if not rest:
                self._ended = True
                return False
        rest = rest.lstrip(b"\0")
        if not rest.startswith(GZIP_MAGIC):
            self._end("gz-garbage", "bytes after the end of the gzip stream", self._taken - len(rest))
            return False
        self._inflate = zlib.decompressobj(wbits=31)
        self._waiting = rest
        return True

    def _end(self, kind: str, detail: str, at: int | None = None) -> None:
        self._ended = True
        self._note(kind, self._taken if at is None else at, detail)


def open_source(
    file: IO[bytes], name: str, limits: Limits, note: Note, progress: Progress | None = None
) -> Source:
    """The text of ``file``, read from its start; gzip is recognised by content, not by name."""
    magic = file.read(2)
    file.seek(0)
    counted = _Counted(file, progress) if progress else file
    if magic == GZIP_MAGIC:
        return GzipSource(counted, name, limits, note)
    return PlainSource(counted, name, limits)


class ByteWindow:
    """The part of the text in memory; ``data[pos:]`` is still to be read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.data, self.pos, self.base, self.ended = b"", 0, 0, False
        self._text: str | None = None
        self._mark, self._lines = 0, 1

    def ensure(self, size: int) -> None:
        """Load ``size`` bytes from ``pos`` on, or all that remain. Invalidates indices into ``data``."""
        if len(self.data) - self.pos >= size or self.ended:
            return
        self.line(self.pos)
        self.data, self.base = self.data[self.pos :], self.base + self.pos
        self._mark, self.pos = 0, 0
        while len(self.data) < size and not self.ended:
            self.grow(max(size - len(self.data), READ_BYTES))

    def grow(self, size: int = 0) -> None:
        """Append ``size`` bytes, or double the window if 0; indices into ``data`` stay valid."""
        more = self._source.read(size or max(READ_BYTES, len(self.data) - self.pos))
        self.data += more
        self.ended = not more
        self._text = None

    @property
    def text(self) -> str:
        """``data`` with one character per byte, for parsers that take text."""
        if self._text is None:
            self._text = self.data.decode("latin-1")
        return self._text

    def line(self, at: int) -> int:
        """The 1-based line number of ``data[at]``; cheap when called in order."""
        if at >= self._mark:
            self._lines += self.data.count(b"\n", self._mark, at)
        else:
            self._lines -= self.data.count(b"\n", at, self._mark)
        self._mark = at
        return self._lines
