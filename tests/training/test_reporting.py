"""What a run reports: figures, TensorBoard, wandb, traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.terminal import on_a_terminal
from tests.training.jobs import REPO_ROOT, TINY, losses, read_log
from utils.training import metrics
from utils.training.step import learning_rate_at
from utils.training.trainer import Trainer, convert_traces

SHORT = ("--skip-eval", "--save-steps", 0)


def test_figures_of_the_log(train_alone: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_alone("gpt2", *SHORT, "--max-steps", 5, "--logging-steps", 2, "--learning-rate", 0.01)
    rows = read_log(folder)
    assert [row["step"] for row in rows] == [2, 4, 5]
    for row in rows:
        assert row["learning_rate"] == pytest.approx(learning_rate_at(row["step"] - 1, 0.01, 2, 5))
        assert row["tokens_per_second"] > 0
        # 2 sequences of 32 tokens at most.
        assert 0 < row["tokens_per_second"] * row["step_seconds"] <= 64
    summary = capsys.readouterr().out
    assert "gpt2 tiny: 5 steps on 1 x cpu, loss " in summary
    assert "data: 261 samples of the sample in data/; model: checkpoints/gpt2/best_model" in summary


@pytest.mark.slow
def test_a_terminal_shows_a_bar_below_the_log(tmp_path: Path, data_cache: Path) -> None:
    command = [sys.executable, str(REPO_ROOT / "gpt2/train.py"), *TINY, *map(str, SHORT), "--max-steps", "4"]
    environment = os.environ | {"HF_DATASETS_CACHE": str(data_cache), "CUDA_VISIBLE_DEVICES": ""}
    said = on_a_terminal(command, environment, cwd=tmp_path).decode()
    last = losses(tmp_path / "checkpoints/gpt2")[4]
    assert re.search(rf"100%.*4/4 \[.*(step/s|s/step), loss {last:.4f}\]", said)
    # Each line of the log begins where the bar was.
    assert len(re.findall(r"[\r\n](?:\x1b\[A)?\d\d:\d\d:\d\d rank 0 INFO step \d/4  loss", said)) == 4
    plain = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "step 4/4  loss" in plain.stderr and "\r" not in plain.stderr and "%|" not in plain.stderr


def test_a_log_that_can_not_be_written_is_one_warning(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(metrics, "_continued", lambda *_: full.open("ab", buffering=0))
    assert make_trainer("gpt2", *SHORT, "--max-steps", 3).train() == 0
    failures = [line for line in caplog.messages if "training_log.jsonl can't be written: No space" in line]
    assert len(failures) == 1 and failures[0].endswith("; training goes on")


def test_the_speed_is_of_the_steps_alone(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}

    def lasting(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            clock["now"] += seconds
            return work(*arguments, **options)

        return run

    monkeypatch.setattr("utils.training.trainer.time", SimpleNamespace(perf_counter=lambda: clock["now"]))
    trainer = make_trainer("gpt2", "--max-steps", 3, "--eval-steps", 1, "--save-steps", 2)
    monkeypatch.setattr(trainer.stepper, "evaluate", lasting(60, lambda *_: 1.0))
    monkeypatch.setattr(trainer.stepper, "run", lasting(2, trainer.stepper.run))
    monkeypatch.setattr(trainer, "_checkpoint", lasting(30, lambda *_: None))
    trainer.train()
    rows = read_log(trainer.save_dir)
    steps = [row for row in rows if "loss" in row]
    assert [row["step_seconds"] for row in steps] == [2, 2, 2]
    assert all(0 < row["tokens_per_second"] <= 64 / 2 for row in steps)
    assert [(row["step"], row["eval_seconds"]) for row in rows if "eval_seconds" in row] == [
        *((1, 60), (2, 60), (3, 60))
    ]
    assert [row["step"] for row in rows if "checkpoint_seconds" in row] == [2, 3]


def test_tensorboard_gets_the_figures(train_alone: Callable[..., Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train_alone("gpt2", "--max-steps", 2, "--save-steps", 0, "--report-to", "tensorboard")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == pytest.approx(losses(folder))
    assert {"eval_loss", "learning_rate", "tokens_per_second", "step_seconds"} <= set(
        events.Tags()["scalars"]
    )


def test_wandb_that_wants_a_login_is_told_in_one_sentence(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty)\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 1, "--report-to", "wandb")
    with pytest.raises(
        ValueError, match=r"wandb: api_key not configured \(no-tty\); log in with .* WANDB_MODE"
    ):
        trainer.train()


def test_wandb_works_offline(train_alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = train_alone("gpt2", *SHORT, "--max-steps", 2, "--report-to", "wandb")
    (run,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    # wandb's own process writes the file, on a busy machine some time after the run has ended.
    patience = time.monotonic() + 60
    while b"tokens_per_second" not in run.read_bytes() and time.monotonic() < patience:
        time.sleep(0.5)
    assert b"tokens_per_second" in run.read_bytes()


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_reporter_is_told_in_one_sentence(
    package: str, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[package]
    monkeypatch.setitem(__import__("sys").modules, module, None)
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 1, "--report-to", package)
    with pytest.raises(ValueError, match=f"--report-to {package} needs the {package} package"):
        trainer.train()


def test_a_run_too_short_for_its_trace_is_refused(
    few_samples: Path, make_trainer: Callable[..., Trainer]
) -> None:
    flags = ("--dataset", few_samples, "--num-epochs", 1, *SHORT, "--enable-tracing")
    with pytest.raises(ValueError, match=r"--trace-active-steps 3\), but the run has 5"):
        make_trainer("gpt2", *flags).train()


def test_a_resumed_run_too_short_for_its_trace_goes_to_its_end(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--skip-eval", "--max-steps", 6, "--save-steps", 4)
    make_trainer("gpt2", *flags).train()
    shutil.rmtree("checkpoints/gpt2/step-6")
    trainer = make_trainer("gpt2", *flags, "--enable-tracing", "--resume-from-checkpoint", "latest")
    assert trainer.train() == 0
    assert "no trace of this resumed run: tracing needs 6 steps" in caplog.text
    assert (trainer.save_dir / "step-6").is_dir()


def test_a_trace_is_taken_and_the_flags_kept_beside_it(
    train_alone: Callable[..., Path], tmp_path: Path
) -> None:
    train_alone(
        "bert",
        *SHORT,
        "--max-steps",
        4,
        "--enable-tracing",
        "--trace-wait-steps",
        1,
        "--trace-active-steps",
        2,
    )
    written = {path.name for path in (tmp_path / "outputs").iterdir()}
    kinds = ("host.json", "device.json", "manifest.json", "config.json")
    converted = {"bert_1gpu_trace.et", "bert_1gpu_trace.0.et"}
    converted |= {f"bert_1gpu_trace_{kind}.json" for kind in ("comm_groups", "conversion")}
    assert written == {f"bert_1gpu_trace_{kind}" for kind in kinds} | converted
    manifest = json.loads((tmp_path / "outputs" / "bert_1gpu_trace_manifest.json").read_text())
    assert manifest["run"]["model"] == "tiny"
    assert manifest["run"]["config"]["max_seq_length"] == 32
    assert manifest["ranks"][0]["steps"] == [2, 3]


def test_traces_of_other_machines_are_asked_for(
    tmp_path: Path, repo_root: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (repo_root / "tests/fixtures/captures/torch-2.13").glob("tiny_2gpu_[hdm]*"):
        shutil.copy(path, tmp_path)
    convert_traces(str(tmp_path), "tiny_2gpu")
    assert "of 2 ranks, the traces of 1 are missing; add them" in capfd.readouterr().err
    assert f"to repeat it: chakra-et convert {tmp_path} --name tiny_2gpu" in caplog.text
