"""``_00_conf.sh`` from Python: its defaults, and the complete settings of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_lm.errors import SettingsError
from megatron_lm.settings.environment import PREFIX, default_values
from megatron_lm.settings.values import NAMES

FOLDER = Path(__file__).resolve().parents[1]
CONF = FOLDER / "_00_conf.sh"
# Settings that hold a path.
PATHS = ("DATA_PATH", "SAVE", "LOAD", "TRACE_OUTPUT_DIR", "LOG_DIR", "CONTAINER_IMAGE_PATH", "CONTAINER_PATH")


def from_caller(values: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``values`` with their relative paths taken from ``folder``, where the caller gave them."""
    return {
        name: os.path.abspath(folder / value) if name in PATHS and value else value
        for name, value in values.items()
    }


def complete(overrides: Mapping[str, str]) -> dict[str, str]:
    """Every setting of a run: ``overrides`` in place of the defaults, checked, with absolute paths.

    Raises ``SettingsError``.
    """
    outside = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = outside | {PREFIX + name: value for name, value in overrides.items()}
    environment["SETTINGS_PYTHON"] = sys.executable
    command = ["bash", "-c", '. "$1" >&2 && env -0', "bash", str(CONF)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["_00_conf.sh: ended without a message."]
        raise SettingsError(lines[-1].removeprefix("_00_conf.sh: "))
    pairs = (entry.partition("=") for entry in done.stdout.split("\0"))
    values = {name.removeprefix(PREFIX): value for name, _, value in pairs if name.startswith(PREFIX)}
    return from_caller({name: values[name] for name in NAMES}, FOLDER)


def log_dir() -> Path:
    """The folder of all logs: $MEGATRON_LOG_DIR from the caller's folder, else as ``_00_conf.sh`` has it."""
    outside = os.environ.get(f"{PREFIX}LOG_DIR")
    if outside:
        return Path(os.path.abspath(outside))
    inside = default_values(CONF.read_text(encoding="utf-8")).get("LOG_DIR", ["../log2"])
    return Path(os.path.abspath(FOLDER / inside[-1]))
