#!/usr/bin/env python3
"""Downloads real traces from the repositories that publish them, each by commit and sha256.

    python scripts/public_traces.py [FOLDER]                  all of them, 14 MB
    python scripts/public_traces.py --only 'pairs/*'
    python scripts/public_traces.py --base file:///MIRROR     from MIRROR/OWNER/REPOSITORY/COMMIT/PATH
    python scripts/public_traces.py FOLDER --tables           measured kernels and collectives instead, for
                                                              benchmarks/cost_accuracy.py --given FOLDER

The traces are under the MIT licence of their repositories: AMD-AGI/TraceLens,
facebookresearch/HolisticTraceAnalysis and facebookresearch/param; ``public_tables.py`` has the tables. A file
that is there already is kept if its sha256 is right. The exit status is 1 if a file could not be had.
``benchmarks/corpus_benchmark.py FOLDER`` converts the traces.
"""

from __future__ import annotations

import csv
import fnmatch
import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.files import atomic_file
from scripts.public_tables import fetch_tables

GITHUB = "https://github.com"
RAW = "https://raw.githubusercontent.com"
TIMEOUT_S = 60
MAX_BYTES = 64 << 20


class Trace(NamedTuple):
    """A row of ``public_traces.csv``.

    ``name``: the file's path here; ``source``: OWNER/REPOSITORY/COMMIT/FOLDER; ``path``: in it.
    """

    name: str
    source: str
    path: str
    sha256: str


with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as _file:
    TRACES = tuple(Trace(**row) for row in csv.DictReader(_file))


@dataclass
class Config:
    folder: str = cli.option("where the traces go", "outputs/public_traces", positional=True)
    only: str = cli.option("names to download, as a shell pattern", "*")
    base: str = cli.option(f"address of a mirror (with --tables: in place of {GITHUB})", RAW)
    tables: bool = cli.option("fetch tables of measured kernels and collectives instead", False)


def main() -> int:
    config = cli.parse(Config, description=__doc__)
    if not config.tables:
        return cli.run(lambda: download(config), TraceError)
    base = GITHUB if config.base == RAW else config.base
    return cli.run(lambda: fetch_tables(Path(config.folder), base), TraceError)


def download(config: Config, traces: tuple[Trace, ...] = TRACES) -> int:
    """Fetch what is not there yet; returns the exit status. Raises ``TraceError`` if no name fits."""
    chosen = [trace for trace in traces if fnmatch.fnmatchcase(trace.name, config.only)]
    if not chosen:
        raise TraceError(f"--only {config.only!r} fits no trace: {', '.join(trace.name for trace in traces)}")
    failed = 0
    for trace in chosen:
        path = Path(config.folder) / trace.name
        try:
            print(f"{path}: {fetch(trace, path, config.base)}")
        except TraceError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    print(f"{len(chosen) - failed} of {len(chosen)} traces are in {config.folder}.")
    return 1 if failed else 0


def fetch(trace: Trace, path: Path, base: str = RAW) -> str:
    """Make ``path`` the trace; returns "kept" or "downloaded". Raises ``TraceError`` where that can't be."""
    if path.exists():
        if hashlib.sha256(path.read_bytes()).hexdigest() == trace.sha256:
            return "kept"
        raise TraceError(f"{path}: there is another file of that name: remove it, or give another folder")
    url = f"{base.rstrip('/')}/{trace.source}/{trace.path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            content = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)  # of a URLError
        raise TraceError(f"{url}: can't be downloaded ({why}): check the network, or give --base") from None
    found = hashlib.sha256(content).hexdigest()
    if found != trace.sha256:
        raise TraceError(f"{url}: its sha256 is {found}, not {trace.sha256}: not used")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content)
    return "downloaded"


if __name__ == "__main__":
    sys.exit(main())
