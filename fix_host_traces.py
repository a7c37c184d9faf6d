#!/usr/bin/env python3
"""Repair host and device traces: several objects in one file, truncation, bad JSON, damaged gzip.

    python fix_host_traces.py                          all traces under outputs/
    python fix_host_traces.py --dir runs --keep all    keep every object of a file, not only the last
    python fix_host_traces.py outputs/a_host.json      these files

A file that is changed is kept as NAME.backup; a good file is not touched. Exit status: 0 if every file is
good or repaired, 1 if one could not be saved.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from chakra_et.errors import TraceError
from chakra_et.repair import RepairLimits, RepairReport, repair_file
from utils.cli import parse

PATTERNS = ("*_host.json", "*_host.json.gz", "*_device.json", "*_device.json.gz")
LIMITS = RepairLimits()
LONG_BYTES = 100 << 20


def _limit(name: str, text: str):
    return field(default=getattr(LIMITS, name), metadata={"help": text})


@dataclass(frozen=True)
class RepairConfig:
    """What to repair and where to stop."""

    files: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "trace files; without any, those under --dir"}
    )
    dir: str = field(default="outputs", metadata={"help": "folder searched, with its subfolders, for traces"})
    keep: Literal["last", "first", "largest", "all"] = field(
        default="last",
        metadata={"help": "which complete object of several stays; all: the others go beside it"},
    )
    dry_run: bool = field(default=False, metadata={"help": "only say what would be done"})
    show: int = field(default=20, metadata={"help": "repairs listed for each file; 0 lists them all"})
    min_records: int = _limit("min_records", "nodes or events that must be left, or the file is refused")
    max_depth: int = _limit("max_depth", "nesting of one node or event")
    max_record_bytes: int = _limit("max_record_bytes", "size of one node or event")
    max_string_bytes: int = _limit("max_string_bytes", "length of one string")
    max_bytes: int = _limit("max_bytes", "size of a trace, unpacked")
    max_ratio: int = _limit("max_ratio", "unpacked size of a gzip file over its size")
    allow_mixed: bool = field(
        default=False,
        metadata={"help": "keep a mixture of several processes' records that can't be told apart"},
    )

    def __post_init__(self) -> None:
        if self.show < 0:
            raise ValueError(f"--show must be 0 or more, not {self.show}")
        self.limits()

    def limits(self) -> RepairLimits:
        names = {item.name for item in dataclasses.fields(RepairLimits)}
        return RepairLimits(**{name: value for name, value in vars(self).items() if name in names})

    def paths(self) -> list[Path]:
        if self.files:
            return [Path(name) for name in self.files]
        return sorted(path for pattern in PATTERNS for path in Path(self.dir).rglob(pattern))


def main() -> int:
    config = parse(RepairConfig, description=__doc__.splitlines()[0])
    paths = config.paths()
    if not paths:
        return _say(f"{config.dir}: no *_host.json or *_device.json in it; name another --dir or files.")
    rows, failed = [], 0
    try:
        for path in tqdm(paths, unit="file", disable=not sys.stderr.isatty() or len(paths) == 1):
            try:
                report = _repair(path, config)
                _list_repairs(report, config.show)
                rows.append(_row(report, config.dry_run))
            except TraceError as error:
                failed += _say(str(error))
                rows.append((str(path), "-", "NOT SAVED", "-", "-", "-"))
    except KeyboardInterrupt:
        return _say(f"Stopped; the files after {rows[-1][0] if rows else 'none'} are as they were.") + 129
    _print_table(("file", "kind", "outcome", "repairs", "records", "backup"), rows)
    return 1 if failed else 0


def _say(sentence: str) -> int:
    print(_printable(sentence), file=sys.stderr)
    return 1


def _printable(text: str) -> str:
    """One line that a terminal can show: names of files and operators may hold anything."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _repair(path: Path, config: RepairConfig) -> RepairReport:
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    long = sys.stderr.isatty() and size > LONG_BYTES
    with tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=not long) as bar:
        return repair_file(
            path, config.keep, write=not config.dry_run, limits=config.limits(), progress=bar.update
        )


def _list_repairs(report: RepairReport, show: int) -> None:
    if report.changed:
        print(_printable(str(report.path)))
    shown = report.repairs[: show or None]
    for repair in shown:
        print(_printable(f"  {repair}"))
    if len(shown) < len(report.repairs):
        print(f"  … {len(report.repairs) - len(shown)} more (--show 0 lists all)")
    for other in report.others:
        print(_printable(f"  further object written to {other}"))


def _row(report: RepairReport, dry_run: bool) -> tuple[str, ...]:
    outcome = "good" if not report.changed else "to repair" if dry_run else "repaired"
    backup = report.backup.name if report.backup else "-"
    counts = str(len(report.repairs)), str(report.nodes_kept)
    return str(report.path), report.kind, outcome, *counts, backup


def _print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    rows = [tuple(map(_printable, row)) for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
