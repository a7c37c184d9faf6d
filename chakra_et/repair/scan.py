"""Read a damaged file front to back: its objects, the bytes between them, the objects left open."""

from __future__ import annotations

import re

from chakra_et.errors import TraceError
from chakra_et.repair import format as layout
from chakra_et.repair.format import ARRAY_OPEN, DEVICE, HOST, OBJECT_START, RECORD_START, matched_end
from chakra_et.repair.records import STEP_BYTES, RecordReader
from chakra_et.repair.types import JsonDocument, Repair

OVERLAP = 8 << 10
MAX_OPENINGS = 8

Match = re.Match[bytes]


class Scanner(RecordReader):
    """Reads one file: ``run`` fills ``documents`` in file order, and ``repairs`` with the changes."""

    def run(self) -> None:
        window = self.window
        window.ensure(STEP_BYTES)
        if window.data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TraceError(f"{self.name}: is UTF-16 text; convert it to UTF-8 first.")
        if window.data.startswith(b"\xef\xbb\xbf"):
            self.note("bom", 0, "removed")
            window.pos = 3
        going = True
        while going:
            window.ensure(STEP_BYTES)
            if self.current:
                going = self.intact_run(self.current) or self.one_record(self.current)
            else:
                going = self._outside()
        end = len(window.data)
        for document in self.waiting():
            offset, line = document.left or (window.base + end, window.line(end))
            lost = f"; {len(document.torn)} bytes of a node or event left out" if document.torn else ""
            broken = f"the object from byte {document.start} breaks off here{lost}"
            self.note_place("truncated", offset, broken, line)
            self.sink.close(document, layout.END)
        if self.unlisted:
            self.repairs.append(Repair("not-listed", 0, f"{self.unlisted} more repairs"))

    def _outside(self) -> bool:
        """Read what comes next outside of any object; False at the end of the text."""
        window = self.window
        at = window.pos = matched_end(layout.SPACE, window.data, window.pos)
        if at == len(window.data):
            return not window.ended
        is_record = RECORD_START[None].match(window.data, at) and not OBJECT_START.match(window.data, at)
        if window.data[at : at + 1] == b"{" and not is_record:
            self._object(at)
        else:
            self._garbage(at)
        return True

    def _object(self, at: int) -> None:
        """Begin the document of the object at ``at``, or skip the object if it is not a trace."""
        window = self.window
        while True:
            opening, certain = self._opening(at)
            if certain or window.ended or len(window.data) - at > self.limits.max_record_bytes:
                break
            window.grow()
        end = None if certain else layout.value_end(window.text, at)
        inner = OBJECT_START.search(window.data, at + 1, opening.start() if opening else len(window.data))
        if end is not None:
            kind = "trailing-garbage" if self.documents else "leading-garbage"
            self.note(kind, at, f"an object of {end - at} bytes without nodes or traceEvents")
            window.pos = end
        elif inner and not certain:
            self.note("truncated", at, "an object breaks off in its header")
            window.pos = inner.start()
        elif opening:
            kind, header = _kind(opening), window.data[at : opening.end()]
            if not certain:
                fields = layout.salvage_fields(header, kind, self.limits)
                detail = f"fields that could be read: {', '.join(fields) or 'none'}"
                self.note("damaged-header", at, detail)
                header = layout.bare_header(kind, fields)
            self._begin(at, kind, header, opening.end())
        else:
            self._garbage(at)

    def _opening(self, at: int) -> tuple[Match | None, bool]:
        """Where the record array of the object at ``at`` opens, and whether the header is valid."""
        first = None
        for count, opening in enumerate(ARRAY_OPEN.finditer(self.window.data, at)):
            first = first or opening
            if layout.is_header(self.window.data[at : opening.end()], _kind(opening), self.limits):
                return opening, True
            if count == MAX_OPENINGS:
                break
        return first, False

    def _begin(self, at: int, kind: str, header: bytes, inside: int, has_header: bool = True) -> JsonDocument:
        """Begin the document of the object at ``at``, and go on ``inside`` its array."""
        window = self.window
        if len(self.documents) >= self.limits.max_objects:
            raise TraceError(f"{self.name}: more than {self.limits.max_objects} objects in one file.")
        number = len(self.documents)
        document = JsonDocument(number, window.base + at, kind, window.line(at), has_header)
        self.documents.append(document)
        self.sink.open(document, header)
        self.current, window.pos, self.loose = document, inside, False
        return document

    def _garbage(self, at: int) -> None:
        """Skip bytes up to the next object or record; a record begins a document without a header."""
        window = self.window
        start, line = window.base + at, window.line(at)
        last = self.documents[-1] if self.documents else None
        other_end = False
        at += 1
        while True:
            opening, header, record = self._next_places(at)
            stop = min((p.start() for p in (opening, header, record) if p), default=len(window.data))
            other_end |= layout.OTHER_WRITE_END.search(window.data, max(0, at - 1), stop) is not None
            if stop < len(window.data) or window.ended:
                break
            window.pos = max(at, len(window.data) - OVERLAP)
            window.ensure(STEP_BYTES)
            at = window.pos
        window.pos = stop
        detail = f"{window.base + stop - start} bytes taken out"
        if last and other_end:
            detail += "; they hold the end of another write to the same file"
        self.note_place("trailing-garbage" if last else "leading-garbage", start, detail, line)
        if last and other_end and not last.mixed and (self.lost_records or self.waiting(last)):
            self.mix(last, stop, "the end of another object follows this one")
        rest = max(0, start - window.base)
        if opening and opening.start() == stop:
            self._headerless(_kind(opening), rest, opening.end())
        elif record and record.start() == stop:
            self._headerless(HOST if RECORD_START[HOST].match(window.data, stop) else DEVICE, rest, stop)

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

    def _headerless(self, kind: str, start: int, at: int) -> None:
        """Begin the document of an object with a damaged header; ``data[start:at]`` is what remains of it."""
        fields = layout.salvage_fields(self.window.data[start:at], kind, self.limits)
        # Footer fields belong to the object before.
        fields = {name: value for name, value in fields.items() if name not in layout.FOOTER_FIELDS}
        names = ", ".join(fields) or "none"
        self.note("missing-header", at, f"the beginning of an object is missing; fields left: {names}")
        before, waiting = self.documents[-1:], self.waiting()
        document = self._begin(at, kind, layout.bare_header(kind, fields), at, has_header=False)
        if waiting:
            document.mixed = True
            if before and before[0].closed and not before[0].mixed:
                self.mix(before[0], at, "records without a beginning follow this object")


def _kind(opening: Match) -> str:
    return HOST if opening.group(1) == b"nodes" else DEVICE
