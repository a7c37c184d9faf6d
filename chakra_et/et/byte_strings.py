"""Many byte strings in one piece of memory, without a Python object for each."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

CHECKED_BYTES = 1 << 20


class ByteStrings(Sequence[bytes]):
    """A list of byte strings: string i is ``buffer[starts[i] : starts[i] + lengths[i]]``.

    ``starts`` is int64[strings], ``lengths`` int32[strings]. Each ends at a zero byte; some may share bytes.
    """

    def __init__(self, buffer: bytearray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.buffer, self.starts, self.lengths = buffer, starts, lengths

    def take(self, rows: np.ndarray) -> ByteStrings:
        """The strings at ``rows``."""
        return ByteStrings(self.buffer, self.starts[rows], self.lengths[rows])

    def is_utf8(self) -> bool:
        """Whether the whole buffer is UTF-8: then each string is, as no character spans a zero byte."""
        if self.buffer.isascii():
            return True
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for at in range(0, len(self.buffer), CHECKED_BYTES):
                decoder.decode(self.buffer[at : at + CHECKED_BYTES])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
        return True

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return list(ByteStrings(self.buffer, self.starts[row], self.lengths[row]))
        start = int(self.starts[row])
        return bytes(self.buffer[start : start + int(self.lengths[row])])

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[bytes]:
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield bytes(self.buffer[start : start + length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Packer:
    """Collects strings, some at a time."""

    def __init__(self) -> None:
        self._buffer, self._lengths = bytearray(), [np.zeros(0, dtype=np.int32)]

    def add(self, texts: Sequence[bytes]) -> None:
        """Add some strings, which are copied."""
        if texts:
            self._buffer += b"\0".join(texts) + b"\0"
            self._lengths.append(np.fromiter(map(len, texts), np.int32, len(texts)))

    def packed(self) -> ByteStrings:
        """All strings."""
        lengths = np.concatenate(self._lengths)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths + np.arange(len(lengths))
        return ByteStrings(self._buffer, starts, lengths)
