"""The table at the end of a quick run: what was written, what is in it, where to look next.

python -m utils.summary --dir outputs --name gpt2_2gpu_quick_trace
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chakra_et import et_file
from chakra_et.errors import TraceError
from chakra_et.execution_trace import NodeType
from utils.cli import parse

# What follows the trace's name → what the file is; in the order of the table.
KINDS = {
    r"(?:_rank(?P<rank>\d+))?_host\.json(?:\.gz)?": "host trace of rank {rank}",
    r"(?:_rank(?P<rank>\d+))?_device\.json(?:\.gz)?": "device trace of rank {rank}",
    r"_stacks\.txt": "top operators of rank 0, by stack",
    r"_manifest\.json": "versions, configuration, step times, checksums",
    r"_merged\.json": "host and device trace of rank 0, linked",
    r"_comm_groups\.json": "process groups, for simulators",
    r"\.(?P<rank>\d+)\.et": "Chakra trace of rank {rank}",
    r"\.et": "the same as rank 0's",
}


@dataclass(frozen=True)
class SummaryConfig:
    """Which run to show."""

    name: str = field(metadata={"help": "trace name, without _host.json and the like"})
    dir: str = field(default="outputs", metadata={"help": "folder of the traces"})


def main() -> int:
    config = parse(SummaryConfig, description=__doc__.splitlines()[0])
    folder = Path(config.dir)
    try:
        lines = list(summary(folder, config.name))
    except (TraceError, OSError, ValueError, KeyError) as error:
        print(f"error: {folder / config.name}: cannot be summarised: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def summary(folder: Path, name: str) -> Iterator[str]:
    """The lines of the table.

    Raises TraceError for a damaged .et file, OSError, ValueError or KeyError for a manifest that cannot be
    used, FileNotFoundError where the run left no .et file.
    """
    traces = {}
    rows = [("file", "size", "what it is")]
    for path, rank, what in files_of(folder, name):
        rows.append((path.name, size_text(path.stat().st_size), what))
        if rank is not None and path.suffix == ".et":
            traces[rank] = path
    if not traces:
        raise FileNotFoundError("no .et file of this name")
    yield f"in {_shown(folder)}:"
    yield from table(rows)
    yield ""

    steps = step_times(folder / f"{name}_manifest.json")
    rows = [("rank", "nodes", "compute", "memory", "collectives", "send/recv", "edges", "traced step")]
    for rank, path in sorted(traces.items()):
        rows.append((str(rank), *node_counts(path), steps.get(rank, "-")))
    yield from table(rows)
    yield ""

    prefix, python = shlex.quote(_shown(folder / name)), shlex.quote(_shown(Path(sys.executable)))
    yield f"next:  {python} -m chakra_et info {prefix}.0.et  (what a trace holds)"
    yield f"       {python} -m chakra_et replay {prefix}  (simulated against measured step time)"
    if len(traces) > 1:  # ASTRA-sim takes two ranks or more
        yield f"       ASTRA-sim: workload {prefix}, communicator groups {prefix}_comm_groups.json"


def files_of(folder: Path, name: str) -> list[tuple[Path, int | None, str]]:
    """Files of the run with their rank (None: the file is not one rank's) and kind, in table order."""
    found = []
    for path in folder.iterdir():
        if not path.name.startswith(name):
            continue
        for order, (pattern, what) in enumerate(KINDS.items()):
            match = re.fullmatch(pattern, path.name[len(name) :])
            if match:
                of_rank = "{rank}" in what
                rank = int(match["rank"] or 0) if of_rank else None
                found.append((order, rank or 0, path, rank, what.format(rank=rank)))
    return [(path, rank, what) for _, _, path, rank, what in sorted(found)]


def node_counts(path: Path) -> tuple[str, ...]:
    """Nodes, compute, memory, collective and send/receive nodes, and edges of one .et file, as text."""
    trace = et_file.read(path)
    of_type = np.bincount(trace.types, minlength=max(NodeType) + 1)
    counts = (
        len(trace),
        of_type[NodeType.COMP],
        of_type[NodeType.MEM_LOAD] + of_type[NodeType.MEM_STORE],
        of_type[NodeType.COMM_COLL],
        of_type[NodeType.COMM_SEND] + of_type[NodeType.COMM_RECV],
        len(trace.data_deps.values) + len(trace.ctrl_deps.values),
    )
    return tuple(f"{count:,}" for count in counts)


def step_times(manifest: Path) -> dict[int, str]:
    """Mean measured time of the traced steps by rank, as text; empty without a manifest."""
    if not manifest.exists():
        return {}
    ranks = json.loads(manifest.read_text(encoding="utf-8"))["ranks"]
    times = {record["rank"]: list(record["step_times_us"].values()) for record in ranks}
    return {rank: f"{sum(steps) / len(steps) / 1e3:.1f} ms" for rank, steps in times.items() if steps}


def size_text(size: float) -> str:
    """Bytes as a figure of three digits, in decimal units."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Rows as aligned lines; columns that hold figures are right-aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    figures = [all(cell[:1].isdigit() or cell == "-" for cell in column[1:]) for column in columns]
    for row in rows:
        cells = zip(row, widths, figures, strict=True)
        yield "  " + "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip()


def _shown(path: Path) -> str:
    """The path as one types it: relative where it is below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    sys.exit(main())
