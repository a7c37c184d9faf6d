"""_03_submit.sh --resume: a run continues from its last checkpoint, on all nodes or on those that FASOP
plans for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_lm.logs import gpus
from megatron_lm.settings.conf import complete, write_lines
from tests.megatron_lm.conftest import Script
from tests.megatron_lm.written_logs import write_node

A100 = gpus.format_line(gpus.Gpu(0, "NVIDIA A100-SXM4-40GB", 40, 99, 30000, 40960, ()))
A10 = gpus.format_line(gpus.Gpu(0, "NVIDIA A10", 40, 99, 20000, 22731, ()))
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


def test_without_a_node_fasop_plans_the_others(script: Script, tmp_path: Path) -> None:
    write_run(tmp_path, {"n1": NO_GPU, "n2": NO_GPU, "n3": NO_GPU})
    done = script("_03_submit.sh", "--resume", "12", "--without", "n2", "--dry-run")
    assert done.returncode == 0, done.stderr
    values = exported(done.stdout)
    assert values["NODELIST"] == "n1,n3" and values["NNODES"] == values["WORLD_SIZE"] == "2"
    assert "#SBATCH --exclude=n2\n" in done.stdout and "#SBATCH --nodelist=n1,n3\n" in done.stdout
    plan = json.loads((tmp_path / "log2/12/plan.json").read_text())["plans"][0]
    assert (plan["tp"], plan["mbs"], plan["dp"] * plan["pp"]) == (1, 1, 2)
    layers = [int(part) for part in values["PARTITION"].split("-")]
    assert sum(layers) == 4 and len(layers) == plan["pp"] == int(values["PIPELINE_MP_SIZE"])
    assert sum(plan["partition"]) == 6 and "(without n2)" in done.stderr
    assert values["LOAD"] == values["SAVE"] == f"{tmp_path}/ckpt"


def test_a_node_that_finds_no_work_is_left_idle(script: Script, tmp_path: Path) -> None:
    """Of 6 ranks 5 remain, whose number divides neither 4 layers nor 8 samples: 4 go on."""
    nodes = {f"n{number}": NO_GPU for number in range(1, 7)}
    write_run(tmp_path, nodes, NNODES="6", PIPELINE_MP_SIZE="3", DP_SIZE="2")
    done = script("_03_submit.sh", "--resume", "12", "--without", "n6", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert exported(done.stdout)["NODELIST"] == "n1,n2,n3,n4" and "(without n5, n6)" in done.stderr


def test_slower_gpus_get_fewer_layers(script: Script, tmp_path: Path) -> None:
    """Two jobs: one A100 node and three A10 nodes, of which one is lost. All stay in their jobs' queues."""
    write_run(
        tmp_path,
        {"a1": A100, "b1": A10, "b2": A10, "b3": A10},
        **{"MODEL": "small", "NNODES": "4", "NPROC_PER_NODE": "1", "PIPELINE_MP_SIZE": "4"},
        **{"PARTITION": "9-5-5-5", "DP_SIZE": "1", "HOMOGENEOUS_CLUSTER": "false", "MASTER_QUEUE": "fast"},
        **{"SLAVE_QUEUE": "slow", "MASTER_GRES": "gpu:a100:1", "SLAVE_GRES": "gpu:a10:1"},
    )
    folder = tmp_path / "log2"
    (folder / "13").mkdir()
    for name in ("b1", "b2", "b3"):
        for path in (folder / "12").glob(f"{name}.*"):
            path.rename(folder / "13" / path.name)
    (folder / "12/jobs").write_text("12\n13\n")
    (folder / "13/jobs").write_text("12\n13\n")
    done = script("_03_submit.sh", "--resume", "13", "--without", "b2", "--dry-run")
    assert done.returncode == 0, done.stderr
    values = exported(done.stdout)
    order = values["NODELIST"].split(",")
    assert set(order) == {"a1", "b1", "b3"}
    layers = dict(zip(order, map(int, values["PARTITION"].split("-")), strict=True))
    # The A100 has 2.5 times the speed; the last stage has the head besides.
    assert layers["a1"] > 1.5 * max(layers["b1"], layers["b3"])
    first = "fast" if order[0] == "a1" else "slow"
    assert (
        values["MASTER_QUEUE"] == first and values["SLAVE_QUEUE"] == {"fast": "slow", "slow": "fast"}[first]
    )
    assert values["MASTER_NNODES"] == ("1" if first == "fast" else "2")
    assert values["MASTER_GRES"] == ("gpu:a100:1" if first == "fast" else "gpu:a10:1")


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


REFUSED = [
    (["--resume", "99"], "no logs of job 99"),
    (["--without", "n2"], "--without: needs --resume JOBID"),
    (["--resume", "12", "--without", "n9"], "--without n9: the run's nodes are n1, n2, n3"),
    (["--resume", "12", "--without", "n1,n2,n3"], "none is left"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_can_not_be_continued_is_one_sentence(
    script: Script, tmp_path: Path, words: list[str], sentence: str
) -> None:
    write_run(tmp_path, {"n1": NO_GPU, "n2": NO_GPU, "n3": NO_GPU})
    done = script("_03_submit.sh", *words, "--dry-run")
    assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1] and not done.stdout


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
