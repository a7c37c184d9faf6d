#!/usr/bin/env python3
"""Runs the bundles of tests/astra/real_sets.py in the real ASTRA-sim and compares them with expected.json.

    python benchmarks/astra_agreement.py                     all sets; an hour on two cores
    python benchmarks/astra_agreement.py --only pipeline     sets with this in their name
    python benchmarks/astra_agreement.py --write             and puts the table into docs/SIMULATORS.md

The binary is that of ASTRA_SIM=, else ../shared/tools/astra-sim. Results are kept in --results as they come,
and a set that is there isn't run again, so that a run can go on where another ended. Each set runs at 0.1, 1,
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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import put
from chakra_et import cli
from chakra_et.__main__ import main as chakra_et
from chakra_et.astra.command import check_log
from chakra_et.files import write_json
from chakra_et.text import table
from tests.astra.real_sets import SETS, networks
from tests.astra.sets import run_astra
from tests.astra.test_real_astra import PERCENT, SPEEDS

DOCUMENT = ROOT / "docs" / "SIMULATORS.md"


@dataclass
class Config:
    only: str = field(default="", metadata={"help": "sets with this text in their names"})
    results: str = field(
        default="astra_agreement.json", metadata={"help": "JSON file that keeps the results of sets"}
    )
    write: bool = field(default=False, metadata={"help": "put the table into docs/SIMULATORS.md"})


def measure(name: str) -> dict[str, Any]:
    """All runs of one set: how many, how many ranks finished, the worst error and its network, seconds."""
    about, begin = SETS[name], time.monotonic()
    found: dict[str, Any] = {"ranks": about.ranks, "runs": 0, "unfinished": 0, "worst": 0.0, "where": ""}
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        made = about.make(Path(scratch) / "set")
        for speed in SPEEDS:
            for kind, network in networks(about.ranks, speed).items():
                folder = Path(scratch) / "bundle"
                status = chakra_et(["astra", made, "-o", str(folder), "--topology", network, *about.flags])
                if status:
                    raise SystemExit(f"error: {name}: no bundle on {network}")
                run_astra(folder)
                checked = check_log(folder / "astra.log", folder)
                worst = checked.worst_percent()
                found["runs"] += 1
                found["unfinished"] += len(checked.unfinished)
                if worst is not None and abs(worst) >= abs(found["worst"]):
                    found |= {"worst": worst, "where": f"{kind}, {speed:,g} Gbit/s"}
    return found | {"seconds": time.monotonic() - begin}


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
            results[name] = measure(name)
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
