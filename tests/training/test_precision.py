"""How the model is computed: bfloat16, activations computed again, torch.compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.jobs import losses
from utils.training.trainer import Trainer

FAMILIES = pytest.mark.parametrize("family", ["gpt2", "bert"])
SHORT = ("--skip-eval", "--save-steps", 0)


@FAMILIES
def test_gradient_checkpointing_changes_no_loss(family: str, make_trainer: Callable[..., Trainer]) -> None:
    runs, calls = [], []
    for flags in ((), ("--gradient-checkpointing",)):
        trainer = make_trainer(family, *SHORT, "--max-steps", 3, *flags, "--save-dir", f"runs{len(runs)}")
        seen: list[object] = []
        module = next(
            m for name, m in trainer.model.named_modules() if name.endswith((".0.mlp", ".0.output"))
        )
        module.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        trainer.train()
        runs.append(losses(trainer.save_dir))
        calls.append(len(seen))
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    assert calls == [3, 6]  # the second time in the backward pass


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
