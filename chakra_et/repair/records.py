"""Read the record array of an object: intact runs in bulk, the rest record by record.

After damage that cannot be mended, reading resumes at the next joint of the format: the start of a record,
the end of the array, a new object. Memory is bounded by one record; time is linear.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chakra_et.repair.documents import JsonDocument, TornRecords, strip_separators
from chakra_et.repair.ends import first_keys, footer_end, mend_footer, value_end
from chakra_et.repair.format import (
    ARRAY_KEY,
    ARRAY_OPEN,
    HOST,
    JOINT,
    OBJECT_START,
    RECORD_START,
    SEPARATOR,
    breaks_limit,
    count_records,
    holds_header,
    is_object,
    matched_end,
)
from chakra_et.repair.mend import mend
from chakra_et.repair.source import ByteWindow
from chakra_et.repair.types import Repair
from chakra_et.traces.limits import Limits

STEP_BYTES = 1 << 20
SMALL_STEP = 4 << 10
LOOK_AHEAD = 256 << 10
SPACES = b" \t\r\n"


class Sink(Protocol):
    """Receives what is read, document by document; records come without the comma between them."""

    def open(self, document: JsonDocument, header: bytes) -> None: ...
    def add(self, document: JsonDocument, records: bytes) -> None: ...
    def close(self, document: JsonDocument, footer: bytes) -> None: ...


class RecordReader:
    """Reads records into ``current``, the document of the object at the current position."""

    def __init__(self, window: ByteWindow, name: str, limits: Limits, sink: Sink) -> None:
        self.window, self.name, self.limits, self.sink = window, name, limits, sink
        self.repairs: list[Repair] = []
        self.unlisted = 0
        self.documents: list[JsonDocument] = []
        self.current: JsonDocument | None = None
        self.torn = TornRecords()
        self.lost_records = False
        # The gap since the last record has been reported already, so commas in it are not.
        self.loose = False
        self.step = STEP_BYTES

    def note(self, kind: str, at: int, detail: str) -> None:
        """List a repair at ``window.data[at]``."""
        self.note_place(kind, self.window.base + at, detail, self.window.line(at))

    def note_place(self, kind: str, offset: int, detail: str, line: int = 0) -> None:
        self.lost_records |= kind in ("damaged", "limit")
        if len(self.repairs) < self.limits.max_listed:
            self.repairs.append(Repair(kind, offset, detail, line))
        else:
            self.unlisted += 1

    def inside(self, document: JsonDocument) -> bool:
        """Continue in ``document``'s array; False at the end of the text."""
        return self._run(document) or self._one(document)

    # ---- intact runs

    def _run(self, document: JsonDocument) -> bool:
        """Pass on the intact records of the next step unchanged; False if there are none."""
        window = self.window
        stop = min(window.pos + self.step, len(window.data))
        lead = window.data[window.pos : matched_end(SEPARATOR, window.data, window.pos)]
        if lead.count(b",") == (document.nodes > 0):
            cut = self._last_start(document, window.pos + len(lead) + 1, stop)
            begin = window.pos + lead.find(b",") + 1
            body = window.data[begin:cut].rstrip(SPACES)
            count = count_records(body[:-1], self.limits) if body.endswith(b",") else None
            if count and not holds_header(body):
                self._hand_on(document, body[:-1], count, window.pos)
                window.pos = begin + len(body) - 1
                return True
        self.step = SMALL_STEP
        return False

    def _last_start(self, document: JsonDocument, start: int, stop: int) -> int:
        """The start of the last record that begins before ``stop``; ``start`` if none does."""
        for begin in (max(start, stop - 16 * SMALL_STEP), start):
            starts = [
                found.start() for found in RECORD_START[document.kind].finditer(self.window.data, begin, stop)
            ]
            if starts:
                return starts[-1]
        return start

    def _hand_on(self, document: JsonDocument, records: bytes, count: int, at: int) -> None:
        if document.keys is None and document.kind == HOST:
            document.keys = first_keys(records)
        if (
            document.kind == HOST
            and self.waiting(document)
            and not document.mixed
            and document.repeats_ids(records)
        ):
            self.mix(document, at, "node ids repeat")
        self.sink.add(document, records)
        document.nodes += count
        self.loose = False
        self.step = min(2 * self.step, STEP_BYTES)

    def waiting(self, document: JsonDocument) -> list[JsonDocument]:
        """Other objects that have begun and not ended: their writers may have continued."""
        return [other for other in self.documents if not other.closed and other is not document]

    def mix(self, document: JsonDocument, at: int, sign: str) -> None:
        """Mark ``document``, and the objects that it broke into, as holding records of several processes."""
        for part in (document, *self.waiting(document)):
            part.mixed = True
        self.note("mixed-processes", at, f"{sign}: another process wrote to this file at the same time")

    # ---- one record

    def _one(self, document: JsonDocument) -> bool:
        window = self.window
        at = matched_end(SEPARATOR, window.data, window.pos)
        lead = window.data[window.pos : at]
        if at == len(window.data):
            if len(lead) > self.limits.max_record_bytes:
                window.pos, self.loose = at, True
            window.grow()
            return not window.ended
        byte = window.data[at : at + 1]
        if byte == b"]":
            self._end(document, lead, at)
        elif OBJECT_START.match(window.data, at):
            self._leave(document, at)
        else:
            self._record(document, lead, at, byte == b"{")
        return True

    def _record(self, document: JsonDocument, lead: bytes, at: int, opens: bool) -> None:
        window = self.window
        while True:
            end = value_end(window.text, at) if opens else None
            if end is not None:
                return self._take(document, lead, at, end)
            ahead = len(window.data) - at
            joint = self.joint(document, at + 1)
            if window.ended or ahead > self.limits.max_record_bytes:
                break
            # An apparent joint may lie in a string of a record that extends beyond the window.
            if joint < len(window.data) and ahead > LOOK_AHEAD:
                break
            window.grow()
        self._damage(document, lead, at, joint)

    def joint(self, document: JsonDocument, at: int) -> int:
        """The next place where reading can resume; the end of the window if it has none."""
        data = self.window.data
        found = JOINT[document.kind].search(data, at)
        return found.start() if found and (found.end() < len(data) or self.window.ended) else len(data)

    def _take(self, document: JsonDocument, lead: bytes, at: int, end: int) -> None:
        """Keep the record ``data[at:end]``, mended if necessary, or leave it out."""
        record = self.window.data[at:end]
        self.window.pos = end
        if len(record) > self.limits.max_record_bytes:
            self._drop("limit", at, f"a record of {len(record)} bytes left out")
        elif is_object(record, self.limits):
            self._commas(document, lead, at)
            self._hand_on(document, lead[lead.rfind(b",") + 1 :] + record, 1, at)
        elif not self._mended(document, lead, at, record):
            kind, why = self._fault(record)
            self._drop(kind, at, f"{why}; {len(record)} bytes left out")

    def _mended(self, document: JsonDocument, lead: bytes, at: int, record: bytes) -> bool:
        mended = mend(record, self.limits, document.kind, document.keys)
        if mended is None:
            return False
        self._commas(document, lead, at)
        for kind, place, detail in mended[1]:
            self.note(kind, min(at + place, len(self.window.data)), detail)
        self._hand_on(document, lead[lead.rfind(b",") + 1 :] + mended[0], 1, at)
        self.step = SMALL_STEP
        return True

    def _commas(self, document: JsonDocument, lead: bytes, at: int) -> None:
        commas, wanted = lead.count(b","), int(document.nodes > 0)
        if not self.loose and commas < wanted:
            self.note("missing-comma", at, "put in before this record")
        elif not self.loose and commas > wanted:
            self.note("double-comma", at, f"{commas - wanted} taken out before this record")

    def _fault(self, record: bytes) -> tuple[str, str]:
        try:
            msgspec.json.decode(record)
        except RecursionError:
            return "limit", "nested too deeply"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return "damaged", f"not valid JSON ({error})"
        return "limit", breaks_limit(record, self.limits) or "not decodable"

    def _drop(self, kind: str, at: int, detail: str) -> None:
        self.note(kind, at, detail)
        self.loose = True

    # ---- damage and seams

    def _damage(self, document: JsonDocument, lead: bytes, at: int, joint: int) -> None:
        """``data[at:joint]`` is not a record: another writer's bytes, or a record too damaged to delimit."""
        window = self.window
        region = strip_separators(window.data[at:joint])
        window.pos = at + len(region)
        if region.startswith(b"{") and self._mended(document, lead, at, region):
            return
        if joint == len(window.data) and window.ended or OBJECT_START.match(window.data, joint):
            document.torn, document.left = region, (window.base + at, window.line(at))
            self.loose = True
            return
        if not document.mixed and any(self.torn.goes_on(other, region) for other in self.waiting(document)):
            self.mix(document, at, "a record of an object that broke off before goes on here")
        kind, why = self._fault(region)
        self._drop(kind, at, f"{why}; {len(region)} bytes left out")

    def _leave(self, document: JsonDocument, at: int) -> None:
        """Another object begins before this one has ended; this one may continue later."""
        document.left = document.left or (self.window.base + at, self.window.line(at))
        self.window.pos = at
        self.current = None

    # ---- the array's end

    def _end(self, document: JsonDocument, lead: bytes, at: int) -> None:
        window = self.window
        end = footer_end(window.text, at)
        after = matched_end(SEPARATOR, window.data, at + 1)
        # With two arrays under one key, readers would see only the second.
        again = end and any(
            found.group(1) == ARRAY_KEY[document.kind] for found in ARRAY_OPEN.finditer(window.data, at, end)
        )
        if again or RECORD_START[document.kind].match(window.data, after):
            window.pos = at + 1
            self._drop("damaged", at, "a bracket that closes the array too early; taken out")
            return
        if b"," in lead and not self.loose:
            self.note("trailing-comma", at, "taken out")
        broken = end is None
        if end is None:
            starts = (pattern.search(window.data, at + 1) for pattern in (OBJECT_START, RECORD_START[None]))
            end = min((start.start() for start in starts if start), default=len(window.data))
        footer, fixes = mend_footer(window.data[at:end], document.kind, self.limits)
        broken_off = broken and end == len(window.data) and window.ended
        for kind, place, detail in fixes:
            if broken_off and kind == "damaged-footer":
                kind, detail = "truncated", f"the object's last fields; {detail}"
            self.note(kind, at + place, detail)
        document.closed, document.end = True, window.base + end
        document.whole = not (broken_off and any(kind == "damaged-footer" for kind, _, _ in fixes))
        self.sink.close(document, footer)
        window.pos = end
        self.current = None
