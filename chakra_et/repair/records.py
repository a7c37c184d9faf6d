"""Read the record array of an object: intact runs in bulk, the rest record by record.

After damage that cannot be mended, reading resumes at the next joint of the format: the start of a record,
the end of the array, a new object. Memory is bounded by one record; time is linear.
"""

from __future__ import annotations

import msgspec

from chakra_et.repair import format as layout
from chakra_et.repair.format import (
    HOST,
    OBJECT_START,
    RECORD_START,
    SEPARATOR,
    count_records,
    is_object,
    matched_end,
)
from chakra_et.repair.mend import is_whole, mend
from chakra_et.repair.source import ByteWindow, Read
from chakra_et.repair.types import JsonDocument, Repair
from chakra_et.traces.records import Limits

STEP_BYTES = 1 << 20
SMALL_STEP = 4 << 10
LOOK_AHEAD = 256 << 10
# Limits of the search for the rest of a torn record, which takes the square of the bytes searched.
MAX_TORN_BYTES = 32 << 10
MAX_SEARCHES = 300


class Sink:
    """Receives what is read, document by document; records come without the comma between them. This one
    discards everything."""

    def open(self, document: JsonDocument, header: bytes) -> None: ...
    def add(self, document: JsonDocument, records: bytes) -> None: ...
    def close(self, document: JsonDocument, footer: bytes) -> None: ...


class RecordReader:
    """Reads records into ``current``, the document of the object at the current position."""

    def __init__(self, read: Read, name: str, limits: Limits, sink: Sink) -> None:
        self.window, self.name, self.limits, self.sink = ByteWindow(read), name, limits, sink
        self.repairs: list[Repair] = []
        self.unlisted = 0
        self.documents: list[JsonDocument] = []
        self.current: JsonDocument | None = None
        self.searches = 0
        self.lost_records = False
        # The gap since the last record has been reported already, so commas in it are not.
        self.loose = False
        self.step = STEP_BYTES

    def note(self, kind: str, at: int, detail: str) -> None:
        """List a repair at ``window.data[at]``."""
        self.note_place(kind, self.window.base + at, detail, self.window.line(at))

    def note_place(self, kind: str, offset: int, detail: str, line: int) -> None:
        self.lost_records |= kind in ("damaged", "limit")
        if len(self.repairs) < self.limits.max_listed:
            self.repairs.append(Repair(kind, offset, detail, line))
        else:
            self.unlisted += 1

    def waiting(self, document: JsonDocument | None = None) -> list[JsonDocument]:
        """Other objects that have begun and not ended: their writers may have continued."""
        return [other for other in self.documents if not other.closed and other is not document]

    def mix(self, document: JsonDocument, at: int, sign: str) -> None:
        """Mark ``document``, and the objects that it broke into, as holding records of several processes."""
        for part in (document, *self.waiting(document)):
            part.mixed = True
        self.note("mixed-processes", at, f"{sign}: another process wrote to this file at the same time")

    def intact_run(self, document: JsonDocument) -> bool:
        """Pass on the intact records of the next step unchanged; False if there are none."""
        window = self.window
        lead = window.data[window.pos : matched_end(SEPARATOR, window.data, window.pos)]
        if lead.count(b",") == (document.nodes > 0):
            # Up to the last record that begins in this step, which is near its end but for a long one.
            first = window.pos + len(lead) + 1
            stop = min(window.pos + self.step, len(window.data))
            cut = first
            for begin in (max(first, stop - 16 * SMALL_STEP), first):
                starts = list(RECORD_START[document.kind].finditer(window.data, begin, stop))
                if starts:
                    cut = starts[-1].start()
                    break
            begin = window.pos + lead.find(b",") + 1
            body = window.data[begin:cut].rstrip(b" \t\r\n")
            count = count_records(body[:-1], self.limits) if body.endswith(b",") else None
            if count and not layout.holds_header(body):
                self._hand_on(document, body[:-1], count, window.pos)
                window.pos = begin + len(body) - 1
                return True
        self.step = SMALL_STEP
        return False

    def _hand_on(self, document: JsonDocument, records: bytes, count: int, at: int) -> None:
        if document.kind == HOST:
            if document.keys is None:
                document.keys = layout.first_keys(records)
            if self.waiting(document) and not document.mixed and document.repeats_ids(records):
                self.mix(document, at, "node ids repeat")
        self.sink.add(document, records)
        document.nodes += count
        self.loose = False
        self.step = min(2 * self.step, STEP_BYTES)

    def one_record(self, document: JsonDocument) -> bool:
        """Read what comes next, a record or the end of the array; False at the end of the text."""
        window = self.window
        at = matched_end(SEPARATOR, window.data, window.pos)
        lead = window.data[window.pos : at]
        if at == len(window.data):
            if len(lead) > self.limits.max_record_bytes:
                window.pos, self.loose = at, True
            window.grow()
            return not window.ended
        if window.data[at : at + 1] == b"]":
            self._end(document, lead, at)
        elif OBJECT_START.match(window.data, at):
            # This object has not ended and may continue later.
            document.left = document.left or (window.base + at, window.line(at))
            window.pos, self.current = at, None
        else:
            self._record(document, lead, at)
        return True

    def _record(self, document: JsonDocument, lead: bytes, at: int) -> None:
        window = self.window
        opens = window.data[at : at + 1] == b"{"
        while True:
            end = layout.value_end(window.text, at) if opens else None
            if end is not None:
                return self._take(document, lead, at, end)
            # The next place where reading can resume.
            found = layout.JOINT[document.kind].search(window.data, at + 1)
            certain = found and (found.end() < len(window.data) or window.ended)
            joint = found.start() if found and certain else len(window.data)
            ahead = len(window.data) - at
            if window.ended or ahead > self.limits.max_record_bytes:
                break
            # An apparent joint may lie in a string of a record that extends beyond the window.
            if joint < len(window.data) and ahead > LOOK_AHEAD:
                break
            window.grow()
        self._damage(document, lead, at, joint)

    def _take(self, document: JsonDocument, lead: bytes, at: int, end: int) -> None:
        """Keep the record ``data[at:end]``, mended if necessary, or leave it out."""
        record = self.window.data[at:end]
        self.window.pos = end
        if len(record) > self.limits.max_record_bytes:
            self._drop("limit", at, f"a record of {len(record)} bytes left out")
        elif is_object(record, self.limits):
            self._keep(document, lead, at, record)
        elif not self._mended(document, lead, at, record):
            self._drop_unreadable(at, record)

    def _mended(self, document: JsonDocument, lead: bytes, at: int, record: bytes) -> bool:
        mended = mend(record, self.limits, document.kind, document.keys)
        if mended is not None:
            self._keep(document, lead, at, *mended)
            self.step = SMALL_STEP
        return mended is not None

    def _keep(
        self,
        document: JsonDocument,
        lead: bytes,
        at: int,
        record: bytes,
        fixes: list[tuple[str, int, str]] | None = None,
    ) -> None:
        commas, wanted = lead.count(b","), int(document.nodes > 0)
        if not self.loose and commas < wanted:
            self.note("missing-comma", at, "put in before this record")
        elif not self.loose and commas > wanted:
            self.note("double-comma", at, f"{commas - wanted} taken out before this record")
        for kind, place, detail in fixes or ():
            self.note(kind, min(at + place, len(self.window.data)), detail)
        self._hand_on(document, lead[lead.rfind(b",") + 1 :] + record, 1, at)

    def _drop(self, kind: str, at: int, detail: str) -> None:
        self.note(kind, at, detail)
        self.loose = True

    def _drop_unreadable(self, at: int, record: bytes) -> None:
        kind = "limit"
        try:
            msgspec.json.decode(record)
            why = layout.breaks_limit(record, self.limits) or "not decodable"
        except RecursionError:
            why = "nested too deeply"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            kind, why = "damaged", f"not valid JSON ({error})"
        self._drop(kind, at, f"{why}; {len(record)} bytes left out")

    def _damage(self, document: JsonDocument, lead: bytes, at: int, joint: int) -> None:
        """``data[at:joint]`` is not a record: another writer's bytes, or a record too damaged to delimit."""
        window = self.window
        region = window.data[at:joint]
        region = region[: len(region) - matched_end(SEPARATOR, region[::-1])]
        window.pos = at + len(region)
        if region.startswith(b"{") and self._mended(document, lead, at, region):
            return
        if joint == len(window.data) and window.ended or OBJECT_START.match(window.data, joint):
            document.torn, document.left = region, (window.base + at, window.line(at))
            self.loose = True
            return
        if not document.mixed and any(self._goes_on(other, region) for other in self.waiting(document)):
            self.mix(document, at, "a record of an object that broke off before goes on here")
        self._drop_unreadable(at, region)

    def _goes_on(self, document: JsonDocument, region: bytes) -> bool:
        """Whether ``region`` has the rest of the record in which ``document`` broke off. Then its writer
        continued after another writer's object began."""
        torn = document.torn
        if not torn or len(torn) + len(region) > MAX_TORN_BYTES or self.searches >= MAX_SEARCHES:
            return False
        self.searches += 1
        return any(is_whole(torn + region[at:], document.kind, document.keys) for at in range(len(region)))

    def _end(self, document: JsonDocument, lead: bytes, at: int) -> None:
        """The array's ``]`` is at ``at``: end the object, or take out a bracket that comes too early."""
        window, kind = self.window, document.kind
        end = layout.footer_end(window.text, at)
        after = matched_end(SEPARATOR, window.data, at + 1)
        # With two arrays under one key, readers would see only the second.
        again = end and any(
            found.group(1) == layout.ARRAY_KEY[kind]
            for found in layout.ARRAY_OPEN.finditer(window.data, at, end)
        )
        if again or RECORD_START[kind].match(window.data, after):
            window.pos = at + 1
            self._drop("damaged", at, "a bracket that closes the array too early; taken out")
            return
        if b"," in lead and not self.loose:
            self.note("trailing-comma", at, "taken out")
        whole = end is not None
        if end is None:
            starts = (pattern.search(window.data, at + 1) for pattern in (OBJECT_START, RECORD_START[None]))
            end = min((start.start() for start in starts if start), default=len(window.data))
        footer, left = layout.mend_footer(window.data[at:end], kind, self.limits)
        whole = whole or not left or end < len(window.data) or not window.ended
        if not whole:
            self.note("truncated", at, f"the object's last fields; {left}")
        elif left:
            self.note("damaged-footer", at, left)
        document.closed, document.whole, document.end = True, whole, window.base + end
        self.sink.close(document, footer)
        window.pos, self.current = end, None
