"""On a real Slurm of two virtual nodes, the real training going wrong without an exception of its own: what
get_result.sh says while it runs and after.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lm import saved
from tests.megatron_lm import virtual_cluster
from tests.megatron_lm.conftest import REPO_ROOT, Script, as_environment
from tests.megatron_lm.processes import processes_with, wait_for
from tests.megatron_lm.virtual_cluster import wait_for_end

pytestmark = pytest.mark.slow
pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")
TWO_NODES = {"NNODES": "2", "NPROC_PER_NODE": "2", "DP_SIZE": "2", "MOSIM_GRACE_SECONDS": "5"}
FAULTY = Path(__file__).with_name("faulty_training.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with virtual_cluster.cluster(2, tmp_path_factory.mktemp("slurm") / "c") as env:
        yield env


@pytest.fixture
def tiny(tiny: dict[str, str], slurm: dict[str, str]) -> dict[str, str]:
    """As in conftest.py, on two nodes of two ranks."""
    return tiny | {name: slurm[name] for name in ("PATH", "SLURM_CONF")} | as_environment(TWO_NODES)


@pytest.fixture
def checkout(checkout: Path) -> Path:
    """As in conftest.py, with the real training in which one rank fails."""
    run = f"import runpy\n\nrunpy.run_path({str(FAULTY)!r}, run_name='__main__')\n"
    (checkout / "megatron_lm/_00_pretrain_gpt.py").write_text(run)
    return checkout


def submitted(script: Script, **settings: str) -> str:
    done = script("_03_submit.sh", **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def problems(script: Script, job: str) -> list[str]:
    lines = script("get_result.sh", job).stdout.splitlines()
    return [line for line in lines if line.startswith(("WRONG: ", "WARNING: "))]


def wait_for_problem(script: Script, job: str, text: str, seconds: float = 300) -> str:
    """Wait until a problem has this text, as a regular expression; the problem."""
    found: list[str] = []
    wait_for(
        lambda: found.extend(line for line in problems(script, job) if re.search(text, line)) or found,
        seconds,
    )
    return found[0]


def test_a_loss_that_is_not_finite_is_a_problem_at_once_and_ends_the_run(
    script: Script, tiny: dict[str, str]
) -> None:
    settings = {"FAULT": "nan outputs", "FAULT_RANK": "3", "FAULT_FROM": "10", "LOG_INTERVAL": "50"}
    job = submitted(script, **settings, TRAIN_ITERS="700")
    what = "iteration 10 is not finite: loss nan, grad norm nan, first in the outputs of rank 3 on n2"
    assert wait_for_problem(script, job, "not finite") == f"WRONG: {what}"
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = (line for line in problems(script, job) if "failed first" in line)
    assert cause.startswith("WRONG: rank 3 on n2 failed first at ")
    assert "since iteration 10" in cause and "50 times in a row (STOP_ON_NAN)" in cause


def test_a_loss_that_diverges_is_a_warning(script: Script, tiny: dict[str, str]) -> None:
    settings = {"LR": "0.9", "LR_WARMUP_FRACTION": "0.000005", "TRAIN_ITERS": "25", "PRECISION": "fp32"}
    job = submitted(script, FAULT="none", **settings)
    assert wait_for_end(tiny, job) == "COMPLETED"
    (warning,) = problems(script, job)
    assert re.match(r"WARNING: the loss diverges from iteration \d+ on: up to \d+", warning)


def test_a_stopped_rank_is_named_while_the_others_wait(script: Script, tiny: dict[str, str]) -> None:
    job = submitted(script, FAULT="stop", FAULT_RANK="3", FAULT_FROM="5", TRAIN_ITERS="1000")
    said = wait_for_problem(script, job, "no progress for .*waiting for")
    who = r"rank 3 on n2 \(\S+, pid \d+, last seen at step [45], \w+\), which shows no sign of life"
    assert re.search(rf"no progress for \d+ s, since iteration 4: waiting for {who}", said), said
    subprocess.run(["scancel", job], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "CANCELLED"


def test_a_rank_that_hangs_is_named_and_shows_its_stack(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    job = submitted(script, FAULT="sleep", FAULT_RANK="0", FAULT_FROM="5", TRAIN_ITERS="1000")
    said = wait_for_problem(script, job, "no progress for .*waiting for")
    assert re.search(r"waiting for rank 0 on n1 \(\S+, pid \d+, last seen at step 5, forward\)$", said), said
    stack = (tmp_path / "log2" / job / "n1.err").read_text()
    assert "most recent call first" in stack and "in hook" in stack
    subprocess.run(["scancel", job], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "CANCELLED"


def test_a_rank_that_exits_with_0_in_start_up_is_named(script: Script, tiny: dict[str, str]) -> None:
    job = submitted(script, FAULT="exit 0", FAULT_RANK="3")
    said = wait_for_problem(script, job, "waiting for")
    assert said.endswith(" s in set-up: waiting for rank 3 on n2, which has not appeared")
    subprocess.run(["scancel", job], env=tiny, check=True)
    assert wait_for_end(tiny, job) == "CANCELLED"


def test_a_rank_that_a_signal_ends_in_start_up(script: Script, tiny: dict[str, str]) -> None:
    job = submitted(script, FAULT="sigterm", FAULT_RANK="1")
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = (line for line in problems(script, job) if "failed first" in line)
    assert re.fullmatch(r"WRONG: rank 1 on n1 failed first at .*: it was ended by SIGTERM", cause), cause


def test_a_folder_for_checkpoints_that_can_not_be_written(script: Script, tiny: dict[str, str]) -> None:
    job = submitted(script, FAULT="none", SAVE="/proc/nope")
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = (line for line in problems(script, job) if "failed first" in line)
    assert re.match(
        r"WRONG: rank [02] on n[12] failed first at .*SAVE=/proc/nope: can't be written to", cause
    )
    assert "no iteration logged yet" in script("get_result.sh", job).stdout


def preprocess(tiny: dict[str, str], tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Make a dataset from the sample on a node."""
    command = [sys.executable, str(REPO_ROOT / "megatron_lm/preprocess_data.py")]
    command += [
        str(REPO_ROOT / "data/squad_sample.json"),
        "--model",
        "tiny",
        "--output",
        str(tmp_path / "made"),
    ]
    return subprocess.run(
        ["srun", "-n1", *command, *more], env=tiny, capture_output=True, text=True, timeout=120
    )


def test_a_vocabulary_that_is_too_small_for_the_data(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    done = preprocess(tiny, tmp_path)
    assert done.returncode == 0, done.stderr
    job = submitted(script, FAULT="none", DATA_PATH=str(tmp_path / "made"), VOCAB_SIZE="2000")
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = (line for line in problems(script, job) if "failed first" in line)
    largest = re.search(r"has token (\d+), and VOCAB_SIZE is 2000: set VOCAB_SIZE to at least (\d+)", cause)
    assert largest and int(largest[2]) == int(largest[1]) + 1 <= 2920, cause
    assert "no iteration logged yet" in script("get_result.sh", job).stdout


def test_a_wrong_path_of_the_tokenizer(tiny: dict[str, str], tmp_path: Path) -> None:
    done = preprocess(tiny, tmp_path, "--tokenizer", "/nowhere/tokenizer.json")
    (said, *slurm) = done.stderr.splitlines()
    assert done.returncode != 0 and all(line.startswith("srun: error: ") for line in slurm), done.stderr
    assert said == (
        "error: --tokenizer /nowhere/tokenizer.json: no such file: /nowhere/tokenizer.json; "
        "give a tokenizer.json or a folder that has one"
    )
    assert not list(tmp_path.glob("made*"))


def test_a_preempted_run_continues_and_passes_over_damaged_checkpoints(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    """Preempted, it saves once more; then a bit of that checkpoint flips, and the one before is cut off."""
    settings = {"SAVE": str(tmp_path / "ckpt"), "SAVE_INTERVAL": "2", "TRAIN_ITERS": "5000"}
    done = script("_03_submit.sh", "--", "--partition=all", "--no-requeue", FAULT="none", **settings)
    job = done.stdout.strip()
    wait_for(lambda: "iteration 5 :" in script("get_result.sh", job).stdout, 300)
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true"]
    subprocess.run(urgent, env=tiny, check=True, capture_output=True)
    assert wait_for_end(tiny, job) == "PREEMPTED"
    assert any("preempted" in line for line in problems(script, job))
    newest, before, good = saved.newest_first(tmp_path / "ckpt")[:3]
    for folder in (newest, before, good):
        assert saved.damage(folder) == ""
    (part,) = newest.glob("stage001*")
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    part.write_bytes(content)
    (part,) = before.glob("stage000*")
    part.write_bytes(part.read_bytes()[:-1])
    number = int(good.name.partition("_")[2])
    more = script("_03_submit.sh", "--resume", job, f"TRAIN_ITERS={number + 3}", FAULT="none")
    again = more.stdout.strip()
    assert f"checkpoint {newest} is damaged: " in more.stderr and f"continuing from {good}\n" in more.stderr
    assert wait_for_end(tiny, again) == "COMPLETED", more.stderr
    said = script("get_result.sh", again).stdout
    assert f"iteration {number + 1} : " in said and f"iteration {number} : " not in said
    log = (tmp_path / "log2" / again / "n1.err").read_text()
    assert f"checkpoint {newest} is damaged: {next(newest.glob('stage001*')).name} has changed" in log
    assert f"checkpoint {before} is damaged: {part.name} has " in log
    assert f"continuing from {good}, the newest good checkpoint" in log


def test_a_launcher_that_is_killed_is_the_first_cause(script: Script, tiny: dict[str, str]) -> None:
    job = submitted(script, FAULT="none", TRAIN_ITERS="5000")
    wait_for(lambda: "iteration 3 :" in script("get_result.sh", job).stdout, 300)
    (launcher,) = (
        pid
        for pid in processes_with("torch.distributed.run")
        if "--node_rank\0001\0" in Path(f"/proc/{pid}/cmdline").read_text() and not _is_supervisor(pid)
    )
    os.kill(launcher, signal.SIGKILL)
    assert wait_for_end(tiny, job) == "FAILED"
    (cause,) = (line for line in problems(script, job) if "failed first" in line)
    assert re.match(
        r"WRONG: node n2 failed first at .*: its launcher, torchrun: it was killed \(SIGKILL\)", cause
    )


def _is_supervisor(pid: int) -> bool:
    return "supervise.py" in Path(f"/proc/{pid}/cmdline").read_text()
