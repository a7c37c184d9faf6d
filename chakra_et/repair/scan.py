"""Find what a damaged file holds: its objects, and in each the records that are intact or can be mended.

The file is read once from front to back. Intact records are found in bulk, damaged ones one by one. After
damage that can't be mended, reading resumes at the next joint of the format: the start of a record, the end
of the array, a new object. Nothing is copied: an object is a list of places in the text, with mended records
between them. Time is linear, and memory is that of a few records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from chakra_et.errors import TraceError
from chakra_et.repair import format as layout
from chakra_et.repair.format import DEVICE, HOST, Buffer, JsonDocument, Repair

STEP_BYTES = 1 << 20
SMALL_STEP = 4 << 10
LOOK_AHEAD = 256 << 10
MAX_OPENINGS = 8
MAX_OBJECTS = MAX_LISTED = 10_000

Match = re.Match[bytes]


@dataclass
class Scanner:
    """Reads the text ``data``: ``run`` fills ``documents`` in file order, and ``repairs`` with the changes.

    ``mixed``: something shows that several processes wrote to the file at the same time.
    """

    data: Buffer
    name: str
    repairs: list[Repair] = field(default_factory=list)
    documents: list[JsonDocument] = field(default_factory=list)
    mixed: bool = False
    _unlisted: int = 0
    _pos: int = 0
    _step: int = STEP_BYTES
    _lost: bool = False
    # The gap since the last record has been reported already, so commas in it are not.
    _loose: bool = False
    _current: JsonDocument | None = None

    def run(self) -> Scanner:
        """Read the text. Raises ``TraceError`` for what can't be JSON, or has too many objects."""
        data, size = self.data, len(self.data)
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TraceError(f"{self.name}: is UTF-16 text; convert it to UTF-8 first.")
        if data[:3] == b"\xef\xbb\xbf":
            self._note("bom", 0, "removed")
            self._pos = 3
        while True:
            document = self._current
            if document is None:
                self._pos = at = layout.matched_end(layout.SPACE, data, self._pos)
            elif self._intact_run(document):
                continue
            else:
                at = layout.matched_end(layout.SEPARATOR, data, self._pos)
            if at == size:
                break
            if document:
                self._inside(document, data[self._pos : at], at)
            else:
                self._outside(at)
        for document in self._waiting():
            lost = f"; {document.torn} bytes of a node or event left out" if document.torn else ""
            where = f"the object from byte {document.start} breaks off here{lost}"
            self._note("truncated", document.left or size, where)
        if self._unlisted:
            self.repairs.append(Repair("not-listed", 0, f"{self._unlisted} more repairs"))
        waiting = False
        for document in self.documents:
            self.mixed |= waiting and document.kind == HOST and document.repeats_ids(data)
            waiting |= not document.closed
        return self

    def _note(self, kind: str, at: int, detail: str) -> None:
        if kind in ("damaged", "limit", "missing-header"):
            self._lost = True
            # An object broke off before: this may be its rest, written after another writer's beginning.
            self.mixed |= bool(self._waiting(self._current))
        if len(self.repairs) < MAX_LISTED:
            self.repairs.append(Repair(kind, at, detail))
        else:
            self._unlisted += 1

    def _waiting(self, document: JsonDocument | None = None) -> list[JsonDocument]:
        """Other objects that have begun and not ended."""
        return [other for other in self.documents if not other.closed and other is not document]

    def _text(self, begin: int, size: int = STEP_BYTES) -> str:
        """Some of the text with one character per byte, for parsers that take text."""
        return self.data[begin : begin + size].decode("latin-1")

    # Outside of any object

    def _outside(self, at: int) -> None:
        data = self.data
        is_record = layout.RECORD_START[None].match(data, at) and not layout.OBJECT_START.match(data, at)
        if data[at : at + 1] == b"{" and not is_record:
            self._object(at)
        else:
            self._garbage(at)

    def _object(self, at: int) -> None:
        """Begin the document of the object at ``at``, or skip the object if it is not a trace."""
        data, size = self.data, LOOK_AHEAD
        while True:
            opening, certain = self._opening(at, at + size)
            end = None if certain else layout.value_end(self._text(at, size), 0)
            if certain or end or at + size >= len(data) or size > layout.MAX_RECORD_BYTES:
                break
            size *= 2
        inner = layout.OBJECT_START.search(data, at + 1, opening.start() if opening else at + size)
        if end is not None:
            kind = "trailing-garbage" if self.documents else "leading-garbage"
            self._note(kind, at, f"an object of {end} bytes without nodes or traceEvents")
            self._pos = at + end
        elif inner and not certain:
            self._note("truncated", at, "an object breaks off in its header")
            self._pos = inner.start()
        elif opening:
            kind, header = _kind(opening), data[at : opening.end()]
            if not certain:
                fields = layout.salvage_fields(header, kind)
                detail = f"fields that could be read: {', '.join(fields) or 'none'}"
                self._note("damaged-header", at, detail)
                header = layout.bare_header(kind, fields)
            self._begin(at, kind, header, opening.end())
        else:
            self._garbage(at)

    def _opening(self, at: int, stop: int) -> tuple[Match | None, bool]:
        """Where the record array of the object at ``at`` opens, and whether the header is valid."""
        first = None
        for count, opening in enumerate(layout.ARRAY_OPEN.finditer(self.data, at, stop)):
            first = first or opening
            if layout.is_header(self.data[at : opening.end()], _kind(opening)):
                return opening, True
            if count == MAX_OPENINGS:
                break
        return first, False

    def _begin(self, at: int, kind: str, header: bytes, inside: int, has_header: bool = True) -> None:
        """Begin the document of the object at ``at``, and go on ``inside`` its array."""
        if len(self.documents) >= MAX_OBJECTS:
            raise TraceError(f"{self.name}: more than {MAX_OBJECTS} objects in one file.")
        self._current = JsonDocument(at, kind, header, has_header)
        self.documents.append(self._current)
        self._pos, self._loose = inside, False

    def _garbage(self, at: int) -> None:
        """Skip bytes up to the next object or record; a record begins a document without a header."""
        opening, header, record = self._next_places(at + 1)
        stop = min((place.start() for place in (opening, header, record) if place), default=len(self.data))
        detail = f"{stop - at} bytes taken out"
        if self.documents and layout.OTHER_WRITE_END.search(self.data, at, stop):
            detail += "; they hold the end of another write to the same file"
            self.mixed |= self._lost or bool(self._waiting(self.documents[-1]))
        self._note("trailing-garbage" if self.documents else "leading-garbage", at, detail)
        self._pos = stop
        if opening:
            self._headerless(_kind(opening), at, opening.end())
        elif record and record.start() == stop:
            self._headerless(HOST if layout.RECORD_START[HOST].match(self.data, stop) else DEVICE, at, stop)

    def _next_places(self, at: int) -> tuple[Match | None, Match | None, Match | None]:
        """The next opening of an array, start of an object, and start of a record.

        Only the first counts, except that records before an array's opening are parts of a header.
        """
        data, record = self.data, layout.RECORD_START[None].search(self.data, at)
        near = record.start() + STEP_BYTES if record else len(data)
        opening, header = layout.ARRAY_OPEN.search(data, at, near), layout.OBJECT_START.search(data, at, near)
        if opening and not (header and header.start() < opening.start()):
            return opening, None, None
        if record and header and header.start() <= record.start():
            record = None
        return None, header, record

    def _headerless(self, kind: str, start: int, at: int) -> None:
        """Begin the document of an object with a damaged header; ``data[start:at]`` is what remains of it."""
        remains = self.data[max(start, at - STEP_BYTES) : at]
        fields = layout.salvage_fields(remains, kind)
        for name in layout.FOOTER_FIELDS:  # of the object before
            fields.pop(name, None)
        names = ", ".join(fields) or "none"
        self._note("missing-header", at, f"the beginning of an object is missing; fields left: {names}")
        self._begin(at, kind, layout.bare_header(kind, fields), at, has_header=False)

    # Within the array of an object

    def _intact_run(self, document: JsonDocument) -> bool:
        """Keep the intact records of the next step unchanged; False if there are none."""
        data, pos = self.data, self._pos
        lead = data[pos : layout.matched_end(layout.SEPARATOR, data, pos)]
        if lead.count(b",") == (document.nodes > 0):
            # Up to the last record that begins in this step, which is near its end but for a long one.
            cut = first = pos + len(lead) + 1
            stop = min(pos + self._step, len(data))
            for begin in (max(first, stop - 16 * SMALL_STEP), first):
                starts = list(layout.RECORD_START[document.kind].finditer(data, begin, stop))
                if starts:
                    cut = starts[-1].start()
                    break
            begin = pos + lead.find(b",") + 1
            body = data[begin:cut].rstrip(b" \t\r\n")
            count = layout.count_records(body[:-1]) if body.endswith(b",") else None
            if count and not layout.holds_header(body):
                self._add(document, (begin, begin + len(body) - 1), count)
                self._pos = begin + len(body) - 1
                return True
        self._step = SMALL_STEP
        return False

    def _add(self, document: JsonDocument, records: bytes | tuple[int, int], count: int) -> None:
        if document.kind == HOST and document.keys is None:
            text = records if isinstance(records, bytes) else self.data[records[0] : records[1]]
            document.keys = layout.first_keys(text)
        document.records.append(records)
        document.nodes += count
        self._loose, self._step = False, min(2 * self._step, STEP_BYTES)

    def _inside(self, document: JsonDocument, lead: bytes, at: int) -> None:
        """Read what is at ``at`` after the separator ``lead``: a record, the end of the array, damage."""
        if self.data[at : at + 1] == b"]":
            self._end(document, lead, at)
        elif layout.OBJECT_START.match(self.data, at):
            # This object has not ended.
            document.left = document.left or at
            self._pos, self._current = at, None
        else:
            self._record(document, lead, at)

    def _record(self, document: JsonDocument, lead: bytes, at: int) -> None:
        data, size = self.data, LOOK_AHEAD
        while True:
            stop = min(at + size, len(data))
            end = layout.value_end(self._text(at, size), 0) if data[at : at + 1] == b"{" else None
            if end is not None:
                return self._take(document, lead, at, at + end)
            # The next place where reading can resume.
            found = layout.JOINT[document.kind].search(data, at + 1, stop)
            certain = found and (found.end() < stop or stop == len(data))
            if certain or stop == len(data) or size > layout.MAX_RECORD_BYTES:
                break
            size *= 2
        self._damage(document, lead, at, found.start() if found and certain else stop)

    def _take(self, document: JsonDocument, lead: bytes, at: int, end: int) -> None:
        """Keep the record ``data[at:end]``, mended if necessary, or leave it out."""
        record, self._pos = self.data[at:end], end
        if len(record) > layout.MAX_RECORD_BYTES:
            self._drop("limit", at, f"a record of {len(record)} bytes left out")
        elif layout.is_object(record):
            self._keep(document, lead, at, record)
        elif not self._mended(document, lead, at, record):
            self._drop_unreadable(at, record)

    def _mended(self, document: JsonDocument, lead: bytes, at: int, record: bytes) -> bool:
        mended = layout.mend(record, document.kind, document.keys)
        if mended is not None:
            self._keep(document, lead, at, *mended)
            self._step = SMALL_STEP
        return mended is not None

    def _keep(
        self, document: JsonDocument, lead: bytes, at: int, record: bytes,
        fixes: list[tuple[str, int, str]] | None = None,
    ) -> None:  # fmt: skip
        commas, wanted = lead.count(b","), int(document.nodes > 0)
        if not self._loose and commas < wanted:
            self._note("missing-comma", at, "put in before this record")
        elif not self._loose and commas > wanted:
            self._note("double-comma", at, f"{commas - wanted} taken out before this record")
        for kind, place, detail in fixes or ():
            self._note(kind, min(at + place, len(self.data)), detail)
        self._add(document, lead[lead.rfind(b",") + 1 :] + record, 1)

    def _drop(self, kind: str, at: int, detail: str) -> None:
        self._note(kind, at, detail)
        self._loose = True

    def _drop_unreadable(self, at: int, record: bytes) -> None:
        kind, why = "damaged", "not a record"
        try:
            msgspec.json.decode(record)
        except RecursionError:
            kind, why = "limit", "nested too deeply"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = f"not valid JSON ({error})"
        self._drop(kind, at, f"{why}; {len(record)} bytes left out")

    def _damage(self, document: JsonDocument, lead: bytes, at: int, joint: int) -> None:
        """``data[at:joint]`` is not a record: another writer's bytes, or a record too damaged to delimit."""
        region = self.data[at:joint]
        region = region[: len(region) - layout.matched_end(layout.SEPARATOR, region[::-1])]
        self._pos = at + len(region)
        if region.startswith(b"{") and self._mended(document, lead, at, region):
            return
        if joint == len(self.data) or layout.OBJECT_START.match(self.data, joint):
            document.torn, document.left = len(region), at
            self._loose = True
            return
        self._drop_unreadable(at, region)

    def _end(self, document: JsonDocument, lead: bytes, at: int) -> None:
        """The array's ``]`` is at ``at``: end the object, or take out a bracket that comes too early."""
        data, kind = self.data, document.kind
        length = layout.footer_end(self._text(at), 0) or 0
        whole = length > 0
        # With two arrays under one key, readers would see only the second.
        again = any(_kind(found) == kind for found in layout.ARRAY_OPEN.finditer(data, at, at + length))
        if again or layout.RECORD_START[kind].match(data, layout.matched_end(layout.SEPARATOR, data, at + 1)):
            self._pos = at + 1
            self._drop("damaged", at, "a bracket that closes the array too early; taken out")
            return
        if b"," in lead and not self._loose:
            self._note("trailing-comma", at, "taken out")
        end = at + length
        if not whole:
            places = layout.OBJECT_START, layout.RECORD_START[None]
            starts = (place.search(data, at + 1) for place in places)
            end = min((start.start() for start in starts if start), default=len(data))
        document.footer, left = layout.mend_footer(data[at:end], kind)
        whole = whole or not left or end < len(data)
        if not whole:
            self._note("truncated", at, f"the object's last fields; {left}")
        elif left:
            self._note("damaged-footer", at, left)
        document.closed, document.whole = True, whole
        self._pos, self._current = end, None


def _kind(opening: Match) -> str:
    return HOST if opening.group(1) == b"nodes" else DEVICE
