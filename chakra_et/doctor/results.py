"""What the parts found: lines of what was measured and expected, in one JSON file and one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """A share that must not be above ``most``. Not ``judged``: a time of a rehearsal on a CPU."""
    verdict = (GOOD if share <= most else BAD) if judged else NOT_JUDGED
    return Line(what, f"{share:.2%}", f"at most {most:.0%}", verdict)


def equal(what: str, measured: object, expected: object) -> Line:
    """A figure or word that must be the expected one."""
    return Line(what, str(measured), str(expected), GOOD if measured == expected else BAD)


def not_run(what: str, why: str) -> Line:
    """A check that can't be made here."""
    return Line(what, "-", why, NOT_RUN)


CUT_OFF = equal("the part itself", "cut off", "every check made")
"""The last line of a part that runs, or that was stopped: it is run again."""


def guarded(what: str, lines: Iterator[Line]) -> Iterator[Line]:
    """These lines; an exception on the way is a bad line, so that the checks after it still run."""
    try:
        yield from lines
    except Exception as error:  # whatever is wrong on a new machine is a finding
        yield equal(what, f"{type(error).__name__}: {error}", "no error")


class Results:
    """The lines of each part, kept in ``doctor.json`` as they come: a later call goes on where one ended."""

    def __init__(self, folder: Path, machine: dict[str, str]) -> None:
        self.file, self.page = folder / "doctor.json", folder / "doctor.md"
        self.machine = machine
        known = json.loads(self.file.read_text()) if self.file.is_file() else {}
        parts = known["parts"] if known.get("machine") == machine else {}
        self.parts = {of: [Line(**each) for each in lines] for of, lines in parts.items()}

    def add(self, part: str, lines: Iterable[Line]) -> Iterator[Line]:
        """Keep and pass on what a part finds, in place of what it found before."""
        self.parts[part] = [CUT_OFF]
        self._write()
        for line in lines:
            self.parts[part].insert(-1, line)
            self._write()
            yield line
        del self.parts[part][-1]
        self._write()

    def _write(self) -> None:
        parts = {of: [asdict(line) for line in found] for of, found in self.parts.items()}
        write_json(self.file, {"machine": self.machine, "parts": parts})
        page = ["# chakra-et doctor", "", ", ".join(map(" ".join, self.machine.items()))]
        for of, rows in parts.items():
            page += ["", f"## {of}", "", "| what | measured | expected | verdict |", "|---|---|---|---|"]
            page += [f"| {' | '.join(each.replace('|', '/') for each in row.values())} |" for row in rows]
        write_text(self.page, "\n".join(page) + "\n")

    @property
    def bad(self) -> int:
        """How many checks failed."""
        return sum(line.verdict == BAD for lines in self.parts.values() for line in lines)
