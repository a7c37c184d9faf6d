"""The losses, repairs, warnings and notes of a conversion: a stable id and a sentence for each.

    report = json.loads(run_at("outputs/gpt2_2gpu_quick_trace").report_file.read_text())
    print([rank["warnings"] for rank in report["ranks"].values()])

Stages count them in a ``Findings``. A key is an id of ``findings.json``, or ``id:detail`` if the sentence has
a ``{}`` for the detail. Ids stay the same between versions; sentences may change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["loss", "repair", "warning", "note"]
KINDS: tuple[Kind, ...] = ("loss", "repair", "warning", "note")

# A loss is an event of the device trace without a node. A repair changed a damaged value. A warning is a
# guess or default that can make the graph differ from the actual execution.
_SENTENCES: dict[Kind, dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
# id → (kind, sentence)
TABLE = {key: (kind, text) for kind, texts in _SENTENCES.items() for key, text in texts.items()}


class Findings(Counter[str]):
    """Counts by key."""

    def add(self, key: str, count: int = 1, detail: str = "") -> None:
        """Add ``count`` to ``key``. Raises ``KeyError`` for an id that is not in ``TABLE``."""
        TABLE[key]
        if count:
            self[f"{key}:{detail}" if detail else key] += int(count)

    def of(self, kind: Kind) -> dict[str, int]:
        """The findings of one kind."""
        return {key: count for key, count in self.items() if TABLE[key.partition(":")[0]][0] == kind}


def joined(*parts: Mapping[str, int]) -> Findings:
    """The sum of all counts."""
    total = Findings()
    for part in parts:
        total.update(part)
    return total


def sentence(key: str) -> str:
    """The sentence for a key, with its detail filled in."""
    name, _, detail = key.partition(":")
    return TABLE[name][1].replace("{}", detail)


def listed(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """For JSON: ``[{"id", "count", "text"}]`` sorted by key, with ``detail`` if the key has one."""
    entries = []
    for key, count in sorted(counts.items()):
        name, _, detail = key.partition(":")
        entries.append(
            {"id": name, **({"detail": detail} if detail else {}), "count": count, "text": sentence(key)}
        )
    return entries
