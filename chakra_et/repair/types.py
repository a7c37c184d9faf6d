"""The kinds of repair, one repair, the report for one file, and an object that is found in it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

Buffer = bytes | mmap.mmap
END = b"\n  ]\n}"

# Kind → meaning. The kinds are stable ids: reports and scripts may rely on them.
KINDS = {
    "bom": "removed a byte-order mark",
    "leading-garbage": "removed bytes before the first object",
    "trailing-garbage": "removed bytes after the end of an object",
    "concatenated": "the file holds several objects; kept or left out, as the detail states",
    "truncated": "an object breaks off; kept its complete records and closed it",
    "missing-header": "records without the start of their object; put an empty header before them",
    "damaged-header": "left out unreadable header fields",
    "damaged-footer": "left out unreadable footer fields",
    "damaged": "left out an unreadable node or event",
    "limit": "left out a node or event that exceeds a limit (depth, size, string length)",
    "missing-comma": "inserted a comma",
    "double-comma": "removed a surplus comma",
    "trailing-comma": "removed a comma before a closing bracket",
    "unescaped-name": "escaped quotes or backslashes in a string",
    "control-character": "escaped control characters in a string",
    "nan": "quoted a number that JSON lacks (NaN, Infinity, 1e999)",
    "invalid-utf8": "replaced bytes or escapes that are not valid Unicode by U+FFFD",
    "secret": "replaced values that look like secrets (tokens, passwords, keys)",
    "gz-truncated": "the gzip stream ends early; kept the text up to there",
    "gz-damaged": "the gzip stream is damaged; kept the text before the damage",
    "gz-garbage": "removed bytes after the gzip stream",
    "not-listed": "further repairs, not listed one by one",
}


@dataclass(frozen=True)
class Repair:
    """One change. ``offset`` (bytes) and ``line`` (1-based, 0 if unknown) refer to the text before the
    repair; for a compressed file that is the decompressed text, except for the ``gz-`` kinds."""

    kind: str
    offset: int
    detail: str
    line: int = 0

    def __str__(self) -> str:
        line = f" (line {self.line})" if self.line else ""
        return f"byte {self.offset}{line}: {self.kind}: {self.detail}"


@dataclass
class RepairReport:
    """The outcome for one file.

    ``kind`` is "host", "device" or "unknown"; ``nodes_kept`` counts the nodes or events in the result;
    ``backup`` is the saved original.
    """

    path: Path
    kind: str = "unknown"
    changed: bool = False
    repairs: list[Repair] = field(default_factory=list)
    nodes_kept: int = 0
    backup: Path | None = None


class _Id(msgspec.Struct):
    id: int = 0


_IDS = msgspec.json.Decoder(list[_Id])


@dataclass
class JsonDocument:
    """An object that begins at byte ``start``.

    ``header``: its text up to the array's ``[``; ``records``: runs of records without the commas between the
    runs, each as its bytes or as (begin, end) in the text; ``footer``: its text from the array's ``]`` on.
    ``keys``: the keys of an intact record, in order. ``closed``: its end was found; ``whole``: and was not
    cut off; ``complete``: nor does its beginning lack. ``left``: (offset, line) where another object began
    before this one had ended; ``torn``: bytes of the incomplete record before that place.
    """

    start: int
    kind: str
    line: int
    header: bytes
    has_header: bool = True
    records: list[bytes | tuple[int, int]] = field(default_factory=list)
    footer: bytes = END
    nodes: int = 0
    closed: bool = False
    whole: bool = False
    keys: tuple[str, ...] | None = None
    torn: int = 0
    left: tuple[int, int] | None = None

    @property
    def complete(self) -> bool:
        return self.whole and self.has_header

    def runs(self, data: Buffer) -> Iterator[bytes]:
        """The text of each run of records."""
        for run in self.records:
            yield run if isinstance(run, bytes) else data[run[0] : run[1]]

    def repeats_ids(self, data: Buffer) -> bool:
        """Whether two nodes have one id, as where the writes of two processes alternate."""
        seen: set[int] = set()
        for text in self.runs(data):
            try:
                ids = [record.id for record in _IDS.decode(b"[%b]" % text)]
            except msgspec.DecodeError:
                return False  # not nodes of the observer
            if len(set(ids)) < len(ids) or not seen.isdisjoint(ids):
                return True
            seen.update(ids)
        return False
