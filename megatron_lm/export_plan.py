"""``python -m fasop export PLAN``: write a plan as the settings that launch it with megatron_lm.

python -m fasop plan --model gpt2-xl --cluster paper-gpt2xl-het --json > plans.json
python -m fasop export plans.json --output plan.conf
megatron_lm/_03_submit.sh --settings plan.conf

With --template, a copy of that ``_00_conf.sh`` gets the plan's settings as its defaults instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli, files
from fasop.plans.plan import pick_plan
from megatron_lm import plan_settings


@dataclass
class Config:
    """Which plan, and where its settings go."""

    plan: str = field(metadata={"positional": True, "help": "file that 'plan --json' printed"})
    rank: int = field(default=1, metadata={"help": "which of its plans, counted from 1"})
    output: str = field(default="", metadata={"help": "file to write (default: standard output)"})
    template: str = field(default="", metadata={"help": "_00_conf.sh to fill in (default: NAME=VALUE lines)"})


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, prog="python -m fasop export", description="Write a plan's settings.")
    plan = pick_plan(config.plan, config.rank)
    text = plan_settings.filled(plan, Path(config.template)) if config.template else plan_settings.lines(plan)
    if config.output:
        files.write_text(Path(config.output), text)
    else:
        sys.stdout.write(text)
    return 0
