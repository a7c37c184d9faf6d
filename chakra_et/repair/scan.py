"""Read a damaged file front to back: its objects, the bytes between them, the objects left open."""

from __future__ import annotations

import re

from chakra_et.errors import TraceError
from chakra_et.repair.documents import JsonDocument
from chakra_et.repair.ends import END, bare_header, is_header, mend_header, salvage_fields, value_end
from chakra_et.repair.format import (
    ARRAY_OPEN,
    DEVICE,
    FOOTER_FIELDS,
    HOST,
    OBJECT_START,
    OTHER_WRITE_END,
    RECORD_START,
    SPACE,
    matched_end,
)
from chakra_et.repair.records import STEP_BYTES, RecordReader
from chakra_et.repair.types import Repair

OVERLAP = 8 << 10
MAX_OPENINGS = 8

Match = re.Match[bytes]


class Scanner(RecordReader):
    """Reads one file: ``run`` returns its documents in file order, ``repairs`` lists the changes."""

    def run(self) -> list[JsonDocument]:
        self._byte_order_mark()
        going = True
        while going:
            self.window.ensure(STEP_BYTES)
            going = self.inside(self.current) if self.current else self._outside()
        for document in self.documents:
            if not document.closed:
                self._break_off(document)
        if self.unlisted:
            self.repairs.append(Repair("not-listed", 0, f"{self.unlisted} more repairs"))
        return self.documents

    def _byte_order_mark(self) -> None:
        window = self.window
        window.ensure(STEP_BYTES)
        if window.data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TraceError(f"{self.name}: is UTF-16 text; convert it to UTF-8 first.")
        if window.data.startswith(b"\xef\xbb\xbf"):
            self.note("bom", 0, "removed")
            window.pos = 3

    def _outside(self) -> bool:
        window = self.window
        at = matched_end(SPACE, window.data, window.pos)
        window.pos = at
        if at == len(window.data):
            return not window.ended
        is_record = RECORD_START[None].match(window.data, at) and not OBJECT_START.match(window.data, at)
        if window.data[at : at + 1] == b"{" and not is_record:
            self._object(at)
        else:
            self._garbage(at)
        return True

    # ---- objects

    def _object(self, at: int) -> None:
        """Begin the document of the object at ``at``, or skip the object if it is not a trace."""
        window = self.window
        while True:
            opening, certain = self._opening(at)
            if certain or window.ended or len(window.data) - at > self.limits.max_record_bytes:
                break
            window.grow()
        end = None if certain else value_end(window.text, at)
        inner = OBJECT_START.search(window.data, at + 1, opening.start() if opening else len(window.data))
        if end is not None:
            kind = "trailing-garbage" if self.documents else "leading-garbage"
            self.note(kind, at, f"an object of {end - at} bytes without nodes or traceEvents")
            window.pos = end
        elif inner and not certain:
            self.note("truncated", at, "an object breaks off in its header")
            window.pos = inner.start()
        elif opening:
            header, fixes = mend_header(window.data[at : opening.end()], _kind(opening), self.limits)
            for fault, place, detail in fixes:
                self.note(fault, at + place, detail)
            self._begin(self._document(at, _kind(opening)), header, opening.end())
        else:
            self._garbage(at)

    def _opening(self, at: int) -> tuple[Match | None, bool]:
        """Where the record array of the object at ``at`` opens, and whether the header is valid."""
        first = None
        for count, opening in enumerate(ARRAY_OPEN.finditer(self.window.data, at)):
            first = first or opening
            if is_header(self.window.data[at : opening.end()], _kind(opening), self.limits):
                return opening, True
            if count == MAX_OPENINGS:
                break
        return first, False

    def _document(self, at: int, kind: str, has_header: bool = True) -> JsonDocument:
        return JsonDocument(
            len(self.documents), self.window.base + at, kind, self.window.line(at), has_header
        )

    def _begin(self, document: JsonDocument, header: bytes, at: int) -> None:
        if len(self.documents) >= self.limits.max_objects:
            raise TraceError(f"{self.name}: more than {self.limits.max_objects} objects in one file.")
        self.documents.append(document)
        self.sink.open(document, header)
        self.current = document
        self.window.pos = at
        self.loose = False

    def _break_off(self, document: JsonDocument) -> None:
        """Close ``document`` at the end of the text, without its own end."""
        end = len(self.window.data)
        offset, line = document.left or (self.window.base + end, self.window.line(end))
        lost = f"; {len(document.torn)} bytes of a node or event left out" if document.torn else ""
        self.note_place(
            "truncated", offset, f"the object from byte {document.start} breaks off here{lost}", line
        )
        self.sink.close(document, END)

    # ---- bytes outside of any object

    def _garbage(self, at: int) -> None:
        """Skip bytes up to the next object or record; a record begins a document without a header."""
        window = self.window
        start, line, first = window.base + at, window.line(at), not self.documents
        other_end = False
        at += 1
        while True:
            opening, header, record = self._next_places(at)
            stop = min((p.start() for p in (opening, header, record) if p), default=len(window.data))
            other_end |= OTHER_WRITE_END.search(window.data, max(0, at - 1), stop) is not None
            if stop < len(window.data) or window.ended:
                break
            window.pos = max(at, len(window.data) - OVERLAP)
            window.ensure(STEP_BYTES)
            at = window.pos
        window.pos = stop
        self._note_garbage(start, window.base + stop - start, line, first, other_end and not first)
        if opening and opening.start() == stop:
            self._headerless(_kind(opening), max(0, start - window.base), opening.end())
        elif record and record.start() == stop:
            kind = HOST if RECORD_START[HOST].match(window.data, stop) else DEVICE
            self._headerless(kind, max(0, start - window.base), stop)

    def _next_places(self, at: int) -> tuple[Match | None, Match | None, Match | None]:
        """The next opening of an array, start of an object, and start of a record.

        Only the first counts, except that records before an array's opening are parts of a header.
        """
        data = self.window.data
        opening, header = ARRAY_OPEN.search(data, at), OBJECT_START.search(data, at)
        if opening and not (header and header.start() < opening.start()):
            return opening, None, None
        record = RECORD_START[None].search(data, at)
        if record and header and header.start() <= record.start():
            record = None
        return None, header, record

    def _note_garbage(self, start: int, length: int, line: int, first: bool, other_end: bool) -> None:
        kind, detail = ("leading-garbage" if first else "trailing-garbage"), f"{length} bytes taken out"
        if other_end:
            detail += "; they hold the end of another write to the same file"
        self.note_place(kind, start, detail, line)
        last = self.documents[-1] if other_end else None
        if last and not last.mixed and (self.lost_records or self.waiting(last)):
            self.mix(last, self.window.pos, "the end of another object follows this one")

    def _headerless(self, kind: str, start: int, at: int) -> None:
        """Begin the document of an object with a damaged header; ``data[start:at]`` is what remains of it."""
        fields = salvage_fields(self.window.data[start:at], kind, self.limits)
        # Footer fields belong to the object before.
        fields = {name: value for name, value in fields.items() if name not in FOOTER_FIELDS}
        names = ", ".join(fields) or "none"
        self.note("missing-header", at, f"the beginning of an object is missing; fields left: {names}")
        document = self._document(at, kind, has_header=False)
        before, waiting = (self.documents or [document])[-1], self.waiting(document)
        self._begin(document, bare_header(kind, fields), at)
        if waiting:
            document.mixed = True
            if before.closed and not before.mixed:
                self.mix(before, at, "records without a beginning follow this object")


def _kind(opening: Match) -> str:
    return HOST if opening.group(1) == b"nodes" else DEVICE
