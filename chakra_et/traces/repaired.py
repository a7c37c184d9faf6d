"""The repairs that a repaired trace carries in itself.

``chakra-et repair`` adds a last field to the object: ``"chakra_et_repairs": {repair: count}``. The conversion
lists them, so that a trace that was cut off does not pass for a whole one after its repair.
"""

from __future__ import annotations

from typing import Any

from chakra_et.findings import Findings
from chakra_et.names import Side

KEY = "chakra_et_repairs"
MAX_LISTED = 21
MAX_TEXT = 1000


def recorded(value: Any) -> dict[str, int]:
    """The repairs in the field's value, as far as they can be read; a file may hold anything there."""
    if not isinstance(value, dict):
        return {}
    known = [(text[:MAX_TEXT], count) for text, count in value.items() if type(count) is int and count > 0]
    return dict(known[:MAX_LISTED])


def add_repairs(findings: Findings, side: Side, value: Any) -> None:
    """Count the repairs in the field's value among ``findings``."""
    for text, count in recorded(value).items():
        findings.add("host-repair" if side == "host" else "device-repair", count, text)
