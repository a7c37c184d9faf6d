"""On a real Slurm of four virtual nodes on this machine, with the real training on four gloo ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_lm.logs import records
from megatron_lm.settings import MODELS
from tests.megatron_lm import virtual_cluster
from tests.megatron_lm.conftest import REPO_ROOT, as_environment
from tests.megatron_lm.processes import processes_with, wait_for
from tests.megatron_lm.virtual_cluster import CLUSTER, wait_for_end, wait_for_state

pytestmark = pytest.mark.slow
MEGATRON = REPO_ROOT / "megatron_lm"
Script = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with virtual_cluster.cluster(4, tmp_path_factory.mktemp("slurm") / "c") as env:
        yield env


@pytest.fixture
def env(cluster: dict[str, str], tmp_path: Path, free_port: int) -> dict[str, str]:
    """Four ranks, a pipeline of two stages of two data-parallel ranks, on two nodes."""
    settings = {
        "MODEL": "tiny",
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
        "DP_SIZE": "2",
        "PIPELINE_MP_SIZE": "2",
        "PARTITION": "1-3",
        "TRAIN_ITERS": "3",
        "LOG_INTERVAL": "1",
        "PROFILE": "true",
        "CPUS_PER_TASK": "2",
        "LOG_DIR": str(tmp_path / "log2"),
        "MASTER_PORT": str(free_port),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON": sys.executable,
    }
    return cluster | as_environment(settings)


@pytest.fixture
def script(env: dict[str, str]) -> Script:
    """Run a script of megatron_lm/ to its end, and give what it printed."""

    def call(name: str, *args: str, **more: str) -> str:
        command = [str(MEGATRON / name), *args]
        done = subprocess.run(
            command, env=env | as_environment(more), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def check_result(script: Script, folder: Path, jobs: list[str], nodes: list[str], **more: str) -> None:
    """What every good run of three iterations shows, and has on disk."""
    result = script("get_result.sh", jobs[-1], **more)
    assert result.startswith("no problems found\n"), result
    assert [int(n) for n in re.findall(r"^iteration (\d+) : [\d.]+ s$", result, re.MULTILINE)] == [1, 2, 3]
    assert f"job info {' '.join(jobs)} *" in result
    ranks = ", ".join(f"{rank} ({node})" for rank, node in enumerate(nodes))
    assert f"NODE_RANK: {ranks}\n" in result and "MASTER_ADDR: 127.0.0.1\n" in result
    outputs = {path.stem: records.read(path) for job in jobs for path in (folder / job).glob("*.out")}
    assert sorted(outputs) == sorted(nodes)
    # The loss is known to the last rank alone; the times to all.
    assert [name for name, data in outputs.items() if records.iterations(data)] == [nodes[-1]]
    ranks_of = {name: {rank for rank, _ in records.timers(data)} for name, data in outputs.items()}
    assert sorted(rank for of_node in ranks_of.values() for rank in of_node) == [0, 1, 2, 3]
    for job in jobs:
        for path in (folder / job).glob("*.gpu"):
            assert "no GPU" in path.read_text() or records.gpu_samples(records.read(path))


def test_a_homogeneous_run(script: Script, env: dict[str, str], tmp_path: Path) -> None:
    job = script("_03_submit.sh").strip()
    assert wait_for_end(env, job) == "COMPLETED"
    check_result(script, tmp_path / "log2", [job], ["n1", "n2"])
    page = tmp_path / "out.html"
    command = [sys.executable, str(MEGATRON / "_05_report_visualization.py"), job, "--iterations", "all"]
    drawn = subprocess.run([*command, "--output", page], env=env, capture_output=True, text=True, timeout=120)
    assert "of 4 ranks" in drawn.stdout and page.stat().st_size > 50_000


HETERO = {"HOMOGENEOUS_CLUSTER": "false", "MASTER_QUEUE": "first", "SLAVE_QUEUE": "rest"}


def test_a_heterogeneous_run_of_two_jobs(script: Script, env: dict[str, str], tmp_path: Path) -> None:
    jobs = script("_03_submit.sh", **HETERO).split()
    assert len(jobs) == 2
    assert [wait_for_end(env, job) for job in jobs] == ["COMPLETED"] * 2
    check_result(script, tmp_path / "log2", jobs, ["n1", "n2"], **HETERO)


def test_a_heterogeneous_run_as_one_het_job(script: Script, env: dict[str, str], tmp_path: Path) -> None:
    (job,) = script("_03_submit.sh", "--het", **HETERO).split()
    assert wait_for_end(env, job) == "COMPLETED"
    check_result(script, tmp_path / "log2", [job], ["n1", "n2"], **HETERO)


def test_a_job_that_fails(script: Script, env: dict[str, str], tmp_path: Path) -> None:
    """Submission only sees that there is a checkpoint, the training of which model it is."""
    (tmp_path / "ckpt/iter_0000001").mkdir(parents=True)
    meta = {"iteration": 1, "model": "small", "size": dataclasses.asdict(MODELS["small"])}
    (tmp_path / "ckpt/iter_0000001/meta.json").write_text(json.dumps(meta))
    job = script("_03_submit.sh", LOAD=str(tmp_path / "ckpt")).strip()
    assert wait_for_end(env, job) == "FAILED"
    said = script("get_result.sh", job).splitlines()
    assert said[0].startswith(f"WRONG: job {job} is not running: FAILED (")
    assert re.match(r"WRONG: rank \d on n[12] failed first at .*iter_0000001 is of another model", said[1])
    assert said[-2:] == ["no iteration logged yet", "debug?  : 0"]


def test_a_job_that_is_cancelled(script: Script, env: dict[str, str], tmp_path: Path) -> None:
    job = script("_03_submit.sh", TRAIN_ITERS="100000").strip()
    wait_for(lambda: "iteration 2 :" in script("get_result.sh", job, TRAIN_ITERS="100000"), 300)
    running = script("get_result.sh", job, TRAIN_ITERS="100000")
    assert f"{job}: RUNNING" in running and "time left: " in running
    subprocess.run(["scancel", job], env=env, check=True)
    assert wait_for_end(env, job) == "CANCELLED"
    marker = str(MEGATRON / "_00_pretrain_gpt.py")
    wait_for(lambda: not [pid for pid in processes_with(marker) if belongs_to(pid, tmp_path)], 60)
    said = script("get_result.sh", job, TRAIN_ITERS="100000")
    assert said.startswith(f"WRONG: job {job} is not running: CANCELLED")
    assert "iteration 2 :" in said


def test_a_job_that_waits_for_nodes(script: Script, env: dict[str, str]) -> None:
    subprocess.run(["sbatch", "--nodes=4", "--output=/dev/null", "--wrap=sleep 600"], env=env, check=True)
    job = script("_03_submit.sh").strip()
    wait_for_state(env, job, "PENDING", seconds=30)
    assert script("get_result.sh", job).startswith(f"job {job} waits: PENDING (")
    subprocess.run(["scancel", "--user", str(os.getuid())], env=env, check=True)
    assert wait_for_end(env, job) == "CANCELLED"


def test_a_slave_job_whose_master_was_cancelled_ends(script: Script, env: dict[str, str]) -> None:
    subprocess.run(["sbatch", "--nodes=4", "--output=/dev/null", "--wrap=sleep 600"], env=env, check=True)
    master, slave = script("_03_submit.sh", **HETERO).split()
    subprocess.run(["scancel", master], env=env, check=True)
    subprocess.run(["scancel", "--name=wrap"], env=env, check=True)
    assert wait_for_end(env, slave) == "FAILED"
    said = script("get_result.sh", master, **HETERO)
    assert f"the master job {master} has no nodes: it was cancelled before it started" in said


def test_a_second_cluster_in_the_same_folder_is_refused(cluster: dict[str, str]) -> None:
    done = subprocess.run([CLUSTER, "up"], env=cluster, capture_output=True, text=True)
    assert done.returncode == 1 and "exists already" in done.stderr and not done.stdout


def belongs_to(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
