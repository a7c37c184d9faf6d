"""The batch scripts of a run: one job, a pair of jobs, or one Slurm het job.

Their ``#SBATCH`` lines are those of all places where a user can give options of sbatch: the settings come
first, then those in ``_02_*_job.sh``, then options on the command line. Of an option given twice sbatch takes
the last.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping

from megatron_lm.errors import RunError
from megatron_lm.logs import BATCH_OUTPUT
from megatron_lm.settings import PREFIX
from megatron_lm.settings.conf import FOLDER

HOMOGENEOUS, MASTER, SLAVE = "_02_homo_job.sh", "_02_hetero_master_job.sh", "_02_hetero_slave_job.sh"
# Options that the launch depends on, and what decides them.
FIXED = {
    "--nodes|-N": "NNODES",
    "--ntasks|-n": "NPROC_PER_NODE (torchrun starts the processes of a node)",
    "--cpus-per-task|-c": "CPUS_PER_TASK",
    "--output|-o|--error|-e": "LOG_DIR",
    "--nodelist|-w": "NODELIST",
    "--array|-a": "submitting one run at a time",
    "--wrap": "_02_*_job.sh",
    "--export": "_03_submit.sh, which passes the settings on",
}


def scripts(values: Mapping[str, str], het: bool, given: str) -> list[str]:
    """The batch scripts of a run, of which the second starts once the first has started; ``given``: options
    of the command line. Raises ``RunError``.
    """
    names = [name for name in values["NODELIST"].split(",") if name]
    count, first = int(values["NNODES"]), int(values["MASTER_NNODES"])
    if names and (len(names) != count or len(set(names)) != count):
        raise RunError(
            f"NODELIST={values['NODELIST']}: names {len(set(names))} different nodes, NNODES is {count}; "
            "name each node once, separated by commas."
        )
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        return [_script(values, HOMOGENEOUS, _header(values, HOMOGENEOUS, count, names, "SLURM_", given))]
    master = _header(values, MASTER, first, names[:first], "MASTER_", given)
    slave = _header(values, SLAVE, count - first, names[first:], "SLAVE_", given)
    if het:
        return [_script(values, MASTER, [*master, "#SBATCH hetjob", *slave])]
    return [_script(values, MASTER, master), _script(values, SLAVE, slave)]


def _script(values: Mapping[str, str], body: str, header: list[str]) -> str:
    export = [f"export {PREFIX}{name}={shlex.quote(value)}" for name, value in values.items()]
    lines = ["#!/usr/bin/env bash", *header, *export, f"exec {shlex.quote(str(FOLDER / body))}"]
    return "\n".join(lines) + "\n"


def _header(
    values: Mapping[str, str], body: str, nodes: int, names: list[str], part: str, given: str
) -> list[str]:
    """The ``#SBATCH`` lines of a request for nodes of one kind, whose settings begin with ``part``.

    Raises ``RunError`` for an option that contradicts the settings in what the launch depends on.
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
    in_body = re.findall(r"^#SBATCH\s+(.*)", (FOLDER / body).read_text(encoding="utf-8"), re.MULTILINE)
    own = [values["SBATCH_OPTIONS"], *in_body, given]
    for text in own:
        for options, decides in FIXED.items():
            if match := re.search(rf"(?:^|\s)((?:{options})\S*)", text):
                raise RunError(f"{match[1]} can't be given to sbatch: {decides} decides it.")
    lines = [f"{name}={shlex.quote(value)}" for name, value in asked.items() if value]
    return [f"#SBATCH {text}" for text in [*lines, *own] if text]


def submit(all_scripts: list[str]) -> list[str]:
    """Give the scripts to sbatch; the ids of their jobs. Raises ``RunError``, and then no job is left."""
    ids: list[str] = []
    for script in all_scripts:
        command = ["sbatch", "--parsable"]
        if ids:
            command.append(f"--dependency=after:{ids[0]}")
            script = script.replace("\nexec ", f"\nexport MASTER_JOB_ID={ids[0]}\nexec ")
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        if done.returncode != 0:
            for known in ids:
                subprocess.run(["scancel", known], capture_output=True)
            reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
            raise RunError(f"sbatch refuses the job: {reason}")
        ids.append(done.stdout.strip().partition(";")[0])
    return ids
