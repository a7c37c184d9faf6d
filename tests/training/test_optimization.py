"""Parameter groups, learning rate, and the order of the samples."""

from __future__ import annotations

import pytest
import torch

from gpt2.config import PRESETS as GPT2_PRESETS
from gpt2.model import GPT2
from utils.training.step import BatchPlan, build_optimizer, derived_seed, learning_rate_at


def test_biases_and_norms_have_no_weight_decay() -> None:
    model = GPT2.build(GPT2_PRESETS["tiny"], None, None)
    groups = build_optimizer(model, 1e-3, 0.1).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays.keys() == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        spared = name.endswith("bias") or ".ln_" in name
        assert decays[id(parameter)] == (0.0 if spared else 0.1), name


def test_adamw_is_fused_where_the_build_has_it() -> None:
    model = torch.nn.Linear(2, 2)
    try:
        torch.optim.AdamW(model.parameters(), fused=True)
    except RuntimeError:
        pytest.skip("this build has no fused AdamW for the CPU")
    assert build_optimizer(model, 1e-3, 0.0).defaults["fused"]


def test_an_optimizer_that_can_not_be_fused_is_made_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.optim.AdamW

    def without_fused(groups: list, lr: float, fused: bool = False) -> torch.optim.AdamW:
        if fused:
            raise RuntimeError("no fused implementation for this device")
        return real(groups, lr=lr)

    monkeypatch.setattr(torch.optim, "AdamW", without_fused)
    assert not build_optimizer(torch.nn.Linear(2, 2), 1e-3, 0.0).defaults["fused"]


def test_learning_rate_rises_and_falls_in_straight_lines() -> None:
    rates = [learning_rate_at(step, 1.0, 4, 10) for step in range(10)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert learning_rate_at(0, 1.0, 0, 10) == 1.0
    assert learning_rate_at(3, 1.0, 100, 10) == pytest.approx(4 / 101)


def batches(plan: BatchPlan, rank: int, epoch: int = 0, first_step: int = 0) -> list[list[int]]:
    return plan.micro_batches(rank, epoch, first_step)


@pytest.mark.parametrize(
    ("world", "accumulation", "micro"), [(1, 1, 8), (2, 1, 4), (4, 2, 1), (1, 8, 1), (8, 1, 1)]
)
def test_a_step_has_the_same_samples_however_they_are_shared(
    world: int, accumulation: int, micro: int
) -> None:
    plan = BatchPlan(53, micro, world, accumulation, seed=7)
    assert plan.global_batch == 8
    steps: list[set[int]] = [set() for _ in range(plan.steps_per_epoch)]
    for rank in range(world):
        for number, batch in enumerate(batches(plan, rank)):
            assert len(batch) == micro
            steps[number // accumulation] |= set(batch)
    whole = batches(BatchPlan(53, 8, 1, 1, seed=7), 0)
    assert steps == [set(batch) for batch in whole]
    assert set().union(*steps) == set(range(53))


def test_epochs_seeds_and_positions() -> None:
    plan = BatchPlan(20, 2, 2, 1, seed=1)
    assert batches(plan, 0) == batches(plan, 0)
    assert batches(plan, 0, epoch=1) != batches(plan, 0)
    assert batches(BatchPlan(20, 2, 2, 1, seed=2), 0) != batches(plan, 0)
    assert batches(plan, 1, first_step=3) == batches(plan, 1)[3:]


def test_a_global_batch_larger_than_the_data_repeats_it() -> None:
    plan = BatchPlan(3, 4, 2, 1, seed=1)
    assert plan.steps_per_epoch == 1
    both = batches(plan, 0)[0] + batches(plan, 1)[0]
    assert sorted(both.count(sample) for sample in range(3)) == [2, 3, 3]


def test_derived_seeds_are_stable_and_differ() -> None:
    assert derived_seed(42, "step", 3, 0) == derived_seed(42, "step", 3, 0)
    seeds = {derived_seed(42, "step", step, rank) for step in range(100) for rank in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**32 for seed in seeds)
