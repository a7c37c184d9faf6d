"""Submits a run and prints its job ids, or runs it on this machine.

    megatron_lm/_03_submit.sh [NAME=VALUE …] [options] [-- options of sbatch]

Settings are those of _00_conf.sh, overridden by the environment (MEGATRON_NAME=VALUE), then by --settings,
then by NAME=VALUE arguments. A heterogeneous run (HOMOGENEOUS_CLUSTER=false) is two jobs, the second of
which starts once the first has started. Logs go to $LOG_DIR/<job id>; get_result.sh shows them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_et import cli, files
from megatron_lm import saved
from megatron_lm.errors import RunError
from megatron_lm.logs import BATCH_OUTPUT, JOBS, LOCAL, SETTINGS
from megatron_lm.settings import PREFIX, conf

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


@dataclass(frozen=True)
class SubmitConfig:
    words: tuple[str, ...] = cli.option("settings for this run, as NAME=VALUE", (), positional=True)
    settings: str = cli.option("file of settings, as 'fasop export' writes it", "")
    resume: str = cli.option("job id of a run to continue from its last checkpoint", "")
    local: bool = cli.option("run all ranks on this machine, without Slurm", False)
    het: bool = cli.option("heterogeneous: one het job instead of two jobs", False)
    dry_run: bool = cli.option("print what would be submitted; submit nothing", False)
    stop_on_nan: str = cli.option("end after N iterations in a row whose loss or gradients aren't finite", "")

    def __post_init__(self) -> None:
        if self.het and self.local:
            raise ValueError("--het and --local exclude each other")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    config = cli.parse(SubmitConfig, words[:at], prog="_03_submit.sh", description=__doc__)
    given = shlex.join(words[at + 1 :])
    if config.local and given:
        raise RunError("--local: options of sbatch have no effect without Slurm; leave them out.")
    values = settings_of(config)
    if config.het and values["HOMOGENEOUS_CLUSTER"] == "true":
        raise RunError("--het: is for a heterogeneous cluster; set HOMOGENEOUS_CLUSTER=false.")
    check_files(values)
    if config.local:
        return run_here(values, config.dry_run)
    scripts = batch_scripts(values, config.het, given)
    if config.dry_run:
        print("\n".join(scripts), end="")
        return 0
    if not shutil.which("sbatch"):
        how = "start a cluster with megatron_lm/slurm/local_cluster.sh up, or use --local"
        raise RunError(f"sbatch was not found: submit on a Slurm cluster, {how}.")
    Path(values["LOG_DIR"]).mkdir(parents=True, exist_ok=True)
    ids = submit(scripts)
    record(Path(values["LOG_DIR"]), ids, values)
    print("\n".join(ids))
    return 0


def settings_of(config: SubmitConfig) -> dict[str, str]:
    """The complete settings of the run. Raises ``RunError``."""
    conf.refuse_misplaced(os.environ)
    given = conf.read_file(config.settings) if config.settings else {}
    given |= dict(map(conf.parse_word, config.words))
    given |= {"STOP_ON_NAN": config.stop_on_nan} if config.stop_on_nan else {}
    overrides = conf.from_caller(conf.prefixed(os.environ) | given, Path.cwd())
    if config.resume:
        overrides |= resumed(config.resume, conf.from_caller(given, Path.cwd()))
    if config.local:
        ranks = conf.complete(overrides)["WORLD_SIZE"]
        overrides |= {"HOMOGENEOUS_CLUSTER": "true", "NNODES": "1", "NPROC_PER_NODE": ranks, "NODELIST": ""}
    values = conf.complete(overrides)
    if not overrides.get("MASTER_PORT"):
        del values["MASTER_PORT"]  # so that the first node may choose another one
    return values


def resumed(job: str, given: Mapping[str, str]) -> dict[str, str]:
    """The settings that continue the run of ``job``, with those ``given`` now. Raises ``RunError``."""
    from megatron_lm.logs import runs  # needs numpy, as no other submission does

    run = runs.find((job,), conf.log_dir())
    values = runs.submitted(run)
    if not values:
        raise RunError(f"job {job}: its settings were not kept: submit it anew, with LOAD set.")
    for each in run.jobs:
        known = runs.state_of(run, each)
        if known.word in runs.ALIVE:
            raise RunError(f"job {each} is still {known.word}: cancel it before you continue its run.")
    if "WORLD_SIZE" not in given:
        values.pop("WORLD_SIZE", None)  # it follows from the number of nodes, which may be given
    values |= given
    if not values["SAVE"]:
        raise RunError(f"job {job} wrote no checkpoints, as SAVE was empty: there is nothing to continue.")
    for folder in saved.newest_first(Path(values["SAVE"])):
        if not (problem := saved.damage(folder)):
            break
        print(f"job {job}: checkpoint {folder} is damaged: {problem}", file=sys.stderr)
    else:
        raise RunError(f"job {job}: there is no good checkpoint in {values['SAVE']} to continue from.")
    done = int(saved.read_meta(folder)["iteration"])
    if done >= int(values["TRAIN_ITERS"]):
        raise RunError(f"job {job} has done {done} iterations of TRAIN_ITERS={values['TRAIN_ITERS']}.")
    print(f"job {job}: continuing from {folder}", file=sys.stderr)
    return values | {"LOAD": values["SAVE"]}


def check_files(values: Mapping[str, str]) -> None:
    """Raise ``RunError`` if the settings' dataset, checkpoint or container image is missing or damaged."""
    data, load, save = values["DATA_PATH"], values["LOAD"], values["SAVE"]
    if data and (problem := saved.dataset_damage(data)):
        raise RunError(f"DATA_PATH={data}: {problem}.")
    if load and not saved.newest_first(Path(load)):
        raise RunError(f"LOAD={load}: there is no checkpoint.")
    if save and Path(save).exists() and not Path(save).is_dir():
        raise RunError(f"SAVE={save}: is not a folder.")
    if values["SAVE_INTERVAL"] != "0" and not save:
        raise RunError(f"SAVE_INTERVAL={values['SAVE_INTERVAL']}: set SAVE to a folder for the checkpoints.")
    image = values["CONTAINER_IMAGE_PATH"]
    if image and not Path(image).is_file():
        raise RunError(f"CONTAINER_IMAGE_PATH={image}: there is no such file; give a .sqsh image.")
    if image and not values["CONTAINER_PATH"]:
        raise RunError("CONTAINER_PATH: is empty; set it to the folder that containers are unpacked in.")


def batch_scripts(values: Mapping[str, str], het: bool, given: str) -> list[str]:
    """The batch scripts of a run, of which the second starts once the first has started; ``given``: options
    of the command line. Raises ``RunError``.

    Options of sbatch come from the settings, then from ``_02_*_job.sh``, then from the command line; of one
    that is given twice sbatch takes the last.
    """
    names = [name for name in values["NODELIST"].split(",") if name]
    count, first = int(values["NNODES"]), int(values["MASTER_NNODES"])
    if names and (len(names) != count or len(set(names)) != count):
        named = f"NODELIST={values['NODELIST']}: names {len(set(names))} different nodes"
        raise RunError(f"{named}, NNODES is {count}; name each node once, separated by commas.")
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        return [_script(values, HOMOGENEOUS, _header(values, HOMOGENEOUS, count, names, "SLURM_", given))]
    master = _header(values, MASTER, first, names[:first], "MASTER_", given)
    slave = _header(values, SLAVE, count - first, names[first:], "SLAVE_", given)
    if het:
        return [_script(values, MASTER, [*master, "#SBATCH hetjob", *slave])]
    return [_script(values, MASTER, master), _script(values, SLAVE, slave)]


def _script(values: Mapping[str, str], body: str, header: list[str]) -> str:
    export = [f"export {PREFIX}{name}={shlex.quote(value)}" for name, value in values.items()]
    lines = ["#!/usr/bin/env bash", *header, *export, f"exec {shlex.quote(str(conf.FOLDER / body))}"]
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
    in_body = re.findall(r"^#SBATCH\s+(.*)", (conf.FOLDER / body).read_text(encoding="utf-8"), re.MULTILINE)
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


def record(folder: Path, ids: Sequence[str], values: Mapping[str, str]) -> None:
    """Keep what belongs to a run beside its logs: the ids of its jobs, and the settings submitted."""
    for job in ids:
        (folder / job).mkdir(parents=True, exist_ok=True)
        files.write_text(folder / job / JOBS, "".join(f"{other}\n" for other in ids))
        files.write_text(folder / job / SETTINGS, conf.write_lines(values))


def run_here(values: Mapping[str, str], dry_run: bool) -> int:
    """Become the script that runs all ranks on this machine and waits for them."""
    folder = Path(values["LOG_DIR"])
    job = f"{LOCAL}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    node = conf.FOLDER / "slurm" / "node.sh"
    if dry_run:
        print(f"{node} 0 127.0.0.1    # {values['WORLD_SIZE']} ranks, logs in {folder / job}")
        return 0
    record(folder, [job], values)
    exported = {PREFIX + name: value for name, value in values.items()}
    script = str(conf.FOLDER / "slurm" / "run_here.sh")
    os.execve(script, [script], {**os.environ, **exported, "RUN_ID": job})
