"""The commands in megatron_lm/README.md run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_lm.conftest import REPO_ROOT
from tests.megatron_lm.virtual_cluster import SBIN, skip_without_slurm

README = REPO_ROOT / "megatron_lm/README.md"


def blocks(kind: str) -> str:
    found = re.findall(
        rf"^```{kind}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert found
    return "\n".join(found)


def run(commands: str, tmp_path: Path, port: int) -> str:
    """The commands in one shell at the root, with what they write below ``tmp_path``."""
    commands = commands.replace(".venv/bin/python", sys.executable)
    commands = re.sub(r"\boutputs/", f"{tmp_path}/outputs/", commands)
    commands = re.sub(r"--iterations 18-20", f"--iterations 18-20 --output {tmp_path}/out.html", commands)
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"} | {
        "PATH": SBIN,
        "PYTHON": sys.executable,
        "MEGATRON_LOG_DIR": str(tmp_path / "log2"),
        "LOCAL_CLUSTER": str(tmp_path / "c"),
        "MEGATRON_MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=REPO_ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path, free_port: int) -> None:
    said = run(blocks("bash"), tmp_path, free_port)
    assert "iteration 20 : " in said and "of 2 ranks" in said and "\npipeline, ms " in said
    assert (
        said.count("#SBATCH --nodes=7") == 2
        and "#SBATCH --exclusive --mem=0" in said
        and (tmp_path / "out.html").exists()
    )


@pytest.mark.slow
def test_the_slurm_commands_run(tmp_path: Path, free_port: int) -> None:
    skip_without_slurm()
    try:
        said = run(blocks("bash slurm"), tmp_path, free_port)
    finally:
        env = os.environ | {"PATH": SBIN, "LOCAL_CLUSTER": str(tmp_path / "c")}
        subprocess.run([REPO_ROOT / "megatron_lm/slurm/local_cluster.sh", "down"], env=env, check=True)
    assert "1: COMPLETED" in said and "iteration 50 : " in said


def test_the_table_lists_the_models() -> None:
    from megatron_lm.settings import MODELS

    text = README.read_text(encoding="utf-8").replace(",", "")
    for name, size in MODELS.items():
        assert (
            f"| {name} | {size.hidden} | {size.layers} | {size.heads} | {size.sequence} | {size.vocabulary} "
            f"| {size.ffn} | {size.kv_groups} |" in text
        )


def test_the_files_exist() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|sh))`", README.read_text(encoding="utf-8")))
    for name in names:
        assert (README.parent / name).exists() or (REPO_ROOT / name).exists(), name
    assert shutil.which("bash")
