"""Mend one damaged record: escape what its writer did not escape, and quote numbers that JSON lacks.

These are the faults of the known writers, which tend to occur in every record of a file. Structure is never
guessed: a record with a bracket, quote or comma too few or too many is not mended.
"""

from __future__ import annotations

import json
import re

from chakra_et.repair.format import HOST, NAME_FIELD, NOT_A_NUMBER, TEXT_VALUE, is_object

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
        if name and _RECORD_INSIDE.search(name.group(2)):
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
