"""scripts/convert_array.sbatch: the parts of an array, then the run as a whole."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "convert_array.sbatch"
CAPTURES = ROOT / "tests" / "fixtures" / "captures" / "torch-2.13"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for path in CAPTURES.glob("tiny_2gpu*"):
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.name.endswith("manifest.json"):
            shutil.copy(path, folder)
    return folder


def job(folder: Path, **slurm: str) -> subprocess.CompletedProcess[str]:
    """One job as Slurm would start it; ``slurm``: its variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"DIR": str(folder), "NAME": "tiny_2gpu", "PYTHON": sys.executable}
    environment |= {"SLURM_SUBMIT_DIR": str(ROOT)} | slurm
    return subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env=environment)


def test_the_parts_of_an_array_and_the_job_after_them(folder: Path, tmp_path: Path) -> None:
    for task in ("0", "1"):
        done = job(folder, SLURM_JOB_ID="7", SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_COUNT="2")
        assert done.returncode == 0, done.stderr
        assert (folder / f"tiny_2gpu.{task}.et").exists()
        assert not json.loads((folder / "tiny_2gpu_conversion.json").read_text())["complete"]
    done = job(folder, SLURM_JOB_ID="8")
    assert done.returncode == 0, done.stderr
    assert "no files written" in done.stdout and "2 kept" in done.stdout
    # The last job adds what only all ranks together show, so that the files are those of one conversion.
    whole = tmp_path / "whole"
    shutil.copytree(
        folder, whole, ignore=shutil.ignore_patterns("*.et", "*_conversion.json", "*_groups.json")
    )
    assert main(["convert", str(whole)]) == 0
    names = ["tiny_2gpu.0.et", "tiny_2gpu.1.et", "tiny_2gpu_comm_groups.json"]
    assert [(folder / name).read_bytes() for name in names] == [(whole / name).read_bytes() for name in names]
    assert (folder / "tiny_2gpu_conversion.json").exists()


def test_a_task_that_was_lost_is_made_good_by_the_last_job(folder: Path) -> None:
    job(folder, SLURM_JOB_ID="7", SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_TASK_COUNT="2")
    assert job(folder, SLURM_JOB_ID="8").returncode == 0
    assert (folder / "tiny_2gpu.0.et").exists()


def test_without_a_folder_it_says_what_to_set() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, env={"PATH": os.defpath})
    assert done.returncode != 0 and "set DIR to the folder with the traces" in done.stderr
