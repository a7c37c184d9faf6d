"""The commands behind the shell scripts: ``python megatron_lm COMMAND …``, from any folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from fasop.errors import PlanError
from megatron_lm.errors import RunError

# Command → (module with ``main(argv) -> status``, one line of help).
COMMANDS = {
    "submit": ("megatron_lm.slurm.submit", "submit a run (_03_submit.sh)"),
    "get_result": ("megatron_lm.results.get_result", "show how a run is doing (get_result.sh)"),
    "report": ("megatron_lm.results.report", "print a run's logs or write its summary (_04_report.sh)"),
    "picture": ("megatron_lm.results.picture", "draw a run's schedule (_05_report_visualization.py)"),
    "plan_run_compare": ("megatron_lm.results.plan_run_compare", "plan, run, compare (plan_run_compare.sh)"),
}


def main(argv: Sequence[str] | None = None) -> int:
    return cli.dispatch("python megatron_lm", COMMANDS, argv, (RunError, PlanError), needs="megatron")


if __name__ == "__main__":
    sys.exit(main())
