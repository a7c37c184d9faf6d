"""The options of sbatch as ``#SBATCH`` lines, merged from all places where a user can give them.

The settings come first; ``#SBATCH`` lines in ``_02_*_job.sh`` override them, and options on the command line
override both.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_lm.errors import SettingsError
from megatron_lm.logs import BATCH_OUTPUT

SHORT = {
    "-A": "--account", "-a": "--array", "-C": "--constraint", "-c": "--cpus-per-task", "-D": "--chdir",
    "-d": "--dependency", "-e": "--error", "-G": "--gpus", "-J": "--job-name", "-N": "--nodes",
    "-n": "--ntasks", "-o": "--output", "-p": "--partition", "-q": "--qos", "-t": "--time",
    "-w": "--nodelist", "-x": "--exclude",
}  # fmt: skip
# What the launch depends on, and what decides it.
FIXED = {
    "--nodes": "NNODES",
    "--ntasks-per-node": "NPROC_PER_NODE (torchrun starts the processes of a node)",
    "--ntasks": "NPROC_PER_NODE (torchrun starts the processes of a node)",
    "--cpus-per-task": "CPUS_PER_TASK",
    "--output": "LOG_DIR",
    "--error": "LOG_DIR",
    "--nodelist": "NODELIST",
    "--array": "submitting one run at a time",
    "--wrap": "_02_*_job.sh",
    "--export": "_03_submit.sh, which passes the settings on",
}

Options = dict[str, str]  # option, as "--time" → the text of its line, as "--time=1:00:00"


def from_settings(values: Mapping[str, str], nodes: int, queue: str, gres: str, nodelist: str) -> Options:
    """The options that the settings decide, for a job of ``nodes`` nodes."""
    given = {
        "--job-name": f"gpt2_{values['MODEL']}"
        if not values["MODEL"].startswith("llama")
        else values["MODEL"],
        "--nodes": str(nodes),
        "--partition": queue,
        "--gres": gres,
        "--ntasks-per-node": "1",
        "--cpus-per-task": values["CPUS_PER_TASK"],
        "--time": values["TIME_LIMIT"],
        "--account": values["ACCOUNT"],
        "--qos": values["QOS"],
        "--constraint": values["CONSTRAINT"],
        "--nodelist": nodelist,
        "--output": f"{values['LOG_DIR']}/{BATCH_OUTPUT.format(job='%j')}",
    }
    return {name: f"{name}={shlex.quote(value)}" for name, value in given.items() if value}


def from_words(words: Sequence[str], where: str) -> Options:
    """Options as words: ``--time=1:00``, ``--time 1:00``, ``-t 1:00``, ``--exclusive``. Raises
    ``SettingsError``.
    """
    found: Options = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            raise SettingsError(f"{where}: '{word}' is not an option of sbatch.")
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, value = name[:2], name[2:] + equals + value
            equals = "=" if value else ""
        if not equals and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        long = SHORT.get(name, name)
        found[long] = f"{long}={shlex.quote(value)}" if equals else long
    return found


def from_body(path: Path) -> Options:
    """The options in the ``#SBATCH`` lines of a batch script. Raises ``SettingsError``."""
    found: Options = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(r"#SBATCH\s", line):
            where = f"{path.name}, line {number}"
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                raise SettingsError(f"{where}: can't be read ({error}).") from None
            found |= from_words(words, where)
    return found


def lines(settings: Options, body: Options, given: Options) -> list[str]:
    """``#SBATCH`` lines of the merged options; later sources override earlier ones.

    Raises ``SettingsError`` for an option that contradicts the settings in what the launch depends on.
    """
    for where, source in (("#SBATCH line in a _02_*_job.sh", body), ("option of sbatch", given)):
        for name, text in source.items():
            if name in FIXED and text != settings.get(name):
                ours = f"; the settings have {settings[name]}" if name in settings else ""
                raise SettingsError(f"{where}: {text} can't be given, {FIXED[name]} decides it{ours}.")
    return [f"#SBATCH {text}" for text in (settings | body | given).values()]


def flags(pairs: Iterable[tuple[str, str]]) -> Options:
    """Options of our own command line that were given: (name, value)."""
    return {name: f"{name}={shlex.quote(value)}" for name, value in pairs if value}
