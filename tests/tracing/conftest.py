"""Processes that are traced and meet a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Test modules are imported by path, so what they share has to be found by name.
sys.path.insert(0, str(Path(__file__).parent))

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start worker.py as one process; its output comes from ``communicate``."""
    running = []

    def start(*args: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        running.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), *args],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
