"""Settings as text: environment variables, files of NAME=VALUE lines, and ``_00_conf.sh`` with its defaults.

In the environment a setting has the prefix MEGATRON_, so that a variable of another program (CONTAINER_NAME,
WORLD_SIZE, LOAD) is never taken for a setting.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chakra_et.files import read_bytes
from megatron_lm.errors import RunError
from megatron_lm.settings.values import NAMES, SIZE_SETTINGS, Settings, check

FOLDER = Path(__file__).resolve().parents[1]
CONF = FOLDER / "_00_conf.sh"
# Settings that hold a path.
PATHS = ("DATA_PATH", "SAVE", "LOAD", "TRACE_OUTPUT_DIR", "LOG_DIR", "CONTAINER_IMAGE_PATH", "CONTAINER_PATH")
PREFIX = "MEGATRON_"
# Nobody but a user of these scripts sets variables of these names, so one without the prefix is a mistake.
UNMISTAKABLE = (
    "HOMOGENEOUS_CLUSTER", "MODEL", "NPROC_PER_NODE", "NNODES", "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE",
    "TENSOR_MP_SIZE", "DP_SIZE", "PIPELINE_MP_SIZE", "PARTITION", "TRAIN_ITERS", "PROFILE_CHAKRA",
)  # fmt: skip


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read and check the settings. Raises ``RunError`` with the setting at fault and what would fit."""
    settings = read_settings(environment)
    check(settings)
    return settings


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings without checking that they fit together. Raises ``RunError``."""
    values: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Settings).items():
        text = environment.get(PREFIX + name.upper())
        if text is not None:
            values[name] = _read(name.upper(), text, kind)
    if "world_size" not in values:
        shape = Settings(**values)
        values["world_size"] = shape.nproc_per_node * shape.nnodes
    return Settings(**values)


def derived(settings: Settings) -> dict[str, str]:
    """The settings that follow from others: NAME → value."""
    texts = {name: text_of(getattr(settings.size, part)) for name, part in SIZE_SETTINGS.items()}
    return {"WORLD_SIZE": str(settings.world_size), **texts}


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def prefixed(environment: Mapping[str, str]) -> dict[str, str]:
    """NAME → value of the settings in the environment. Raises ``RunError`` for a misspelt name."""
    found = {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX)
        if variable == name:
            continue
        if name in NAMES:
            found[name] = value
        elif near := difflib.get_close_matches(name, NAMES, 1, 0.85):
            raise RunError(f"{variable}: there is no such setting; the nearest is {PREFIX}{near[0]}.")
    return found


def refuse_misplaced(environment: Mapping[str, str]) -> None:
    """Raise ``RunError`` for a setting without its prefix that can only be meant for these scripts."""
    for name in UNMISTAKABLE:
        if name in environment and PREFIX + name not in environment:
            given, how = f"{name}={environment[name]}", f"set that, or give {name} to _03_submit.sh"
            raise RunError(f"{given} in the environment: settings are read from {PREFIX}{name} only; {how}.")


def read_file(path: str | Path) -> dict[str, str]:
    """NAME → value of lines ``NAME=VALUE``, with quotes, ``export`` and comments as in a shell; nothing is
    executed. Raises ``RunError``.
    """
    try:
        text = read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not text"
        raise RunError(f"{path}: can't be read: {reason}.") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line.removeprefix("export "), comments=True)
            if len(words) > 1 or re.match(r"[^'#]*[$`]", line):
                raise ValueError("give one setting as NAME=VALUE.")
            found |= dict(map(parse_word, words))
        except ValueError as error:
            raise RunError(f"{path}, line {number}: {error}") from None
    return found


def write_lines(values: Mapping[str, str]) -> str:
    """NAME=VALUE lines, quoted as a shell needs it, as ``read_file`` reads them."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def parse_word(word: str) -> tuple[str, str]:
    """A word NAME=VALUE of a command line. Raises ``RunError``."""
    name, equals, value = word.partition("=")
    if not equals or name not in NAMES:
        raise RunError(f"'{word}': give settings as NAME=VALUE, with a name of megatron_lm/_00_conf.sh.")
    return name, value


def from_caller(values: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``values`` with their relative paths taken from ``folder``, where the caller gave them."""
    return {
        name: os.path.abspath(folder / value) if name in PATHS and value else value
        for name, value in values.items()
    }


def complete(overrides: Mapping[str, str]) -> dict[str, str]:
    """Every setting of a run: ``overrides`` in place of the defaults, checked, with absolute paths.

    Raises ``RunError``.
    """
    outside = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment = outside | {PREFIX + name: value for name, value in overrides.items()}
    environment["SETTINGS_PYTHON"] = sys.executable
    command = ["bash", "-c", '. "$1" >&2 && env -0', "bash", str(CONF)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["_00_conf.sh: ended without a message."]
        raise RunError(lines[-1].removeprefix("_00_conf.sh: "))
    pairs = (entry.partition("=") for entry in done.stdout.split("\0"))
    values = {name.removeprefix(PREFIX): value for name, _, value in pairs if name.startswith(PREFIX)}
    return from_caller({name: values[name] for name in NAMES}, FOLDER)


def log_dir() -> Path:
    """The folder of all logs: $MEGATRON_LOG_DIR from the caller's folder, else as ``_00_conf.sh`` has it."""
    outside = os.environ.get(f"{PREFIX}LOG_DIR")
    if outside:
        return Path(os.path.abspath(outside))
    inside = re.search(r'\bLOG_DIR="\$\{LOG_DIR:?-([^}"$]*)\}"', CONF.read_text(encoding="utf-8"))
    return Path(os.path.abspath(FOLDER / (inside[1] if inside else "../log2")))


def _read(name: str, text: str, kind: Any) -> Any:
    """``text`` as a value of type ``kind``; empty where the type allows None."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        if text not in options:
            raise RunError(f"{name}={text}: choose from {', '.join(filter(None, options))}.")
        return text
    if type(None) in options and not text:
        return None
    kind = options[0] if options else kind
    if kind is int and not re.fullmatch(r"0|[1-9][0-9]{0,17}", text):
        raise RunError(f"{name}={text}: give a whole number without leading zeros.")
    if kind is bool and text not in ("true", "false"):
        raise RunError(f"{name}={text}: give true or false.")
    if kind is str and not text.isprintable():
        raise RunError(f"{name}: has a line break or another control character; give one line of text.")
    try:
        return text == "true" if kind is bool else kind(text)
    except ValueError:
        raise RunError(f"{name}={text}: give a number.") from None
