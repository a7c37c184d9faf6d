"""A run in the log folder: its jobs, nodes, files and state.

``$LOG_DIR/<job id>/`` has ``<node>.out``, ``.err``, ``.gpu`` and ``.state`` per node and ``jobs``, the ids
of all jobs of the run; ``$LOG_DIR/<job id>.sbatch.out`` is the batch script's own output.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_lm.errors import RunError
from megatron_lm.logs import BATCH_OUTPUT, JOBS, LOCAL, NODE_KINDS, SETTINGS, records
from megatron_lm.settings import conf

RUNNING, COMPLETED, FAILED, CANCELLED, UNKNOWN = "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "UNKNOWN"
WAITING = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED")
ALIVE = (*WAITING, RUNNING, "COMPLETING", "RESIZING")
BY_SIGNAL = (130, 143)  # exit status of a script ended by Ctrl-C or SIGTERM


@dataclass(frozen=True)
class Node:
    """One node of a job; its files are ``stem`` plus .out, .err, .gpu or .state."""

    job: str
    name: str
    stem: Path

    def file(self, kind: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{kind}")

    def read(self, kind: str) -> bytes:
        return records.read(self.file(kind))


@dataclass(frozen=True)
class Run:
    """jobs: the ids, the master job's first. nodes: in order of their node rank."""

    log_dir: Path
    jobs: tuple[str, ...]
    nodes: tuple[Node, ...]

    def batch_output(self, job: str) -> Path:
        """The batch script's own output, outside of any node."""
        return self.log_dir / BATCH_OUTPUT.format(job=job)


class State(NamedTuple):
    """word: as Slurm reports it (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, …), or UNKNOWN."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


class Note(NamedTuple):
    """A node's ``.state``. word: "running" (number: a process id) or "exit" (a status); when: epoch
    seconds.
    """

    word: str
    number: int
    when: float | None


def find(ids: tuple[str, ...], folder: Path) -> Run:
    """The run that has these job ids, with all of its jobs. Raises ``RunError`` if nothing is known of it."""
    jobs: list[str] = []
    for job in ids:
        if not re.fullmatch(r"[\w.+-]+", job) or job.startswith("."):
            raise RunError(f"'{job}' is not a job id: give one that _03_submit.sh printed.")
        known: list[str] = []
        with contextlib.suppress(OSError):
            known = (folder / job / JOBS).read_text().split()
        jobs += [other for other in (known if job in known else [job]) if other not in jobs]
    nodes = []
    for job in jobs:
        files = (folder / job).iterdir() if (folder / job).is_dir() else []
        stems = {path.with_suffix("") for path in files if path.suffix[1:] in NODE_KINDS}
        nodes += [Node(job, stem.name, stem) for stem in stems]
    run = Run(folder, tuple(jobs), tuple(sorted(nodes, key=_order)))
    if not any((folder / job).exists() or run.batch_output(job).exists() for job in jobs):
        names = (path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
        there = sorted(names, key=_natural)
        hint = f"the latest runs there are {', '.join(there[-5:])}" if there else "the folder has no runs"
        raise RunError(f"no logs of job {' '.join(ids)} in {folder}: {hint}.")
    return run


def _order(node: Node) -> tuple[int, list[tuple[int, str]]]:
    rank = records.settings(node.read("out")).get("NODE_RANK", "")
    return (int(rank) if rank.isdigit() else 1 << 30), _natural(node.name)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by their value: 9 before 15, n2 before n10."""
    return [(int(digits or 0), word) for digits, word in re.findall(r"(\d+)|(\D+)", name)]


def submitted(run: Run) -> dict[str, str]:
    """The settings that the run was submitted with; empty if they were not kept. Raises ``RunError``."""
    path = run.log_dir / run.jobs[0] / SETTINGS
    return conf.read_file(path) if path.is_file() else {}


def state_of(run: Run, job: str) -> State:
    """Slurm's state of the job; where Slurm has none, the state that its nodes recorded."""
    if not job.startswith(LOCAL) and (known := _in_slurm(job)):
        return known
    notes = [note_of(node) for node in run.nodes if node.job == job]
    if not notes or None in notes:
        return State(UNKNOWN, "Slurm does not know this job, and no node has recorded its state")
    failed = sorted({note.number for note in notes if note and note.word == "exit" and note.number})
    if failed:
        word = CANCELLED if failed[-1] in BY_SIGNAL else FAILED
        return State(word, f"exit status {', '.join(map(str, failed))}")
    pids = [note.number for note in notes if note and note.word == "running"]
    if not pids:
        return State(COMPLETED)
    if job.startswith(LOCAL):
        return State(RUNNING) if all(map(_is_running, pids)) else State(FAILED, "killed")
    return State(UNKNOWN, "Slurm does not know this job, and not every node has recorded its end")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM  # another user's
    return True


def note_of(node: Node) -> Note | None:
    """What a node recorded last; None if nothing."""
    words = node.read("state").decode(errors="replace").split()
    if len(words) < 2 or not all(word.isdigit() for word in words[1:]):
        return None
    return Note(words[0], int(words[1]), float(words[2]) if words[2:] else None)


def _in_slurm(job: str) -> State | None:
    if not shutil.which("scontrol") or not job.isdigit():
        return None
    try:
        said = _said("scontrol", "--oneliner", "show", "job", job)
    except subprocess.TimeoutExpired:
        return None
    for line in said:
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if facts.get("JobId") != job:
            continue
        why = "" if facts.get("Reason") in (None, "None") else facts["Reason"].replace("_", " ")
        if "DRAINED" in why:
            # The nodes that are out of service, as "n3: bad memory".
            why = "; ".join([why, *_said("sinfo", "--noheader", "--list-reasons", "--format=%N: %E")])
        code, _, number = facts.get("ExitCode", "0:0").partition(":")
        if code != "0":
            why = f"exit status {code}"
        elif number != "0":
            why = f"ended by signal {number}"
        return State(facts["JobState"], "" if facts["JobState"] == COMPLETED else why)
    return None


def _said(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=15).stdout.splitlines()
