"""The loop on one rank: what it computes, logs, saves and goes on from."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, GPT2LMHeadModel

from tests.training.jobs import losses, read_log
from utils.training.checkpoint import CheckpointError
from utils.training.optim import learning_rate_at
from utils.training.trainer import Trainer

FAMILIES = pytest.mark.parametrize("family", ["gpt2", "bert"])
SHORT = ("--skip-eval", "--save-steps", 0)


@pytest.fixture
def few_samples(tmp_path: Path, repo_root: Path) -> Path:
    """A data set with 10 training samples: 5 steps of 2 are an epoch."""
    sample = json.loads((repo_root / "data" / "squad_sample.json").read_text())
    paragraphs = [{**p, "qas": p["qas"][:1]} for a in sample["data"] for p in a["paragraphs"]][:11]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "few", "paragraphs": paragraphs}]}))
    return path


def gradients_at_the_step(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """Filled with the gradient that the optimizer gets at each step."""
    seen: list[dict[str, torch.Tensor]] = []
    real = trainer.optimizer.step

    def step() -> None:
        seen.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        real()

    trainer.optimizer.step = step
    return seen


@FAMILIES
def test_gradient_accumulation_changes_nothing(family: str, train_alone: Callable[..., Path]) -> None:
    """Dropout is off, as each forward pass draws its own."""
    runs = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        flags = ("--batch-size", batch, "--gradient-accumulation-steps", accumulation)
        folder = train_alone(
            family, *flags, *SHORT, "--max-steps", 5, "--dropout", 0, "--save-dir", f"b{batch}"
        )
        runs.append(losses(folder))
    assert len(runs[0]) == 5
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)
    assert runs[2] == pytest.approx(runs[0], rel=1e-6)


@FAMILIES
def test_the_gradient_is_of_the_mean_over_all_tokens(
    family: str, make_trainer: Callable[..., Trainer]
) -> None:
    """Against the loss that transformers itself computes for the whole batch, padding and all."""
    flags = ("--batch-size", 2, "--gradient-accumulation-steps", 2, "--max-seq-length", 200, "--dropout", 0)
    trainer = make_trainer(family, *flags, *SHORT, "--max-steps", 1, "--max-grad-norm", 0)
    batches = trainer._micro_batches()
    parts = [next(batches) for _ in range(2)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    assert counts[0] != counts[1], "a mean of the parts' means would pass"
    reference = trainer.model(**batch).loss
    reference.backward()
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()
    seen = gradients_at_the_step(trainer)
    trainer.train()
    assert losses(trainer.save_dir)[1] == pytest.approx(reference.item(), rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[0][name], gradient, rtol=1e-3, atol=1e-6)


def test_the_gradient_is_clipped(make_trainer: Callable[..., Trainer]) -> None:
    norms = {}
    for limit in (0, 0.25):
        trainer = make_trainer("gpt2", *SHORT, "--max-steps", 2, "--max-grad-norm", limit)
        seen = gradients_at_the_step(trainer)
        trainer.train()
        norms[limit] = torch.stack([g.norm() for g in seen[0].values()]).norm().item()
        assert ("grad_norm" in read_log(trainer.save_dir)[0]) == (limit > 0)
    assert norms[0] > 0.5
    assert norms[0.25] == pytest.approx(0.25, rel=1e-4)
    assert read_log(trainer.save_dir)[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-4)


@FAMILIES
def test_loss_falls_on_the_sample(family: str, train_alone: Callable[..., Path]) -> None:
    folder = train_alone(family, *SHORT, "--max-steps", 30, "--learning-rate", 1e-2)
    curve = losses(folder)
    first, last = (sum(curve[s] for s in steps) / 5 for steps in (range(1, 6), range(26, 31)))
    # Random weights know nothing: the logarithm of the vocabulary's size.
    assert curve[1] == pytest.approx(math.log({"gpt2": 50257, "bert": 30522}[family]), abs=0.2)
    assert last < first - 1.5


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
    assert [row["step"] for row in read_log(folder)] == [1, 2, 3, 4, 5, 6]
    assert losses(folder) == whole


def test_the_same_seed_gives_the_same_run(train_alone: Callable[..., Path]) -> None:
    runs = [
        losses(train_alone("bert", *SHORT, "--max-steps", 3, "--seed", seed, "--num-workers", workers))
        for seed, workers in ((1, 0), (1, 1), (2, 0))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_epochs_give_the_number_of_steps(few_samples: Path, train_alone: Callable[..., Path]) -> None:
    flags = ("--dataset", few_samples, *SHORT, "--batch-size", 4, "--num-epochs", 2)
    assert max(losses(train_alone("gpt2", *flags))) == 6
    assert max(losses(train_alone("gpt2", *flags, "--max-steps", 0))) == 6
    assert max(losses(train_alone("gpt2", *flags, "--max-steps", 2))) == 2


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
    assert "model: checkpoints/gpt2/best_model" in summary


@pytest.mark.parametrize(("family", "loader"), [("gpt2", GPT2LMHeadModel), ("bert", BertForMaskedLM)])
def test_checkpoints_and_the_best_model(family: str, loader, train_alone: Callable[..., Path]) -> None:
    folder = train_alone(family, "--max-steps", 5, "--save-steps", 2, "--eval-steps", 2, "--batch-size", 8)
    assert {path.name for path in folder.iterdir()} == {
        *("step-2", "step-4", "step-5", "best_model", "training_log.jsonl", "train_config.json")
    }
    evaluated = {row["step"]: row["eval_loss"] for row in read_log(folder) if "eval_loss" in row}
    assert sorted(evaluated) == [2, 4, 5]
    best = min(evaluated, key=evaluated.get)
    expected = loader.from_pretrained(folder / f"step-{best}").state_dict()
    found = loader.from_pretrained(folder / "best_model").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    config = json.loads((folder / "train_config.json").read_text())
    assert (config["max_seq_length"], config["eval_steps"]) == (32, 2)


def test_the_evaluation_is_the_mean_over_the_whole_validation_set(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 1, "--save-steps", 0, "--batch-size", 7)
    trainer.train()
    total = tokens = 0.0
    trainer.model.eval()
    with torch.no_grad():
        for index in range(len(trainer.validation_set)):
            batch = {name: value[None] for name, value in trainer.validation_set[index].items()}
            count = int((batch["labels"][:, 1:] != -100).sum())
            total += trainer.model(**batch).loss.item() * count
            tokens += count
    assert read_log(trainer.save_dir)[-1]["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


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
    trainer = make_trainer("gpt2", "--max-steps", 2, "--save-steps", 0, "--skip-eval", "--save-format", "bin")
    trainer.train()
    names = {path.name for path in trainer.save_dir.iterdir()}
    assert names == {"best_model", "training_log.jsonl", "train_config.json"}
    loaded = GPT2LMHeadModel.from_pretrained(trainer.save_dir / "best_model").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trainer.model.state_dict().items())


def test_starting_from_weights(train_alone: Callable[..., Path]) -> None:
    flags = (*SHORT, "--max-steps", 10, "--learning-rate", 1e-2)
    first = train_alone("gpt2", *flags, "--save-dir", "first")
    second = train_alone("gpt2", *flags, "--save-dir", "second", "--init-from", first / "best_model")
    assert losses(second)[1] < losses(first)[1] - 1


def test_resuming_what_does_not_fit_is_refused(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make_trainer("gpt2", "--max-steps", 2, "--save-steps", 1, "--skip-eval")
    trainer.train()
    with pytest.raises(ValueError, match="--model-name is gpt2, but checkpoint .* is of tiny"):
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


def test_a_loss_that_is_no_number_ends_the_run(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 2)
    with torch.no_grad():
        trainer.model.transformer.wte.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the loss is nan at step 1: lower --learning-rate"):
        trainer.train()
    assert not (trainer.save_dir / "best_model").exists()


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


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(make_trainer: Callable[..., Trainer]) -> None:
    trainers = [
        make_trainer("gpt2", *SHORT, "--max-steps", 2, "--save-dir", d, *f)
        for d, f in (("a", ()), ("b", ("--bf16",)))
    ]
    kinds = set()
    trainers[1].model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *args: kinds.add(args[2].dtype))
    for trainer in trainers:
        trainer.train()
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in trainers[1].model.parameters()} == {torch.float32}
    exact, rounded = (losses(trainer.save_dir) for trainer in trainers)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)


def test_packing_fills_every_position(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 2, "--pack", "--max-seq-length", 200)
    assert next(trainer._micro_batches())["attention_mask"].all()
    trainer.train()


def test_tensorboard_gets_the_figures(train_alone: Callable[..., Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = train_alone("gpt2", "--max-steps", 2, "--save-steps", 0, "--report-to", "tensorboard")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == pytest.approx(losses(folder))
    assert {"eval_loss", "learning_rate", "tokens_per_second", "step_seconds"} <= set(
        events.Tags()["scalars"]
    )


def test_a_terminal_sees_a_progress_bar(
    train_alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    train_alone("gpt2", *SHORT, "--max-steps", 2)
    written = capsys.readouterr().err
    assert "2/2" in written
    assert "loss " in written


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
    kinds = ("host.json", "device.json", "stacks.txt", "manifest.json", "config.json")
    assert written == {f"bert_1gpu_trace_{kind}" for kind in kinds}
    manifest = json.loads((tmp_path / "outputs" / "bert_1gpu_trace_manifest.json").read_text())
    assert manifest["run"]["model"] == "tiny"
    assert manifest["run"]["config"]["max_seq_length"] == 32
    assert manifest["ranks"][0]["steps"] == [2, 3]


@pytest.mark.slow
def test_compile_gives_the_same_losses(train_alone: Callable[..., Path]) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    flags = (*SHORT, "--max-steps", 4, "--dropout", 0)
    plain, compiled = (losses(train_alone("gpt2", *flags, *extra)) for extra in ((), ("--compile",)))
    assert compiled == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
def test_a_missing_compiler_is_told_in_one_sentence(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    config = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(config.cpp, "cxx", (None, str(tmp_path / "no-compiler")))
    trainer = make_trainer("bert", *SHORT, "--max-steps", 1, "--compile")
    with pytest.raises(ValueError, match="--compile fails here, omit it"):
        trainer.train()
