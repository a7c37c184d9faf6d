"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ports

REPO_ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure() -> None:
    """No test may wait for a hub that is not there; huggingface_hub reads these when it is imported."""
    if hasattr(signal, "SIGHUP"):  # ignored under nohup, also by the processes that tests start
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("WANDB_MODE", "offline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO_ROOT


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``torchrun(2, "gpt2/train.py", "--max-steps", "3")``: run a script on N local gloo processes.

    Runs in ``tmp_path``; a script path is taken from the repository root. Returns the completed process
    with stdout and stderr together in ``stdout``. After ``timeout`` seconds the whole group is killed.
    """

    def launch(
        nproc: int,
        script: str | Path,
        *args: str | Path,
        timeout: float = 300,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += [str(REPO_ROOT / script), *map(str, args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            # torchrun passes SIGTERM on to its workers, which live in sessions of their own.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, "")

    return launch
