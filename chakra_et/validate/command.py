"""``chakra-et validate FILE…``: check .et files before a simulator reads them.

chakra-et validate outputs/gpt2
chakra-et validate bundle/*.et --for astra-sim --strict
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from chakra_et.cli import allow_missing_ranks, cluster, option, parse, run_names
from chakra_et.et.sets import find_rank_sets
from chakra_et.validate.check import check_set

DESCRIPTION = (
    "Check .et files before a simulator reads them. Files of one run (NAME.0.et, NAME.1.et, …, or just NAME) "
    "are also checked against each other. Exit status: 0 if valid, 1 if not, 2 for unusable arguments."
)


@dataclass
class ValidateConfig:
    files: tuple[str, ...] = run_names("the runs", "a folder or .et files")
    allow_missing_ranks: bool = allow_missing_ranks()
    cluster: str = cluster()
    json: bool = option("print JSON with the keys valid, files, notes, problems", False)
    strict: bool = option("treat warnings as errors", False)
    for_: Literal["any", "astra-sim"] = option(
        "astra-sim: also check its rules, and the network.yml beside the files", "any"
    )


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(ValidateConfig, argv, description=DESCRIPTION)
    sets = find_rank_sets(config.files, config.allow_missing_ranks)
    how = config.for_ == "astra-sim", config.cluster
    problems = [each for run in sets for each in check_set(run, *how)]
    for problem in problems:
        if problem.rule == "rank-missing" and config.allow_missing_ranks:
            problem.severity = "note"
    count = {kind: sum(problem.severity == kind for problem in problems) for kind in ("error", "warning")}
    valid = not count["error"] and not (config.strict and count["warning"])
    notes = [note for run in sets for note in run.notes]
    paths = [str(path) for run in sets for path in run.files.values()]
    if config.json:
        answer = {"valid": valid, "files": paths, "notes": notes, "problems": [*map(asdict, problems)]}
        print(json.dumps(answer, indent=2))
    else:
        for line in [*(f"note: {note}" for note in notes), *problems]:
            print(line)
        counts = ", ".join(f"{number} {kind}{'s' * (number != 1)}" for kind, number in count.items())
        print(f"{len(paths)} file{'s' * (len(paths) != 1)}: {'valid' if valid else 'not valid'} ({counts})")
    return 0 if valid else 1
