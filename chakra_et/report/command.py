"""``chakra-et report NAME``: one self-contained HTML page about a run.

    chakra-et report outputs/gpt2 -o gpt2.html
    chakra-et report outputs/gpt2 --json

NAME stands for NAME.0.et, NAME.1.et, … (or for traces of that name, which are converted on the way). The
run's files are accepted too, so `outputs/NAME*` works. Exit status: 0; 2 for arguments or files that can't be
used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.report.content import content, with_names
from chakra_et.report.inputs import find_run
from chakra_et.report.page import write_page
from chakra_et.report.run import load


@dataclass
class ReportConfig:
    """The command's arguments."""

    names: tuple[str, ...] = field(
        default=(),
        metadata={"positional": True, "help": "the run: NAME, its files, a folder, or PyTorch traces"},
    )
    output: str | None = field(
        default=None,
        metadata={"short": "-o", "help": "page to write (default: NAME_report.html beside the run)"},
    )
    allow_missing_ranks: bool = cli.allow_missing_ranks()
    xlsx: str | None = field(
        default=None,
        metadata={"help": "also write the tables to this workbook"},
    )
    json: bool = field(default=False, metadata={"help": "print what the page's tables show, as JSON"})

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("give the run to report on: NAME of NAME.0.et, NAME.1.et, …, or its files")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = cli.parse(ReportConfig, argv, description="Write one HTML page about a run.")
    return cli.run(lambda: write_report(config), TraceError)


def write_report(config: ReportConfig) -> None:
    chosen = find_run(config.names, config.allow_missing_ranks)
    run = load(chosen)
    output = Path(config.output) if config.output else chosen.files.page_file
    found, columns = content(run)
    size = write_page(output, "report", f"{run.name}: report", found, columns)
    if config.xlsx:
        from chakra_et.export.spreadsheet import write_workbook  # it needs openpyxl

        write_workbook(run, found["headline"], Path(config.xlsx))
    if config.json:
        print(json.dumps(with_names(found) | {"page": str(output)}))
        return
    print("\n".join(found["headline"]))
    print(f"{output}: {size / 1e6:.1f} MB, open it in a browser")
