"""Submits a run and prints its job ids, or runs it on this machine.

    megatron_lm/_03_submit.sh [NAME=VALUE …] [options] [-- options of sbatch]

Settings are those of _00_conf.sh, overridden by the environment (MEGATRON_NAME=VALUE), then by --settings,
then by NAME=VALUE arguments. A heterogeneous run (HOMOGENEOUS_CLUSTER=false) is two jobs, the second of
which starts once the first has started. Logs go to $LOG_DIR/<job id>; get_result.sh shows them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli, files
from megatron_lm import checkpoints, datasets
from megatron_lm.errors import RunError, SettingsError
from megatron_lm.logs import JOBS, LOCAL, SETTINGS
from megatron_lm.settings import PREFIX, conf
from megatron_lm.slurm import batch


@dataclass(frozen=True)
class SubmitConfig:
    """What to submit, and where."""

    words: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "settings for this run, as NAME=VALUE"}
    )
    settings: str = field(default="", metadata={"help": "file of settings, as 'fasop export' writes it"})
    resume: str = field(default="", metadata={"help": "job id of a run to continue from its last checkpoint"})
    without: str = field(default="", metadata={"help": "with --resume: nodes to leave out, as node7,node8"})
    local: bool = field(default=False, metadata={"help": "run all ranks on this machine, without Slurm"})
    het: bool = field(default=False, metadata={"help": "heterogeneous: one het job instead of two jobs"})
    dry_run: bool = field(default=False, metadata={"help": "print what would be submitted; submit nothing"})
    time: str = field(default="", metadata={"help": "time limit, as for sbatch"})
    account: str = field(default="", metadata={"help": "account to charge"})
    qos: str = field(default="", metadata={"help": "quality of service"})
    partition: str = field(default="", metadata={"help": "partition (queue) of all jobs"})
    constraint: str = field(default="", metadata={"help": "required node features"})
    stop_on_nan: str = field(default="", metadata={"help": "end after N iterations in a row not finite"})

    def __post_init__(self) -> None:
        if self.het and self.local:
            raise ValueError("--het and --local exclude each other")
        if self.without and not self.resume:
            raise ValueError("--without: needs --resume JOBID, the run whose nodes these are")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    config = cli.parse(
        SubmitConfig, words[:at], prog="_03_submit.sh", description=(__doc__ or "").splitlines()[0]
    )
    names = ("time", "account", "qos", "partition", "constraint")
    given = batch.flags((f"--{name}", getattr(config, name)) for name in names)
    given |= batch.from_words(words[at + 1 :], "after --")
    if config.local and given:
        raise SettingsError("--local: options of sbatch have no effect without Slurm; leave them out.")
    values = settings_of(config)
    if config.het and values["HOMOGENEOUS_CLUSTER"] == "true":
        raise SettingsError("--het: is for a heterogeneous cluster; set HOMOGENEOUS_CLUSTER=false.")
    check_files(values)
    if config.local:
        return run_here(values, config.dry_run)
    try:
        options = shlex.split(values["SBATCH_OPTIONS"])
    except ValueError as error:
        text = values["SBATCH_OPTIONS"]
        raise SettingsError(f"SBATCH_OPTIONS={text}: can't be read ({error}).") from None
    given = batch.from_words(options, "SBATCH_OPTIONS") | given
    if config.without and "--exclude" not in given:
        given |= batch.flags([("--exclude", config.without)])
    jobs = batch.jobs(values, config.het, given)
    if config.dry_run:
        print("\n".join(job.script for job in jobs), end="")
        return 0
    if not shutil.which("sbatch"):
        raise RunError(
            "sbatch was not found: submit on a Slurm cluster, start one with "
            "megatron_lm/slurm/local_cluster.sh up, or use --local."
        )
    Path(values["LOG_DIR"]).mkdir(parents=True, exist_ok=True)
    ids = batch.submit(jobs)
    record(Path(values["LOG_DIR"]), ids, values)
    print("\n".join(ids))
    return 0


def settings_of(config: SubmitConfig) -> dict[str, str]:
    """The complete settings of the run. Raises ``SettingsError``."""
    conf.refuse_misplaced(os.environ)
    given = conf.from_caller(dict(map(conf.parse_word, config.words)), Path.cwd())
    overrides = conf.prefixed(os.environ)
    if config.settings:
        overrides |= conf.read_file(config.settings)
    if config.resume:
        # Only a resumed run needs to read logs, and to plan.
        from megatron_lm.slurm import resume

        without = [name for name in config.without.split(",") if name]
        overrides |= resume.settings_of(config.resume, without, given)
    overrides |= given | ({"STOP_ON_NAN": config.stop_on_nan} if config.stop_on_nan else {})
    overrides = conf.from_caller(overrides, Path.cwd())
    if config.local:
        ranks = conf.complete(overrides)["WORLD_SIZE"]
        overrides |= {"HOMOGENEOUS_CLUSTER": "true", "NNODES": "1", "NPROC_PER_NODE": ranks, "NODELIST": ""}
    values = conf.complete(overrides)
    if not overrides.get("MASTER_PORT"):
        del values["MASTER_PORT"]  # so that the first node may choose another one
    return values


def check_files(values: Mapping[str, str]) -> None:
    """Raise ``SettingsError`` if a dataset, checkpoint or container image that the settings name is missing
    or damaged.
    """
    data, load, save = values["DATA_PATH"], values["LOAD"], values["SAVE"]
    if data and (problem := datasets.problem(data)):
        raise SettingsError(f"DATA_PATH={data}: {problem}.")
    if load and checkpoints.newest(Path(load)) is None:
        raise SettingsError(f"LOAD={load}: there is no checkpoint.")
    if save and Path(save).exists() and not Path(save).is_dir():
        raise SettingsError(f"SAVE={save}: is not a folder.")
    if values["SAVE_INTERVAL"] != "0" and not save:
        raise SettingsError(
            f"SAVE_INTERVAL={values['SAVE_INTERVAL']}: set SAVE to a folder for the checkpoints."
        )
    image = values["CONTAINER_IMAGE_PATH"]
    if image and not Path(image).is_file():
        raise SettingsError(f"CONTAINER_IMAGE_PATH={image}: there is no such file; give a .sqsh image.")
    if image and not values["CONTAINER_PATH"]:
        raise SettingsError("CONTAINER_PATH: is empty; set it to the folder that containers are unpacked in.")


def record(folder: Path, ids: Sequence[str], values: Mapping[str, str]) -> None:
    """Keep what belongs to a run beside its logs: the ids of its jobs, and the settings it was submitted
    with.
    """
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
