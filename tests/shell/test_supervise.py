"""scripts/supervise.py: nothing that a script started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# A launcher like torchrun: it starts a worker in a session of its own, passes SIGTERM on, and waits.
LAUNCHER = """
import signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(str(worker.pid))
import os; os.replace(sys.argv[1] + ".part", sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
sys.exit(worker.wait() and 1)
"""
SLEEP = "import time; time.sleep(300)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


def is_running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


@pytest.fixture
def script(tmp_path: Path, repo_root: Path) -> Callable[..., tuple[subprocess.Popen, int, int]]:
    """``script(worker code)``: a bash script that supervises a launcher; also launcher's and worker's pid."""
    started = []

    def start(worker: str, grace: float = 20) -> tuple[subprocess.Popen, int, int]:
        pid_file = tmp_path / "worker.pid"
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        (tmp_path / "job.sh").write_text(
            f'. "{repo_root}/scripts/common.sh"\nPYTHON="{sys.executable}"\nsupervise "$PYTHON" "$@"\n'
        )
        process = subprocess.Popen(
            ["bash", tmp_path / "job.sh", tmp_path / "launcher.py", pid_file, worker],
            env={**os.environ, "MOSIM_GRACE_SECONDS": str(grace)},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        wait_for(pid_file.exists)
        worker_pid = int(pid_file.read_text())
        parent = subprocess.run(["ps", "-o", "ppid=", "-p", str(worker_pid)], capture_output=True, text=True)
        launcher_pid = int(parent.stdout)
        started.extend([process.pid, launcher_pid, worker_pid])
        return process, launcher_pid, worker_pid

    yield start
    for pid in started:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_script_ends_everything(script: Callable, number: int, status: int) -> None:
    process, launcher, worker = script(SLEEP)
    process.send_signal(number)
    assert process.wait(30) == status
    assert not is_running(launcher) and not is_running(worker)


def test_ctrl_c_reaches_the_whole_group_and_ends_everything(script: Callable) -> None:
    process, launcher, worker = script(SLEEP)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert b"stopped" in process.stderr.read()
    assert not is_running(launcher) and not is_running(worker)


def test_kill_9_of_the_script_ends_everything(script: Callable) -> None:
    process, launcher, worker = script(SLEEP)
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(launcher) and not is_running(worker))


def test_kill_9_of_torchrun_leaves_no_worker(script: Callable) -> None:
    process, launcher, worker = script(SLEEP)
    time.sleep(3)  # one look at the family must have been taken
    os.kill(launcher, signal.SIGKILL)
    assert process.wait(30) == 137
    assert not is_running(worker)


def test_a_worker_that_will_not_end_is_killed_after_the_grace_period(script: Callable) -> None:
    process, launcher, worker = script(STUBBORN, grace=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    wait_for(lambda: not is_running(launcher) and not is_running(worker), 5)


@pytest.mark.parametrize("code, status", [("", 0), ("raise SystemExit(7)", 7)])
def test_the_commands_status_is_kept(repo_root: Path, code: str, status: int) -> None:
    supervise = repo_root / "scripts" / "supervise.py"
    assert subprocess.run([sys.executable, supervise, sys.executable, "-c", code]).returncode == status


def test_a_command_that_is_not_there_is_one_sentence(repo_root: Path) -> None:
    supervise = repo_root / "scripts" / "supervise.py"
    result = subprocess.run([sys.executable, supervise, "/no/such"], capture_output=True, text=True)
    assert result.returncode == 127
    assert result.stderr == "/no/such cannot be started: No such file or directory\n"
