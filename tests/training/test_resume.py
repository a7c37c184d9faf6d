"""What a run leaves: checkpoints, the best model, and resuming from them after an end or a stop."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, GPT2LMHeadModel

from tests.training.jobs import losses, read_log
from utils.training.checkpoint import CheckpointError
from utils.training.trainer import Trainer

FAMILIES = pytest.mark.parametrize("family", ["gpt2", "bert"])
SHORT = ("--skip-eval", "--save-steps", 0)


@FAMILIES
def test_a_resumed_run_repeats_the_uninterrupted_one(
    family: str, few_samples: Path, train_alone: Callable[..., Path]
) -> None:
    """With dropout on, fresh masks each epoch, and interruptions before and after an epoch's end."""
    flags = ("--dataset", few_samples, "--max-steps", 12, "--save-steps", 4, "--skip-eval")
    whole = train_alone(family, *flags, "--save-dir", "whole")
    assert json.loads((whole / "step-12" / "trainer_state.json").read_text())["order"]["samples"] == 10
    for step in (4, 8):
        folder = train_alone(
            family, *flags, "--save-dir", f"r{step}", "--resume-from-checkpoint", whole / f"step-{step}"
        )
        again = losses(folder)
        assert sorted(again) == list(range(step + 1, 13))
        assert again == {s: loss for s, loss in losses(whole).items() if s > step}


def test_the_log_of_a_resumed_run_has_every_step_once(train_alone: Callable[..., Path]) -> None:
    flags = ("--max-steps", 6, "--save-steps", 2, "--skip-eval")
    whole = losses(train_alone("gpt2", *flags))
    shutil.rmtree("checkpoints/gpt2/step-6")
    shutil.rmtree("checkpoints/gpt2/step-4")
    folder = train_alone("gpt2", *flags, "--resume-from-checkpoint", "latest")
    assert [row["step"] for row in read_log(folder) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert losses(folder) == whole


@pytest.mark.parametrize(("family", "loader"), [("gpt2", GPT2LMHeadModel), ("bert", BertForMaskedLM)])
def test_checkpoints_and_the_best_model(family: str, loader, train_alone: Callable[..., Path]) -> None:
    folder = train_alone(family, "--max-steps", 5, "--save-steps", 2, "--eval-steps", 2, "--batch-size", 8)
    assert {path.name for path in folder.iterdir()} == {
        *("step-2", "step-4", "step-5", "best_model", "training_log.jsonl", "train_config.json")
    }
    evaluated = {row["step"]: row["eval_loss"] for row in read_log(folder) if "eval_loss" in row}
    perplexity = {row["step"]: row["eval_perplexity"] for row in read_log(folder) if "eval_loss" in row}
    assert sorted(evaluated) == [2, 4, 5]
    assert perplexity == pytest.approx({step: math.exp(loss) for step, loss in evaluated.items()})
    best = min(evaluated, key=evaluated.get)
    expected = loader.from_pretrained(folder / f"step-{best}").state_dict()
    found = loader.from_pretrained(folder / "best_model").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    config = json.loads((folder / "train_config.json").read_text())
    assert (config["max_seq_length"], config["eval_steps"]) == (32, 2)


def test_a_worse_model_does_not_replace_the_best(make_trainer: Callable[..., Trainer]) -> None:
    """The best loss is kept over a resume."""
    make_trainer("gpt2", "--max-steps", 3, "--save-steps", 2, "--eval-steps", 2).train()
    trainer = make_trainer("gpt2", "--max-steps", 3, "--eval-steps", 1, "--resume-from-checkpoint", "latest")
    assert trainer.step >= 2
    assert trainer.best_loss < 12
    before = (trainer.save_dir / "best_model" / "model.safetensors").read_bytes()
    trainer = make_trainer("gpt2", "--max-steps", 4, "--resume-from-checkpoint", "latest")
    trainer.best_loss = 0.0
    trainer.train()
    assert (trainer.save_dir / "best_model" / "model.safetensors").read_bytes() == before


def test_without_evaluation_the_last_model_is_the_best(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 2, "--save-steps", 0, "--skip-eval")
    trainer.train()
    names = {path.name for path in trainer.save_dir.iterdir()}
    assert names == {"best_model", "training_log.jsonl", "train_config.json"}
    loaded = GPT2LMHeadModel.from_pretrained(trainer.save_dir / "best_model").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trainer.model.state_dict().items())


def test_resuming_what_does_not_fit_is_refused(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 2, "--save-steps", 1, "--skip-eval")
    trainer.train()
    with pytest.raises(ValueError, match="--model-name gpt2: checkpoint .* is of tiny"):
        make_trainer("gpt2", "--resume-from-checkpoint", "latest", "--model-name", "gpt2")
    with pytest.raises(CheckpointError, match="has weights only"):
        make_trainer("gpt2", "--resume-from-checkpoint", trainer.save_dir / "best_model")
    with pytest.raises(ValueError, match="gpt2 model, not bert"):
        make_trainer("bert", "--resume-from-checkpoint", trainer.save_dir / "step-2")


def test_another_order_after_a_resume_is_told(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer("gpt2", "--max-steps", 1, "--save-steps", 1, "--skip-eval").train()
    make_trainer("gpt2", "--max-steps", 2, "--resume-from-checkpoint", "latest")
    assert "order" not in caplog.text
    make_trainer("gpt2", "--max-steps", 2, "--resume-from-checkpoint", "latest", "--batch-size", 4)
    assert "differ from the interrupted run" in caplog.text
    assert make_trainer("gpt2", "--max-steps", 1, "--resume-from-checkpoint", "latest").train() == 0
    assert "nothing to do: the checkpoint is at step 1 of 1" in caplog.text


@pytest.mark.parametrize(("save_steps", "saved"), [(50, True), (0, False)])
def test_a_stop_is_taken_at_the_next_step_boundary(
    save_steps: int, saved: bool, make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 100, "--save-steps", save_steps)
    mark = trainer.watch.mark

    def stop_during_step_3(step: int, phase: str, micro: int = 0) -> None:
        if (step, phase) == (2, "backward"):
            trainer.watch.signal = signal.SIGTERM
        mark(step, phase, micro)

    trainer.watch.mark = stop_during_step_3
    assert trainer.train() == 143
    assert max(losses(trainer.save_dir)) == 3
    assert (trainer.save_dir / "step-3" / "optimizer.pt").exists() == saved
    assert "stopped by SIGTERM after step 3 of 100" in caplog.text
    assert not (trainer.save_dir / "best_model").exists()


def test_a_stop_during_the_evaluation_drops_it(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 100, "--eval-steps", 2, "--save-steps", 2)
    mark = trainer.watch.mark

    def stop(step: int, phase: str, micro: int = 0) -> None:
        if (phase, micro) == ("evaluating", 1):
            trainer.watch.signal = signal.SIGINT
        mark(step, phase, micro)

    trainer.watch.mark = stop
    assert trainer.train() == 130
    assert not any("eval_loss" in row for row in read_log(trainer.save_dir))
    assert (trainer.save_dir / "step-2").is_dir()


@pytest.mark.parametrize("save_steps", [0, 4])
def test_a_run_stopped_in_its_last_evaluation_resumes_to_its_end(
    save_steps: int, make_trainer: Callable[..., Trainer]
) -> None:
    flags = ("--max-steps", 4, "--eval-steps", 3, "--save-steps", save_steps)
    whole = make_trainer("gpt2", *flags, "--save-dir", "whole")
    assert whole.train() == 0
    trainer = make_trainer("gpt2", *flags)
    mark = trainer.watch.mark

    def stop(step: int, phase: str, micro: int = 0) -> None:
        if (step, phase, micro) == (3, "evaluating", 1):
            trainer.watch.signal = signal.SIGTERM
        mark(step, phase, micro)

    trainer.watch.mark = stop
    assert trainer.train() == 143
    if not save_steps:
        return
    (trainer.save_dir / "best_model" / "model.safetensors").unlink()  # that of step 3
    resumed = make_trainer("gpt2", *flags, "--resume-from-checkpoint", "latest")
    assert resumed.step == 4 and resumed.train() == 0
    evaluations = [
        {row["step"]: row["eval_loss"] for row in read_log(t.save_dir) if "eval_loss" in row}
        for t in (whole, resumed)
    ]
    assert evaluations[0] == evaluations[1] and sorted(evaluations[0]) == [3, 4]
    best = [(t.save_dir / "best_model" / "model.safetensors").read_bytes() for t in (whole, resumed)]
    assert best[0] == best[1]
    assert make_trainer("gpt2", *flags, "--resume-from-checkpoint", "latest").complete


def test_a_run_stopped_after_its_last_step_resumes_to_its_final_model(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--max-steps", 2, "--skip-eval", "--save-steps", 2)
    trainer = make_trainer("gpt2", *flags)
    mark = trainer.watch.mark

    def stop(step: int, phase: str, micro: int = 0) -> None:
        if (step, phase) == (1, "backward"):
            trainer.watch.signal = signal.SIGTERM
        mark(step, phase, micro)

    trainer.watch.mark = stop
    assert trainer.train() == 143
    assert not (trainer.save_dir / "best_model").exists()
    assert make_trainer("gpt2", *flags, "--resume-from-checkpoint", "latest").train() == 0
    assert (trainer.save_dir / "best_model" / "model.safetensors").is_file()
    assert "nothing to do" not in caplog.text
    assert make_trainer("gpt2", *flags, "--resume-from-checkpoint", "latest").train() == 0
    assert "nothing to do: the checkpoint is at step 2 of 2" in caplog.text
