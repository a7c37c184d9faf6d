"""On a real Slurm of four virtual nodes, runs that fail for real, in each way that ends a job: get_result.sh
names the rank or node and the cause. The training is a stand-in, so that a run takes seconds.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_lm import virtual_cluster
from tests.megatron_lm.conftest import Script, as_environment
from tests.megatron_lm.processes import wait_for
from tests.megatron_lm.virtual_cluster import fact, wait_for_end, wait_for_state

pytestmark = pytest.mark.slow
TWO_NODES = {"NNODES": "2", "NPROC_PER_NODE": "2", "DP_SIZE": "2", "MOSIM_GRACE_SECONDS": "5"}
LONG = {"STAND_IN_SECONDS": "1", "TRAIN_ITERS": "600"}
HETERO = {"HOMOGENEOUS_CLUSTER": "false", "MASTER_QUEUE": "first", "SLAVE_QUEUE": "rest"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with virtual_cluster.cluster(4, tmp_path_factory.mktemp("slurm") / "c") as env:
        yield env


@pytest.fixture
def tiny(tiny: dict[str, str], slurm: dict[str, str]) -> dict[str, str]:
    """As in conftest.py, on two nodes of two ranks."""
    return tiny | {name: slurm[name] for name in ("PATH", "SLURM_CONF")} | as_environment(TWO_NODES)


def submitted(script: Script, *words: str, **settings: str) -> list[str]:
    done = script("_03_submit.sh", *words, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def wrong(script: Script, job: str) -> list[str]:
    """What get_result.sh finds wrong, from the second problem on; the first is the state."""
    lines = script("get_result.sh", job).stdout.splitlines()
    assert lines[0].startswith(f"WRONG: job {job} is not running: "), lines[0]
    return [line for line in lines if line.startswith("WRONG: ")][1:]


def is_training(script: Script, job: str) -> bool:
    return "iteration 1 : " in script("get_result.sh", job).stdout


def test_the_runs_in_a_list_stand_in_the_order_of_their_numbers(script: Script, tiny: dict[str, str]) -> None:
    """The first test of this file: its job numbers go beyond 9."""
    jobs = [job for _ in range(11) for job in submitted(script, "--", "--hold")]
    subprocess.run(["scancel", *jobs], env=tiny, check=True)
    said = script("get_result.sh", "999999").stderr
    assert said.endswith(f": the latest runs there are {', '.join(jobs[-5:])}.\n"), said
    assert jobs == sorted(jobs, key=int)


FAILURES = [
    ("message", "rank 0 was asked to fail"),
    ("exception", "it raised KeyError: 'decoder.layers.48.mlp.weight'"),
    ("kill", "it was killed (SIGKILL), as the kernel does when memory runs out"),
    ("crash", "it crashed with a segmentation fault (SIGSEGV)"),
    ("disk", "no space is left on the disk (OSError: [Errno 28] No space left on device)"),
]


@pytest.mark.parametrize(("failure", "cause"), FAILURES, ids=lambda value: value.partition(" ")[0])
@pytest.mark.parametrize("rank", ["0", "3"])
def test_the_rank_that_fails_is_named_with_its_cause(
    script: Script, tiny: dict[str, str], failure: str, cause: str, rank: str
) -> None:
    (job,) = submitted(script, STAND_IN_FAIL=failure, STAND_IN_RANK=rank)
    assert wait_for_end(tiny, job) == "FAILED"
    node = {"0": "n1", "3": "n2"}[rank]
    found = wrong(script, job)
    assert len(found) == 1 and re.match(rf"WRONG: rank {rank} on {node} failed first at 20", found[0]), found
    assert found[0].endswith(f": {cause}")


@pytest.mark.parametrize("options", [(), ("--het",)], ids=["two jobs", "het job"])
def test_a_failure_in_the_second_part_of_a_heterogeneous_run(
    script: Script, tiny: dict[str, str], options: tuple[str, ...]
) -> None:
    jobs = submitted(script, *options, **HETERO, STAND_IN_FAIL="exception", STAND_IN_RANK="3")
    assert {wait_for_end(tiny, job) for job in jobs} <= {"FAILED", "CANCELLED"}
    said = script("get_result.sh", jobs[0]).stdout.splitlines()
    (cause,) = (line for line in said if line.startswith("WRONG: rank"))
    assert re.fullmatch(r"WRONG: rank 3 on n2 failed first at \S+ \S+: it raised KeyError: '\S+'", cause)


def test_the_masters_port_is_in_use(script: Script, tiny: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (job,) = submitted(script, MASTER_PORT=port)
        assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = wrong(script, job)
    assert "node n1 failed first" in cause
    assert f"port {port} is already in use; set MASTER_PORT to a free one" in cause


def test_two_jobs_that_would_use_the_same_port(script: Script, tiny: dict[str, str], tmp_path: Path) -> None:
    """Both start at once, long before torchrun listens, and their first nodes are the same machine."""
    jobs = [job for _ in range(2) for job in submitted(script, MASTER_PORT="")]
    assert [wait_for_end(tiny, job) for job in jobs] == ["COMPLETED"] * 2
    used = []
    for job in jobs:
        texts = [path.read_text() for path in (tmp_path / "log2" / job).glob("*.out")]
        (port,) = {
            found for text in texts for found in re.findall(r"^MASTER_PORT: (\d+)$", text, re.MULTILINE)
        }
        used.append(int(port))
        moved = f"port 6787 is taken on the first node: all nodes use {port}\n"
        assert [moved in text for text in texts] == [port != "6787"] * 2
        assert script("get_result.sh", job).stdout.startswith("no problems found\n")
    assert used[0] != used[1] and min(used) >= 6787


def test_a_job_that_waits_for_a_drained_node(script: Script, tiny: dict[str, str]) -> None:
    def set_state(*words: str) -> None:
        subprocess.run(["scontrol", "update", "NodeName=n4", *words], env=tiny, check=True)

    set_state("State=DRAIN", "Reason=bad memory")
    try:
        (job,) = submitted(script, NNODES="4", DP_SIZE="4")
        wait_for(lambda: "DRAINED" in script("get_result.sh", job).stdout, 90)
        first = script("get_result.sh", job).stdout.splitlines()[0]
    finally:
        set_state("State=RESUME")
        subprocess.run(["scancel", job], env=tiny, check=True)
    why = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    assert first == f"job {job} waits: PENDING ({why}; n4: bad memory)"
    assert wait_for_end(tiny, job) == "CANCELLED"


def test_a_job_uses_more_memory_than_it_has(script: Script, tiny: dict[str, str]) -> None:
    (job,) = submitted(script, "--", "--mem=2000", STAND_IN_FAIL="memory", STAND_IN_RANK="2")
    assert wait_for_end(tiny, job) in ("FAILED", "OUT_OF_MEMORY")
    (cause,) = wrong(script, job)
    assert "more memory" in cause and "than it was given" in cause


def test_a_job_reaches_its_time_limit(script: Script, tiny: dict[str, str]) -> None:
    (job,) = submitted(script, TIME_LIMIT="1", **LONG)
    assert wait_for_end(tiny, job) == "TIMEOUT"
    (cause,) = wrong(script, job)
    assert "the job reached its time limit" in cause


def test_a_job_is_preempted(script: Script, tiny: dict[str, str]) -> None:
    (job,) = submitted(script, "--", "--partition=all", "--no-requeue", **LONG)
    wait_for(lambda: is_training(script, job))
    urgent = ["sbatch", "--partition=urgent", "--nodes=4", "--output=/dev/null", "--wrap=true"]
    subprocess.run(urgent, env=tiny, check=True, capture_output=True)
    assert wait_for_end(tiny, job) == "PREEMPTED"
    (cause,) = wrong(script, job)
    assert "the job was preempted by another job" in cause


def test_a_job_is_cancelled(script: Script, tiny: dict[str, str]) -> None:
    (job,) = submitted(script, **LONG)
    wait_for(lambda: is_training(script, job))
    subprocess.run(["scancel", job], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "CANCELLED"
    (cause,) = wrong(script, job)
    assert "the job was cancelled" in cause


def test_a_requeued_job_continues_and_its_first_attempt_is_no_failure(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    settings = {"SAVE": str(tmp_path / "ckpt"), "TRAIN_ITERS": "12", "STAND_IN_SECONDS": "1"}
    (job,) = submitted(script, **settings)
    wait_for(lambda: is_training(script, job))
    subprocess.run(["scontrol", "requeue", job], env=tiny, check=True)
    wait_for(lambda: fact(tiny, job, "Restarts") == "1")
    # Slurm waits two minutes before it starts a requeued job.
    wait_for_state(tiny, job, "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "COMPLETED"
    shown = script("get_result.sh", job).stdout
    assert shown.startswith("no problems found\n")
    numbers = [int(number) for number in re.findall(r"^iteration (\d+) : ", shown, re.MULTILINE)]
    assert numbers == list(range(1, 13)), "no iteration is done twice"


def test_a_run_continues_without_the_node_that_was_lost(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    four = {"NNODES": "4", "NPROC_PER_NODE": "1", "PIPELINE_MP_SIZE": "4", "PARTITION": "1-1-1-1"}
    settings = four | {"DP_SIZE": "1", "SAVE": str(tmp_path / "ckpt"), "TRAIN_ITERS": "15"}
    (job,) = submitted(script, "--", "--no-requeue", **settings, STAND_IN_SECONDS="1")
    wait_for(lambda: is_training(script, job))
    subprocess.run(["scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test"], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "NODE_FAIL"
    (cause,) = wrong(script, job)
    assert "node n3 failed" in cause
    done = int(max((tmp_path / "ckpt").glob("iter_*")).name.partition("_")[2])
    assert 1 <= done < 15
    fewer = ("NNODES=3", "PIPELINE_MP_SIZE=3", "PARTITION=2-1-1")
    (again,) = submitted(script, "--resume", job, *fewer, "--", "--exclude=n3")
    assert wait_for_end(tiny, again) == "COMPLETED"
    shown = script("get_result.sh", again).stdout
    assert shown.startswith("no problems found\n") and f"iteration {done + 1} : " in shown
    assert f"iteration {done} : " not in shown and "iteration 15 : " in shown
    names = {path.name for path in (tmp_path / "log2" / again).glob("*.out")}
    assert names == {"n1.out", "n2.out", "n4.out"} and "PARTITION: 2-1-1\n" in shown


def test_nodes_without_the_container_runtime(script: Script, tiny: dict[str, str], tmp_path: Path) -> None:
    image = tmp_path / "megatron.sqsh"
    image.touch()
    container = {"CONTAINER_IMAGE_PATH": str(image), "CONTAINER_PATH": str(tmp_path / "unpacked")}
    (job,) = submitted(script, **container)
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = wrong(script, job)
    assert re.search(r"node n[12] failed first", cause)
    assert cause.endswith("enroot is not installed on this node: CONTAINER_IMAGE_PATH needs it")


def test_no_process_of_a_run_is_left(slurm: dict[str, str]) -> None:
    """Runs last in this file."""
    jobs = subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, text=True, check=True)
    assert jobs.stdout == ""
    assert os.environ.get("SLURM_CONF") != slurm["SLURM_CONF"]
