"""get_result.sh on runs that are written down here: their state, what is wrong with them, their speed."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from megatron_lm.__main__ import main as command
from megatron_lm.logs import records, runs
from megatron_lm.plan_settings import model_of
from megatron_lm.results import get_result, view
from megatron_lm.settings import MODELS, Size
from tests.megatron_lm import written_logs
from tests.megatron_lm.conftest import Script
from tests.megatron_lm.written_logs import simple_iteration, write_node
from tests.terminal import on_a_terminal

SETTINGS = (
    "NODE_RANK: {rank}\nMODEL: small\nNPROC_PER_NODE: 4\nWORLD_SIZE: 8\nGLOBAL_BATCH_SIZE: 64\n"
    "PROFILE: false\nstart\n"
)
BUSY = records.Gpu(0, "NVIDIA A10", 60, 99, 20000, 22731)
IDLE = records.Gpu(0, "NVIDIA A10", 30, 0, 5, 22731)


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_LOG_DIR", str(tmp_path / "log2"))
    return tmp_path / "log2"


def write_run(folder: Path, job: str, name: str, rank: int, gpu: records.Gpu = BUSY, **kinds: str) -> None:
    said = {
        "out": SETTINGS.format(rank=rank),
        "err": "",
        "gpu": written_logs.gpu_line(gpu) + "\n",
        "state": f"running {os.getpid()}\n",
    }
    write_node(
        folder / job, name, **(said | {kind: said.get(kind, "") + text for kind, text in kinds.items()})
    )


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert get_result.main(list(args)) == 0
    return capsys.readouterr().out.splitlines()


ITERATIONS = "".join(
    written_logs.iteration_line(simple_iteration(n, 4.5 if n == 1 else 1.4)) for n in range(1, 11)
)


def test_the_sections_stand_in_their_order_and_each_iteration_is_there(log_dir: Path, capsys) -> None:
    write_run(log_dir, "local-7", "n1", 0)
    write_run(log_dir, "local-7", "n2", 1, out=ITERATIONS)
    said = shown(capsys, "local-7")
    assert said[0] == "no problems found"
    assert [line for line in said if line.startswith("*****")] == [
        "******************* last output message *******************",
        "******************* last error message *******************",
        "******************* last gpu message *******************",
        "******************* job info local-7 *******************",
        "******************* iteration time *******************",
    ]
    assert "local-7/n2: 17 lines" in said and written_logs.gpu_line(BUSY) in "\n".join(said)
    assert "NODE_RANK: 0 (n1), 1 (n2)" in said and "PROFILE: false" in said
    # As the scripts that these stand in for print it.
    assert "items: n1.err n1.gpu n1.out n2.err n2.gpu n2.out" in said and said[-1] == "debug?  : 0"
    assert [line for line in said if line.startswith("iteration ")][1:3] == [
        "iteration 2 : 1.4000 s",
        "iteration 3 : 1.4000 s",
    ]
    assert "throughput: 45.71 samples/s" in said  # 64 / 1.4
    assert "time left: 0 min 56 s for 40 iterations" in said  # 40 × 1.4 s


def test_nodes_stand_in_the_order_of_their_ranks(log_dir: Path) -> None:
    for rank, name in enumerate(["n10", "n9", "n2"]):
        write_run(log_dir, "5", name, rank)
    assert [node.name for node in runs.find(("5",), log_dir).nodes] == ["n10", "n9", "n2"]


@pytest.mark.parametrize("asked", [("11",), ("12",), ("11", "12"), ("12", "11")])
def test_two_jobs_of_a_heterogeneous_run_show_as_one(log_dir: Path, capsys, asked: tuple[str, ...]) -> None:
    write_run(log_dir, "11", "a1", 0)
    write_run(log_dir, "12", "b1", 1, out=ITERATIONS)
    for job in ("11", "12"):
        (log_dir / job / "jobs").write_text("11\n12\n")
    said = shown(capsys, *asked)
    assert "******************* job info 11 12 *******************" in said
    assert "NODE_RANK: 0 (a1), 1 (b1)" in said and "iteration 10 : 1.4000 s" in said


def test_two_jobs_that_nobody_noted_show_as_one_when_both_are_named(log_dir: Path, capsys) -> None:
    write_run(log_dir, "11", "a1", 0)
    write_run(log_dir, "12", "b1", 1)
    assert "NODE_RANK: 0 (a1), 1 (b1)" in shown(capsys, "11", "12")


FAILED_RANK = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/x/train.py", line 1, in <module>\n'
    "[rank1]: RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    "E1121 10:00:05.000000 4 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) "
    "local_rank: 1 (pid: 5) of binary: /opt/venv/bin/python\n"
)


def test_problems_come_first(log_dir: Path, capsys) -> None:
    write_run(log_dir, "local-7", "n1", 0, gpu=IDLE, err=FAILED_RANK)
    (log_dir / "local-7/settings").write_text("GLOBAL_BATCH_SIZE=32\nPRECISION=fp16\nMODEL=small\n")
    said = shown(capsys, "local-7")
    year = time.localtime().tm_year
    cause = f"rank 1 on n1 failed first at {year}-11-21 10:00:05: its PyTorch was not built for this GPU"
    assert said[:3] == [
        "WRONG: no process uses the GPUs of n1",
        f"WRONG: {cause}",
        "WRONG: GLOBAL_BATCH_SIZE is '64' on n1, the run was submitted with '32'",
    ]
    at = said.index("******************* last error message *******************")
    assert said[at + 1 : at + 5] == [
        f"first failure: {cause}",
        *(f"  {line}" for line in FAILED_RANK.split("\n")[:3]),
    ]
    (log_dir / "local-7/n1.state").write_text("exit 1\n")
    assert shown(capsys, "local-7")[0] == "WRONG: job local-7 is not running: FAILED (exit status 1)"
    (log_dir / "local-7/n1.state").write_text("exit 143 1700000000\n")
    assert shown(capsys, "local-7")[0] == "WRONG: job local-7 is not running: CANCELLED (exit status 143)"


def test_a_lost_node_is_named(log_dir: Path, capsys) -> None:
    write_run(log_dir, "12", "n1", 0)
    write_run(log_dir, "12", "n7", 1)
    for name, note in (("n1", "exit 143 1700000000\n"), ("n7", "running 99\n")):
        (log_dir / f"12/{name}.state").write_text(note)
    (log_dir / "12.sbatch.out").write_text("srun: error: Node failure on n7\n")
    assert "WRONG: node n7 failed" in shown(capsys, "12")


def test_a_run_that_was_killed_is_not_called_running(log_dir: Path, capsys) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_run(log_dir, "local-7", "n1", 0)
    (log_dir / "local-7/n1.state").write_text(f"running {gone.pid}\n")
    assert shown(capsys, "local-7")[0] == "WRONG: job local-7 is not running: FAILED (killed)"


def test_idle_gpus_of_a_run_that_has_ended_are_not_wrong(log_dir: Path, capsys) -> None:
    write_run(log_dir, "local-7", "n1", 0, gpu=IDLE, out=ITERATIONS)
    (log_dir / "local-7/n1.state").write_text("exit 0\n")
    said = shown(capsys, "local-7")
    assert said[0] == "no problems found" and not any(line.startswith("time left") for line in said)


def operations(size: Size, batch: int) -> float:
    """Of an iteration."""
    return model_of(size, "", batch).flops_per_token * size.sequence * batch


def test_operations_are_those_of_the_matrix_products() -> None:
    """Counted one by one, 2·m·n·k each, forward once and backward twice; and the published formula."""
    size, batch = MODELS["small"], 64
    h, s, v = size.hidden, size.sequence, size.vocabulary
    token = 2 * (h * 3 * h + h * h + h * 4 * h + 4 * h * h)  # QKV, projection, the MLP's two
    attention = 2 * 2 * s * h  # scores and values, per token
    expected = 3 * batch * s * (size.layers * (token + attention) + 2 * h * v)
    assert operations(size, batch) == pytest.approx(expected, rel=1e-12)
    published = 72 * batch * s * size.layers * h**2 * (1 + s / (6 * h) + v / (12 * size.layers * h))
    assert operations(size, batch) == pytest.approx(published, rel=1e-12)
    llama = MODELS["llama3-8b"]
    token = 2 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14_336)  # Q, K and V, projection, gate, up and down
    expected = 3 * 8192 * (32 * (token + 2 * 2 * 8192 * 4096) + 2 * 4096 * 128_256)
    assert operations(llama, 1) == pytest.approx(expected, rel=1e-12)


def test_the_speed_is_that_of_the_sizes_in_the_log() -> None:
    settings = {"MODEL": "xl", "WORLD_SIZE": "2", "HIDDEN_SIZE": "64", "NUM_LAYERS": "4", "NUM_HEADS": "4"}
    found = [simple_iteration(1, 1.5)]
    shown = dict(view.figures(found, settings))["operations"]
    size = dataclasses.replace(MODELS["xl"], hidden=64, layers=4, heads=4, ffn=256, kv_groups=4)
    assert shown.startswith(f"{operations(size, 64) / 1.5e12:.4g} TFLOP/s")
    assert "TFLOP/s" not in str(view.figures(found, {"MODEL": "other", "WORLD_SIZE": "2"}))


def test_an_unknown_job_is_one_sentence_that_names_those_there_are(log_dir: Path, capsys) -> None:
    """By number: as text, 5 to 9 would stand after 15."""
    for job in range(5, 16):
        write_run(log_dir, str(job), "n1", 0)
    assert command(["get_result", "999999"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert "the latest runs there are 11, 12, 13, 14, 15." in said.err
    assert command(["get_result", "../etc"]) == 2
    assert "is not a job id" in capsys.readouterr().err


def test_an_empty_folder_is_shown_as_it_is(log_dir: Path, capsys) -> None:
    (log_dir / "77").mkdir(parents=True)
    said = shown(capsys, "77")
    assert "UNKNOWN" in said[0] and said[-2:] == ["no iteration logged yet", "debug?  : 0"]


def test_watching_ends_with_the_run(log_dir: Path, capsys) -> None:
    write_run(log_dir, "local-7", "n1", 0, out=ITERATIONS)
    (log_dir / "local-7/n1.state").write_text("exit 0\n")
    said = shown(capsys, "local-7", "--watch")
    assert "iteration 10 : 1.4000 s" in said
    assert said[-1] == str(log_dir / "local-7" / "summary.html")
    assert "Iterations" in Path(said[-1]).read_text()


def test_a_terminal_shows_tables_that_are_refreshed(
    checkout: Path, tiny: dict[str, str], tmp_path: Path
) -> None:
    write_run(tmp_path / "log2", "local-7", "n1", 0, out=ITERATIONS, err="ValueError: x\n")
    (tmp_path / "log2/local-7/n1.state").write_text("exit 1 1700000000\n")
    said = on_a_terminal(
        [checkout / "megatron_lm/get_result.sh", "local-7", "--watch"], tiny | {"TERM": "xterm"}
    )
    assert b"\033[H\033[J" in said
    text = re.sub(rb"\033\[[0-9;?]*[A-Za-z]", b"", said).decode()
    assert "WRONG: job local-7 is not running: FAILED (exit status 1)" in text
    assert re.search(r"\n +10 +1.4000 +10 +2 +0.0001", text) and "\nn1 " in text
    assert text.rstrip().endswith("summary.html")


def test_colours_are_for_terminals_only(
    script: Script, checkout: Path, tiny: dict[str, str], tmp_path: Path
) -> None:
    write_run(tmp_path / "log2", "local-7", "n1", 0, err="ValueError: x\n")
    assert "\033" not in script("get_result.sh", "local-7").stdout
    said = on_a_terminal([checkout / "megatron_lm/get_result.sh", "local-7"], tiny)
    assert re.search(rb"\033\[1;31mWRONG: node n1 failed first: it raised ValueError: x\033\[0m", said)
    assert b"\033[1m******************* last output message" in said
