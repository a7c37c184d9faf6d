"""Find traces with arbitrary names by their content.

PyTorch and its frameworks use many names (``worker0.1700.pt.trace.json.gz``, ``rank3_trace.json``,
``rank-0_et.json``). A JSON object with ``traceEvents`` is a Kineto device trace, one with ``schema`` and
``nodes`` is a host trace. Rank and world size come from Kineto's distributedInfo, or else from the file name.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from chakra_et.names import Side
from chakra_et.traces.records import open_trace

HEAD_BYTES = 1 << 18
_DEVICE = re.compile(rb'"(traceEvents|deviceProperties|traceName|baseTimeNanoseconds)"\s*:')
_HOST = re.compile(rb'"schema"\s*:\s*"\d')
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]*?"rank"\s*:\s*(\d{1,6})')
_WORLD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]*?"world_size"\s*:\s*(\d{1,6})')
_RANK_IN_NAME = re.compile(r"(?:^|(?<=[._-]))(?:rank|worker|r)[._-]?(\d{1,6})(?=[._-]|$)", re.IGNORECASE)
_ENDINGS = (".gz", ".json", ".trace", ".pt", ".chrome", ".kineto", ".device", ".host")
# Other files that we write to the same folder.
_OURS = ("_manifest.json", "_conversion.json", "_comm_groups.json", "_merged.json")


@dataclass(frozen=True)
class Found:
    """A trace. ``rank`` is -1 and ``world`` 0 if neither the file nor its name has them."""

    path: Path
    side: Side
    rank: int
    world: int

    @property
    def stem(self) -> str:
        """The name without endings and rank, ideally the same for all ranks of a run."""
        name = self.path.name
        while (shorter := next((name[: -len(end)] for end in _ENDINGS if name.endswith(end)), "")) or False:
            name = shorter
        without = _RANK_IN_NAME.sub("", name)
        return re.sub(r"([._-])[._-]+", r"\1", without).strip("._- ") or name


def look_at(path: Path) -> Found | None:
    """Identify ``path`` by its first bytes; None if it is not a trace. Never raises for bad content."""
    if not path.is_file() or path.name.endswith(_OURS):
        return None
    try:
        with open_trace(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile):
        return None
    if _DEVICE.search(head):
        side: Side = "device"
    elif _HOST.search(head) and b'"nodes"' in head:
        side = "host"
    else:
        return None
    rank, world = _RANK.search(head), _WORLD.search(head)
    named = _RANK_IN_NAME.search(path.name)
    number = int(rank[1]) if rank else int(named[1]) if named else -1
    return Found(path, side, number, int(world[1]) if world else 0)


def look_for(paths: Iterable[Path]) -> list[Found]:
    """The traces among ``paths``, in their order."""
    return [found for path in paths if (found := look_at(path))]


def runs_of(traces: list[Found]) -> dict[str, list[Found]]:
    """The device traces by run: name → traces of distinct ranks.

    Traces belong together if their names differ only in the rank, or if they have the same world size above 1
    and distinct ranks. The names of runs are made unique.
    """
    devices = [found for found in traces if found.side == "device"]
    by_stem: dict[tuple[str, int], list[Found]] = {}
    for found in devices:
        by_stem.setdefault((found.stem, found.world), []).append(found)
    parts: list[list[Found]] = []
    of_world: dict[int, list[list[Found]]] = {}
    for (_, world), part in by_stem.items():
        pieces = [part] if _distinct(part) else [[found] for found in part]
        for piece in pieces:
            (of_world.setdefault(world, []) if world > 1 else parts).append(piece)
    for pieces in of_world.values():
        together = [found for piece in pieces for found in piece]
        parts += [together] if _distinct(together) else pieces
    runs: dict[str, list[Found]] = {}
    for part in parts:
        name = base = _run_name(part)
        number = 2
        while name in runs:
            name, number = f"{base}_{number}", number + 1
        runs[name] = part
    return runs


def _distinct(part: list[Found]) -> bool:
    ranks = [found.rank for found in part]
    return len(part) == 1 or (min(ranks) >= 0 and len(set(ranks)) == len(ranks))


def _run_name(part: list[Found]) -> str:
    stems = {found.stem for found in part}
    if len(stems) == 1:
        return stems.pop()
    shared = os.path.commonprefix([found.path.name for found in part]).strip("._- ")
    return shared if len(shared) > 2 else part[0].path.resolve().parent.name or "run"
