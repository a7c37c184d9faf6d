"""Converting by Dask under a real Slurm of virtual nodes: the same bytes, also when a node is lost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from tests.megatron_lm.virtual_cluster import cluster

pytest.importorskip("dask_jobqueue", reason="from a clone, pip install '.[cluster]'")
pytestmark = pytest.mark.slow
RANKS = 8
ROOT = Path(__file__).resolve().parents[2]
# What a user writes into ~/.config/dask/jobqueue.yaml.
JOBS = {"CORES": "1", "MEMORY": "2GB", "PROCESSES": "1", "WALLTIME": "00:10:00", "QUEUE": "all"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with (
        tempfile.TemporaryDirectory(prefix="dask-", dir="/tmp") as folder,
        cluster(3, Path(folder, "s")) as env,
    ):
        yield env | {f"DASK_JOBQUEUE__SLURM__{name}": value for name, value in JOBS.items()}


def converting(traces: Path, output: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    words = ["convert", str(traces), "-o", str(output), "--cluster", "slurm", "--workers", "2"]
    env = env | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "chakra_et", *words],
        cwd=traces.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def busy_nodes(env: dict[str, str]) -> list[str]:
    command = ["squeue", "--noheader", "--states=R", "--format=%N"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("lost", [False, True])
def test_slurm_writes_the_same_bytes(
    lost: bool,
    slurm: dict[str, str],
    traces: Path,
    tmp_path: Path,
    contents: Callable[[Path], dict[str, bytes]],
) -> None:
    """``lost``: a node goes down once its worker runs; its ranks go to the others."""
    running = converting(traces, tmp_path / "there", slurm)
    until = time.monotonic() + 120
    while lost and running.poll() is None and len(busy_nodes(slurm)) < 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    node = busy_nodes(slurm)[0] if lost else ""
    if lost:
        down = ["scontrol", "update", f"nodename={node}", "state=down", "reason=test"]
        subprocess.run(down, env=slurm, check=True)
        assert node not in busy_nodes(slurm)
    said, _ = running.communicate(timeout=300)
    if lost:  # where Slurm hasn't taken it back by itself
        up = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(up, env=slurm, check=False)
    assert running.returncode == 0, said
    assert main(["convert", str(traces), "-o", str(tmp_path / "here")]) == 0
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
