"""Convert the traces of a run to .et files when it ends."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]


def convert_traces(folder: str, name: str) -> bool:
    """Run ``chakra-et convert`` on the traces NAME in ``folder``, in a process of its own.

    Returns whether all were converted. A failure is logged with the command to repeat: the traces are kept.
    """
    place = Path(folder).resolve()
    again = f"chakra-et convert {shlex.quote(folder)} --name {shlex.quote(name)}"
    try:
        ranks = json.loads((place / f"{name}_manifest.json").read_text(encoding="utf-8"))["ranks"]
    except OSError:
        ranks = []
    if not any(rank["files"] for rank in ranks):
        return False  # the tracer has logged why there are none
    elsewhere = [rank["rank"] for rank in ranks if not _is_here(place, rank)]
    if elsewhere:
        listed = ", ".join(map(str, elsewhere))
        log.warning(
            "not converted: the traces of rank %s are not in %s here; copy them to it, then run: %s",
            *(listed, folder, again),
        )
        return False
    command = [sys.executable, "-m", "chakra_et", "convert", str(place), "--name", name]
    if subprocess.run(command, cwd=ROOT).returncode:
        log.error("the traces are kept, but not all could be converted; to repeat it: %s", again)
        return False
    return True


def _is_here(folder: Path, rank: dict[str, object]) -> bool:
    files = rank["files"]
    return isinstance(files, dict) and all((folder / entry["name"]).is_file() for entry in files.values())
