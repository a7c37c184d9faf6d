"""A checkout whose training is a stand-in, and a way to call its scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lm.settings import NAMES, PREFIX

REPO_ROOT = Path(__file__).resolve().parents[2]
Script = Callable[..., subprocess.CompletedProcess[str]]


def as_environment(settings: dict[str, str]) -> dict[str, str]:
    """Variables by name: settings get the prefix under which the scripts read them."""
    return {PREFIX + name if name in NAMES else name: value for name, value in settings.items()}


def put_tool(folder: Path, name: str, body: str) -> None:
    """A program ``name`` in ``folder``, of these lines of bash."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}")
    (folder / name).chmod(0o755)


@pytest.fixture
def tiny(tmp_path: Path, free_port: int) -> dict[str, str]:
    """The environment of a run of the tiny model that logs every iteration under ``tmp_path``."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "SLURM_CONF") if name in os.environ}
    return keep | as_environment(
        {
            "MODEL": "tiny",
            "TRAIN_ITERS": "4",
            "LOG_INTERVAL": "1",
            "LOG_DIR": str(tmp_path / "log2"),
            "MASTER_PORT": str(free_port),
            "CPUS_PER_TASK": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHON": sys.executable,
        }
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of megatron_lm/ with the stand-in as its training script, beside the real rest."""
    root = tmp_path / "repo"
    shutil.copytree(
        REPO_ROOT / "megatron_lm", root / "megatron_lm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("scripts", "utils", "tests", "fasop", "chakra_et"):
        (root / name).symlink_to(REPO_ROOT / name)
    stand_in = (Path(__file__).parent / "stand_in_training.py").read_text()
    on_path = f"import sys\nsys.path.insert(0, {str(root)!r})\n"
    future = "from __future__ import annotations\n"
    (root / "megatron_lm/_00_pretrain_gpt.py").write_text(stand_in.replace(future, future + on_path))
    return root


@pytest.fixture
def script(checkout: Path, tiny: dict[str, str]) -> Script:
    """``script("_03_submit.sh", "--local", TRAIN_ITERS="2")``: run a script of the checkout to its end."""

    def call(name: str, *args: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(checkout / "megatron_lm" / name), *args],
            env=tiny | as_environment(env),
            cwd=checkout.parent,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call
