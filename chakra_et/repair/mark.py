"""The list of repairs that a repaired trace carries in its last field, see ``traces.repaired``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

from chakra_et.repair.documents import JsonDocument
from chakra_et.repair.ends import value_end
from chakra_et.repair.types import Repair
from chakra_et.traces.repaired import KEY, MAX_LISTED, recorded

CUT = ("truncated", "gz-truncated")
FURTHER = "further repairs, not listed one by one"
_FIELD = re.compile(rb',\s*"%s"\s*:\s*' % KEY.encode())


def marked(footer: bytes, document: JsonDocument, repairs: Iterable[Repair]) -> bytes:
    """``footer`` with the repairs of its document, after those of an earlier repair."""
    listed = _earlier(footer)
    # An object that is whole is not cut off, whatever else was in its file. A cut comes first, as it counts.
    own = [repair for repair in repairs if not (document.whole and repair.kind in CUT)]
    for repair in sorted(own, key=lambda repair: repair.kind not in CUT):
        text = str(repair)
        if text not in listed and len(listed) >= MAX_LISTED - 1:
            text = FURTHER
        listed[text] = listed.get(text, 0) + 1
    if not listed:
        return footer
    footer = _without(footer)
    end = footer.rindex(b"}")
    field = f',\n  "{KEY}": {json.dumps(listed)}\n'
    return footer[:end].rstrip() + field.encode() + footer[end:]


def _earlier(footer: bytes) -> dict[str, int]:
    try:
        fields = msgspec.json.decode(b'{"_": [%b' % footer, type=dict[str, msgspec.Raw])
        return recorded(msgspec.json.decode(fields[KEY]))
    except (msgspec.DecodeError, KeyError, RecursionError):
        return {}


def _without(footer: bytes) -> bytes:
    found = _FIELD.search(footer)
    end = value_end(footer.decode("latin-1"), found.end()) if found else None
    return footer if found is None or end is None else footer[: found.start()] + footer[end:]
