"""The batch scripts of a run: one job, a pair of jobs, or one Slurm het job.

Their ``#SBATCH`` lines are merged from all places where a user can give options of sbatch: the settings come
first; ``#SBATCH`` lines in ``_02_*_job.sh`` override them, and options on the command line override both.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lm.errors import RunError, SettingsError
from megatron_lm.logs import BATCH_OUTPUT
from megatron_lm.settings import PREFIX
from megatron_lm.settings.conf import FOLDER

HOMOGENEOUS, MASTER, SLAVE = "_02_homo_job.sh", "_02_hetero_master_job.sh", "_02_hetero_slave_job.sh"
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


class Job(NamedTuple):
    """A job to submit. after: it starts once the job before it has started, whose id it gets."""

    script: str
    after: bool = False


def jobs(values: Mapping[str, str], het: bool, given: Options) -> list[Job]:
    """The jobs of a run; ``given``: options of the command line. Raises ``SettingsError``."""
    names = [name for name in values["NODELIST"].split(",") if name]
    count, first = int(values["NNODES"]), int(values["MASTER_NNODES"])
    if names and (len(names) != count or len(set(names)) != count):
        raise SettingsError(
            f"NODELIST={values['NODELIST']}: names {len(set(names))} different nodes, NNODES is {count}; "
            "name each node once, separated by commas."
        )
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        return [
            Job(_script(values, HOMOGENEOUS, _header(values, HOMOGENEOUS, count, names, "SLURM_", given)))
        ]
    master = _header(values, MASTER, first, names[:first], "MASTER_", given)
    slave = _header(values, SLAVE, count - first, names[first:], "SLAVE_", given)
    if het:
        return [Job(_script(values, MASTER, [*master, "#SBATCH hetjob", *slave]))]
    return [Job(_script(values, MASTER, master)), Job(_script(values, SLAVE, slave), after=True)]


def _script(values: Mapping[str, str], body: str, header: list[str]) -> str:
    export = [f"export {PREFIX}{name}={shlex.quote(value)}" for name, value in values.items()]
    lines = ["#!/usr/bin/env bash", *header, *export, f"exec {shlex.quote(str(Path(FOLDER / body)))}"]
    return "\n".join(lines) + "\n"


def _header(
    values: Mapping[str, str], body: str, nodes: int, names: list[str], part: str, given: Options
) -> list[str]:
    """The ``#SBATCH`` lines of a request for nodes of one kind, whose settings begin with ``part``.

    Raises ``SettingsError`` for an option that contradicts the settings in what the launch depends on.
    """
    model = values["MODEL"]
    asked = {
        "--job-name": model if model.startswith("llama") else f"gpt2_{model}",
        "--nodes": str(nodes),
        "--partition": values[f"{part}QUEUE"],
        "--gres": values["GRES" if part == "SLURM_" else f"{part}GRES"],
        "--ntasks-per-node": "1",
        "--cpus-per-task": values["CPUS_PER_TASK"],
        "--time": values["TIME_LIMIT"],
        "--account": values["ACCOUNT"],
        "--qos": values["QOS"],
        "--constraint": values["CONSTRAINT"],
        "--nodelist": ",".join(names),
        "--output": f"{values['LOG_DIR']}/{BATCH_OUTPUT.format(job='%j')}",
    }
    basic, in_body = flags(asked.items()), from_body(FOLDER / body)
    for where, source in (("#SBATCH line in a _02_*_job.sh", in_body), ("option of sbatch", given)):
        for name, text in source.items():
            if name in FIXED and text != basic.get(name):
                ours = f"; the settings have {basic[name]}" if name in basic else ""
                raise SettingsError(f"{where}: {text} can't be given, {FIXED[name]} decides it{ours}.")
    return [f"#SBATCH {text}" for text in (basic | in_body | given).values()]


def flags(pairs: Iterable[tuple[str, str]]) -> Options:
    """The options (name, value) that have a value."""
    return {name: f"{name}={shlex.quote(value)}" for name, value in pairs if value}


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


def submit(all_jobs: list[Job]) -> list[str]:
    """Give the jobs to sbatch; their ids. Raises ``RunError``, and then no job is left behind."""
    ids: list[str] = []
    for job in all_jobs:
        command = ["sbatch", "--parsable"]
        script = job.script
        if job.after:
            command.append(f"--dependency=after:{ids[-1]}")
            script = script.replace("\nexec ", f"\nexport MASTER_JOB_ID={ids[-1]}\nexec ")
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        if done.returncode != 0:
            for known in ids:
                subprocess.run(["scancel", known], capture_output=True)
            reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
            raise RunError(f"sbatch refuses the job: {reason}")
        ids.append(done.stdout.strip().partition(";")[0])
    return ids
