"""What the parts found: lines of what was measured and expected, in one JSON file and one page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chakra_et.files import write_json, write_text

GOOD, BAD, NOT_RUN, NOT_JUDGED = "good", "bad", "not run", "not judged"


@dataclass(frozen=True)
class Line:
    """One check: ``what``, the figure ``measured`` and what was ``expected`` of it, as text; ``verdict``."""

    what: str
    measured: str
    expected: str
    verdict: str


def at_most(what: str, share: float, most: float, judged: bool = True) -> Line:
    """A part of 1 that must not be above ``most``; times of a rehearsal on a CPU are told, and not judged."""
    verdict = (GOOD if share <= most else BAD) if judged else NOT_JUDGED
    return Line(what, f"{share:.2%}", f"at most {most:.0%}", verdict)


def equal(what: str, measured: object, expected: object) -> Line:
    """A figure or word that must be the expected one."""
    return Line(what, str(measured), str(expected), GOOD if measured == expected else BAD)


def not_run(what: str, why: str) -> Line:
    """A check that can't be made here."""
    return Line(what, "-", why, NOT_RUN)


class Results:
    """The lines of each part, kept in ``doctor.json``: a later call goes on where an earlier one ended."""

    def __init__(self, folder: Path, machine: dict[str, str]) -> None:
        self.file, self.page = folder / "doctor.json", folder / "doctor.md"
        self.machine = machine
        self.parts: dict[str, list[Line]] = {}
        if self.file.is_file():
            known = json.loads(self.file.read_text())
            if known["machine"] == machine:
                self.parts = {
                    part: [Line(**line) for line in lines] for part, lines in known["parts"].items()
                }

    def add(self, part: str, lines: Iterable[Line]) -> list[Line]:
        """Keep what a part found, in place of what it found before."""
        found = self.parts[part] = list(lines)
        write_json(self.file, {"machine": self.machine, "parts": self._plain()})
        write_text(self.page, self._text())
        return found

    @property
    def bad(self) -> int:
        """How many checks failed."""
        return sum(line.verdict == BAD for lines in self.parts.values() for line in lines)

    def _plain(self) -> dict[str, list[dict[str, Any]]]:
        return {part: [asdict(line) for line in lines] for part, lines in self.parts.items()}

    def _text(self) -> str:
        lines = [
            "# chakra-et doctor",
            "",
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
        ]
        for part, found in self.parts.items():
            lines += ["", f"## {part}", "", "| what | measured | expected | verdict |", "|---|---|---|---|"]
            rows = (" | ".join(each.replace("|", "/") for each in asdict(line).values()) for line in found)
            lines += [f"| {row} |" for row in rows]
        return "\n".join(lines) + "\n"
