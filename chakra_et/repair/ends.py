"""The two ends of a trace object: the fields before its record array and those after it.

Pure functions from bytes to bytes. A header is the text up to and including the array's ``[``, a footer the
text from the array's ``]`` to the object's ``}``.
"""

from __future__ import annotations

import json
import re

import msgspec

from chakra_et.repair.format import ARRAY_KEY, SEPARATOR, TOP_FIELD, is_object, matched_end
from chakra_et.repair.mend import Fix
from chakra_et.traces.limits import Limits

END = b"\n  ]\n}"
DECODER = json.JSONDecoder(strict=False)
_AFTER_FIELD = re.compile(rb"[ \t\r\n]*[,}\]\n]")


def value_end(text: str, at: int) -> int | None:
    """The end of the JSON value that begins at ``at``; None if it is invalid or nested too deeply."""
    try:
        return DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


def first_keys(records: bytes) -> tuple[str, ...] | None:
    """The keys of the first of these records; None if that record is longer than 64 KiB."""
    text = records[: 64 << 10].decode("latin-1").lstrip(" \t\r\n")
    try:
        return tuple(DECODER.raw_decode(text)[0])
    except (ValueError, RecursionError):
        return None


def mend_header(header: bytes, kind: str, limits: Limits) -> tuple[bytes, list[Fix]]:
    """``header`` unchanged if it is valid, else with the fields that can be read."""
    if is_header(header, kind, limits):
        return header, []
    fields = salvage_fields(header, kind, limits)
    names = ", ".join(fields) or "none"
    return bare_header(kind, fields), [("damaged-header", 0, f"fields that could be read: {names}")]


def is_header(header: bytes, kind: str, limits: Limits) -> bool:
    """Whether the text is valid JSON up to the ``[`` of this kind's array."""
    if not is_object(header + b"]}", limits):
        return False
    return ARRAY_KEY[kind].decode() in msgspec.json.decode(header + b"]}", type=dict[str, msgspec.Raw])


def bare_header(kind: str, fields: dict[str, bytes]) -> bytes:
    """A header with these fields."""
    lines = [b'  "%b": %b,\n' % (name.encode(), value) for name, value in fields.items()]
    return b'{\n%b  "%b": [' % (b"".join(lines), ARRAY_KEY[kind])


def salvage_fields(text: bytes, kind: str, limits: Limits) -> dict[str, bytes]:
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
        if name not in fields and is_object(b'{"%b": %b}' % (name.encode(), value), limits):
            fields[name] = value
    return fields


def footer_end(text: str, at: int) -> int | None:
    """The end of the object whose array's ``]`` is at ``at``; None if no complete footer follows."""
    after = matched_end(SEPARATOR, text[at + 1 : at + 4096].encode("latin-1")) + at + 1
    if text[after : after + 1] == "}":
        return after + 1
    end = value_end("{" + text[after:], 0)
    return None if end is None else after + end - 1


def mend_footer(footer: bytes, kind: str, limits: Limits) -> tuple[bytes, list[Fix]]:
    """``footer`` (from ``]`` on) unchanged if it is valid, else with the fields that can be read."""
    if is_object(b'{"_": [%b' % footer, limits):
        return footer, []
    fields = salvage_fields(footer, kind, limits)
    lines = [b',\n  "%b": %b' % (name.encode(), value) for name, value in fields.items()]
    detail = f"fields that could be read: {', '.join(fields) or 'none'}"
    return b"\n  ]%b\n}" % b"".join(lines), [("damaged-footer", 0, detail)]
