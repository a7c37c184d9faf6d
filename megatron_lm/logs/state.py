"""The state of a run's jobs: Slurm's own, or where Slurm has forgotten the job, what its nodes recorded."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lm.logs.files import LOCAL
from megatron_lm.logs.runs import Node, Run
from utils.processes import is_running

RUNNING, COMPLETED, FAILED, CANCELLED, UNKNOWN = "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "UNKNOWN"
ENDED = (
    *(COMPLETED, FAILED, CANCELLED, UNKNOWN),
    *("TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
)
ALIVE = ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING")
WAITING = ("PENDING", "CONFIGURING", "SUSPENDED", "REQUEUED")
BY_SIGNAL = (130, 143)  # exit status of a script ended by Ctrl-C or SIGTERM


@dataclass(frozen=True)
class State:
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


def of_job(run: Run, job: str) -> State:
    """Slurm's state of the job; without one, the state that its nodes recorded."""
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
        return State(RUNNING) if all(map(is_running, pids)) else State(FAILED, "killed")
    return State(UNKNOWN, "Slurm does not know this job, and not every node has recorded its end")


def note_of(node: Node) -> Note | None:
    """What a node recorded last; None if nothing."""
    words = node.read("state").decode(errors="replace").split()
    if len(words) < 2 or not all(word.isdigit() for word in words[1:]):
        return None
    return Note(words[0], int(words[1]), float(words[2]) if words[2:] else None)


def _in_slurm(job: str) -> State | None:
    if not shutil.which("scontrol") or not job.isdigit():
        return None
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except subprocess.TimeoutExpired:
        return None
    for line in done.stdout.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if facts.get("JobId") != job:
            continue
        why = "" if facts.get("Reason") in (None, "None") else facts["Reason"].replace("_", " ")
        if "DRAINED" in why:
            why += "".join(f"; {line}" for line in _drained())
        code, _, number = facts.get("ExitCode", "0:0").partition(":")
        if code != "0":
            why = f"exit status {code}"
        elif number != "0":
            why = f"ended by signal {number}"
        return State(facts["JobState"], "" if facts["JobState"] == COMPLETED else why)
    return None


def _drained() -> list[str]:
    """``n3: bad memory`` for each node that is out of service."""
    command = ["sinfo", "--noheader", "--list-reasons", "--format=%N: %E"]
    return subprocess.run(command, capture_output=True, text=True, timeout=15).stdout.splitlines()
