"""The layout of traces by the known writers (PyTorch's observer, Kineto, json.dump) as byte patterns; and
what is found in a damaged file: objects, and what was repaired. ``mend`` escapes in one record what its
writer did not escape, and quotes numbers that JSON lacks; structure is never guessed.

A trace is an object with a few fields, one long array of records under ``nodes`` (host) or ``traceEvents``
(device), and possibly more fields. The patterns find the next joint after a damaged stretch; a valid file is
read without them. A header is the text up to and including the array's ``[``, a footer the text from the
array's ``]`` to the object's ``}``.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

MAX_RECORD_BYTES = 8 << 20
"""A longer record is left out."""
Buffer = bytes | mmap.mmap
HOST, DEVICE = "host", "device"
ARRAY_KEY = {HOST: b"nodes", DEVICE: b"traceEvents"}
_HOST_KEYS = rb"schema|pid|time|start_ts|finish_ts|chakra_et_repairs"
_DEVICE_KEYS = (
    rb"schemaVersion|traceName|displayTimeUnit|baseTimeNanoseconds|deviceProperties|distributedInfo|trace_id|"
    rb"record_shapes|profile_memory|with_stack|with_flops|with_modules|host_name|cuda_runtime_version|"
    rb"cuda_driver_version|chakra_et_repairs"
)
# Fields that the known writers put after the array.
FOOTER_FIELDS = ("finish_ts", "traceName")
END = b"\n  ]\n}"
W = rb"[ \t\r\n]*"


def _pattern(text: bytes) -> re.Pattern[bytes]:
    """Each space in ``text`` matches any JSON white space."""
    return re.compile(text.replace(b" ", W), re.DOTALL)


_OBJECT = (
    rb'\{ "(?:(?:schema|schemaVersion|finish_ts|start_ts|nodes|traceEvents|traceName|displayTimeUnit|'
    rb'baseTimeNanoseconds|deviceProperties|distributedInfo)" :|'
    rb'pid" : \d+ , "(?:time|start_ts|finish_ts|schema|nodes)" :)'
)
# The keys after id and name distinguish a node from an entry of a device trace's deviceProperties and from an
# entry of a node's attrs.
_HOST_RECORD = (
    rb'\{ "(?:id" : \d+ , (?:"name" : ".{0,1000}?" ,? )?"(?:ctrl_deps|rf_id|parent|inputs|outputs|attrs)" :|'
    rb'attrs" :|ctrl_deps" :|fw_parent" : \d|'
    rb'name" : (?!"[^"\n]{0,100}" , "(?:type|value)")"[^\n]{0,1000}?" ,? "(?:id|ctrl_deps|rf_id|inputs)" :)'
)
_DEVICE_RECORD = (
    rb'\{ "(?:ph" : "|cat" : "|args" : \{|bp" : "|(?:dur|ts|pid|tid)" :|'
    rb'name" : "[^\n]{0,1000}?" ,? "(?:ph|cat|ts|pid|tid|dur|args|s)" :)'
)
_END_BY_KEY = rb'\] , "(?:' + _HOST_KEYS + rb"|" + _DEVICE_KEYS + rb')" :'
_END_BY_BRACE = rb"\] \} (?:\Z|\{(?!" + _HOST_RECORD[2:] + rb"|" + _DEVICE_RECORD[2:] + rb"))"

SPACE = _pattern(rb" ")
SEPARATOR = re.compile(rb"[ \t\r\n,]*")
ARRAY_OPEN = _pattern(rb'"(nodes|traceEvents)" : \[')
OBJECT_START = _pattern(_OBJECT)
RECORD_START = {
    HOST: _pattern(_HOST_RECORD),
    DEVICE: _pattern(_DEVICE_RECORD),
    None: _pattern(_HOST_RECORD + rb"|" + _DEVICE_RECORD),
}
# The next joint after damage inside an array: a record, a new object, the array's end.
JOINT = {
    kind: _pattern(rb"|".join((_OBJECT, record, _END_BY_KEY, _END_BY_BRACE)))
    for kind, record in ((HOST, _HOST_RECORD), (DEVICE, _DEVICE_RECORD))
}
OTHER_WRITE_END = _pattern(rb'"(?:finish_ts|traceName)" :|\] \} \Z')
TOP_FIELD = {
    HOST: _pattern(rb'"(' + _HOST_KEYS + rb')" : '),
    DEVICE: _pattern(rb'"(' + _DEVICE_KEYS + rb')" : '),
}

# The observer does not escape names, but what follows a name is always the same. Where nothing of it follows,
# nothing follows later names, too: the rest of the record in one piece, without groups 2 and 3, so that they
# aren't tried one by one, which takes the square of the time.
NAME_FIELD = _pattern(rb'("name" : ")(?:(.*)(" , "(?:ctrl_deps|id)" : \d+ ,)|.*)')
TEXT_VALUE = _pattern(rb'("type" : "string" , "value" : ")(?:(.*?)(" \} (?:, \{|\]))|.*)')
NOT_A_NUMBER = _pattern(
    rb"([\[,:] )([+-]?(?i:nan(?:\(ind\))?|inf(?:inity)?|\d[\d.]{0,40}e\+?\d{3,9}|\d{309,}))(?= [,\]}])"
)
# Maps every digit to 0 and E to e, so that one search finds the numbers that may be too large to decode:
# those with an exponent of three digits, and those as long as Python's limit.
_DIGITS_ALIKE = bytes(
    48 if chr(byte).isdigit() and byte < 128 else 101 if byte == 69 else byte for byte in range(256)
)
_LONG_NUMBER = b"0" * 4300
_ONLY_IN_HEADERS = (b'"schema', b'"traceEvents"')
_AFTER_FIELD = re.compile(rb"[ \t\r\n]*[,}\]\n]")
_DECODER = json.JSONDecoder(strict=False)


class _AnyObject(msgspec.Struct):
    """Any JSON object: every field is skipped."""


_ARRAY_OF_OBJECTS = msgspec.json.Decoder(list[_AnyObject])


def matched_end(pattern: re.Pattern[bytes], text: Buffer, at: int = 0) -> int:
    """Where the match of ``pattern`` at ``at`` ends; ``at`` if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


def count_records(body: bytes) -> int | None:
    """The number of JSON objects in ``body``, an array without its brackets.

    None if any of it is not valid JSON that msgspec decodes.
    """
    try:
        if not body.isascii():
            body.decode()
        count = len(_ARRAY_OF_OBJECTS.decode(b"[%b]" % body))
        digits = body.translate(_DIGITS_ALIKE, b"+")
        if b"0e000" in digits or _LONG_NUMBER in digits:
            msgspec.json.decode(b"[%b]" % body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return count


def holds_header(body: bytes) -> bool:
    """Whether another object begins in a run of records. An object that was written between two records can
    leave valid JSON, in which it looks like a record itself."""
    return any(key in body for key in _ONLY_IN_HEADERS) and OBJECT_START.search(body) is not None


def is_object(text: bytes) -> bool:
    """Whether ``text`` is one valid JSON object, with or without white space around it."""
    return count_records(text) == 1


def value_end(text: str, at: int) -> int | None:
    """The end of the JSON value that begins at ``at``; None if it is invalid or nested too deeply."""
    try:
        return _DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


def first_keys(records: bytes) -> tuple[str, ...] | None:
    """The keys of the first of these records; None if that record is longer than 64 KiB."""
    text = records[: 64 << 10].decode("latin-1").lstrip(" \t\r\n")
    try:
        return tuple(_DECODER.raw_decode(text)[0])
    except (ValueError, RecursionError):
        return None


def is_header(header: bytes, kind: str) -> bool:
    """Whether the text is valid JSON up to the ``[`` of this kind's array."""
    if not is_object(header + b"]}"):
        return False
    return ARRAY_KEY[kind].decode() in msgspec.json.decode(header + b"]}", type=dict[str, msgspec.Raw])


def bare_header(kind: str, fields: dict[str, bytes]) -> bytes:
    """A header with these fields."""
    lines = [b'  "%b": %b,\n' % (name.encode(), value) for name, value in fields.items()]
    return b'{\n%b  "%b": [' % (b"".join(lines), ARRAY_KEY[kind])


def salvage_fields(text: bytes, kind: str) -> dict[str, bytes]:
    """The known fields of a damaged header or footer whose values are complete: name → value as written."""
    fields: dict[str, bytes] = {}
    decoded = text.decode("latin-1")
    for found in TOP_FIELD[kind].finditer(text):
        name = found.group(1).decode()
        end = value_end(decoded, found.end())
        # A number that is cut off would read as a smaller one.
        if end is None or not _AFTER_FIELD.match(text, end):
            continue
        value = text[found.end() : end]
        if name not in fields and is_object(b'{"%b": %b}' % (name.encode(), value)):
            fields[name] = value
    return fields


def footer_end(text: str, at: int) -> int | None:
    """The end of the object whose array's ``]`` is at ``at``; None if no complete footer follows."""
    after = matched_end(SEPARATOR, text[at + 1 : at + 4096].encode("latin-1")) + at + 1
    if text[after : after + 1] == "}":
        return after + 1
    end = value_end("{" + text[after:], 0)
    return None if end is None else after + end - 1


def mend_footer(footer: bytes, kind: str) -> tuple[bytes, str]:
    """``footer`` (from ``]`` on) if it is valid, else what can be read of it and a sentence on that."""
    if is_object(b'{"_": [%b' % footer):
        return footer, ""
    fields = salvage_fields(footer, kind)
    lines = [b',\n  "%b": %b' % (name.encode(), value) for name, value in fields.items()]
    return b"\n  ]%b\n}" % b"".join(lines), f"fields that could be read: {', '.join(fields) or 'none'}"


# ---- what is found in a file ----


@dataclass(frozen=True)
class Repair:
    """One change. ``offset``: bytes in the text before the repair; for a compressed file that is the
    decompressed text, except for the ``gz-`` kinds."""

    kind: str
    offset: int
    detail: str

    def __str__(self) -> str:
        return f"byte {self.offset}: {self.kind}: {self.detail}"


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
    ``keys``: the keys of an intact record, in order. ``closed``: its end was found; ``whole``: its end is
    there, not made by us; ``complete``: its beginning, too. ``left``: the byte where another object began
    before this one had ended; ``torn``: bytes of the incomplete record before that place.
    """

    start: int
    kind: str
    header: bytes
    has_header: bool = True
    records: list[bytes | tuple[int, int]] = field(default_factory=list)
    footer: bytes = END
    nodes: int = 0
    closed: bool = False
    whole: bool = False
    keys: tuple[str, ...] | None = None
    torn: int = 0
    left: int | None = None

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


MAX_MEND_BYTES = 1 << 20

Fix = tuple[str, int, str]  # kind, offset in the record, detail

_W = rb"[ \t\r\n]{0,200}"
_ESCAPED_INSIDE = re.compile(rb'[^"\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*)*')
_SURROGATES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_IN_A_NAME = re.compile(rb"[\x00-\x1f]")
# A "name" that contains one of these spans two records.
_RECORD_INSIDE = re.compile(rb'"(?:inputs|outputs|attrs|op_schema)"' + _W + rb":")


def mend(record: bytes, kind: str, keys: tuple[str, ...] | None = None) -> tuple[bytes, list[Fix]] | None:
    """``record`` as valid JSON and the list of fixes, or None if it cannot be mended.

    ``kind`` is "host" or "device". ``keys`` are the keys of an intact record of the same file: a mended host
    record must have the same keys, or two torn records could pass as one.
    """
    if len(record) > MAX_MEND_BYTES:
        return None
    fixes: list[Fix] = []
    try:
        record.decode()
    except UnicodeDecodeError as error:
        fixes.append(("invalid-utf8", error.start, f"byte 0x{record[error.start]:02x} is no UTF-8"))
        record = record.decode("utf-8", "replace").encode()

    def escape(text: re.Match[bytes]) -> bytes:
        before, inside, after = text.groups()
        if inside is None:
            return text.group()
        if not _ESCAPED_INSIDE.fullmatch(inside):
            why = "unescaped-name", text.start(2), f"quotes or backslashes escaped in {_short(inside)}"
            fixes.append(why)
            inside = inside.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        elif _IN_A_NAME.search(inside):
            fixes.append(
                ("control-character", text.start(2), f"control characters escaped in {_short(inside)}")
            )
        return before + _IN_A_NAME.sub(_escape, inside) + after

    if kind == HOST:
        name = NAME_FIELD.search(record)
        if name and _RECORD_INSIDE.search(name.group(2) or b""):
            return None
        record = NAME_FIELD.sub(escape, TEXT_VALUE.sub(escape, record))  # the last first: offsets hold
    if control := _CONTROLS.search(record):
        fixes.append(("control-character", control.start(), "control characters escaped"))
        record = _CONTROLS.sub(_escape, record)
    if any(found.group(1) for found in _SURROGATES.finditer(record)):
        fixes.append(("invalid-utf8", 0, "half a surrogate pair"))
        record = _SURROGATES.sub(lambda found: rb"\ufffd" if found.group(1) else found.group(), record)

    def quote(number: re.Match[bytes]) -> bytes:
        before, text = number.groups()
        if abs(float(text.removesuffix(b"(ind)"))) < float("inf"):
            return number.group()
        fixes.append(("nan", number.start(2), f"{text.decode()[:60]} put in quotes"))
        return b'%b"%b"' % (before, text)

    record = NOT_A_NUMBER.sub(quote, record)
    return (record, fixes) if fixes and is_object(record) and is_whole(record, kind, keys) else None


def _escape(control: re.Match[bytes]) -> bytes:
    return json.dumps(control.group().decode())[1:-1].encode()


def _short(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")


def is_whole(record: bytes, kind: str, keys: tuple[str, ...] | None = None) -> bool:
    """Whether this is a valid JSON object with the fields of one record, and no key twice."""
    try:
        value = json.loads(record, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value.get("name"), str):
        return False
    if kind != HOST:
        return isinstance(value.get("ph"), str)
    attrs = value.get("attrs", [])
    return (
        isinstance(value.get("id"), int)
        and (keys is None or tuple(value) == keys)
        and isinstance(attrs, list)
        and all(isinstance(attr, dict) and attr.keys() == {"name", "type", "value"} for attr in attrs)
    )


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value
