"""The loop on one rank: what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.jobs import losses, read_log
from utils.training.trainer import Trainer

FAMILIES = pytest.mark.parametrize("family", ["gpt2", "bert"])
SHORT = ("--skip-eval", "--save-steps", 0)


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
    flags += ("--padding", "max")  # so that the micro-batches can be joined
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


def test_a_loss_that_is_no_number_ends_the_run(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 2)
    with torch.no_grad():
        trainer.model.transformer.wte.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="the loss is nan at step 1: lower --learning-rate"):
        trainer.train()
    assert not (trainer.save_dir / "best_model").exists()


def test_batches_are_padded_to_their_longest_sample(make_trainer: Callable[..., Trainer]) -> None:
    flags = (*SHORT, "--max-steps", 2, "--max-seq-length", 512, "--dropout", 0, "--batch-size", 4)
    short = make_trainer("bert", *flags, "--save-dir", "short")
    full = make_trainer("bert", *flags, "--padding", "max", "--save-dir", "full")
    batch, whole = next(short._micro_batches()), next(full._micro_batches())
    longest = int(whole["attention_mask"].sum(dim=1).max())
    assert whole["input_ids"].shape == (4, 512)
    assert batch["input_ids"].shape == (4, -(-longest // 8) * 8) and longest < 400
    for name in batch:
        assert torch.equal(batch[name], whole[name][:, : batch[name].shape[1]])
    for trainer in (short, full):
        trainer.train()
    assert losses(short.save_dir) == pytest.approx(losses(full.save_dir), rel=1e-5)


def test_gpt2_never_looks_at_its_padding(make_trainer: Callable[..., Trainer]) -> None:
    """It is on the right of a causal model, which therefore needs no attention mask."""
    trainer = make_trainer("gpt2", *SHORT, "--max-steps", 1, "--max-seq-length", 256, "--padding", "max")
    trainer.model.eval()
    batch = next(trainer._micro_batches())
    assert not batch["attention_mask"].all()
    bare = {**batch, "input_ids": batch["input_ids"] * batch["attention_mask"]}
    with torch.no_grad():
        first, second = (trainer.stepper.family.loss_sum(trainer.model, b)[0] for b in (batch, bare))
    assert first == second
