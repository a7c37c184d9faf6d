"""The names of the files of a run, in one place.

For a run NAME: ``NAME_host.json`` and ``NAME_device.json`` are the traces of rank 0,
``NAME_rank1_host.json`` … those of the other ranks (each also as ``.json.gz``). ``NAME.0.et``, ``NAME.1.et``
… are the Chakra traces under the names that simulators expect, ``NAME.et`` is a copy of rank 0's. The name
of every file that we write is made here; names found inside files are never used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Side = Literal["host", "device"]
SIDES: tuple[Side, Side] = ("host", "device")

_TRACE = re.compile(
    r"(?P<run>.+?)(?:_rank(?P<rank>[0-9]{1,6}))?_(?P<side>host|device)\.json(?:\.gz)?", re.DOTALL
)
_ET = re.compile(r"(?P<run>.+)\.(?P<rank>[0-9]{1,9})\.et", re.DOTALL)
# Shell patterns that find all traces.
TRACE_GLOBS = tuple(f"*_{side}.json{ending}" for side in SIDES for ending in ("", ".gz"))


class TraceName(NamedTuple):
    """The run, rank and side of a host or device trace, from its file name."""

    run: str
    rank: int
    side: Side


def parse_trace(file_name: str) -> TraceName | None:
    """Run, rank and side of ``NAME_rank3_host.json.gz``; None for any other form of name."""
    found = _TRACE.fullmatch(file_name)
    return TraceName(found["run"], int(found["rank"] or 0), found["side"]) if found else None  # type: ignore[arg-type]


def parse_et(path: str | Path) -> tuple[str, int] | None:
    """``folder/NAME.3.et`` as (``folder/NAME``, 3); None for any other name."""
    found = _ET.fullmatch(str(path))
    return (found["run"], int(found["rank"])) if found else None


@dataclass
class RunFiles:
    """The paths of the files of run ``name`` in ``folder``."""

    folder: Path
    name: str

    def _of_rank(self, rank: int, ending: str) -> Path:
        return self.folder / f"{self.name}{f'_rank{rank}' if rank else ''}_{ending}"

    def trace_file(self, rank: int, side: Side) -> Path:
        """The uncompressed trace; pass it to ``gz`` for the name that ``--trace-gzip`` writes."""
        return self._of_rank(rank, f"{side}.json")

    def merged_file(self, rank: int) -> Path:
        """Both traces of a rank as one, written by ``--keep-merged``."""
        return self._of_rank(rank, "merged.json")

    def et_file(self, rank: int) -> Path:
        """The name that simulators expect."""
        return self.folder / f"{self.name}.{rank}.et"

    @property
    def first_et_file(self) -> Path:
        """A copy of rank 0's file under the name that users expect."""
        return self.folder / f"{self.name}.et"

    @property
    def stacks_file(self) -> Path:
        return self.folder / f"{self.name}_stacks.txt"

    @property
    def manifest_file(self) -> Path:
        return self.folder / f"{self.name}_manifest.json"

    @property
    def groups_file(self) -> Path:
        """Process group number → ranks, as ASTRA-sim reads it."""
        return self.folder / f"{self.name}_comm_groups.json"

    @property
    def report_file(self) -> Path:
        return self.folder / f"{self.name}_conversion.json"

    @property
    def page_file(self) -> Path:
        """The HTML page about the run, written by ``chakra-et report``."""
        return self.folder / f"{self.name}_report.html"

    def et_files(self) -> list[tuple[int, Path]]:
        """(rank, path) of the existing ``NAME.N.et``, in order of rank."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            parsed = parse_et(path.name)
            if parsed and parsed[0] == self.name:
                found.append((parsed[1], path))
        return sorted(found)


def gz(path: Path) -> Path:
    """The name of the gzip file."""
    return path.with_name(path.name + ".gz")


def run_at(prefix: str) -> RunFiles:
    """``folder/NAME`` as the files of that run."""
    path = Path(prefix)
    return RunFiles(path.parent, path.name)
