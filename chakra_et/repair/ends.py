"""The two ends of a trace object: the fields before its array and those after it.

Pure functions from bytes to bytes. A header is the text up to and including the array's ``[``, a footer the
text from its ``]`` to the object's ``}``.
"""

from __future__ import annotations

import json
import re

import msgspec

from chakra_et.repair.format import ARRAY_KEY, SEPARATOR, TOP_FIELD, is_object
from chakra_et.repair.mend import Fix, mend
from chakra_et.traces.limits import Limits

END = b"\n  ]\n}"
DECODER = json.JSONDecoder(strict=False)
_AFTER_FIELD = re.compile(rb"[ \t\r\n]*[,}\]\n]")


def value_end(text: str, at: int) -> int | None:
    """Where the JSON value that begins at ``at`` ends; None if it is not valid or nested too deeply."""
    try:
        return DECODER.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return None


def first_keys(records: bytes) -> tuple[str, ...] | None:
    """The keys of the first of these records; None if it is too long to tell cheaply."""
    text = records[: 64 << 10].decode("latin-1").lstrip(" \t\r\n")
    try:
        return tuple(DECODER.raw_decode(text)[0])
    except (ValueError, RecursionError):
        return None


def mend_header(header: bytes, kind: str, limits: Limits) -> tuple[bytes, list[Fix]]:
    """``header`` as it is if it is fine, else mended, else the fields that can be read in it."""
    if is_header(header, kind, limits):
        return header, []
    mended = mend(header + b"]}", limits, None)
    if mended and is_header(mended[0][:-2], kind, limits):
        return mended[0][:-2], mended[1]
    fields = salvage_fields(header, kind, limits)
    names = ", ".join(fields) or "none"
    return bare_header(kind, fields), [("damaged-header", 0, f"fields that could be read: {names}")]


def is_header(header: bytes, kind: str, limits: Limits) -> bool:
    """Whether the text is valid up to the ``[`` of this kind's array."""
    if not is_object(header + b"]}", limits):
        return False
    return ARRAY_KEY[kind].decode() in msgspec.json.decode(header + b"]}", type=dict[str, msgspec.Raw])


def bare_header(kind: str, fields: dict[str, bytes]) -> bytes:
    """A header with these fields."""
    lines = [b'  "%b": %b,\n' % (name.encode(), value) for name, value in fields.items()]
    return b'{\n%b  "%b": [' % (b"".join(lines), ARRAY_KEY[kind])


def salvage_fields(text: bytes, kind: str, limits: Limits) -> dict[str, bytes]:
    """The known fields in a damaged header or footer whose values are whole: name -> value as written."""
    fields: dict[str, bytes] = {}
    decoded = text.decode("latin-1")
    for found in TOP_FIELD[kind].finditer(text):
        name = found.group(1).decode()
        end = value_end(decoded, found.end())
        # A number that the text breaks off in would read as a smaller one.
        if end is None or not _AFTER_FIELD.match(text, end):
            continue
        value = text[found.end() : end]
        if name not in fields and is_object(b'{"%b": %b}' % (name.encode(), value), limits):
            fields[name] = value
    return fields


def footer_end(text: str, at: int) -> int | None:
    """Where the object ends whose array's ``]`` is at ``at``; None if what follows is not a whole footer."""
    after = SEPARATOR.match(text[at + 1 : at + 4096].encode("latin-1")).end() + at + 1
    if text[after : after + 1] == "}":
        return after + 1
    end = value_end("{" + text[after:], 0)
    return None if end is None else after + end - 1


def mend_footer(footer: bytes, kind: str, limits: Limits) -> tuple[bytes, list[Fix]]:
    """``footer`` (from ``]`` on) as it is if it is fine, else mended, else the fields that can be read."""
    if is_object(b'{"_": [%b' % footer, limits):
        return footer, []
    # A number at the very end may have lost digits.
    for ending in (b"", b"}") if footer.rstrip().endswith((b'"', b"]", b"}")) else (b"",):
        mended = mend(b'{"_": [%b%b' % (footer, ending), limits, None)
        if mended and mended[0].startswith(b'{"_": ['):
            fixes = [(kind, max(0, at - 7), detail) for kind, at, detail in mended[1]]
            return mended[0][7:], fixes
    fields = salvage_fields(footer, kind, limits)
    lines = [b',\n  "%b": %b' % (name.encode(), value) for name, value in fields.items()]
    detail = f"fields that could be read: {', '.join(fields) or 'none'}"
    return b"\n  ]%b\n}" % b"".join(lines), [("damaged-footer", 0, detail)]
