"""``chakra-et export NAME --format …``: a run, or a part of it, for other tools.

    perfetto     NAME.pftrace: open in https://ui.perfetto.dev
    chrome       NAME_trace.json.gz: chrome://tracing
    graphml      NAME.graphml: Gephi, yEd, NetworkX
    dot          NAME.dot: Graphviz
    parquet      NAME_nodes.parquet, NAME_edges.parquet
    csv          NAME_nodes.csv, NAME_edges.csv
    tensorboard  scalars per step and rank, and the trace, in the folder -o
    wandb        the report and its tables, in the project -o

A whole run goes to Perfetto and chrome://tracing as it was recorded, with every level of its call stacks, as
long as its device traces are there; --nodes, --step, --ranks and --around write the nodes of the .et files
instead. The run is given as in ``chakra-et report``. Exit status: 0; 2 for arguments or files that
can't be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.export import chrome, graphs, perfetto, publish, recorded, tables
from chakra_et.export.window import Window, choose
from chakra_et.files import atomic_file
from chakra_et.report.inputs import RunInput, find_run
from chakra_et.report.run import load

Format = Literal["perfetto", "chrome", "graphml", "dot", "parquet", "csv", "tensorboard", "wandb"]
Write = Callable[[Window, IO[bytes]], None]
# The files of a format, by the ends of their names.
FILES: dict[str, dict[str, Write]] = {
    "perfetto": {".pftrace": perfetto.write},
    "chrome": {"_trace.json.gz": chrome.write},
    "graphml": {".graphml": graphs.write_graphml},
    "dot": {".dot": graphs.write_dot},
    "parquet": {
        "_nodes.parquet": lambda window, file: tables.write_parquet(tables.nodes(window), file),
        "_edges.parquet": lambda window, file: tables.write_parquet(tables.edges(window), file),
    },
    "csv": {
        "_nodes.csv": lambda window, file: tables.write_csv(tables.nodes(window), file),
        "_edges.csv": lambda window, file: tables.write_csv(tables.edges(window), file),
    },
}


RECORDED = {
    "perfetto": (".pftrace", recorded.write_perfetto),
    "chrome": ("_trace.json.gz", recorded.write_chrome),
}
"""Formats that keep a run as it was recorded."""


@dataclass
class ExportConfig:
    """The command's arguments."""

    names: tuple[str, ...] = field(
        default=(),
        metadata={"positional": True, "help": "the run: NAME, its files, a folder, or PyTorch traces"},
    )
    format: Format = field(default="perfetto", metadata={"help": "what to write"})
    output: str | None = field(
        default=None,
        metadata={
            "short": "-o",
            "help": "file to write; NAME for parquet and csv, a folder for tensorboard, a project for wandb",
        },
    )
    nodes: bool = field(
        default=False, metadata={"help": "nodes of the .et files in place of recorded slices"}
    )
    step: str = field(default="", metadata={"help": "only nodes that start in this step"})
    ranks: str = field(default="", metadata={"help": "only these ranks, such as 0-7,12"})
    around: str = field(
        default="", metadata={"help": "only this node, RANK:ID, and those up to --hops dependencies away"}
    )
    hops: int = field(default=2, metadata={"help": "how far --around reaches"})
    allow_missing_ranks: bool = cli.allow_missing_ranks()

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("give the run to export: NAME of NAME.0.et, NAME.1.et, …, or its files")
        if self.hops < 0:
            raise ValueError(f"--hops must be 0 or more, not {self.hops}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = cli.parse(ExportConfig, argv, description="Write a run in a format of other tools.")
    return cli.run(lambda: export(config), TraceError)


def _recorded(config: ExportConfig, chosen: RunInput) -> bool:
    """Write the run as it was recorded; False where the traces of some rank aren't there any more."""
    notes: list[str] = []
    if chosen.traces is not None:
        traces = {rank: pair.device for rank, pair in chosen.traces.pairs.items()}
    else:
        traces, notes = recorded.find_traces(chosen.files)
    for note in notes:
        print(f"note: {note}: the nodes of the .et files are written", file=sys.stderr)
    if notes or not traces:
        return False
    ending, write = RECORDED[config.format]
    path = Path(config.output or f"{chosen.files.folder / chosen.name}{ending}")
    with atomic_file(path) as file:
        if path.suffix == ".gz":
            with chrome.packed(file) as packed:
                count = write(traces, packed)
        else:
            count = write(traces, file)
        size = file.tell()
    print(f"{path}: {size / 1e6:.1f} MB")
    print(f"{count:,} slices of {len(traces)} ranks, as they were recorded")
    return True


def export(config: ExportConfig) -> None:
    chosen = find_run(config.names, config.allow_missing_ranks)
    whole = not (config.nodes or config.step or config.ranks or config.around)
    if config.format in RECORDED and whole and _recorded(config, chosen):
        return
    run = load(chosen)
    window = choose(run, config.step, config.ranks, config.around, config.hops)
    beside = chosen.files.folder / chosen.name
    if config.format == "tensorboard":
        folder = config.output or f"{beside}_tensorboard"
        whole = not config.step and not config.around
        recorded = publish.recorded_traces(chosen, run.ranks) if whole else {}
        publish.to_tensorboard(window, Path(folder), recorded)
        print(f"{folder}: look at it by `tensorboard --logdir {folder}`")
        return
    if config.format == "wandb":
        publish.to_wandb(run, config.output or "chakra-et")
        return
    files = FILES[config.format]
    for ending, write in files.items():
        name = config.output or str(beside)
        path = Path(config.output if config.output and len(files) == 1 else f"{name}{ending}")
        with atomic_file(path) as file:
            if config.format == "chrome" and path.suffix == ".gz":
                with chrome.packed(file) as packed:
                    write(window, packed)
            else:
                write(window, file)
            size = file.tell()
        print(f"{path}: {size / 1e6:.1f} MB")
    print(f"{len(window):,} nodes, {len(window.source):,} dependencies")
