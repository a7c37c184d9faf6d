#!/usr/bin/env python3
"""Runs the bundles of tests/astra/real_sets.py in the real ASTRA-sim and compares them with expected.json.

    python benchmarks/astra_agreement.py                     all sets; an hour on two cores
    python benchmarks/astra_agreement.py --only pipeline     sets with this in their name
    python benchmarks/astra_agreement.py --write             and puts the table into docs/SIMULATORS.md

The binary is that of ASTRA_SIM=, else ../shared/tools/astra-sim. Results are kept in --results as they come,
and a set that is there isn't run again, so that a run can go on where another ended, or with the results of
`ASTRA_RESULTS=FILE pytest --slow tests/astra`. Each set runs at 0.1, 1,
10, 100 and 1,000 Gbit/s on networks of one, two and three dimensions, as far as its ranks factor. The exit
status is 1 where a rank did not finish, or is off by more than 1%.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.files import write_json
from chakra_et.text import table
from tests.astra.real_sets import PERCENT, SETS, measure

DOCUMENT = ROOT / "docs" / "SIMULATORS.md"


@dataclass
class Config:
    only: str = field(default="", metadata={"help": "sets with this text in their names"})
    results: str = field(
        default="astra_agreement.json", metadata={"help": "JSON file that keeps the results of sets"}
    )
    write: bool = field(default=False, metadata={"help": "put the table into docs/SIMULATORS.md"})


def rows(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    found = [("set", "ranks", "runs", "ranks that did not finish", "worst rank", "on")]
    for name in SETS:
        if name in results:
            each = results[name]
            worst = f"{each['worst']:+.3f}%"
            found.append(
                (name, str(each["ranks"]), str(each["runs"]), str(each["unfinished"]), worst, each["where"])
            )
    return found


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    os.chdir(ROOT)
    path = Path(config.results)
    results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    for name in SETS:
        if config.only in name and name not in results:
            with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
                results[name] = measure(name, Path(scratch))
            write_json(path, results)
            print(name, json.dumps(results[name]), flush=True)
    lines = rows(results)
    print("\n".join(table(lines)))
    if config.write:
        marked = ["| " + " | ".join(row) + " |" for row in lines]
        put("astra-agreement", [marked[0], "|---" * len(lines[0]) + "|", *marked[1:]], DOCUMENT)
    return int(any(each["unfinished"] or abs(each["worst"]) > PERCENT for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
