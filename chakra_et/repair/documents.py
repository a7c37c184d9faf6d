"""One document for each object in a file, and the signs that other processes wrote between its lines."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from chakra_et.repair.format import SEPARATOR
from chakra_et.repair.mend import is_whole

MAX_SEEN = 100_000
MAX_TORN_BYTES = 32 << 10
MAX_SEARCHES = 300


class _Id(msgspec.Struct):
    id: int = 0


_IDS = msgspec.json.Decoder(list[_Id])


@dataclass
class Document:
    """An object being read, which begins at byte ``start``.

    ``keys`` are those of an intact record. ``closed``: nothing more belongs to it; ``whole``: nor is its end
    missing. ``left`` (place, line) is where another object began before this one had ended and ``torn`` the
    part of a record in front of that place; ``mixed``: it holds records of other processes.
    """

    index: int
    start: int
    kind: str
    line: int
    has_header: bool = True
    nodes: int = 0
    closed: bool = False
    whole: bool = False
    mixed: bool = False
    end: int = 0
    keys: tuple[str, ...] | None = None
    torn: bytes = b""
    left: tuple[int, int] | None = None
    seen: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return self.whole and self.has_header

    def repeats_ids(self, records: bytes) -> bool:
        """Whether ids come twice in this document; it remembers the first hundred thousand."""
        try:
            ids = [record.id for record in _IDS.decode(b"[%b]" % records)]
        except msgspec.DecodeError:
            return False
        repeats = len(set(ids)) < len(ids) or not self.seen.isdisjoint(ids)
        if len(self.seen) < MAX_SEEN:
            self.seen.update(ids)
        return repeats


@dataclass
class TornRecords:
    """Looks for the rest of a record that a document broke off in: found, its writer has written on after
    another one's object began. Searches are counted, as each costs time."""

    searches: int = 0

    def goes_on(self, document: Document, region: bytes) -> bool:
        if (
            not document.torn
            or len(document.torn) + len(region) > MAX_TORN_BYTES
            or self.searches >= MAX_SEARCHES
        ):
            return False
        self.searches += 1
        return any(
            is_whole(document.torn + region[at:], document.kind, document.keys) for at in range(len(region))
        )


def strip_separators(region: bytes) -> bytes:
    """``region`` without the commas and white space at its end."""
    return region[: len(region) - SEPARATOR.match(region[::-1]).end()]
