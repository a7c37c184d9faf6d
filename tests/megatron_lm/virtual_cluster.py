"""A real Slurm of virtual nodes on this machine, for the tests beside this file."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.megatron_lm.conftest import REPO_ROOT
from tests.megatron_lm.processes import processes_with, wait_for

CLUSTER = REPO_ROOT / "megatron_lm/slurm/local_cluster.sh"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def skip_without_slurm() -> None:
    missing = " ".join(tool for tool in TOOLS if not shutil.which(tool, path=SBIN))
    if missing:
        pytest.skip(f"Slurm is not installed ({missing}): apt-get install slurm-wlm munge")


@contextlib.contextmanager
def cluster(nodes: int, folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of n1, n2, … that lives in ``folder``; the environment that selects it.

    The folder's path must be short, because the path of a socket has at most 107 letters.
    """
    skip_without_slurm()
    env = os.environ | {"PATH": SBIN, "LOCAL_CLUSTER": str(folder)}
    up = subprocess.run([CLUSTER, "up", str(nodes)], env=env, capture_output=True, text=True, timeout=180)
    assert up.returncode == 0, up.stderr
    try:
        match = re.fullmatch(r"export SLURM_CONF=(\S+)\n", up.stdout)
        assert match
        yield env | {"SLURM_CONF": match[1]}
    finally:
        subprocess.run([CLUSTER, "down"], env=env, check=True, timeout=180)
        assert not folder.exists() and not processes_with(str(folder))


def fact(env: Mapping[str, str], job: str, name: str) -> str:
    """One of the fields that Slurm shows of a job, such as JobState."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    shown = subprocess.run(command, env=env, capture_output=True, text=True).stdout
    match = re.search(rf"(?:^| ){name}=(\S*)", shown)
    assert match, shown
    return match[1]


def wait_for_state(env: Mapping[str, str], job: str, *words: str, seconds: float = 300) -> str:
    """Wait until the job is in one of these states; the state."""
    found: list[str] = []

    def arrived() -> bool:
        found.append(fact(env, job, "JobState"))
        return found[-1] in words

    wait_for(arrived, seconds)
    return found[-1]


def wait_for_end(env: Mapping[str, str], job: str, seconds: float = 300) -> str:
    """Wait until the job has ended; its state."""
    return wait_for_state(env, job, *ENDED, seconds=seconds)
