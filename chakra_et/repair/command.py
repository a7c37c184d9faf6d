"""``chakra-et repair``: repair damaged trace files and list every change.

chakra-et repair outputs/a_host.json --dry-run
chakra-et repair --dir runs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from chakra_et.cli import option, parse
from chakra_et.errors import TraceError
from chakra_et.files import path_of
from chakra_et.names import TRACE_GLOBS
from chakra_et.repair.file import repair_file
from chakra_et.text import printable, table
from chakra_et.traces.records import MAX_BYTES

LISTED = 20


@dataclass(frozen=True)
class RepairConfig:
    files: tuple[str, ...] = option("trace files (default: all under --dir)", (), positional=True)
    dir: str = option("folder with the traces, and its subfolders", "outputs", metavar="FOLDER")
    dry_run: bool = option("list the repairs without writing anything", False)
    max_bytes: int = option("refuse a larger trace (uncompressed size)", MAX_BYTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Repair the files that the flags name; the exit status is 1 if one could not be repaired."""
    config = parse(RepairConfig, argv, description="Repair damaged host and device traces.")
    found = (path for pattern in TRACE_GLOBS for path in path_of(config.dir).rglob(pattern))
    paths = [path_of(name) for name in config.files] or sorted(found)
    if not paths:
        raise TraceError(f"{config.dir}: holds no *_host.json or *_device.json; give another --dir or files.")
    rows: list[tuple[str, ...]] = [("file", "kind", "outcome", "repairs", "records", "backup")]
    for path in tqdm(paths, unit="file", disable=not sys.stderr.isatty() or len(paths) == 1):
        try:
            rows.append(_repair(path, config))
        except TraceError as error:
            print(printable(str(error)), file=sys.stderr)
            rows.append((printable(str(path)), "-", "NOT SAVED", "-", "-", "-"))
    for line in table(rows, right=()):
        print(line)
    return int(any("NOT SAVED" in row for row in rows))


def _repair(path: Path, config: RepairConfig) -> tuple[str, ...]:
    """Repair one file and list its repairs; returns its row in the table."""
    report = repair_file(path, write=not config.dry_run, max_bytes=config.max_bytes)
    if report.changed:
        print(printable(str(report.path)))
    for repair in report.repairs[:LISTED]:
        print(printable(f"  {repair}"))
    if len(report.repairs) > LISTED:
        print(f"  … {len(report.repairs) - LISTED} more")
    outcome = "good" if not report.changed else "to repair" if config.dry_run else "repaired"
    backup = printable(report.backup.name) if report.backup else "-"
    counts = str(len(report.repairs)), str(report.nodes_kept)
    return printable(str(report.path)), report.kind, outcome, *counts, backup
