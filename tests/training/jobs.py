"""The real train.py as a background job, and reading what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--model-name", "tiny", "--dataset", "sample", "--max-seq-length", "32", "--num-workers", "0"),
    *("--batch-size", "2", "--learning-rate", "1e-3", "--warmup-steps", "2", "--logging-steps", "1"),
]


def read_log(save_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (save_dir / "training_log.jsonl").read_text().splitlines()]


def losses(save_dir: Path) -> dict[int, float]:
    """The training loss by step, from the file that a run leaves."""
    return {row["step"]: row["loss"] for row in read_log(save_dir) if "loss" in row}


class Job:
    """A command in the background, with all that it starts."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]):
        self.mark = f"MOSIM_TEST_JOB={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.log = folder / f"{value}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment, name: value},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.output}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            time.sleep(0.05)

    def finish(self, timeout: float = 120) -> int:
        """Wait for the end; the exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None

    def alive(self) -> dict[int, dict[str, str]]:
        """The environments of all processes of this job, zombies excepted, by pid."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.mark in variables and state != "Z":
                found[int(folder.name)] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def worker(self, rank: int) -> int:
        """The pid of a rank (a data loader is its child, and has a higher one)."""
        return min(pid for pid, variables in self.alive().items() if variables.get("RANK") == str(rank))

    def wait_until_gone(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.alive():
            assert time.monotonic() < deadline, f"left behind: {list(self.alive())}\n{self.output}"
            time.sleep(0.1)

    def kill(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
