"""``chakra-et export NAME --format …``: a run, or a part of it, for other tools.

    perfetto     NAME.pftrace: open in https://ui.perfetto.dev
    chrome       NAME_trace.json.gz: chrome://tracing
    graphml      NAME.graphml: Gephi, yEd, NetworkX
    dot          NAME.dot: Graphviz
    parquet      NAME_nodes.parquet, NAME_edges.parquet
    csv          NAME_nodes.csv, NAME_edges.csv
    tensorboard  scalars per step and rank, and the trace, in the folder -o
    wandb        the report and its tables, in the project -o

The run is given as in ``chakra-et report``. Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.export import chrome, graphs, perfetto, publish, tables
from chakra_et.export.window import Window, choose
from chakra_et.files import atomic_file
from chakra_et.report.inputs import find_run
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


def export(config: ExportConfig) -> None:
    chosen = find_run(config.names, config.allow_missing_ranks)
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
