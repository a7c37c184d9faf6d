"""``chakra-et stragglers NAME`` and ``chakra-et stragglers TRACE.parquet --meta META.yaml``.

    chakra-et stragglers outputs/gpt2 --typical median
    chakra-et stragglers job.parquet --meta job.yaml --json

What slow ranks cost: step times against those of an ideal job, in which each operation takes what is typical
of its kind. JSON: see ``Stragglers.as_json``. Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from chakra_et.cli import allow_missing_ranks, parse, skeletons
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.sets import Skeletons
from chakra_et.simulate.run import load_run
from chakra_et.stragglers.load import SUFFIX, find_stragglers
from chakra_et.stragglers.operations import Typical
from chakra_et.stragglers.text import text


@dataclass
class StragglersConfig:
    """The command's arguments."""

    name: str = field(
        metadata={
            "positional": True,
            "help": "the NAME of NAME.0.et, NAME.1.et, …, or a .parquet trace of operations",
        }
    )
    meta: str | None = field(
        default=None, metadata={"help": "YAML file that describes the job of the .parquet trace"}
    )
    typical: Typical = field(
        default="mean",
        metadata={"help": "the typical duration of computation; of communication it is always the median"},
    )
    threshold: float = field(
        default=1.03,
        metadata={
            "help": "slowdown from which on it is attributed to operator types, ranks, stages and steps"
        },
    )
    allow_missing_ranks: bool = allow_missing_ranks()
    skeletons: Skeletons = skeletons()
    json: bool = field(default=False, metadata={"help": "print JSON, with the heat maps as numbers"})

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"--threshold must be a slowdown such as 1.03, not {self.threshold}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(StragglersConfig, argv, description="Find what slows a distributed job down.")
    missing = config.allow_missing_ranks
    found = find_stragglers(
        config.name, config.meta, config.typical, config.threshold, missing, config.skeletons
    )
    recorded = not config.name.endswith(SUFFIX)
    diagnosis = (
        diagnose(load_run(config.name, allow_missing=missing, skeletons=config.skeletons))
        if recorded
        else None
    )
    if config.json:
        print(json.dumps(found.as_json() | {"diagnosis": diagnosis and diagnosis.as_json()}, indent=2))
    else:
        print(text(config.name, found, diagnosis.about_ranks() if diagnosis else []))
    return 0
