"""The text of a trace, plain or gzip, as a sliding window."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import IO

from chakra_et.traces.records import Limits, TextMeter

READ_BYTES = 1 << 20
GZIP_PIECE = 64 << 10
GZIP_MAGIC = b"\x1f\x8b"

Note = Callable[[str, int, str], None]
Progress = Callable[[int], None]
Read = Callable[[int], bytes]
"""Gives the next bytes of a text, at most as many as asked for, and none at its end."""


def is_gzip(file: IO[bytes]) -> bool:
    """Whether the file begins as gzip does, whatever its name; reading then begins at its start."""
    file.seek(0)
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return magic == GZIP_MAGIC


class Text:
    """The text of ``file``, from its start, and of a gzip file as far as it decompresses.

    Calls ``note`` with where and why a gzip stream ends early, and ``progress`` with the bytes of each read.
    """

    def __init__(
        self, file: IO[bytes], name: str, limits: Limits, note: Note, progress: Progress | None = None
    ) -> None:
        self._inflate = zlib.decompressobj(wbits=31) if is_gzip(file) else None
        self._file, self._meter, self._note, self._progress = file, TextMeter(name, limits), note, progress
        self._waiting, self._taken, self._ended = b"", 0, False

    def read(self, size: int) -> bytes:
        if self._inflate is None:
            data = self._take(size)
            self._meter.add(len(data), self._taken)
            return data
        parts: list[bytes] = []
        while size > 0 and not self._ended:
            part = self._unpack(self._inflate, size)
            self._meter.add(len(part), self._taken)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        self._taken += len(data)
        if self._progress:
            self._progress(len(data))
        return data

    def _unpack(self, inflate: zlib._Decompress, size: int) -> bytes:
        if inflate.eof:
            return self._next_member(inflate.unused_data)
        self._waiting = self._waiting or self._take(GZIP_PIECE)
        before = inflate.copy()
        try:
            # Even without new input, text may be left over from the last piece.
            text = inflate.decompress(self._waiting, size)
        except zlib.error as error:
            return self._up_to_damage(before, str(error))
        if not text and not self._waiting and not inflate.eof:
            self._end("gz-truncated", f"the gzip stream stops after {self._taken} bytes", self._taken)
        self._waiting = inflate.unconsumed_tail
        return text

    def _next_member(self, rest: bytes) -> bytes:
        """gzip files may be concatenated and padded with zeros."""
        while not rest.strip(b"\0"):
            rest = self._take(GZIP_PIECE)
            if not rest:
                self._ended = True
                return b""
        rest = rest.lstrip(b"\0")
        if rest.startswith(GZIP_MAGIC):
            self._inflate, self._waiting = zlib.decompressobj(wbits=31), rest
        else:
            self._end("gz-garbage", "bytes after the end of the gzip stream", self._taken - len(rest))
        return b""

    def _up_to_damage(self, inflate: zlib._Decompress, reason: str) -> bytes:
        """zlib drops the text of a call that fails, so this passes one byte at a time."""
        parts, good = [], 0
        try:
            for good in range(len(self._waiting)):
                parts.append(inflate.decompress(self._waiting[good : good + 1]))
        except zlib.error:
            pass
        checksum = "the checksum does not match, so some of the text up to here may be wrong"
        detail = checksum if "check" in reason else f"the gzip stream can't be read from here on ({reason})"
        self._end("gz-damaged", detail, self._taken - len(self._waiting) + good)
        return b"".join(parts)

    def _end(self, kind: str, detail: str, at: int) -> None:
        self._ended = True
        self._note(kind, at, detail)


class ByteWindow:
    """The part of the text in memory; ``data[pos:]`` is still to be read."""

    def __init__(self, read: Read) -> None:
        self._read = read
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
        more = self._read(size or max(READ_BYTES, len(self.data) - self.pos))
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
