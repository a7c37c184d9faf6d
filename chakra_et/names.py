"""The names of the files of a run, in one place.

    run = run_at("outputs/gpt2_2gpu_quick_trace")
    print(run.et_file(1), run.report_file, [rank for rank, _ in run.et_files()])

For a run NAME: ``NAME_host.json`` and ``NAME_device.json`` are the traces of rank 0,
``NAME_rank1_host.json`` … those of the other ranks (each also as ``.json.gz``). ``NAME.0.et``, ``NAME.1.et``
… are the Chakra traces, named as simulators expect; ``NAME.et`` is rank 0's file again (a hard link to it
where the file system has them). All output names are made here; names found inside files are never used.
``NAME_kineto.json``, the name in older captures, is read as a device trace, and ``rank3_device.json`` is rank
3 of a run without a name of its own, which becomes ``rank``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from chakra_et.files import path_of

Side = Literal["host", "device"]
SIDES: tuple[Side, Side] = ("host", "device")

_TRACE = re.compile(
    r"(?:rank[_-]?(?P<only>[0-9]{1,6})|(?P<run>.+?)(?:_rank(?P<rank>[0-9]{1,6}))?)"
    r"_(?P<side>host|device|kineto)\.json(?:\.gz)?",
    re.DOTALL,
)
SKELETON = ".skeleton.parquet"
_ET = re.compile(r"(?P<run>.+)\.(?P<rank>[0-9]{1,9})(?P<ending>\.et|\.skeleton\.parquet)", re.DOTALL)
# Glob patterns for all traces.
TRACE_GLOBS = tuple(f"*_{side}.json{ending}" for side in SIDES for ending in ("", ".gz"))


class TraceName(NamedTuple):
    """The run, rank and side of a host or device trace, from its file name."""

    run: str
    rank: int
    side: Side


def parse_trace(file_name: str) -> TraceName | None:
    """Run, rank and side of a name such as ``NAME_rank3_host.json.gz``; None for other names."""
    found = _TRACE.fullmatch(file_name)
    if not found:
        return None
    rank = int(found["only"] or found["rank"] or 0)
    return TraceName(found["run"] or "rank", rank, "host" if found["side"] == "host" else "device")


def renamed(file_name: str, rank: int) -> str:
    """The name of the same side's trace of another rank; "" if the name is not of our scheme."""
    named = parse_trace(file_name)
    if named is None:
        return ""
    ending = file_name[file_name.rindex(".json") :]
    return RunFiles(Path(), named.run).trace_file(rank, named.side).name.removesuffix(".json") + ending


def parse_et(path: str | Path) -> tuple[str, int] | None:
    """``folder/NAME.3.et``, or that rank's skeleton, as (``folder/NAME``, 3); None for any other name."""
    found = _ET.fullmatch(str(path))
    return (found["run"], int(found["rank"])) if found else None


@dataclass
class RunFiles:
    """The paths of the files of run ``name`` in ``folder``."""

    folder: Path
    name: str

    def trace_file(self, rank: int, side: Side) -> Path:
        """The uncompressed trace; ``gz`` gives the name of the compressed one."""
        return self.folder / f"{self.name}{f'_rank{rank}' if rank else ''}_{side}.json"

    def et_file(self, rank: int) -> Path:
        """The .et file of a rank, named as simulators expect."""
        return self.folder / f"{self.name}.{rank}.et"

    @property
    def first_et_file(self) -> Path:
        """Rank 0's .et file again, under the name of the run."""
        return self.folder / f"{self.name}.et"

    @property
    def manifest_file(self) -> Path:
        return self.folder / f"{self.name}_manifest.json"

    @property
    def groups_file(self) -> Path:
        """The comm-group file: group id → ranks, as ASTRA-sim reads it."""
        return self.folder / f"{self.name}_comm_groups.json"

    @property
    def report_file(self) -> Path:
        return self.folder / f"{self.name}_conversion.json"

    @property
    def page_file(self) -> Path:
        """The HTML page about the run, written by ``chakra-et report``."""
        return self.folder / f"{self.name}_report.html"

    def et_files(self, ending: str = ".et") -> list[tuple[int, Path]]:
        """(rank, path) of the existing ``NAME.N.et``, sorted by rank; or of the files with another ending."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            parsed = parse_et(path.name)
            if parsed and parsed[0] == self.name and path.name.endswith(ending):
                found.append((parsed[1], path))
        return sorted(found)


def gz(path: Path) -> Path:
    """The name of the gzip file of ``path``."""
    return path.with_name(path.name + ".gz")


def run_at(prefix: str) -> RunFiles:
    """The files of the run ``folder/NAME``."""
    path = path_of(prefix)
    return RunFiles(path.parent, path.name)
