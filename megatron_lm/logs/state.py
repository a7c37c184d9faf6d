"""The state of a run's jobs: Slurm's own, or where Slurm has forgotten the job, what its nodes recorded."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from megatron_lm.logs.runs import LOCAL, Run
from utils.processes import is_running

RUNNING, COMPLETED, FAILED, CANCELLED, UNKNOWN = "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "UNKNOWN"
ENDED = (
    *(COMPLETED, FAILED, CANCELLED, UNKNOWN),
    *("TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
)
BY_SIGNAL = (130, 143)  # exit status of a script ended by Ctrl-C or SIGTERM


@dataclass(frozen=True)
class State:
    """word: as Slurm reports it (PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, …), or UNKNOWN."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


def of_job(run: Run, job: str) -> State:
    """Slurm's state of the job; without one, the state that its nodes recorded."""
    if not job.startswith(LOCAL) and (known := _in_slurm(job)):
        return known
    notes = [node.read("state").decode().split() for node in run.nodes if node.job == job]
    if not notes or any(len(note) != 2 or not note[1].isdigit() for note in notes):
        return State(UNKNOWN, "Slurm does not know this job, and no node has recorded its state")
    failed = sorted({int(number) for word, number in notes if word == "exit" and number != "0"})
    if failed:
        word = CANCELLED if failed[-1] in BY_SIGNAL else FAILED
        return State(word, f"exit status {', '.join(map(str, failed))}")
    pids = [int(number) for word, number in notes if word == "running"]
    if not pids:
        return State(COMPLETED)
    if job.startswith(LOCAL):
        return State(RUNNING) if all(map(is_running, pids)) else State(FAILED, "killed")
    return State(UNKNOWN, "Slurm does not know this job, and not every node has recorded its end")


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
        why = "" if facts.get("Reason") in (None, "None") else facts["Reason"]
        code, _, number = facts.get("ExitCode", "0:0").partition(":")
        if code != "0":
            why = f"exit status {code}"
        elif number != "0":
            why = f"ended by signal {number}"
        return State(facts["JobState"], "" if facts["JobState"] == COMPLETED else why)
    return None
