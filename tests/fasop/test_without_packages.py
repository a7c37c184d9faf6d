"""With a Python that has none of the packages, every way to start the planner names the command that
makes the environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTS = [["-m", "fasop", "plan"], *([str(path)] for path in sorted((ROOT / "fasop").glob("FASOP_*.py")))]


@pytest.mark.parametrize("words", STARTS, ids=lambda words: Path(words[-1]).stem)
def test_the_command_that_makes_the_environment_is_named(words: list[str]) -> None:
    # -S leaves out site-packages.
    done = subprocess.run([sys.executable, "-S", "-E", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (sentence,) = done.stderr.splitlines()
    assert "is not installed for " in sentence
    assert "'python3 scripts/environment.py run' and use .venv/bin/python" in sentence
