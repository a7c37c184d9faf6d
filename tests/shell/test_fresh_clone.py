"""What a newcomer does: clone, one command, traces. Installs the pinned packages, so it is slow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.shell.test_supervise import is_running, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TINY = ["--", "--model-name", "tiny", "--dataset", "sample", "--max-seq-length", "32"]


def newcomers_environment() -> dict[str, str]:
    """This machine's variables without an active environment."""
    hidden = {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        folders = environment["PATH"].split(os.pathsep)
        environment["PATH"] = os.pathsep.join(f for f in folders if not f.startswith(active))
    return environment


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    if not (repo_root / ".git").exists():
        pytest.skip("this is not a git checkout, so it cannot be cloned")
    folder = tmp_path_factory.mktemp("fresh") / "mosim-llms"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", repo_root, folder], check=True)
    return folder


def run(clone: Path, *command: str, timeout: float = 1500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=clone, env=newcomers_environment(), capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def first_run(clone: Path) -> subprocess.CompletedProcess[str]:
    """The one command, which also makes the environment that the other tests use."""
    return run(clone, "./run_gpt2_quick.sh", "2", "4", *TINY)


def test_one_command_on_a_fresh_clone_gives_valid_traces(
    clone: Path, first_run: subprocess.CompletedProcess[str]
) -> None:
    result = first_run
    assert result.returncode == 0, result.stdout + result.stderr
    outputs = {path.name for path in (clone / "outputs").iterdir()}
    name = "gpt2_2gpu_quick_trace"
    assert {f"{name}.0.et", f"{name}.1.et", f"{name}.et", f"{name}_manifest.json"} <= outputs
    assert re.search(rf"^{re.escape(name)}\.1\.et .* ok$", result.stdout, re.MULTILINE)
    python = str(clone / ".venv" / "bin" / "python")
    code = "import torch; print(torch.__version__)"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.startswith("2.13.0")

    status = run(clone, "git", "status", "--porcelain")
    assert status.stdout == "", "what a run writes must be ignored by git"


def test_a_second_run_reuses_the_environment_and_starts_in_seconds(
    clone: Path, first_run: subprocess.CompletedProcess[str]
) -> None:
    assert first_run.returncode == 0, "the first run must have passed"
    log = (clone / ".venv" / "install.log").stat().st_mtime_ns
    began = time.monotonic()
    result = run(clone, "bash", "-c", ". scripts/common.sh; use_environment run; echo $PYTHON")
    assert time.monotonic() - began < 5
    assert result.stdout.strip() == str(clone / ".venv" / "bin" / "python")
    assert (clone / ".venv" / "install.log").stat().st_mtime_ns == log


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("first_run")
def test_ctrl_c_in_the_middle_of_training_leaves_no_process(clone: Path, number: int, status: int) -> None:
    process = subprocess.Popen(
        ["./run_bert_quick.sh", "2", "100000", *TINY],
        cwd=clone,
        env=newcomers_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.search(r"step [3-9]/", line):
                break
        mine = workers(clone)
        assert len(mine) >= 3, "".join(lines)  # torchrun and two ranks
        os.killpg(process.pid, number)
        process.communicate(timeout=60)
        assert process.returncode == status
        wait_for(lambda: not any(map(is_running, mine)), 10)
    finally:
        process.kill()  # what it started ends when it is gone


def workers(clone: Path) -> set[int]:
    """Running processes that were started with the clone's interpreter on its train.py."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True).stdout
    rows = (line.split(None, 1) for line in listing.splitlines())
    return {int(pid) for pid, words in rows if f"{clone}/bert/train.py" in words}
