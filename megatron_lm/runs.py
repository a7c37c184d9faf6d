"""A run on disk: its jobs, nodes and log files, whether it is running, what it complains of."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_lm import logs
from utils.processes import is_running

FOLDER = Path(__file__).resolve().parent
CONF = FOLDER / "_00_conf.sh"
LOCAL = "local-"  # how the id of a run without Slurm begins
RUNNING, ENDED_WELL = "RUNNING", "COMPLETED"

# torch, NCCL, CUDA, Slurm, the shell and the kernel each have their own way to say that something failed.
ERROR = re.compile(
    r"\b(?:error|ERROR|fatal|FATAL)\b|[A-Z]\w*(?:Error|Exception)\b"
    r"|^\[?E\d{4} |out of memory|CANCELLED|Segmentation fault|core dumped|command not found"
    r"|^Killed|: stopped$|^megatron_lm/\S+\.sh: |^\S+\.py: "
)
WARNING = re.compile(r"\b[Ww]arn(?:ing)?\b|\bWARN(?:ING)?\b|\w+Warning\b|^\[?W\d{4} |^\[W")

# What torchrun tells after a rank has failed: it hides what that rank said.
AFTERWARDS = re.compile(r"torch[./]distributed|^traceback +:|^error_file *:|^exitcode +:| FAILED$|^frame #\d")


class RunError(ValueError):
    """What was asked for is not there; the text is one sentence for the user."""


@dataclass(frozen=True)
class Node:
    """One node's files: ``stem`` with .out, .err, .gpu or .state behind it."""

    job: str
    name: str
    stem: Path

    def file(self, kind: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{kind}")

    def read(self, kind: str) -> bytes:
        return logs.read(self.file(kind))


@dataclass(frozen=True)
class Run:
    """jobs: the ids, the master's first. nodes: in the order of their ranks."""

    log_dir: Path
    jobs: tuple[str, ...]
    nodes: tuple[Node, ...]

    def batch_output(self, job: str) -> Path:
        """What the batch script itself said, outside of any node."""
        return self.log_dir / f"slurm-{job}.out"


@dataclass(frozen=True)
class State:
    """word: as Slurm says it (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, …), or UNKNOWN."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


def log_dir() -> Path:
    """$LOG_DIR as the scripts take it: relative to megatron_lm; by default ../log2."""
    return (FOLDER / os.environ.get("LOG_DIR", "../log2")).resolve()


def find(ids: tuple[str, ...], folder: Path) -> Run:
    """The run that these job ids belong to, its other job included. Raises ``RunError``."""
    jobs: list[str] = []
    for job in ids:
        if not re.fullmatch(r"[\w.+-]+", job) or job.startswith("."):
            raise RunError(f"'{job}' is no job id: give one that _03_submit.sh printed.")
        with contextlib.suppress(OSError):
            known = (folder / job / "jobs").read_text().split()
            jobs += [other for other in known if other not in jobs] if job in known else []
        if job not in jobs:
            jobs.append(job)
    nodes = []
    for job in jobs:
        files = (folder / job).iterdir() if (folder / job).is_dir() else []
        stems = {path.with_suffix("") for path in files if path.suffix in (".out", ".err", ".gpu", ".state")}
        nodes += [Node(job, stem.name, stem) for stem in stems]
    run = Run(folder, tuple(jobs), tuple(sorted(nodes, key=_order)))
    if not any(_is_known(run, job) for job in jobs):
        there = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        hint = f"the last ones there are {', '.join(there[-5:])}" if there else "there are none yet"
        raise RunError(f"no logs of job {' '.join(ids)} in {folder}: {hint}.")
    return run


def state(run: Run, job: str) -> State:
    """What Slurm says; where it has forgotten the job, or has no part in it, what the nodes noted."""
    if not job.startswith(LOCAL) and (found := _slurm_state(job)):
        return found
    notes = [node.read("state").decode().split() for node in run.nodes if node.job == job]
    if not notes or any(len(note) != 2 or not note[1].isdigit() for note in notes):
        return State("UNKNOWN", "Slurm knows no such job, and no node has noted anything")
    failed = sorted({int(number) for word, number in notes if word == "exit" and number != "0"})
    if failed:
        word = "CANCELLED" if failed[-1] in (130, 143) else "FAILED"
        return State(word, f"exit status {', '.join(map(str, failed))}")
    pids = [int(number) for word, number in notes if word == "running"]
    if not pids:
        return State(ENDED_WELL)
    if job.startswith(LOCAL):
        return State(RUNNING) if all(map(is_running, pids)) else State("FAILED", "killed")
    return State("UNKNOWN", "Slurm knows no such job, and not every node has noted its end")


def settings(run: Run) -> dict[str, dict[str, str]]:
    """job/node → the settings that it echoed."""
    return {f"{node.job}/{node.name}": logs.settings(node.read("out")) for node in run.nodes}


def conf(names: set[str]) -> dict[str, str]:
    """What _00_conf.sh gives now for these settings. Raises ``RunError`` if it refuses its own values."""
    script = '. "$1" >&2 && env -0'
    done = subprocess.run(["bash", "-c", script, "bash", str(CONF)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RunError(f"_00_conf.sh refuses its settings: {_last_line(done.stderr)}")
    pairs = (entry.partition("=") for entry in done.stdout.split("\0") if entry)
    return {name: value for name, _, value in pairs if name in names}


def errors(text: str) -> list[str]:
    """The lines that tell of an error, in order; warnings and torchrun's own report are left out."""
    lines = (line.strip() for line in text.splitlines())
    return [
        line
        for line in lines
        if ERROR.search(line) and not WARNING.search(line) and not AFTERWARDS.search(line)
    ]


def _is_known(run: Run, job: str) -> bool:
    return (run.log_dir / job).exists() or run.batch_output(job).exists() or _slurm_state(job) is not None


def _order(node: Node) -> tuple[int, list[tuple[int, str]]]:
    rank = logs.settings(node.read("out")).get("NODE_RANK", "")
    parts = re.findall(r"(\d+)|(\D+)", node.name)
    return (int(rank) if rank.isdigit() else 1 << 30), [(int(digits or 0), word) for digits, word in parts]


def _slurm_state(job: str) -> State | None:
    if not shutil.which("scontrol") or not job.isdigit():
        return None
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, timeout=15
        )
    except subprocess.TimeoutExpired:
        return None
    for line in done.stdout.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if facts.get("JobId") != job:
            continue
        why = "" if facts.get("Reason") in (None, "None") else facts["Reason"]
        code, _, number = facts.get("ExitCode", "0:0").partition(":")
        if code != "0":
            why = f"exit status {code}"
        elif number != "0":
            why = f"ended by signal {number}"
        return State(facts["JobState"], "" if facts["JobState"] == ENDED_WELL else why)
    return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
