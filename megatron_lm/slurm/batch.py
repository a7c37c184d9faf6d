"""The batch scripts of a run: one job, a pair of jobs, or one Slurm het job."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_lm.errors import RunError, SettingsError
from megatron_lm.settings import PREFIX
from megatron_lm.settings.conf import FOLDER
from megatron_lm.slurm import headers
from megatron_lm.slurm.headers import Options

HOMOGENEOUS, MASTER, SLAVE = "_02_homo_job.sh", "_02_hetero_master_job.sh", "_02_hetero_slave_job.sh"


class Job(NamedTuple):
    """A job to submit. after: it starts once the job before it has started, whose id it gets."""

    script: str
    after: bool = False


@dataclass(frozen=True)
class Component:
    """A request to Slurm for nodes of one kind."""

    body: str
    nodes: int
    queue: str
    gres: str
    nodelist: str

    def header(self, values: Mapping[str, str], given: Options) -> list[str]:
        """Its ``#SBATCH`` lines; ``given``: options of the command line."""
        basic = headers.from_settings(values, self.nodes, self.queue, self.gres, self.nodelist)
        return headers.lines(basic, headers.from_body(FOLDER / self.body), given)


def jobs(values: Mapping[str, str], het: bool, given: Options) -> list[Job]:
    """The jobs of a run. Raises ``SettingsError``."""
    names = [name for name in values["NODELIST"].split(",") if name]
    count, first = int(values["NNODES"]), int(values["MASTER_NNODES"])
    if names and (len(names) != count or len(set(names)) != count):
        raise SettingsError(
            f"NODELIST={values['NODELIST']}: names {len(set(names))} different nodes, NNODES is {count}; "
            "name each node once, separated by commas."
        )
    export = [f"export {PREFIX}{name}={shlex.quote(value)}" for name, value in values.items()]
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        alone = Component(HOMOGENEOUS, count, values["SLURM_QUEUE"], values["GRES"], ",".join(names))
        return [Job(_script(alone.header(values, given), export, alone.body))]
    master = Component(MASTER, first, values["MASTER_QUEUE"], values["MASTER_GRES"], ",".join(names[:first]))
    slave = Component(
        SLAVE, count - first, values["SLAVE_QUEUE"], values["SLAVE_GRES"], ",".join(names[first:])
    )
    parts = [part.header(values, given) for part in (master, slave)]
    if het:
        return [Job(_script([*parts[0], "#SBATCH hetjob", *parts[1]], export, MASTER))]
    return [Job(_script(parts[0], export, MASTER)), Job(_script(parts[1], export, SLAVE), after=True)]


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


def _script(header: list[str], export: list[str], body: str) -> str:
    lines = ["#!/usr/bin/env bash", *header, *export, f"exec {shlex.quote(str(Path(FOLDER / body)))}"]
    return "\n".join(lines) + "\n"
