"""What a repair is told, what it reports, and where it stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KINDS = {
    "bom": "a byte-order mark in front of the text was removed",
    "leading-garbage": "bytes before the first object were removed",
    "trailing-garbage": "bytes after the end of an object were removed",
    "concatenated": "several objects in one file; this one was left out",
    "interleaved": "several processes wrote in turns of equal size; they were told apart",
    "mixed-processes": "an object that holds records of several processes, not told apart",
    "truncated": "an object breaks off; what was whole is kept and the object closed",
    "missing-header": "records without the beginning of their object; an empty header was put before them",
    "damaged-header": "header fields that could not be read were left out",
    "damaged-footer": "footer fields that could not be read were left out",
    "damaged": "a node or event that could not be read was left out",
    "limit": "a node or event beyond a limit (depth, size, string length) was left out",
    "missing-comma": "a comma was put in",
    "double-comma": "a comma was taken out",
    "trailing-comma": "a comma before a closing bracket was taken out",
    "unescaped-name": "quotes or backslashes that the writer did not escape were escaped",
    "control-character": "control characters inside a string were escaped",
    "nan": "a number that JSON does not have (NaN, Infinity, 1e999) was put in quotes",
    "invalid-utf8": "bytes or escapes that are no Unicode text became U+FFFD",
    "gz-truncated": "the gzip stream ends early",
    "gz-damaged": "the gzip stream is damaged; what lies before the damage is kept",
    "gz-garbage": "bytes after the gzip stream were removed",
    "not-listed": "more repairs than are listed one by one",
}


@dataclass(frozen=True)
class Repair:
    """One change. ``offset`` (bytes) and ``line`` (from 1, 0 if not known) are places in the text before the
    repair; of a compressed file that is the decompressed text, except for the ``gz-`` kinds."""

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

    ``kind`` is "host", "device" or "unknown"; ``nodes_kept`` counts nodes or events in the result;
    ``output`` is the file that holds the result, ``backup``
    what the original was saved as, ``others`` the further objects that ``keep="all"`` wrote.
    """

    path: Path
    kind: str = "unknown"
    changed: bool = False
    repairs: list[Repair] = field(default_factory=list)
    nodes_kept: int = 0
    output: Path | None = None
    backup: Path | None = None
    others: list[Path] = field(default_factory=list)
