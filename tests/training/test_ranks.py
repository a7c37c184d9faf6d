"""Two gloo ranks under torchrun: the same losses as one, and every way of ending early."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2LMHeadModel

from tests.training.jobs import TINY, Job, losses

Start = Callable[..., Job]
GPT2 = "gpt2/train.py"
# Long enough that a test always ends it before its end.
ENDLESS = ("--max-steps", 100_000, "--skip-eval", "--save-steps", 0, "--save-dir", "saved")


def folder_of(job: Job) -> Path:
    return job.log.parent


def test_two_ranks_give_the_losses_of_one(start_job: Start, train_alone: Callable[..., Path]) -> None:
    """The same global batch of 8, once as 2 ranks x 2 micro-batches x 2 samples. Dropout is off."""
    flags = ("--max-steps", 6, "--save-steps", 0, "--eval-steps", 3, "--dropout", 0)
    shared = ("--batch-size", 2, "--gradient-accumulation-steps", 2, "--num-gpus", 2, "--num-workers", 1)
    job = start_job(2, "bert/train.py", *TINY, *flags, *shared, "--save-dir", "two")
    one = train_alone("bert", *flags, "--batch-size", 8, "--save-dir", "one")
    assert job.finish() == 0, job.output
    two = folder_of(job) / "two"
    assert len(losses(two)) == 6
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    evaluated = [
        [
            row["eval_loss"]
            for row in map(json.loads, (path / "training_log.jsonl").open())
            if "eval_loss" in row
        ]
        for path in (one, two)
    ]
    assert len(evaluated[0]) == 2
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
    assert "bert tiny: 6 steps on 2 x cpu" in job.output
    assert job.output.count("bert tiny:") == 1, "rank 1 prints too"
    job.wait_until_gone(5)


@pytest.mark.slow
def test_a_run_resumed_after_sigterm_repeats_the_uninterrupted_one(start_job: Start, tmp_path: Path) -> None:
    """Dropout is on; the signal goes to torchrun, as from a cluster's scheduler."""
    flags = [*TINY, "--max-steps", 60, "--skip-eval", "--save-dir", tmp_path / "saved"]
    job = start_job(2, GPT2, *flags, "--save-steps", 1000)
    job.wait_for("step 3/")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(60) != 0
    assert "stopped by SIGTERM after step" in job.output
    (saved,) = (tmp_path / "saved").glob("step-*")
    stopped_at = int(saved.name.removeprefix("step-"))
    assert 3 <= stopped_at < 60
    GPT2LMHeadModel.from_pretrained(saved)
    job.wait_until_gone(5)
    before = losses(tmp_path / "saved")

    rest = start_job(2, GPT2, *flags, "--resume-from-checkpoint", "latest")
    whole = start_job(2, GPT2, *flags[:-1], tmp_path / "whole", "--save-steps", 0)
    assert rest.finish() == 0, rest.output
    assert whole.finish() == 0, whole.output
    after = losses(tmp_path / "saved")
    assert f"resumed from {saved}, after step {stopped_at}" in rest.output
    assert sorted(after) == list(range(1, 61))
    assert {step: after[step] for step in before} == before
    assert after == losses(tmp_path / "whole")


@pytest.mark.slow
def test_kill_9_of_a_rank_ends_the_other_which_names_it_and_keeps_its_trace(start_job: Start) -> None:
    trace = ("--enable-tracing", "--trace-wait-steps", 0, "--trace-active-steps", 50_000)
    job = start_job(2, GPT2, *TINY, *ENDLESS, *trace)
    job.wait_for("step 4/")
    os.kill(job.worker(1), signal.SIGKILL)
    began = time.monotonic()
    assert job.finish(60) != 0
    assert time.monotonic() - began < 25
    assert "rank 0 stops: rank 1 (" in job.output
    assert "is dead or stopped" in job.output
    job.wait_until_gone(5)
    outputs = folder_of(job) / "outputs"
    for kind in ("host", "device"):
        assert json.loads((outputs / f"gpt2_2gpu_trace_{kind}.json").read_text())
    assert not json.loads((outputs / "gpt2_2gpu_trace_manifest.json").read_text())["complete"]


FAILING = """
import os, sys, time
sys.path.insert(0, {root!r})
from gpt2.config import GPT2TrainConfig
from gpt2.model import GPT2
from utils.training.config import parse_config
from utils.training.step import Stepper
from utils.training.trainer import train

real = Stepper.run

def run(self, step, batches):
    if step == 3 and self.world.rank == 1:
        {what}
    return real(self, step, batches)

Stepper.run = run
train(parse_config(GPT2TrainConfig, None), GPT2)
"""


def failing_script(folder: Path, repo_root: Path, what: str) -> Path:
    """A train.py in which ``what`` happens to rank 1 at its fourth step."""
    path = folder / "train.py"
    path.write_text(FAILING.format(root=str(repo_root), what=what))
    return path


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_and_is_quoted(start_job: Start, tmp_path: Path, repo_root: Path) -> None:
    script = failing_script(tmp_path, repo_root, "raise OSError('the data is on fire')")
    job = start_job(2, script, *TINY, *ENDLESS)
    assert job.finish() != 0
    assert "rank 1: the data is on fire" in job.output
    assert "rank 0 stops: rank 1 failed: the data is on fire" in job.output
    assert "trainer.py" not in job.output, "a traceback for what is no defect"
    job.wait_until_gone(5)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_dist_timeout(
    start_job: Start, tmp_path: Path, repo_root: Path
) -> None:
    script = failing_script(tmp_path, repo_root, "time.sleep(1000)")
    job = start_job(2, script, *TINY, *ENDLESS, "--dist-timeout", 6)
    job.wait_for("step 3/")
    began = time.monotonic()
    job.wait_for("hangs: waited 6 s for it (--dist-timeout)", timeout=25)
    assert time.monotonic() - began > 5
    assert "rank 0 stops: rank 1 (" in job.output
    assert job.finish(60) != 0
    job.wait_until_gone(5)


@pytest.mark.slow
def test_a_stopped_rank_is_named_after_dist_timeout(start_job: Start) -> None:
    """torchrun needs 30 seconds more, since a stopped process takes no SIGTERM."""
    job = start_job(2, GPT2, *TINY, *ENDLESS, "--dist-timeout", 6)
    job.wait_for("step 3/")
    os.kill(job.worker(1), signal.SIGSTOP)
    job.wait_for("is dead or stopped: no sign of life", timeout=25)
    assert "rank 0 stops: rank 1 (" in job.output
    assert job.finish(90) != 0
    job.wait_until_gone(5)


@pytest.mark.slow
def test_ranks_end_with_their_launcher(start_job: Start) -> None:
    job = start_job(2, GPT2, *TINY, *ENDLESS, "--num-workers", 1)
    job.wait_for("step 3/")
    job.process.kill()
    job.wait_until_gone(30)
    # Where the store ends first, its silence is what the rank notices.
    assert re.search(r"the launcher \(torchrun\) is gone|node 0 or its launcher is gone", job.output)


@pytest.mark.slow
def test_a_rank_that_never_appears_is_named(start_job: Start, free_port: int) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    job = start_job(0, GPT2, *TINY, *ENDLESS, "--dist-timeout", 3, **variables, **address)
    assert job.finish() == 1
    assert "rank 0 stops: rank 1 did not appear within 3 s (--dist-timeout)" in job.output


@pytest.mark.slow
def test_ranks_run_without_torchrun_and_its_store(start_job: Start, free_port: int) -> None:
    """Any launcher that sets the same variables will do; rank 0 then serves the store."""
    jobs = []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        flags = ("--max-steps", 3, "--skip-eval", "--save-steps", 0)
        jobs.append(start_job(0, GPT2, *TINY, *flags, **variables, **address))
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].output + jobs[1].output


@pytest.mark.slow
def test_several_nodes(start_job: Start, repo_root: Path, free_port: int) -> None:
    """Two launchers on this machine, as on two nodes, with the flags that torchrun has for it."""
    flags = [*TINY, "--max-steps", 3, "--skip-eval", "--save-steps", 0, "--num-gpus", 3]
    jobs = []
    for node, processes in ((0, 2), (1, 1)):
        launch = ["--nnodes", 2, "--node_rank", node, "--nproc_per_node", processes]
        launch += ["--master_addr", "127.0.0.1", "--master_port", free_port]
        jobs.append(start_job(None, *launch, repo_root / GPT2, *flags))
    assert [job.finish() for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    assert "gpt2 tiny: 3 steps on 3 x cpu" in jobs[0].output
    assert "gpt2 tiny" not in jobs[1].output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_saves_and_ends(number: signal.Signals, start_job: Start) -> None:
    """Ctrl-C in a terminal, or a scheduler's SIGTERM: the data loaders get it too and must not die of it."""
    job = start_job(0, GPT2, *TINY, *ENDLESS, "--save-steps", 1000, "--num-workers", 1)
    job.wait_for("step 3/")
    os.killpg(job.process.pid, number)
    assert job.finish(60) == 128 + number
    assert f"stopped by {number.name} after step" in job.output
    assert "Traceback" not in job.output
    assert len(list((folder_of(job) / "saved").glob("step-*"))) == 1
    job.wait_until_gone(10)


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves_and_ends(start_job: Start) -> None:
    job = start_job(2, GPT2, *TINY, *ENDLESS, "--save-steps", 1000)
    job.wait_for("step 3/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish(60) != 0
    assert "stopped by SIGINT after step" in job.output
    assert len(list((folder_of(job) / "saved").glob("step-*"))) == 1
    job.wait_until_gone(5)


@pytest.mark.slow
def test_a_wrong_count_of_processes_is_told_once(start_job: Start) -> None:
    job = start_job(2, GPT2, *TINY, "--num-gpus", 4)
    assert job.finish() != 0
    assert job.output.count("--num-gpus 4 needs as many processes, not 2") == 1


@pytest.mark.slow
def test_the_same_failure_of_all_ranks_is_told_once(start_job: Start) -> None:
    job = start_job(2, GPT2, *TINY, "--resume-from-checkpoint", "latest")
    assert job.finish() != 0
    assert job.output.count("latest: there is no checkpoint in") == 1
    assert "trainer.py" not in job.output
    job.wait_until_gone(5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_other_numbers_of_ranks(ranks: int, start_job: Start, train_alone: Callable[..., Path]) -> None:
    flags = ("--max-steps", 3, "--save-steps", 0, "--skip-eval", "--dropout", 0)
    job = start_job(ranks, GPT2, *TINY, *flags, "--batch-size", 1)
    assert job.finish(300) == 0, job.output
    one = losses(train_alone("gpt2", *flags, "--batch-size", ranks))
    assert losses(folder_of(job) / "checkpoints" / "gpt2") == pytest.approx(one, rel=1e-6)


@pytest.mark.slow
def test_a_full_disk_warns_at_a_periodic_save_and_fails_the_last_one(start_job: Start, small_disk) -> None:
    """Room for one checkpoint of 20 MB and most of a second."""
    disk = small_disk(36)
    flags = ("--max-steps", 8, "--skip-eval", "--save-steps", 3, "--save-dir", disk / "saved")
    job = start_job(2, GPT2, *TINY, *flags)
    assert job.finish() != 0
    warning = f"can't save {disk}/saved/step-6: the disk is full"
    assert f"WARNING {warning}" in job.output and "step 7/8" in job.output
    sentence = f"can't save {disk}/saved/step-8: the disk is full"
    assert f"rank 0: {sentence}" in job.output
    assert f"rank 1 stops: rank 0 failed: {sentence}" in job.output
    assert "trainer.py" not in job.output
    assert [path.name for path in (disk / "saved").glob("*step*")] == ["step-3"]
    GPT2LMHeadModel.from_pretrained(disk / "saved" / "step-3")
    job.wait_until_gone(5)


@pytest.mark.slow
def test_ranks_that_see_different_checkpoints_are_refused(
    start_job: Start, train_alone: Callable[..., Path], free_port: int
) -> None:
    """As on two nodes whose --save-dir is not one shared folder."""
    jobs = []
    for rank, steps in (("0", 1), ("1", 2)):
        folder = train_alone("gpt2", "--max-steps", steps, "--skip-eval", "--save-dir", f"node{rank}")
        variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        flags = ("--resume-from-checkpoint", "latest", "--save-dir", folder)
        jobs.append(start_job(0, GPT2, *TINY, *ENDLESS, *flags, **variables, **address))
    assert [job.finish() for job in jobs] == [1, 1]
    assert "the ranks don't see the same checkpoint" in jobs[0].output


@pytest.mark.slow
def test_compile_on_two_ranks_with_accumulation(start_job: Start) -> None:
    flags = ("--max-steps", 3, "--save-steps", 0, "--skip-eval", "--gradient-accumulation-steps", 2)
    curves = []
    for extra in ((), ("--compile",)):
        job = start_job(2, GPT2, *TINY, *flags, "--dropout", 0, *extra)
        assert job.finish(400) == 0, job.output
        curves.append(losses(folder_of(job) / "checkpoints" / "gpt2"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.slow
def test_traces_of_two_ranks_end_as_et_files(start_job: Start) -> None:
    flags = ("--max-steps", 6, "--skip-eval", "--save-steps", 0, "--enable-tracing")
    job = start_job(2, GPT2, *TINY, *flags)
    assert job.finish(200) == 0, job.output
    outputs = folder_of(job) / "outputs"
    assert {path.name for path in outputs.glob("*.et")} == {
        *("gpt2_2gpu_trace.et", "gpt2_2gpu_trace.0.et", "gpt2_2gpu_trace.1.et")
    }
    again = start_job(2, GPT2, *TINY, *flags, "--no-convert")
    assert again.finish(200) == 0, again.output
    assert not list((folder_of(again) / "outputs").glob("*.et"))
    assert (folder_of(again) / "outputs" / "gpt2_2gpu_trace_rank1_host.json").is_file()
