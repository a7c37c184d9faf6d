"""What comes at the end of a run: its traces are converted to .et files, and a quick run prints a table of
the files written, what they contain, and what to do next.

python -m utils.training.summary --dir outputs --name gpt2_2gpu_quick_trace
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from chakra_et import text
from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from chakra_et.names import SIDES, RunFiles, parse_trace

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class SummaryConfig:
    """Which run to summarise."""

    name: str = field(metadata={"help": "trace name, without _host.json and the like"})
    dir: str = field(default="outputs", metadata={"help": "folder of the traces"})


def convert_traces(folder: str, name: str) -> bool:
    """Run ``chakra-et convert`` on the traces NAME in ``folder``, in a process of its own.

    Returns whether all were converted. A failure is logged with the command to repeat: the traces are kept.
    """
    place = Path(folder).resolve()
    again = f"chakra-et convert {shlex.quote(folder)} --name {shlex.quote(name)}"
    try:
        ranks = json.loads((place / f"{name}_manifest.json").read_text(encoding="utf-8"))["ranks"]
    except OSError:
        ranks = []
    if not any(rank["files"] for rank in ranks):
        return False  # the tracer has logged why there are none
    elsewhere = []
    for rank in ranks:
        files = rank["files"]
        if not isinstance(files, dict) or not all(
            (place / each["name"]).is_file() for each in files.values()
        ):
            elsewhere.append(str(rank["rank"]))
    if elsewhere:
        log.warning(
            "not converted: the traces of rank %s are not in %s here; copy them to it, then run: %s",
            *(", ".join(elsewhere), folder, again),
        )
        return False
    command = [sys.executable, "-m", "chakra_et", "convert", str(place), "--name", name]
    if subprocess.run(command, cwd=ROOT).returncode:
        log.error("the traces are kept, but not all could be converted; to repeat it: %s", again)
        return False
    return True


def main() -> int:
    """Print the table; returns the exit status."""
    config = parse(SummaryConfig, description="Summarise the files of a run.")
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

    Raises TraceError for a damaged .et file; OSError, ValueError or KeyError for an unusable manifest;
    FileNotFoundError if the run has no .et file.
    """
    run = RunFiles(folder, name)
    if not run.et_files():
        raise FileNotFoundError("no .et file of this name")
    yield f"in {_shown(folder)}:"
    sizes = [(path.name, text.size(path.stat().st_size), what) for path, what in files_of(run)]
    yield from text.table([("file", "size", "contents"), *sizes], indent="  ")
    yield ""

    steps = {}  # mean measured time of the traced steps, by rank
    if run.manifest_file.exists():
        for record in json.loads(run.manifest_file.read_text(encoding="utf-8"))["ranks"]:
            if times := list(record["step_times_us"].values()):
                steps[record["rank"]] = f"{sum(times) / len(times) / 1e3:.1f} ms"
    header = ("rank", "nodes", "compute", "memory", "collectives", "send/recv", "edges", "traced step")
    counts = [(str(rank), *node_counts(path), steps.get(rank, "-")) for rank, path in run.et_files()]
    yield from text.table([header, *counts], indent="  ")
    yield ""

    prefix, python = shlex.quote(_shown(folder / name)), shlex.quote(_shown(Path(sys.executable)))
    yield f"next:  {python} -m chakra_et info {prefix}.0.et  (contents of one trace)"
    yield f"       {python} -m chakra_et replay {prefix}  (simulated against measured step time)"
    if len(counts) > 1:  # ASTRA-sim takes two ranks or more
        groups = shlex.quote(_shown(run.groups_file))
        yield f"       ASTRA-sim: workload {prefix}, communicator groups {groups}"


def files_of(run: RunFiles) -> list[tuple[Path, str]]:
    """Files of the run with their contents, in table order."""
    named = [(parse_trace(path.name), path) for path in run.folder.iterdir()]
    traces = sorted(
        (SIDES.index(trace.side), trace.rank, path)
        for trace, path in named
        if trace and trace.run == run.name
    )
    found = [
        *((path, f"{SIDES[side]} trace of rank {rank}") for side, rank, path in traces),
        (run.stacks_file, "top operators of rank 0 by stack"),
        (run.manifest_file, "versions, configuration, step times, checksums"),
        (run.merged_file(0), "host and device trace of rank 0, linked"),
        (run.groups_file, "process groups, for simulators"),
        *((path, f"Chakra trace of rank {rank}") for rank, path in run.et_files()),
        (run.first_et_file, "rank 0's again"),
        (run.page_file, "timeline, breakdown and communication: open it in a browser"),
    ]
    return [each for each in found if each[0].exists()]


def node_counts(path: Path) -> tuple[str, ...]:
    """Nodes, compute, memory, collective and send/receive nodes, and edges of one .et file, as text."""
    trace = et_file.read(path)
    kinds = (
        (NodeType.COMP,),
        (NodeType.MEM_LOAD, NodeType.MEM_STORE),
        (NodeType.COMM_COLL,),
        (NodeType.COMM_SEND, NodeType.COMM_RECV),
    )
    of_kinds = [int(np.isin(trace.types, kind).sum()) for kind in kinds]
    edges = len(trace.data_deps.values) + len(trace.ctrl_deps.values)
    return tuple(f"{count:,}" for count in (len(trace), *of_kinds, edges))


def _shown(path: Path) -> str:
    """The path as a user would type it: relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


if __name__ == "__main__":
    sys.exit(main())
