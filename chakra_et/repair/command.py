"""``chakra-et repair``: repair damaged trace files and list every change.

chakra-et repair outputs/a_host.json --dry-run
chakra-et repair --dir runs --keep all
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from chakra_et.cli import parse
from chakra_et.errors import TraceError
from chakra_et.names import TRACE_GLOBS
from chakra_et.repair.file import repair_file
from chakra_et.text import printable, table
from chakra_et.traces.records import DEFAULT_LIMITS, Limits

LONG_BYTES = 100 << 20
RARE = "for damaged or hostile files"


def _limit(name: str, text: str) -> int:
    default: int = getattr(DEFAULT_LIMITS, name)
    return field(default=default, metadata={"help": text, "group": RARE})


@dataclass(frozen=True)
class RepairConfig:
    """Which files to repair, what to keep and where to stop."""

    files: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "trace files; default: all traces under --dir"}
    )
    dir: str = field(default="outputs", metadata={"help": "search this folder and its subfolders for traces"})
    keep: Literal["last", "first", "largest", "all"] = field(
        default="last",
        metadata={
            "help": "which complete object of a file with several to keep; all: write the others beside"
        },
    )
    dry_run: bool = field(default=False, metadata={"help": "list the repairs without writing anything"})
    show: int = field(default=20, metadata={"help": "list at most this many repairs per file; 0: all"})
    min_records: int = _limit("min_records", "refuse a file with fewer intact nodes or events")
    allow_mixed: bool = field(
        default=False,
        metadata={"help": "keep records of several processes that cannot be separated", "group": RARE},
    )
    max_depth: int = _limit("max_depth", "leave out a node or event nested deeper")
    max_record_bytes: int = _limit("max_record_bytes", "leave out a larger node or event")
    max_string_bytes: int = _limit("max_string_bytes", "leave out a node or event with a longer string")
    max_bytes: int = _limit("max_bytes", "refuse a larger trace (uncompressed size)")
    max_ratio: int = _limit("max_ratio", "refuse a gzip file that expands by more than this factor")

    def __post_init__(self) -> None:
        if self.show < 0:
            raise ValueError(f"--show {self.show}: must be 0 or more")
        self.limits()

    def limits(self) -> Limits:
        names = {item.name for item in dataclasses.fields(Limits)}
        return Limits(**{name: value for name, value in vars(self).items() if name in names})


def main(argv: Sequence[str] | None = None) -> int:
    """Repair the files that the flags name; the exit status is 1 if one could not be repaired."""
    config = parse(RepairConfig, argv, description="Repair damaged host and device traces.")
    found = (path for pattern in TRACE_GLOBS for path in Path(config.dir).rglob(pattern))
    paths = [Path(name) for name in config.files] or sorted(found)
    if not paths:
        _complain(f"{config.dir}: holds no *_host.json or *_device.json; give another --dir or files.")
        return 1
    rows: list[tuple[str, ...]] = [("file", "kind", "outcome", "repairs", "records", "backup")]
    failed = False
    try:
        for path in tqdm(paths, unit="file", disable=not sys.stderr.isatty() or len(paths) == 1):
            try:
                rows.append(_repair(path, config))
            except TraceError as error:
                failed = True
                _complain(str(error))
                rows.append((printable(str(path)), "-", "NOT SAVED", "-", "-", "-"))
    except KeyboardInterrupt:
        _complain(f"interrupted: {len(rows) - 1} of {len(paths)} files are done, the others are unchanged.")
        return 130
    for line in table(rows, right=()):
        print(line)
    return 1 if failed else 0


def _complain(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)


def _repair(path: Path, config: RepairConfig) -> tuple[str, ...]:
    """Repair one file and list its repairs; returns its row in the table."""
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    long = sys.stderr.isatty() and size > LONG_BYTES
    with tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=not long) as bar:
        report = repair_file(
            path, config.keep, write=not config.dry_run, limits=config.limits(), progress=bar.update
        )
    if report.changed:
        print(printable(str(report.path)))
    shown = report.repairs[: config.show or None]
    for repair in shown:
        print(printable(f"  {repair}"))
    if len(shown) < len(report.repairs):
        print(f"  … {len(report.repairs) - len(shown)} more (--show 0 lists all)")
    for other in report.others:
        print(printable(f"  another object was written to {other}"))
    outcome = "good" if not report.changed else "to repair" if config.dry_run else "repaired"
    backup = printable(report.backup.name) if report.backup else "-"
    counts = str(len(report.repairs)), str(report.nodes_kept)
    return printable(str(report.path)), report.kind, outcome, *counts, backup
