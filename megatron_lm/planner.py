"""FASOP, by its command line: a plan, and the settings that launch it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from chakra_et import files
from megatron_lm.errors import RunError
from megatron_lm.settings import conf
from megatron_lm.settings.environment import read_file

PLANS, SETTINGS = "plan.json", "plan.conf"


def plan(words: Sequence[str], folder: Path, python: str = sys.executable) -> dict[str, str]:
    """Plan with these arguments of ``python -m fasop plan`` and return the best plan's settings.

    Leaves the plan and its settings in ``folder``, an absolute path. Raises ``RunError`` with FASOP's
    sentence.
    """
    files.write_text(folder / PLANS, _run(python, "plan", *words, "--json"))
    _run(python, "export", str(folder / PLANS), "--output", str(folder / SETTINGS))
    return read_file(folder / SETTINGS)


def _run(python: str, *words: str) -> str:
    command = [python, "-m", "fasop", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=conf.FOLDER.parent)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RunError(f"python -m fasop {words[0]}: {reason.removeprefix('error: ')}")
    return done.stdout
