"""``chakra-et export NAME --format …``: a run for other tools.

    perfetto     NAME.pftrace: open in https://ui.perfetto.dev
    chrome       NAME_trace.json.gz: chrome://tracing
    parquet      NAME_nodes.parquet, NAME_edges.parquet, and tables of the whole run: steps, operators, …
    csv          the same as CSV
    tensorboard  scalars per step and rank, and the trace, in the folder -o

A whole run goes to Perfetto and chrome://tracing as it was recorded, with every level of its call stacks, as
long as its device traces are there; --nodes writes the nodes of the .et files instead. The run is given as in
``chakra-et report``. Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Literal

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.export import events, tables
from chakra_et.files import atomic_file
from chakra_et.report.inputs import RunInput, device_traces, find_run
from chakra_et.report.run import PHASES, ReportRun, load
from chakra_et.report.times import find_steps
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.traces.records import open_trace

Format = Literal["perfetto", "chrome", "parquet", "csv", "tensorboard"]
WRITERS = {"parquet": tables.write_parquet, "csv": tables.write_csv}
# Those that keep a run as it was recorded.
RECORDED = {
    "perfetto": (".pftrace", events.write_perfetto),
    "chrome": ("_trace.json.gz", events.write_chrome),
}


@dataclass
class ExportConfig:
    """The command's arguments."""

    names: tuple[str, ...] = field(
        metadata={"positional": True, "help": "the run: NAME, its files, a folder, or PyTorch traces"},
    )
    format: Format = field(default="perfetto", metadata={"help": "what to write"})
    output: str | None = field(
        default=None,
        metadata={
            "short": "-o",
            "help": "file to write; NAME for parquet and csv, a folder for tensorboard",
        },
    )
    nodes: bool = field(
        default=False, metadata={"help": "nodes of the .et files in place of recorded slices"}
    )
    allow_missing_ranks: bool = cli.allow_missing_ranks()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = cli.parse(ExportConfig, argv, description="Write a run in a format of other tools.")
    return cli.run(lambda: export(config), TraceError)


def _write(path: Path, write: Callable[[IO[bytes]], int | None]) -> int | None:
    """Write a file atomically, compressed where its name ends in .gz; returns what ``write`` does."""
    with atomic_file(path) as file:
        into: AbstractContextManager[IO[bytes]] = nullcontext(file)
        if path.suffix == ".gz":
            into = events.packed(file)
        with into as packed:
            found = write(packed)
        size = file.tell()
    print(f"{path}: {size / 1e6:.1f} MB")
    return found


def _recorded_traces(chosen: RunInput) -> dict[int, Path]:
    """The device traces of all ranks; {} where some aren't there any more."""
    traces, notes = device_traces(chosen)
    for note in notes:
        print(f"note: {note}: the nodes of the .et files are written", file=sys.stderr)
    return {} if notes else traces


def export(config: ExportConfig) -> None:
    chosen = find_run(config.names, config.allow_missing_ranks)
    form, beside = config.format, chosen.files.folder / chosen.name
    if form in RECORDED:
        ending, write_events = RECORDED[form]
        path = Path(config.output or f"{beside}{ending}")
        traces = {} if config.nodes else _recorded_traces(chosen)
        source: events.Source = partial(events.recorded_events, traces)
        if not traces:
            source = events.NodeEvents(load(chosen)).write_all
        count = _write(path, partial(write_events, source))
        of = f"of {len(traces)} ranks, as they were recorded" if traces else "that are nodes of .et files"
        print(f"{count:,} slices {of}")
        return
    run = load(chosen)
    if form == "tensorboard":
        folder = config.output or f"{beside}_tensorboard"
        to_tensorboard(run, Path(folder), device_traces(chosen)[0])
        print(f"{folder}: look at it by `tensorboard --logdir {folder}`")
    else:
        for name, table in tables.TABLES.items():
            path = Path(f"{config.output or beside}_{name}.{form}")
            _write(path, partial(WRITERS[form], table(run)))
        print(f"{len(run.graph):,} nodes, {len(run.graph.source):,} dependencies")


def scalars(run: ReportRun) -> Iterator[tuple[int, int, str, float]]:
    """(rank, step, name, ns): the parts of every step; a trace without steps is step 0."""
    for step in find_steps(run):
        found: list[tuple[str, float]] = [(f"step/{run.base}", step.lasts_ns)]
        if step.replayed_ns is not None:
            found.append(("step/replayed", step.replayed_ns))
        found += [
            (f"time/{name.replace(' ', '_')}", ns) for name, ns in zip(ACTIVITIES, step.parts_ns, strict=True)
        ]
        found.append(("time/hidden_communication", step.hidden_ns))
        found += [(f"phase/{name}", ns) for name, ns in zip(PHASES, step.phases_ns, strict=True)]
        for name, ns in found:
            yield step.rank, int(step.name) if step.name.isdigit() else 0, name, ns


def to_tensorboard(run: ReportRun, folder: Path, recorded: Mapping[int, Path]) -> None:
    """Write scalars to FOLDER/NAME/rankN, and the trace of each rank to FOLDER/NAME/rankN.pt.trace.json.gz,
    where TensorBoard's plugin looks for it.

    ``recorded``: rank → its device trace, which is taken as it is; ranks without one get their nodes.
    Raises ``TraceError`` where torch or tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TraceError("tensorboard needs torch and tensorboard: pip install torch tensorboard") from None
    found = list(scalars(run))
    place = folder / run.name
    nodes = events.NodeEvents(run)
    for rank in run.ranks:
        with SummaryWriter(str(place / f"rank{rank}")) as writer:
            for of_rank, step, name, ns in found:
                if of_rank == rank:
                    writer.add_scalar(f"{name}_ms", ns / 1e6, step)
        with atomic_file(place / f"rank{rank}.pt.trace.json.gz") as file:
            if rank in recorded:
                with open_trace(recorded[rank]) as trace, events.packed(file) as written:
                    shutil.copyfileobj(trace, written)
            else:
                nodes.write_kineto(rank, file)
