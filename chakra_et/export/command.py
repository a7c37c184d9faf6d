"""``chakra-et export NAME --format …``: a run for other tools.

    perfetto     NAME.pftrace: open in https://ui.perfetto.dev
    chrome       NAME_trace.json.gz: chrome://tracing
    parquet      NAME_nodes.parquet, NAME_edges.parquet, and tables of the whole run: steps, operators, …
    csv          the same as CSV
    tensorboard  scalars per step and rank, and the trace, in the folder -o

A run goes to Perfetto and chrome://tracing as it was recorded, with every level of its call stacks, as long
as its device traces are there, else as the nodes of its .et files. NAME is as in ``chakra-et report``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from chakra_et import cli
from chakra_et.convert.inputs import device_traces, files_of, find_run
from chakra_et.errors import TraceError
from chakra_et.et.sets import RankSet
from chakra_et.export import events, tables
from chakra_et.files import atomic_file, move, path_of, scratch_folder
from chakra_et.redact import redacted_json
from chakra_et.report.run import ReportRun, load
from chakra_et.text import plural, size
from chakra_et.traces.records import open_trace

Format = Literal["perfetto", "chrome", "parquet", "csv", "tensorboard"]
# What follows the NAME in the name of the file or folder.
DEFAULTS = {"perfetto": ".pftrace", "chrome": "_trace.json.gz", "tensorboard": "_tensorboard"}


@dataclass
class ExportConfig:
    names: tuple[str, ...] = cli.run_names()
    format: Format = cli.option("what to write", "perfetto")
    output: str | None = cli.option(
        "file to write; NAME for parquet and csv, a folder for tensorboard", None, short="-o"
    )
    allow_missing_ranks: bool = cli.allow_missing_ranks()


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ExportConfig, argv, description="Write a run in a format of other tools.")
    chosen = find_run(config.names, config.allow_missing_ranks)
    files, form = files_of(chosen), config.format
    output = config.output or f"{files.folder / files.name}{DEFAULTS.get(form, '')}"
    if form in tables.WRITERS:
        run = load(chosen)
        paths = {path_of(f"{output}_{name}.{form}"): table for name, table in tables.TABLES.items()}
        with scratch_folder(next(iter(paths))) as scratch:
            for path, table in paths.items():
                _write(scratch / path.name, partial(tables.WRITERS[form], table(run)), path)
            for path in paths:  # old and new tables are never beside each other
                path.unlink(missing_ok=True)
            for path in paths:
                move(scratch / path.name, path)
        print(f"{len(run.graph):,} nodes, {len(run.graph.source):,} dependencies")
        return 0
    traces, notes = device_traces(chosen)
    for note in notes:
        print(f"note: {note}: the nodes of the .et files are written", file=sys.stderr)
    if form == "tensorboard":
        to_tensorboard(load(chosen), Path(output), traces)
        print(f"{output}: look at it by `tensorboard --logdir {output}`")
        return 0
    whole = bool(traces) and not notes
    about = chosen.notes if isinstance(chosen, RankSet) else []
    for note in about if whole else ():
        print(f"warning: {note}", file=sys.stderr)
    source = partial(events.recorded_events, traces) if whole else partial(events.node_events, load(chosen))
    write = events.Slices().write if form == "perfetto" else events.write_chrome
    count = _write(Path(output), partial(write, partial(events.labelled, source, "; ".join(about))))
    recorded = f"of {plural(len(traces), 'rank')}, as they were recorded"
    print(f"{count:,} slices {recorded if whole else 'that are nodes of .et files'}")
    return 0


def _write(path: Path, write: Callable[[IO[bytes]], int | None], named: Path | None = None) -> int | None:
    """Write a file atomically, compressed where its name ends in .gz; returns what ``write`` does. ``named``:
    what it will be called."""
    packing = events.packed if path.suffix == ".gz" else nullcontext
    with atomic_file(path) as file, packing(file) as into:
        found = write(into)
    print(f"{named or path}: {size(path.stat().st_size)}")
    return found


def scalars(run: ReportRun) -> Iterator[tuple[int, int, str, float]]:
    """(rank, step, name, ns): the times of every step, see ``tables.steps``; a trace without steps is step
    0."""
    for row in tables.steps(run).rows():
        step = int(row["name"]) if row["name"].isdigit() else 0
        row["lasts_ns"] = row.pop("end_ns") - row.pop("start_ns")
        for name in row:
            if name.endswith("_ns"):
                yield row["rank"], step, f"step/{name.removesuffix('_ns')}", row[name]


def to_tensorboard(run: ReportRun, folder: Path, recorded: Mapping[int, Path]) -> None:
    """Write scalars to FOLDER/NAME/rankN, and the trace of each rank to FOLDER/NAME/rankN.pt.trace.json.gz,
    where TensorBoard's plugin looks for it.

    ``recorded``: rank → its device trace; of other ranks, the nodes are written. Raises ``TraceError`` where
    torch or tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TraceError("tensorboard needs torch and tensorboard: pip install torch tensorboard") from None
    found = list(scalars(run))
    place = folder / run.name
    for rank in run.ranks:
        with SummaryWriter(str(place / f"rank{rank}")) as writer:
            for of_rank, step, name, ns in found:
                if of_rank == rank:
                    writer.add_scalar(f"{name}_ms", ns / 1e6, step)
            writer.add_text("notes", "\n\n".join(tables.notes(run)["note"]))
        with atomic_file(place / f"rank{rank}.pt.trace.json.gz") as file, events.packed(file) as written:
            if rank in recorded:
                with open_trace(recorded[rank]) as trace:
                    for lines in iter(partial(trace.readlines, 1 << 20), []):
                        written.write(redacted_json(b"".join(lines)))
            else:
                events.write_chrome(partial(events.node_events, run, only=rank), written)
