"""Mend one damaged record: escape what its writer did not escape, quote NaN, correct commas.

First a fast pass for the two faults of the known writers, unescaped names and NaN, which tend to occur in
every record of a file; then a lenient reader, token by token. Structure is never guessed: a record with a
bracket too few or too many is not mended.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial

from chakra_et.repair.format import HOST, NAME_FIELD, NOT_A_NUMBER, RECORD_KEYS, is_object, matched_end
from chakra_et.traces.records import Limits

MAX_MEND_BYTES = 1 << 20

Fix = tuple[str, int, str]  # kind, offset in the record, detail

_W = rb"[ \t\r\n]{0,200}"
_ESCAPE = rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_GOOD_INSIDE = re.compile(rb'[^"\\\x00-\x1f]*(?:' + _ESCAPE + rb'[^"\\\x00-\x1f]*)*')
_ESCAPED_INSIDE = re.compile(rb'[^"\\]*(?:' + _ESCAPE + rb'[^"\\]*)*')
_SURROGATES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_KEY = rb'"[^"\\]{1,200}"' + _W + rb":"
_KNOWN_KEY = rb'"(?:' + RECORD_KEYS + rb')"' + _W + rb":"
# What may follow the closing quote of a string, by where the string stands.
_AFTER_KEY = re.compile(_W + rb":")
_NEXT_ITEM = re.compile(_W + rb'["\[{]')
_AFTER_ITEM = re.compile(_W + rb"(?:\]|," + _W + rb'["\[{\]\-+0-9tfniINF,])')
_AFTER_MEMBER = re.compile(_W + rb"(?:\}|,?" + _W + _KEY + rb"|," + _W + rb"[,}])")
_AFTER_TOP_MEMBER = re.compile(_W + rb"(?:\}|,?" + _W + _KNOWN_KEY + rb"|," + _W + rb"[,}])")
_SCALAR = re.compile(
    rb"(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>true|false|null)|"
    rb"(?P<nan>[+-]?(?i:nan(?:\(ind\))?|inf(?:inity)?))"
)
_DELIMITER = re.compile(rb"[ \t\r\n,\]}]|\Z")
# A "name" that contains one of these spans two records.
_RECORD_INSIDE = re.compile(rb'"(?:inputs|outputs|attrs|op_schema)"' + _W + rb":")
_JOINT_INSIDE = re.compile(rb'"' + _W + rb"[,:]|[,:]" + _W + rb'"')
_SPACE = re.compile(rb"[ \t\r\n]+")


class _Unmendable(Exception):
    pass


def mend(
    record: bytes, limits: Limits, kind: str, keys: tuple[str, ...] | None = None
) -> tuple[bytes, list[Fix]] | None:
    """``record`` as valid JSON and the list of fixes, or None if it cannot be mended.

    ``kind`` is "host" or "device". ``keys`` are the keys of an intact record of the same file: a mended host
    record must have the same keys, or two torn records could pass as one.
    """
    if len(record) > MAX_MEND_BYTES:
        return None
    for attempt in (partial(_mend_usual, record, kind), _Reader(record, limits).read):
        try:
            text, fixes = attempt()
        except _Unmendable:
            continue
        if fixes and is_object(text, limits) and is_whole(text, kind, keys):
            return text, fixes
    return None


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


def _mend_usual(record: bytes, kind: str) -> tuple[bytes, list[Fix]]:
    fixes: list[Fix] = []
    name = NAME_FIELD.search(record) if kind == HOST else None
    if name and _RECORD_INSIDE.search(name.group(2)):
        raise _Unmendable
    if name and not _GOOD_INSIDE.fullmatch(name.group(2)):
        inside, fault, detail = _escape(name.group(2))
        fixes.append((fault, name.start(2), detail))
        record = record[: name.start(2)] + inside + record[name.end(2) :]
    grown = len(record)

    def quote(number: re.Match[bytes]) -> bytes:
        fixes.append(("nan", number.start(2), f"{number.group(2).decode()} put in quotes"))
        return b'%b"%b"' % number.groups()

    record = NOT_A_NUMBER.sub(quote, record)
    if len(record) == grown and not fixes:
        raise _Unmendable
    return record, fixes


def _escape(inside: bytes) -> tuple[bytes, str, str]:
    """The text between the quotes of a string, made valid: (text, kind of fix, detail)."""
    try:
        text = inside.decode()
        fault, detail = "", ""
    except UnicodeDecodeError as error:
        text = inside.decode("utf-8", "replace")
        fault, detail = "invalid-utf8", f"byte 0x{inside[error.start]:02x} is no UTF-8"
    if not _ESCAPED_INSIDE.fullmatch(inside):
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        fault, detail = "unescaped-name", f"quotes or backslashes escaped in {_short(inside)}"
    controls = re.compile("[\x00-\x1f]")
    if controls.search(text):
        text = controls.sub(lambda found: json.dumps(found.group())[1:-1], text)
        if fault != "unescaped-name":
            fault, detail = "control-character", f"control characters escaped in {_short(inside)}"
    result = text.encode()
    whole = _SURROGATES.sub(lambda found: rb"\ufffd" if found.group(1) else found.group(), result)
    if whole != result and not fault:
        fault, detail = "invalid-utf8", f"half a surrogate pair in {_short(inside)}"
    return whole, fault, detail


def _short(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")


@dataclass
class _Reader:
    """Reads one value leniently. ``wants`` is what the grammar expects next: value (the whole), key, colon,
    member (a value after a colon), item (of an array), next (a comma or the end of the container), done."""

    record: bytes
    limits: Limits

    def read(self) -> tuple[bytes, list[Fix]]:
        self.at, self.wants = 0, "value"
        self.stack: list[bytes] = []
        self.out: list[bytes] = []
        self.fixes: list[Fix] = []
        self.comma: int | None = None  # index in ``out`` of a comma that nothing has followed yet
        while self.at < len(self.record):
            byte = self.record[self.at : self.at + 1]
            if space := _SPACE.match(self.record, self.at):
                self._take(space.group())
            elif byte == b",":
                self._read_comma()
            elif byte in b"}]":
                self._close(byte)
            elif byte == b":":
                if self.wants != "colon":
                    raise _Unmendable
                self._take(byte)
                self.wants = "member"
            else:
                if self.wants == "next":
                    self._fix("missing-comma", "put in")
                    self.out.append(b",")
                    self._expect_inside()
                self._read_value(byte)
                self.comma = None
        if self.stack or self.wants != "done":
            raise _Unmendable
        return b"".join(self.out), self.fixes

    def _take(self, token: bytes, instead: bytes | None = None) -> None:
        self.out.append(token if instead is None else instead)
        self.at += len(token)

    def _fix(self, kind: str, detail: str) -> None:
        self.fixes.append((kind, self.at, detail))

    def _expect_inside(self) -> None:
        self.wants = "key" if self.stack[-1] == b"}" else "item"

    def _expect_after_value(self) -> None:
        self.wants = "next" if self.stack else "done"

    def _read_comma(self) -> None:
        if self.wants == "next":
            self.comma = len(self.out)
            self._take(b",")
            self._expect_inside()
        elif self.wants in ("key", "item"):
            self._fix("double-comma", "taken out")
            self._take(b",", b"")
        else:
            raise _Unmendable

    def _close(self, byte: bytes) -> None:
        if not self.stack or self.stack[-1] != byte or self.wants not in ("next", "key", "item"):
            raise _Unmendable
        if self.comma is not None:
            self._fix("trailing-comma", "taken out")
            self.out[self.comma] = b""
            self.comma = None
        self.stack.pop()
        self._take(byte)
        self._expect_after_value()

    def _read_value(self, byte: bytes) -> None:
        if self.wants not in ("value", "item", "member", "key") or (self.wants == "key" and byte != b'"'):
            raise _Unmendable
        if byte == b'"':
            self._read_string()
        elif byte in b"{[":
            if len(self.stack) >= self.limits.max_depth:
                raise _Unmendable
            self.stack.append(b"}" if byte == b"{" else b"]")
            self._take(byte)
            self._expect_inside()
        else:
            scalar = _SCALAR.match(self.record, self.at)
            if not scalar or not _DELIMITER.match(self.record, scalar.end()):
                raise _Unmendable
            token = scalar.group()
            # A number beyond the range of a double: Python reads it as infinite, msgspec refuses it.
            if scalar["nan"] or (scalar["number"] and abs(float(token)) == float("inf")):
                self._fix("nan", f"{_short(token)} put in quotes")
                self._take(token, b'"%b"' % token)
            else:
                self._take(token)
            self._expect_after_value()

    def _read_string(self) -> None:
        in_array = self.stack[-1:] == [b"]"]
        if self.wants == "key":
            follows, self.wants = _AFTER_KEY, "colon"
        else:
            top = len(self.stack) == 1
            follows = _AFTER_ITEM if in_array else _AFTER_TOP_MEMBER if top else _AFTER_MEMBER
            self._expect_after_value()
        start = self.at + 1
        end = matched_end(_GOOD_INSIDE, self.record, start)
        closed = self.record[end : end + 1] == b'"'
        if not closed or not (
            follows.match(self.record, end + 1) or (in_array and _NEXT_ITEM.match(self.record, end + 1))
        ):
            # Then the string ends at the first quote, escaped or not, with what must follow a string here.
            # If what is before it looks like the joint of two strings, a quote is damaged, not unescaped.
            end = self.record.find(b'"', start)
            while end >= 0 and not follows.match(self.record, end + 1):
                end = self.record.find(b'"', end + 1)
            if (
                end < 0
                or end - start > self.limits.max_string_bytes
                or _JOINT_INSIDE.search(self.record, start, end)
            ):
                raise _Unmendable
        escaped, fault, detail = _escape(self.record[start:end])
        if fault:
            self._fix(fault, detail)
        self._take(self.record[self.at : end + 1], b'"%b"' % escaped)
