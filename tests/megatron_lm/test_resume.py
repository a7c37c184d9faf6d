"""_03_submit.sh --resume: a run continues from its last good checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_lm.settings.conf import complete, write_lines
from tests.megatron_lm.conftest import Script
from tests.megatron_lm.written_logs import write_node

THREE = {"MODEL": "tiny", "NNODES": "3", "NPROC_PER_NODE": "1", "PIPELINE_MP_SIZE": "3", "PARTITION": "2-1-1"}


def write_run(
    tmp_path: Path, nodes: dict[str, str], done: int = 20, job: str = "12", **settings: str
) -> None:
    """A run of ``nodes`` (name → GPU line) that was stopped, with a checkpoint after ``done`` iterations."""
    given = THREE | {"SAVE": str(tmp_path / "ckpt"), "LOG_DIR": str(tmp_path / "log2")} | settings
    values = complete(given)
    folder = tmp_path / "log2" / job
    for rank, (name, gpu) in enumerate(nodes.items()):
        out = f"NODE_RANK: {rank}\nNPROC_PER_NODE: 1\n\n"
        write_node(folder, name, out=out, err="", gpu=f"{gpu}\n", state="exit 143 1700000000\n")
    (folder / "settings").write_text(write_lines(values))
    (folder / "jobs").write_text(f"{job}\n")
    checkpoint = tmp_path / "ckpt" / f"iter_{done:07d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(json.dumps({"iteration": done}))


def exported(text: str) -> dict[str, str]:
    found = re.findall(r"^export MEGATRON_(\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip("'") for name, value in found}


NO_GPU = "no GPU: not installed"


def test_a_run_continues_on_as_many_nodes(script: Script, tmp_path: Path) -> None:
    write_run(tmp_path, {"n1": NO_GPU, "n2": NO_GPU, "n3": NO_GPU})
    done = script("_03_submit.sh", "--resume", "12", "--dry-run", "TRAIN_ITERS=80", MODEL="xl")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"job 12: continuing from {tmp_path}/ckpt/iter_0000020\n"
    values = exported(done.stdout)
    wanted = {"MODEL": "tiny", "PARTITION": "2-1-1", "LOAD": f"{tmp_path}/ckpt", "TRAIN_ITERS": "80"}
    assert values.items() >= wanted.items() and "#SBATCH --nodes=3\n" in done.stdout


def test_a_run_continues_on_fewer_nodes_with_the_settings_of_a_plan(script: Script, tmp_path: Path) -> None:
    write_run(tmp_path, {"n1": NO_GPU, "n2": NO_GPU, "n3": NO_GPU})
    plan = tmp_path / "plan.conf"
    plan.write_text("NNODES=2\nPIPELINE_MP_SIZE=2\nPARTITION=3-1\n")
    words = ("--resume", "12", "--settings", str(plan), "--dry-run", "TRAIN_ITERS=80", "--", "--exclude=n2")
    done = script("_03_submit.sh", *words)
    assert done.returncode == 0, done.stderr
    wanted = {"NNODES": "2", "WORLD_SIZE": "2", "PARTITION": "3-1", "LOAD": f"{tmp_path}/ckpt"}
    assert exported(done.stdout).items() >= (wanted | {"TRAIN_ITERS": "80"}).items()
    assert "#SBATCH --exclude=n2\n" in done.stdout and "#SBATCH --nodes=2\n" in done.stdout


def test_a_checkpoint_that_is_cut_off_is_passed_over(script: Script, tmp_path: Path) -> None:
    write_run(tmp_path, {"n1": NO_GPU})
    cut = tmp_path / "ckpt" / "iter_0000030"
    cut.mkdir()
    (cut / "stage000_tensor000.pt").write_bytes(b"12345")
    files = {"stage000_tensor000.pt": [6_000, "0" * 64]}
    (cut / "meta.json").write_text(json.dumps({"iteration": 30, "files": files}))
    done = script("_03_submit.sh", "--resume", "12", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"job 12: checkpoint {cut} is damaged: stage000_tensor000.pt has 5 bytes instead of 6,000",
        f"job 12: continuing from {tmp_path}/ckpt/iter_0000020",
    ]


def test_a_run_that_is_not_known_can_not_be_continued(script: Script) -> None:
    done = script("_03_submit.sh", "--resume", "99", "--dry-run")
    assert done.returncode == 2 and "no logs of job 99" in done.stderr and not done.stdout


def test_a_run_without_checkpoints_settings_or_iterations_left_is_refused(
    script: Script, tmp_path: Path
) -> None:
    write_run(tmp_path, {"n1": NO_GPU}, SAVE="")
    done = script("_03_submit.sh", "--resume", "12", "--dry-run")
    assert done.returncode == 2 and "wrote no checkpoints, as SAVE was empty" in done.stderr
    write_run(tmp_path, {"n1": NO_GPU}, done=50)
    done = script("_03_submit.sh", "--resume", "12", "--dry-run")
    assert done.returncode == 2 and "has done 50 iterations of TRAIN_ITERS=50" in done.stderr
    assert script("_03_submit.sh", "--resume", "12", "--dry-run", "TRAIN_ITERS=60").returncode == 0
    (tmp_path / "log2/12/settings").unlink()
    done = script("_03_submit.sh", "--resume", "12", "--dry-run")
    assert done.returncode == 2 and "its settings were not kept" in done.stderr
