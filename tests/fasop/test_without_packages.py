"""With a Python that has none of the packages, the planner names the command that makes the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_that_makes_the_environment_is_named() -> None:
    # -S leaves out site-packages.
    command = [sys.executable, "-S", "-E", "-m", "fasop", "plan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (sentence,) = done.stderr.splitlines()
    assert "is not installed for " in sentence
    assert "'python3 scripts/environment.py run' and use .venv/bin/python" in sentence
