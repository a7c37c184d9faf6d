"""``python -m fasop export PLAN``: write a plan as the settings that launch it on Megatron.

python -m fasop plan --model gpt2-xl --cluster paper-gpt2xl-het --json > plans.json
python -m fasop export plans.json --output megatron_lm/_00_conf.sh

Only what is planned changes; every other setting of the file stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli, files
from fasop.output.export import TEMPLATE, exported
from fasop.plans.plan import pick_plan


@dataclass
class Config:
    """Which plan, and where its settings go."""

    plan: str = field(metadata={"positional": True, "help": "file that 'plan --json' printed"})
    rank: int = field(default=1, metadata={"help": "which of its plans, the first is 1"})
    output: str = field(default="", metadata={"help": "file to write (default: print it)"})
    template: str = field(default=str(TEMPLATE), metadata={"help": "settings file to start from"})


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, prog="python -m fasop export", description="Write a plan's settings.")
    text = exported(pick_plan(config.plan, config.rank), Path(config.template))
    if config.output:
        files.write_text(Path(config.output), text)
    else:
        sys.stdout.write(text)
    return 0
