"""FASOP, by its command line: the best plan, and the settings that launch it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_et import files
from megatron_lm.errors import RunError
from megatron_lm.settings import conf
from megatron_lm.settings.environment import read_file

PLANS, SETTINGS = "plan.json", "plan.conf"


@dataclass(frozen=True)
class Chosen:
    """The best plan. layers: of each stage; placement: kind of GPU of each node, in the order of node
    ranks.
    """

    dp: int
    pp: int
    layers: tuple[int, ...]
    placement: tuple[str, ...]


def best(words: Sequence[str], folder: Path) -> Chosen:
    """Plan with these arguments of ``python -m fasop plan``. Leaves the plan in ``folder``, an absolute path.

    Raises ``RunError`` with FASOP's sentence.
    """
    text = _run("plan", *words, "--top", "1", "--json")
    files.write_text(folder / PLANS, text)
    try:
        plan = json.loads(text)["plans"][0]
        # The embedding is a unit of the first stage, the head one of the last.
        layers = list(map(int, plan["partition"]))
        layers[0] -= 1
        layers[-1] -= 1
        return Chosen(int(plan["dp"]), int(plan["pp"]), tuple(layers), tuple(map(str, plan["placement"])))
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{folder / PLANS}: is not a plan that can be launched ({error!r}).") from None


def settings(words: Sequence[str], folder: Path) -> dict[str, str]:
    """The settings of the best plan, as ``python -m fasop export`` gives them. Raises ``RunError``."""
    best(words, folder)
    _run("export", str(folder / PLANS), "--output", str(folder / SETTINGS))
    return read_file(folder / SETTINGS)


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "fasop", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=conf.FOLDER.parent)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RunError(f"python -m fasop {words[0]}: {reason.removeprefix('error: ')}")
    return done.stdout
