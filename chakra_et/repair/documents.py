"""One document per object in a file, and evidence of interleaved writers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from chakra_et.repair.format import SEPARATOR, matched_end
from chakra_et.repair.mend import is_whole

MAX_SEEN = 100_000
MAX_TORN_BYTES = 32 << 10
MAX_SEARCHES = 300


class _Id(msgspec.Struct):
    id: int = 0


_IDS = msgspec.json.Decoder(list[_Id])


@dataclass
class JsonDocument:
    """An object being read, which begins at byte ``start``.

    ``keys``: the keys of an intact record, in order. ``closed``: its end has been read; ``whole``: and was
    not cut off. ``left``: (offset, line) where another object began before this one had ended; ``torn``: the
    incomplete record before that place. ``mixed``: it holds records of other processes.
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
        """Whether an id occurs twice in this document. Only the first ``MAX_SEEN`` ids are remembered."""
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
    """Searches for the rest of the record in which a document broke off.

    If it is found, its writer continued after another writer's object began. The number of searches is
    bounded, as each takes time proportional to the square of the text searched.
    """

    searches: int = 0

    def goes_on(self, document: JsonDocument, region: bytes) -> bool:
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
    """``region`` without trailing commas and white space."""
    return region[: len(region) - matched_end(SEPARATOR, region[::-1])]
