"""``chakra-et diagnose NAME``: what bounds a run, which rank is slow, and what to change.

chakra-et diagnose outputs/gpt2
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from chakra_et.cli import allow_missing_ranks, option, parse, run_names, skeletons
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.sets import Skeletons
from chakra_et.text import plural


@dataclass
class DiagnoseConfig:
    name: str = run_names()
    allow_missing_ranks: bool = allow_missing_ranks()
    skeletons: Skeletons = skeletons()
    json: bool = option("print JSON, with all figures", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(DiagnoseConfig, argv, description="Find what bounds a run and what to change.")
    run = load_run(config.name, config.allow_missing_ranks, config.skeletons)
    found = diagnose(run)
    if config.json:
        print(json.dumps(found.as_json() | {"notes": run.notes}, indent=2))
        return 0
    told = [f"{found.name}: {plural(found.ranks, 'rank')}, {found.duration()}", *found.lines()]
    predict = f"To predict it: chakra-et predict {found.name}"
    told += [f"{predict} {each.flags} (−{each.gain:.1%})" for each in found.proposals if each.flags]
    print("\n".join([*told, *(f"note: {note}" for note in run.notes)]))
    return 0
